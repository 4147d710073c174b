"""Who is said to keep the others waiting, and when; the processes of `tests/train/test_processes.py` really meet."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.runs.report import SlowDevicesEvent, StragglerEvent
from autoshard.train.device_probe import device_seconds
from autoshard.train.meeting import Findings, as_row


def told(batches: Any = (0, 0, 0), host: Any = (0, 0, 0), measured: float = 0) -> np.ndarray:
    """What three processes tell; process 1 takes ``measured`` for what the others do in a millisecond."""
    rows = [
        as_row([0, 0, 7], (11, b, b), (12, h, h), 2.0, measured and (measured if n == 1 else 1e-3))
        for n, (b, h) in enumerate(zip(batches, host, strict=True))
    ]
    return np.stack(rows)[:, 3:]


def test_a_straggler_is_named_once_and_again_after_it_was_in_time():
    find = Findings()
    first, second = find(20, told(batches=(0, 1, 0), host=(0, 0, 0.5)))
    assert isinstance(first, StragglerEvent)
    assert isinstance(second, StragglerEvent)
    assert (first.cause, first.process, first.step, first.seconds) == ("batches", 1, 11, 1.0)
    assert (second.cause, second.process, second.step, second.passed) == ("host", 2, 12, 2.0)
    assert find(30, told(batches=(0, 1, 0))) == []
    assert find(40, told()) == []
    assert [event.process for event in find(50, told(batches=(0, 1, 0)))] == [1]


def test_devices_that_are_slow_twice_in_a_row_are_named_once():
    find = Findings()
    found = [find(step, told(measured=m)) for step, m in enumerate((2e-3, 0, 1e-3, 2e-3, 0, 2e-3, 2e-3))]
    assert [len(each) for each in found] == [0, 0, 0, 0, 0, 1, 0]
    assert found[5] == [SlowDevicesEvent(step=5, process=1, seconds=2e-3, others=1e-3)]


def test_devices_are_measured():
    assert 0 < device_seconds() < 60
