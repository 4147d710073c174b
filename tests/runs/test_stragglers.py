"""Which of several processes is named, of how late each was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autoshard.runs.report import SlowDevicesEvent, StragglerEvent
from autoshard.runs.stragglers import Findings, Lateness, as_row, latest, slow_devices, stragglers


@pytest.mark.parametrize(
    ("totals", "named"),
    [
        ((0.0, 3.0, 0.1, 0.1), [1]),
        ((0.0, 0.0, 1.5), [2]),
        ((2.0, 0.0), [0]),
        ((0.0, 0.9, 0.0), []),  # hardly any of ten seconds
        ((3.0, 3.2, 3.1), []),  # all are late
        ((2.0, 3.9), []),
        ((3.0, 0.0, 3.0, 0.1), [0, 2]),
    ],
)
def test_who_is_late_and_later_than_the_others_is_named(totals: tuple[float, ...], named: list[int]):
    events = stragglers("batches", [Lateness(10 + n, total, total / 2, 10.0) for n, total in enumerate(totals)])
    assert [found.process for found in events] == named
    for found in events:
        assert found.step == 10 + found.process
        assert found.text.startswith(
            f"process {found.process} keeps the others waiting: its batches came {totals[found.process]:.2f}"
        )
        assert f"{totals[found.process] / 2:.2f} s of that before step {found.step}" in found.text


def test_milliseconds_are_not_late():
    assert stragglers("host", [Lateness(2, total, total, 0.02) for total in (0.0, 0.01)]) == []
    (found,) = stragglers("host", [Lateness(2, total, total, 0.2) for total in (0.0, 0.1)])
    assert "its host was 0.10 s late in 0.20 s" in found.text


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ((1.0, 1.4, 1.0), [1]),
        ((2.0, 1.0), [0]),
        ((1.0, 1.2, 1.0), []),
        ((1.4, 1.4, 1.4), []),
        ((0.5, 1.0, 1.0), []),
        ((1.0, 2.0, 1.0, 2.0), [1, 3]),
    ],
)
def test_slow_devices_are_named(seconds: tuple[float, ...], named: list[int]):
    events = slow_devices(7, [each / 1e3 for each in seconds])
    assert [found.process for found in events] == named
    for found in events:
        assert f"after step 7 a device of it takes {seconds[found.process]:.2f} ms for what" in found.text


def reported(batches: Any = (0, 0, 0), host: Any = (0, 0, 0), measured: float = 0) -> np.ndarray:
    """What three processes report; process 1 takes ``measured`` for what the others do in a millisecond."""
    rows = [
        as_row([0, 0, 7], (11, b, b), (12, h, h), 2.0, measured and (measured if n == 1 else 1e-3))
        for n, (b, h) in enumerate(zip(batches, host, strict=True))
    ]
    return np.stack(rows)[:, 3:]


def test_a_straggler_is_named_once_and_again_after_it_was_in_time():
    find = Findings()
    first, second = find(20, reported(batches=(0, 1, 0), host=(0, 0, 0.5)))
    assert isinstance(first, StragglerEvent)
    assert isinstance(second, StragglerEvent)
    assert (first.cause, first.process, first.step, first.seconds) == ("batches", 1, 11, 1.0)
    assert (second.cause, second.process, second.step, second.passed) == ("host", 2, 12, 2.0)
    assert find(30, reported(batches=(0, 1, 0))) == []
    assert find(40, reported()) == []
    assert [event.process for event in find(50, reported(batches=(0, 1, 0)))] == [1]


def test_devices_that_are_slow_three_times_in_a_row_are_named_once():
    find = Findings()
    found = [find(step, reported(measured=m)) for step, m in enumerate((2e-3, 2e-3, 1e-3, 2e-3, 0, 2e-3, 2e-3, 2e-3))]
    assert [len(each) for each in found] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert found[6] == [SlowDevicesEvent(step=6, process=1, seconds=2e-3, others=1e-3)]


def test_two_processes_that_are_slower_in_turn_are_both_named():
    """Two of four, of which now the one is slowest and now the other."""
    find, found = Findings(), list[list[int]]()
    for step in range(4):
        seconds = [1e-3, 1e-3, 2e-3 + step % 2 * 1e-5, 2e-3 + (step + 1) % 2 * 1e-5]
        rows = [as_row([0, 0, 7], (1, 0, 0), (1, 0.5 * (each > 1e-3), 0), 2.0, each) for each in seconds]
        found.append([event.process for event in find(step, np.stack(rows)[:, 3:])])
    assert found == [[2, 3], [], [2, 3], []]  # their hosts, and their devices


def test_the_latest_step_is_named():
    assert latest(20, [0.0, 0.5, 0.25]) == (19, 0.75, 0.5)
    assert latest(20, []) == (20, 0.0, 0.0)
