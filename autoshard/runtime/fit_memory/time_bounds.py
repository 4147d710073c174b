"""How fast a step is at best after passes that save memory, as far as plans have shown."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import MemoryBudgetError
from autoshard.plan.record import PlanRecord
from autoshard.transforms.pipeline import Pass


class TimeBounds:
    """Of one program without a pipeline, for each sequence of passes that was planned, with whichever optional ones:
    the seconds of the fastest layout that was priced, whatever memory it takes, or a bound on them. Every search solves
    for that one first; nothing is known of sequences after which none was made, as nothing can fit.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Pass, ...], float] = {}

    def learn(self, passes: tuple[Pass, ...], found: PlanRecord | MemoryBudgetError) -> None:
        """Takes note of what planning with ``passes`` found."""
        if isinstance(found, PlanRecord):
            seconds = min([found.cost.seconds, *(a.seconds for a in found.alternatives)])
        else:
            seconds = found.fastest
        self._seconds[passes] = min(seconds, self._seconds.get(passes, seconds))

    def seconds(self, passes: tuple[Pass, ...]) -> float:
        """Of the fastest layout after ``passes``; 0 where they were not planned."""
        return self._seconds.get(passes, 0.0)

    def estimate(self, sequences: Sequence[tuple[Pass, ...]], n: int) -> float:
        """`seconds` of sequence ``n`` of ``sequences``, each of which saves more memory than the one before it; where
        it was not planned, the least of the nearest on either side that were, and 0 where on one side none was."""
        known = [i for i, passes in enumerate(sequences) if passes in self._seconds]
        nearest = max((i for i in known if i <= n), default=None), min((i for i in known if i >= n), default=None)
        return min([0.0 if i is None else self._seconds[sequences[i]] for i in nearest])
