"""Which values to hold for the backward part, by the prices of a plan and the memory that its layouts leave."""

from __future__ import annotations

import math

from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.plan.record import PlanRecord
from autoshard.runtime.stages import run_passes
from autoshard.transforms.pipeline import Pass


def held_by_value(
    traced: Program, passes: tuple[Pass, ...], plan: PlanRecord, more: float, request: PlanRequest
) -> tuple[Pass | None, float]:
    """What to take in place of the pass among ``passes`` that decides what is held for the backward part, for the step
    to take least time, and the seconds that it then takes; None where none decides that.

    Args:
      plan: made with ``passes``. It has the prices, what is held now, and the layouts that it was chosen from.
      more: bytes per device that may be held beyond the budget of ``request``.
    """
    prices = {r.name: (float(r.bytes), r.seconds) for r in plan.residuals}
    counts = {r.name: (r.layers - r.held - r.on_host, r.on_host) for r in plan.residuals}
    limit = budget_of(request, traced) + more
    layouts = [(plan.cost.seconds, limit - plan.memory.peak)]
    layouts += [(a.seconds, limit - a.peak) for a in plan.alternatives]
    for i, decides in enumerate(passes):
        if decides.decides_held:
            program, _ = run_passes(traced, passes[:i], request)
            return decides.within(program, prices, counts, layouts) or (None, math.inf)
    return None, math.inf
