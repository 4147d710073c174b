"""Which of several processes keeps the others waiting, by what each waited for its own batches.

Steps are taken together: where one process has to wait for a batch, all wait for that process, and the clock of none of
them says which. What each waits before it starts its part of a step is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autoshard.runs.report import StragglerEvent

SHARE = 0.1
"""Of the time since the last meeting: what a process waits beyond the others before it is named."""
TIMES = 2.0
"""What it waits, in that of the others."""


@dataclass(frozen=True)
class Waits:
    """How one process waited for its batches since all met last."""

    step: int
    """That for whose batch it waited longest."""
    total: float
    """Seconds, over all steps."""
    longest: float
    """Seconds, for that step."""
    passed: float
    """Seconds since all met."""


def straggler(waits: Sequence[Waits]) -> StragglerEvent | None:
    """The process, of two or more, that kept the others waiting; None where none did. ``waits`` are by process."""
    number = max(range(len(waits)), key=lambda n: waits[n].total)
    most, others = waits[number], median(each.total for n, each in enumerate(waits) if n != number)
    if most.total - others <= SHARE * most.passed or most.total <= TIMES * others:
        return None
    return StragglerEvent(
        step=most.step, process=number, seconds=most.longest, total=most.total, others=others, passed=most.passed
    )
