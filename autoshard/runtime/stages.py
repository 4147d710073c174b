"""The stages of planning one traced program: passes, graph, search, plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

from autoshard.backend.compilation import stage
from autoshard.errors import MemoryBudgetError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph, OpKinds
from autoshard.ir.program import Program
from autoshard.machine.mesh import LogicalMesh
from autoshard.pipelining.stage_dims import least_arguments
from autoshard.plan.planner import PlanRequest, budget_of, pipelined_plan, plan_from_candidate
from autoshard.plan.record import PlanRecord
from autoshard.search.candidates import Search
from autoshard.search.search import search
from autoshard.transforms.pipeline import KeptPrograms, Pass, Pipeline
from autoshard.units import size_text

MAX_BUDGETS = 4
"""Budgets that are tried, each less than the one before, for a pipeline to fit in memory."""


MIN_GAIN = 0.02
"""Least share of the step's time that a schedule must gain for a layout to be tried that leaves room for it."""


class _Kept:
    """What programs that are planned together share: programs after passes, and kinds of operations."""

    def __init__(self) -> None:
        self.programs = KeptPrograms()
        self._kinds: dict[tuple[LogicalMesh, int], OpKinds] = {}

    def kinds(self, program: Program) -> OpKinds:
        """Of all programs on its mesh that have its rules, which the one that was traced keeps alive."""
        return self._kinds.setdefault((program.mesh, id(program.rules)), OpKinds())


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


class Planned(NamedTuple):
    """A planned program with the values that the stages made on the way."""

    traced: Program
    """The program as traced for the plan's mesh, before the passes."""
    graph: Graph
    """The graph of the program after the passes, which is `graph.program`."""
    plan: PlanRecord


def plan_program(
    traced: Program,
    passes: tuple[Pass, ...],
    request: PlanRequest,
    to_beat: float = math.inf,
    *,
    gives_up: bool = False,
) -> Planned:
    """Plans ``traced`` after ``passes``.

    Args:
      to_beat: seconds of a step. Of a pipeline that is slower no layout is searched for that needs less memory.
      gives_up: as in `search`; a pipeline does not.

    Raises:
      PassError: a pass broke the program.
      RuleError, SpecError, ArgumentError: as `build_graph` and `search`.
      MemoryBudgetError: no layout fits.
    """
    program, request = run_passes(traced, passes, request)
    with stage("graph", traced.name):
        graph = _graph(program, request)
    if program.pipeline is None:
        return Planned(traced, graph, _search(graph, request, to_beat, gives_up=gives_up))
    return Planned(traced, graph, _search_pipelined(graph, request, to_beat))


def least_memory(traced: Program, passes: tuple[Pass, ...], request: PlanRequest) -> float:
    """Lower bound on the bytes per device of every layout of ``traced`` after ``passes`` that the layout problem can
    express; 0 of a pipeline and of a preset, of which none is known. Takes a fifth of what planning does."""
    program, _ = run_passes(traced, passes, request)
    if program.pipeline is not None or request.strategy != "auto":
        return 0.0
    with stage("bound", traced.name):
        return Search(_graph(program, request), math.inf).least_peak


def _graph(program: Program, request: PlanRequest) -> Graph:
    kept = _kept.get()
    return build_graph(program, strict=request.strict, kinds=kept and kept.kinds(program))


def _search(graph: Graph, request: PlanRequest, to_beat: float, *, gives_up: bool) -> PlanRecord:
    name, budget = graph.program.name, budget_of(request, graph.program)
    with stage("search", name):
        best, found = search(
            graph, request.strategy, budget, request.compiler_options, to_beat=to_beat, gives_up=gives_up
        )
    with stage("plan", name):
        return plan_from_candidate(graph, best, found, request)


def _search_pipelined(graph: Graph, request: PlanRequest, to_beat: float) -> PlanRecord:
    """The plan of the best layout on one stage's devices as a pipeline, within the budget.

    What all layers on one stage would need is more than what a stage needs of its own: the budget of the search is what
    leaves the pipeline within that of ``request``. Where a faster schedule needs more, it is what leaves room for that
    one, if the layout is not slower by as much.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    program, budget = graph.program, budget_of(request, graph.program)
    assert program.pipeline is not None
    allowed, lowest, least, fastest = budget * program.pipeline.stages, False, math.inf, math.inf
    fitting: list[PlanRecord] = []
    if (arguments := least_arguments(graph)) > budget:
        raise MemoryBudgetError(
            f"the arguments of {program.name} as a pipeline over {program.pipeline.axis!r} need "
            f"{size_text(arguments, 2)} per device, and the memory budget is {size_text(budget, 2)}; raise "
            "memory_budget or add devices",
            arguments,
            of_arguments=True,
        )
    for _ in range(MAX_BUDGETS):
        try:
            with stage("search", program.name):
                best, found = search(graph, request.strategy, allowed, request.compiler_options)
        except MemoryBudgetError as e:
            if lowest and math.isinf(least) and not fitting:
                raise MemoryBudgetError(str(e), e.least) from None  # it knows of no pipeline
            if lowest or fitting:
                break
            allowed, lowest = e.least, True
            continue
        with stage("plan", program.name):
            plan = pipelined_plan(plan_from_candidate(graph, best, found, request), graph, best, found, budget)
        if plan.memory.peak <= budget:
            fitting.append(plan)
        least = min(least, plan.memory.peak)
        fastest = min(fastest, plan.cost.seconds, *(a.seconds for a in plan.alternatives))
        if fastest > (1 - MIN_GAIN) * to_beat:
            break
        missing = plan.memory.peak - budget
        if missing <= 0:
            larger = [
                a for a in plan.alternatives if a.peak > budget and a.seconds < (1 - MIN_GAIN) * plan.cost.seconds
            ]
            missing = min((a.peak - budget for a in larger), default=0)
        if lowest or missing <= 0:
            break
        allowed = best.memory.peak - missing
    if fitting:
        plan = min(fitting, key=lambda plan: plan.cost.seconds)
        return replace(plan, memory_budget=budget if math.isfinite(budget) else None)
    raise MemoryBudgetError(
        f"no layout of {program.name} as a pipeline over {program.pipeline.axis!r} fits the memory budget of "
        f"{size_text(budget, 2)} per device: the smallest needs {size_text(least, 2)}; raise memory_budget, add "
        "devices, or take more micro-batches",
        least,
        fastest if math.isfinite(fastest) else 0.0,
    )


@contextlib.contextmanager
def keeping_programs() -> Generator[None]:
    """Within it, `run_passes` keeps the programs that passes make, to the end, and graphs share what is computed for
    their kinds of operations: one program is planned after many sequences of passes that begin alike."""
    token = _kept.set(_Kept())
    try:
        yield
    finally:
        _kept.reset(token)


def run_passes(traced: Program, passes: tuple[Pass, ...], request: PlanRequest) -> tuple[Program, PlanRequest]:
    """The program after ``passes``, and the request with their reports."""
    with stage("passes", traced.name):
        kept = _kept.get()
        program, reports = Pipeline(passes, kept and kept.programs).run(traced)
    return program, replace(request, passes=(*request.passes, *reports))
