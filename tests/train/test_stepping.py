"""The loop, with a step that only counts: what is done after which step, and in what order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.errors import ArgumentError
from autoshard.train.non_finite import Checked
from autoshard.train.sources import source_of
from autoshard.train.stepping import Duties, scalars, take_steps, traced


def taken(numbers: range, batches: Any, *, every: int = 100, evals: int = 100, stop: int = 0) -> tuple[list[Any], Any]:
    """What was done, in order, and the result; a step adds its batch to the state."""
    done: list[Any] = []
    duties = Duties(
        log=lambda n, metrics: done.append(("log", n, metrics["loss"])),
        save=lambda n, state, position: done.append(("save", n, state, position)),
        saves=lambda n: n % every == 0,
        evaluate=lambda n, state: done.append(("evaluate", n, state)),
        evaluates=lambda n: n % evals == 0,
        stops=lambda n: n == stop,
    )
    try:
        result = take_steps(lambda s, b: (s + b, np.float32(b)), 0, source_of(batches), numbers, duties)
    except ArgumentError as error:
        return done, str(error)
    return done, result


def test_metrics_are_logged_before_what_follows_them():
    done, result = taken(range(1, 5), iter([1, 2, 3, 4]), every=2, evals=2)
    assert done == [
        ("log", 1, 1.0),
        ("log", 2, 2.0),
        ("evaluate", 2, 3),
        ("save", 2, 3, {"taken": 2}),
        ("log", 3, 3.0),
        ("log", 4, 4.0),
        ("evaluate", 4, 10),
        ("save", 4, 10, {"taken": 4}),
    ]
    assert result == (10, 4)


def test_the_last_step_is_saved_and_so_is_the_one_it_stops_at():
    assert [each for each in taken(range(1, 4), iter([1, 2, 3]))[0] if each[0] == "save"] == [
        ("save", 3, 6, {"taken": 3})
    ]
    done, result = taken(range(1, 4), iter([1, 2, 3]), stop=2)
    assert done[-1] == ("save", 2, 3, {"taken": 2})
    assert result == (3, 2)


def test_batches_that_end_too_early_lose_nothing():
    done, error = taken(range(1, 9), iter([1, 2, 3]))
    assert done[-2:] == [("log", 3, 3.0), ("save", 3, 6, {"taken": 3})]
    assert "ended after step 3 of 8" in error
    assert [each[0] for each in taken(range(1, 9), iter([1, 2, 3]), every=3)[0]].count("save") == 1


def test_the_numbers_among_metrics_have_names():
    assert scalars(np.float32(2)) == {"loss": 2.0}
    assert scalars({"a": {"b": 1}, "c": np.zeros(3), "d": [True]}) == {"a.b": 1.0, "d.0": 1.0}


def test_what_follows_a_step_that_was_undone_is_logged_and_not_judged():
    done: list[Any] = []
    duties = Duties(
        log=lambda n, metrics: done.append(("log", n, metrics["loss"])),
        save=lambda n, state, position: done.append(("save", n, state, position)),
        saves=lambda n: False,
        evaluate=lambda n, state: None,
        evaluates=lambda n: False,
        stops=lambda n: False,
        failed=lambda n, found, state, batch: done.append(("failed", n, state, batch)) or 100,
    )

    def step(state: int, batch: int) -> Any:
        return state + batch, Checked(np.float32(batch), np.array([batch < 5]))

    result = take_steps(step, 0, source_of(iter([1, 7, 9, 2])), range(1, 5), duties)
    assert done == [
        ("log", 1, 1.0),
        ("log", 2, 7.0),
        ("failed", 2, 17, 7),
        ("log", 3, 9.0),
        ("log", 4, 2.0),
        ("save", 4, 102, {"taken": 4}),
    ]
    assert result == (102, 4)


def recorded(folder: Path) -> set[int]:
    """The numbers of the steps in the recordings in a folder."""
    found: set[int] = set()
    for file in folder.glob("plugins/profile/*/*.xplane.pb"):
        lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
        events = [dict(event.stats) for line in lines for event in line.events if event.name == "step"]
        found.update(int(stats["step_num"]) for stats in events)
    return found


@pytest.mark.filterwarnings("ignore:builtin type event_stats")
def test_some_steps_are_recorded_for_xprof(tmp_path: Path):
    for name, last, expected in (("whole", 7, {4, 5}), ("stopped", 4, {4})):
        with traced(jax.jit(lambda s, b: (s + b, s)), 3, range(4, 6), str(tmp_path / name)) as step:
            state = 0
            for _ in range(3, last + 1):
                state, _ = step(state, 1)
        assert state == last - 2
        assert recorded(tmp_path / name) == expected
