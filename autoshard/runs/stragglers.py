"""Which of several processes keeps the others waiting, and by what: its batches, its host, or its devices.

Steps are taken together: where one process is late, all wait for it, and the clock of none of them says which. So each
measures what is its own: how long it waited for its batches, how long its host worked while its devices had nothing to
do, and what its devices take for one product that no other takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_high

import numpy as np

from autoshard.runs.report import Cause, SlowDevicesEvent, StragglerEvent

SHARE = 0.1
"""Of the time since the last meeting: what a process is late beyond the others before it is named."""
TIMES = 2.0
"""What it is late, in that of the others."""
LEAST = 0.05
"""Seconds that it is late beyond the others; steps of a millisecond differ by more than a share."""
SLOWER = 1.3
"""What its devices take for the product, in what those of the others do."""
AGAIN = 3
"""How often in a row devices are found slower than those of others before it is said."""

PASSED = 9
"""Where a row of `as_row` has what passed since all met, in microseconds."""


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


def stragglers(cause: Cause, late: Sequence[Lateness]) -> list[StragglerEvent]:
    """The processes, of two or more, that kept the others waiting. ``late`` are by process."""
    found: list[StragglerEvent] = []
    for number, own in enumerate(late):
        others = median(each.total for n, each in enumerate(late) if n != number)
        if own.total - others <= max(SHARE * own.passed, LEAST) or own.total <= TIMES * others:
            continue
        found.append(
            StragglerEvent(
                step=own.step,
                process=number,
                cause=cause,
                seconds=own.longest,
                total=own.total,
                others=others,
                passed=own.passed,
            )
        )
    return found


def slow_devices(step: int, seconds: Sequence[float]) -> list[SlowDevicesEvent]:
    """The processes, of two or more, whose devices are slower than those of the others.

    Args:
      step: after which all measured.
      seconds: that the slowest device of each process took for the same product, by process.
    """
    found: list[SlowDevicesEvent] = []
    for number, own in enumerate(seconds):
        others = median_high(each for n, each in enumerate(seconds) if n != number)
        if own > SLOWER * others:
            found.append(SlowDevicesEvent(step=step, process=number, seconds=own, others=others))
    return found


def latest(number: int, late: Sequence[float]) -> tuple[int, float, float]:
    """Before which step, up to ``number``, the process was latest; all seconds that it was, and those before that."""
    late = late or [0.0]
    return number + 1 - len(late) + late.index(max(late)), sum(late), max(late)


def as_row(
    flags: Sequence[int],
    batches: tuple[int, float, float],
    host: tuple[int, float, float],
    passed: float,
    measured: float,
) -> np.ndarray:
    """What one process sends to the meeting: uint32 [11], seconds as microseconds."""
    seconds = [*batches[1:], *host[1:], passed, measured]
    micros = [min(round(each * 1e6), 2**32 - 1) for each in seconds]
    return np.asarray([*flags, batches[0], *micros[:2], host[0], *micros[2:]], np.uint32)


@dataclass
class Findings:
    """Who is found to keep the others waiting, and was not at the meeting before."""

    late: frozenset[tuple[Cause, int]] = frozenset()
    slow: dict[int, int] = field(default_factory=dict[int, int])
    """How often in a row the devices of a process were found slower, by process."""

    def __call__(self, number: int, rows: np.ndarray) -> list[StragglerEvent | SlowDevicesEvent]:
        """What is new after step ``number``.

        Args:
          rows: of each process what `as_row` gives after the flags.
        """
        late: list[StragglerEvent] = []
        causes: tuple[tuple[Cause, int], ...] = (("batches", 0), ("host", 3))
        for cause, first in causes:
            parts = [Lateness(int(row[first]), *(row[[first + 1, first + 2, 6]] / 1e6).tolist()) for row in rows]
            late += stragglers(cause, parts)
        new: list[StragglerEvent | SlowDevicesEvent] = [e for e in late if (e.cause, e.process) not in self.late]
        self.late = frozenset((e.cause, e.process) for e in late)
        if rows[:, 7].all():
            slow = slow_devices(number, (rows[:, 7] / 1e6).tolist())
            self.slow = {e.process: self.slow.get(e.process, 0) + 1 for e in slow}
            new += [e for e in slow if self.slow[e.process] == AGAIN]
        return new
