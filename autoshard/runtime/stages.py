"""The stages of planning one traced program: passes, graph, search, plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from autoshard.backend.stage_log import stage
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of, plan_from_candidate
from autoshard.plan.record import PlanRecord
from autoshard.search.search import search
from autoshard.transforms.pipeline import Pass, Pipeline


class Planned(NamedTuple):
    """A planned program with the values that the stages made on the way."""

    traced: Program
    """The program as traced for the plan's mesh, before the passes."""
    graph: Graph
    """The graph of the program after the passes, which is `graph.program`."""
    plan: PlanRecord


def plan_program(traced: Program, passes: tuple[Pass, ...], request: PlanRequest) -> Planned:
    """Plans ``traced`` after ``passes``.

    Raises:
      PassError: a pass broke the program.
      RuleError, SpecError, ArgumentError: as `build_graph` and `search`.
      MemoryBudgetError: no layout fits.
    """
    program, request = run_passes(traced, passes, request)
    with stage("graph", traced.name):
        graph = build_graph(program, strict=request.strict)
    with stage("search", traced.name):
        best, found = search(graph, request.strategy, budget_of(request, program), request.compiler_options)
    with stage("plan", traced.name):
        plan = plan_from_candidate(graph, best, found, request)
    return Planned(traced, graph, plan)


def run_passes(traced: Program, passes: tuple[Pass, ...], request: PlanRequest) -> tuple[Program, PlanRequest]:
    """The program after ``passes``, and the request with their reports."""
    with stage("passes", traced.name):
        program, reports = Pipeline(passes).run(traced)
    return program, replace(request, passes=(*request.passes, *reports))
