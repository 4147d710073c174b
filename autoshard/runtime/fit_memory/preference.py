"""Which of two plans is better, and whether memory decided."""

from __future__ import annotations

from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

MIN_SAVING = 0.01
"""Least share of the peak memory that dropping a demand must save to be proposed; and of the budget, by which the
room for held values is made less where they do not fit."""
MIN_GAIN = 0.02
"""Least share of the step's time that memory must cost for passes that save some, or micro-batches, to be tried."""


def preference(plan: PlanRecord) -> tuple[float, float]:
    """Sort key, best first: a preset splits the batch into as many parts as it can, whatever passes make of it. Then
    the least predicted time."""
    specs = {p.path: p.spec for p in plan.inputs}
    parts = [plan.mesh.axes_size(specs[b.path].dims[b.dim]) for b in plan.batch if plan.strategy != "auto"]
    return -max(parts, default=1), plan.cost.seconds


def is_memory_bound(plan: PlanRecord) -> bool:
    """Whether a layout that does not fit in memory is faster, by more than `MIN_GAIN`."""
    fastest, budget = next(iter(plan.alternatives), None), plan.memory_budget
    if fastest is None or budget is None:
        return False
    return fastest.seconds * (1 + MIN_GAIN) < plan.cost.seconds and fastest.peak > budget


def faster_but_larger(plan: PlanRecord) -> str:
    fastest = plan.alternatives[0]
    return (
        f"the fastest layout that fits takes {time_text(plan.cost.seconds)}; one that takes "
        f"{time_text(fastest.seconds)} needs {size_text(fastest.peak, 2)} per device"
    )


def axes_of_batch(plan: PlanRecord) -> tuple[str, ...]:
    """The mesh axes that split the batch, in the order of the mesh."""
    specs = {p.path: p.spec for p in plan.inputs}
    found = {axis for b in plan.batch for axis in specs[b.path].dims[b.dim]}
    return tuple(a for a in plan.mesh.axis_names if a in found)
