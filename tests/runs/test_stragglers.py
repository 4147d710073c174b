"""Which of several processes is named, of what each waited for its batches."""

from __future__ import annotations

import pytest

from autoshard.runs.stragglers import Waits, straggler


@pytest.mark.parametrize(
    ("totals", "named"),
    [
        ((0.0, 3.0, 0.1, 0.1), 1),
        ((0.0, 0.0, 1.5), 2),
        ((2.0, 0.0), 0),
        ((0.0, 0.9, 0.0), None),  # hardly any of ten seconds
        ((3.0, 3.2, 3.1), None),  # all wait
        ((2.0, 3.9), None),
    ],
)
def test_who_waits_long_and_longer_than_the_others_is_named(totals: tuple[float, ...], named: int | None):
    found = straggler([Waits(10 + n, total, total / 2, 10.0) for n, total in enumerate(totals)])
    assert (None if found is None else found.process) == named
    if found is not None:
        assert found.step == 10 + found.process
        assert found.text.startswith(
            f"process {named} keeps the others waiting: its batches came {totals[found.process]:.2f}"
        )
        assert f"{totals[found.process] / 2:.2f} s of that before step {found.step}" in found.text
