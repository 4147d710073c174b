"""Which of several processes keeps the others waiting, and by what: its batches, its host, or its devices.

Steps are taken together: where one process is late, all wait for it, and the clock of none of them says which. So each
measures what is its own: how long it waited for its batches, how long its host worked while its devices had nothing to
do, and what its devices take for one product that no other takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high

from autoshard.runs.report import Cause, SlowDevicesEvent, StragglerEvent

SHARE = 0.1
"""Of the time since the last meeting: what a process is late beyond the others before it is named."""
TIMES = 2.0
"""What it is late, in that of the others."""
LEAST = 0.05
"""Seconds that it is late beyond the others; steps of a millisecond differ by more than a share."""
SLOWER = 1.3
"""What its devices take for the product, in what those of the others do."""


@dataclass(frozen=True)
class Lateness:
    """How late one process was since all met last, by one cause."""

    step: int
    """Before which it was latest."""
    total: float
    """Seconds, over all steps."""
    longest: float
    """Seconds, before that step."""
    passed: float
    """Seconds since all met."""


def straggler(cause: Cause, late: Sequence[Lateness]) -> StragglerEvent | None:
    """The process, of two or more, that kept the others waiting; None where none did. ``late`` are by process."""
    number = max(range(len(late)), key=lambda n: late[n].total)
    most, others = late[number], median(each.total for n, each in enumerate(late) if n != number)
    beyond = most.total - others
    if beyond <= max(SHARE * most.passed, LEAST) or most.total <= TIMES * others:
        return None
    return StragglerEvent(
        step=most.step,
        process=number,
        cause=cause,
        seconds=most.longest,
        total=most.total,
        others=others,
        passed=most.passed,
    )


def slow_devices(step: int, seconds: Sequence[float]) -> SlowDevicesEvent | None:
    """The process, of two or more, whose devices are slower than those of the others; None where none are.

    Args:
      step: after which all measured.
      seconds: that the slowest device of each process took for the same product, by process.
    """
    number = max(range(len(seconds)), key=lambda n: seconds[n])
    others = median_high(each for n, each in enumerate(seconds) if n != number)
    if seconds[number] <= SLOWER * others:
        return None
    return SlowDevicesEvent(step=step, process=number, seconds=seconds[number], others=others)
