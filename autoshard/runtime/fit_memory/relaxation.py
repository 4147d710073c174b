"""What a user could give up where nothing fits."""

from __future__ import annotations

import math

from autoshard.errors import AutoshardError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.plan.relax import best_relaxation
from autoshard.runtime.fit_memory.preference import MIN_SAVING
from autoshard.runtime.options import Options, memory_saving_sequences
from autoshard.runtime.stages import run_passes
from autoshard.search.search import explore
from autoshard.units import size_text


def relaxation_hint(traced: Program, options: Options, least: float) -> str:
    """The demand to drop so that less than ``least`` bytes per device are needed, as the end of a sentence; empty where
    none helps."""
    *_, passes = options.passes, *memory_saving_sequences(traced, options)

    def peak(relaxed: Program, request: PlanRequest) -> float:
        program, request = run_passes(relaxed, passes, request)
        try:
            graph, budget = build_graph(program), budget_of(request, program)
            return explore(graph, request.strategy, budget, request.compiler_options)[0].memory.peak
        except AutoshardError:  # the strategy does not apply to the relaxed program
            return math.inf

    lowest, demand = best_relaxation(traced, options.request, peak)
    return f"; {demand}, {size_text(lowest, 2)} would do" if lowest < least * (1 - MIN_SAVING) else ""
