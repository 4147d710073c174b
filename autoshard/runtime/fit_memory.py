"""Planning within a memory budget: passes that hold less are tried where memory stands in the way."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from dataclasses import replace

from autoshard.errors import AutoshardError, MemoryBudgetError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of, make_plan
from autoshard.plan.record import PlanRecord
from autoshard.plan.relax import best_relaxation
from autoshard.runtime.options import Options, memory_saving_sequences, rewritten, with_optional_passes
from autoshard.search.search import explore
from autoshard.transforms.pipeline import Pass
from autoshard.units import size_text, time_text

MIN_SAVING = 0.01
"""The least share of memory for which something is to be let go of."""


def plan_within_memory(program: Program, options: Options) -> tuple[PlanRecord, Graph]:
    """Plans ``program`` into what its compiler leaves as it is planned; if nothing fits there, into the budget.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    room = program.mesh.hardware.remat_threshold
    if room < budget_of(options.request, program):
        with contextlib.suppress(MemoryBudgetError):
            return _plan_within_budget(program, replace(options, request=replace(options.request, memory_budget=room)))
    return _plan_within_budget(program, options)


def _plan_within_budget(program: Program, options: Options) -> tuple[PlanRecord, Graph]:
    """Plans ``program`` into the budget. Where memory stands in the way of the fastest layout and the user said nothing
    of passes, those that hold less are tried, and the fastest of what fits is taken.

    Raises:
      MemoryBudgetError: nothing fits; what it says is of the passes with which least is missing.
    """
    made: list[tuple[PlanRecord, Graph, tuple[Pass, ...]]] = []
    refused: list[MemoryBudgetError] = []

    def unhindered(passes: tuple[Pass, ...], way: tuple[Pass, ...] | None = None) -> bool:
        changed, request = rewritten(program, way or passes, options)
        try:
            plan, graph = make_plan(changed, request)
        except MemoryBudgetError as e:
            refused.append(e)
            return False
        if passes is not options.passes:
            added = ", ".join(str(p) for p in passes if p not in options.passes)
            said = f"{added} was added: without it, {refused[0] if refused else _faster_but_larger(made[0][0])}"
            plan = replace(plan, diagnostics=(*plan.diagnostics, said))
        made.append((plan, graph, passes))
        return not _memory_bound(plan)

    def fastest() -> tuple[PlanRecord, Graph, tuple[Pass, ...]]:
        return min(made, key=lambda m: m[0].cost.seconds)

    if not unhindered(options.passes):
        ways = list(memory_saving_sequences(program, options))
        bisect.bisect_left(ways, True, key=unhindered)  # what holds most and leaves every layout its room
    if made:
        *_, passes = fastest()
        for way in itertools.islice(with_optional_passes(program, passes, options), 1, None):
            unhindered(passes, way)
        plan, graph, _ = fastest()
        return plan, graph
    how = "" if options.memory_saving_passes else "; or pass passes=['recompute:full']"
    if options.memory_saving_passes:
        how = f" (with {', '.join(str(p) for p in options.memory_saving_passes if p not in options.passes)})"
    raise MemoryBudgetError(f"{refused[-1]}{how}", refused[-1].least) from None


def relaxation_hint(program: Program, options: Options, least: float) -> str:
    """What to let go of so that less than ``least`` bytes would do, as a sentence ends; empty where none helps."""
    *_, passes = options.passes, *memory_saving_sequences(program, options)

    def peak(relaxed: Program, request: PlanRequest) -> float:
        changed, request = rewritten(relaxed, passes, replace(options, request=request))
        try:
            graph, budget = build_graph(changed), budget_of(request, changed)
            return explore(graph, request.strategy, budget, request.compiler_options)[0].memory.peak
        except AutoshardError:  # a strategy that does not serve what is left
            return math.inf

    peak_then, words = best_relaxation(program, options.request, peak)
    return f"; {words}, {size_text(peak_then, 2)} would do" if peak_then < least * (1 - MIN_SAVING) else ""


def _memory_bound(plan: PlanRecord) -> bool:
    """Whether a faster layout was found that does not fit in memory."""
    return bool(plan.alternatives) and plan.alternatives[0].seconds < plan.cost.seconds


def _faster_but_larger(plan: PlanRecord) -> str:
    fastest = plan.alternatives[0]
    return (
        f"what fits takes {time_text(plan.cost.seconds)}; what takes {time_text(fastest.seconds)} "
        f"holds {size_text(fastest.peak, 2)} a device"
    )
