"""Which of several processes is named, of how late each was."""

from __future__ import annotations

import pytest

from autoshard.runs.stragglers import Lateness, slow_devices, straggler


@pytest.mark.parametrize(
    ("totals", "named"),
    [
        ((0.0, 3.0, 0.1, 0.1), 1),
        ((0.0, 0.0, 1.5), 2),
        ((2.0, 0.0), 0),
        ((0.0, 0.9, 0.0), None),  # hardly any of ten seconds
        ((3.0, 3.2, 3.1), None),  # all are late
        ((2.0, 3.9), None),
    ],
)
def test_who_is_late_and_later_than_the_others_is_named(totals: tuple[float, ...], named: int | None):
    found = straggler("batches", [Lateness(10 + n, total, total / 2, 10.0) for n, total in enumerate(totals)])
    assert (None if found is None else found.process) == named
    if found is not None:
        assert found.step == 10 + found.process
        assert found.text.startswith(
            f"process {named} keeps the others waiting: its batches came {totals[found.process]:.2f}"
        )
        assert f"{totals[found.process] / 2:.2f} s of that before step {found.step}" in found.text


def test_milliseconds_are_not_late():
    assert straggler("host", [Lateness(2, total, total, 0.02) for total in (0.0, 0.01)]) is None
    found = straggler("host", [Lateness(2, total, total, 0.2) for total in (0.0, 0.1)])
    assert found is not None
    assert "its host was 0.10 s late in 0.20 s" in found.text


@pytest.mark.parametrize(
    ("seconds", "named"),
    [((1.0, 1.4, 1.0), 1), ((2.0, 1.0), 0), ((1.0, 1.2, 1.0), None), ((1.4, 1.4, 1.4), None), ((0.5, 1.0, 1.0), None)],
)
def test_slow_devices_are_named(seconds: tuple[float, ...], named: int | None):
    found = slow_devices(7, [each / 1e3 for each in seconds])
    assert (None if found is None else found.process) == named
    if found is not None:
        assert f"after step 7 a device of it takes {seconds[found.process]:.2f} ms for what" in found.text
