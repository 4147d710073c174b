"""How fast a step is at best after passes that save memory, as far as plans have shown."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import MemoryBudgetError
from autoshard.plan.record import PlanRecord
from autoshard.transforms.pipeline import Pass


class TimeBounds:
    """Of one program without a pipeline, for each sequence of passes that was planned: the seconds of the fastest
    layout that was priced, whatever memory it takes. The search begins with that one, at every budget."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Pass, ...], float] = {}

    def learn(self, passes: tuple[Pass, ...], found: PlanRecord | MemoryBudgetError) -> None:
        """Takes note of what planning with ``passes`` found."""
        if isinstance(found, MemoryBudgetError):
            seconds = found.fastest
        else:
            seconds = min([found.cost.seconds, *(a.seconds for a in found.alternatives)])
        self._seconds[passes] = min(seconds, self._seconds.get(passes, seconds))

    def seconds(self, sequences: Sequence[tuple[Pass, ...]]) -> float:
        """Least seconds after the last of ``sequences``, each of which saves more memory and takes more time than the
        one before it; 0 where none was planned."""
        return max([self._seconds.get(passes, 0.0) for passes in sequences], default=0.0)
