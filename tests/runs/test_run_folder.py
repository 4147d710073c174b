"""What a run leaves beside its checkpoints: claimed once, cut where it resumes, deleted only when it is a run's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import get_args

import pytest
from etils import epath

from autoshard.errors import CheckpointError, ConfigError
from autoshard.runs.report import (
    EndEvent,
    Event,
    HeldOutEvent,
    NonFiniteEvent,
    PhaseEvent,
    Report,
    SlowDevicesEvent,
    StepEvent,
    StragglerEvent,
    make_report,
)
from autoshard.runs.run_folder import RunFolder, write_json
from autoshard.strict_files import parse_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(epath.Path(tmp_path / "run"))


def taken(*steps: int) -> list[StepEvent]:
    return [StepEvent(step=n, loss=1.0 / n, grad_norm=1.0, learning_rate=0.1) for n in steps]


def not_finite(step: int) -> NonFiniteEvent:
    return NonFiniteEvent(
        step=step, metrics=("loss",), state=("state['w']",), batch=(), processes=(0, 1), did="skip", restored=None
    )


def report_of(events: list[Event], steps: int) -> Report:
    about = {"parameters": 1, "held_out": 1.0, "bigram_bits": 1.0, "scored": 1, "unit": "tokens"}
    return make_report(events, steps=steps, checkpoint=f"run/{steps}", **about)


def saved(folder: RunFolder, step: int = 5) -> None:
    (folder.checkpoints / str(step)).mkdir(parents=True)


def test_the_log_is_cut_where_the_run_resumes(folder: RunFolder):
    folder.claim({})
    folder.append(taken(*range(1, 8)))
    with folder.log.open("a") as file:
        file.write('{"event": "step", "st')  # killed in the middle of a line
    assert folder.events() == taken(*range(1, 8))
    assert folder.drop_events_after(5) == 0
    folder.append([*taken(6), EndEvent(step=6, how="failed", error="OSError: no space left")])
    assert len(folder.events()) == 7
    assert folder.drop_events_after(6) == 0  # it goes on
    assert folder.events() == taken(1, 2, 3, 4, 5, 6)


def test_every_kind_of_event_is_read_from_the_log(folder: RunFolder):
    events = [
        PhaseEvent(step=0, mesh="mesh", collectives=""),
        *taken(1),
        HeldOutEvent(step=1, loss=2.0),
        not_finite(2),
        StragglerEvent(step=2, process=1, seconds=0.5, total=1.0, others=0.0, passed=2.0),
        SlowDevicesEvent(step=2, process=1, seconds=0.5, others=0.1),
        EndEvent(step=2, how="finished"),
    ]
    assert {type(event) for event in events} == {*get_args(Event)}
    folder.claim({})
    folder.append(events)
    assert folder.events() == events
    assert folder.drop_events_after(2) == 0
    assert folder.events() == events[:-1]


def test_steps_that_came_to_nothing_are_in_no_mean():
    steps = [StepEvent(step=n, loss=math.nan if n in (2, 11, 12) else n / 10) for n in range(1, 13)]
    events = [event for step in steps for event in (step, *([not_finite(step.step)] if step.step in (2, 11) else []))]
    (phase,) = report_of([PhaseEvent(step=0, mesh="mesh", collectives=""), *events], 12).phases
    assert phase.loss_first == pytest.approx(sum(n / 10 for n in (1, 3, 4, 5, 6)) / 5)
    assert phase.loss_last == pytest.approx(sum(n / 10 for n in (7, 8, 9, 10)) / 4)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"event": "step", "step": 3, "loss": "low"}',
        b'{"event": "step", "step": 3, "loss": 1.0, "grad_norm": "low"}',
        b'{"event": "pause", "step": 3}',
        b'{"event": "held_out", "step": "3", "loss": 1.0}',
        b'{"event": "held_out", "step": -3, "loss": 1.0}',
        b'{"event": "held_out", "step": 3, "loss": 1.0, "loss": 2.0}',
        b"[" * 10_000,
        b"9" * 5_000,
        b"x" * 5_000_000,
    ],
)
def test_a_damaged_line_of_the_log_is_dropped_alone(folder: RunFolder, line: bytes):
    folder.claim({})
    folder.append(taken(1, 2, 3, 4))
    lines = folder.log.read_bytes().splitlines(keepends=True)
    folder.log.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[3:]]))
    assert folder.events() == taken(1, 2, 4)
    assert folder.drop_events_after(9) == 1 + len(line) // 2**22
    assert folder.drop_events_after(9) == 0
    assert folder.events() == taken(1, 2, 4)


def test_losses_that_are_no_numbers_stay(folder: RunFolder):
    folder.claim({})
    folder.append([HeldOutEvent(step=1, loss=math.inf), HeldOutEvent(step=2, loss=math.nan)])
    texts = [parse_json(line)["loss"] for line in folder.log.read_text().splitlines()]
    assert texts == ["Infinity", "NaN"]
    first, second = folder.events()
    assert isinstance(first, HeldOutEvent)
    assert isinstance(second, HeldOutEvent)
    assert first.loss == math.inf
    assert math.isnan(second.loss)


def test_a_changed_entry_is_named(folder: RunFolder):
    folder.claim({"model.layers": 4, "model.heads": 2, "data.include": ("*.py",)})
    saved(folder)
    folder.claim({"model.layers": 4, "model.heads": 2, "data.include": ("*.py",)})
    with pytest.raises(ConfigError, match=r"model\.layers is 6, and the run in .* was begun with 4"):
        folder.claim({"model.layers": 6, "model.heads": 2, "data.include": ("*.py",)})


def test_without_a_checkpoint_nothing_depends_on_the_configuration(folder: RunFolder):
    folder.claim({"model.layers": 4})
    assert folder.settings() is None
    folder.claim({"model.layers": 6})
    (folder.root / "run.json").write_text("{")
    folder.claim({"model.layers": 8})
    saved(folder)
    assert folder.settings() == {"model.layers": 8}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"a": 1, "a": 2}', b"9" * 5_000])
def test_damaged_settings_are_one_error(folder: RunFolder, content: bytes):
    folder.claim({"a": 1})
    saved(folder)
    (folder.root / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged .* --fresh"):
        folder.claim({"a": 1})


def test_checkpoints_of_an_unknown_run_are_left_alone(folder: RunFolder):
    saved(folder)
    with pytest.raises(CheckpointError, match=r"checkpoints but no run\.json"):
        folder.claim({})


@pytest.mark.parametrize("content", [None, b"", b"{}", b"null", b"\xff", b'{"steps": 12}', b"[" * 50_000])
def test_a_report_that_cannot_be_read_is_no_report(folder: RunFolder, content: bytes | None):
    folder.claim({})
    report = make_report(
        taken(1, 2),
        steps=2,
        parameters=1,
        held_out=math.nan,
        bigram_bits=1,
        scored=1,
        unit="tokens",
        checkpoint="run/2",
    )
    write_json(folder.report, report.as_json())
    found = folder.finished(2)
    assert found is not None
    assert (found.steps, found.checkpoint, math.isnan(found.held_out_bits)) == (2, "run/2", True)
    assert folder.finished(3) is None  # of the run before it was extended
    if content is None:
        folder.report.unlink()
    else:
        folder.report.write_bytes(content)
    assert folder.finished(2) is None


def test_a_log_with_gaps_makes_a_report_with_gaps():
    phases = [PhaseEvent(step=n, mesh=f"mesh {n}", collectives="") for n in (0, 20)]
    report = report_of([phases[0], *taken(1), phases[1]], 40)
    assert [(p.first, p.last, p.loss_first, p.loss_last) for p in report.phases] == [
        (0, 20, 1.0, None),
        (20, 40, None, None),
    ]
    assert "loss 1.0000 -> unknown" in str(report)
    assert "training loss unknown before, unknown after" in str(report)
    assert report_of([], 40).phases == ()


def test_a_folder_is_held_by_one_at_a_time(folder: RunFolder):
    with folder.locked():
        with pytest.raises(CheckpointError, match=rf"is in use by process {os.getpid()} on .*checkpoint\.dir"):
            folder.locked().__enter__()
        folder.claim({})
        assert folder.clear() == ["run.json"]
        with pytest.raises(CheckpointError, match="is in use"):
            folder.locked().__enter__()
    with folder.locked():
        pass


def test_clearing_says_what_it_deletes(folder: RunFolder):
    assert folder.clear() == []
    folder.claim({})
    folder.append(taken(1))
    saved(folder)
    write_json(folder.plan(0), {})
    assert folder.clear() == ["checkpoints", "log.jsonl", "metrics.csv", "plan-0.json", "run.json"]
    assert list(folder.root.iterdir()) == []


def test_clearing_refuses_a_folder_with_anything_else(folder: RunFolder):
    folder.claim({})
    (folder.root / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex, which no training run writes; nothing was deleted"):
        folder.clear()
    assert (folder.root / "run.json").exists()
