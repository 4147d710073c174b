"""Planning a pipeline within a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.api import DEFAULT_PASSES
from autoshard.cost.overlap import beside_products
from autoshard.errors import MemoryBudgetError
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.passes.dead_code import DeadCode
from autoshard.plan.planner import PlanRequest
from autoshard.runtime import stages
from autoshard.runtime.fit_memory import within_budget
from benchmarks.baselines import abstract
from benchmarks.cells import GPT_7B, LLAMA_8B
from benchmarks.zoo import decoder
from tests.programs import mesh, mlp_args, mlp_step, program


def test_a_layout_leaves_room_for_a_faster_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest layout of a stage may hold so much that only a slow schedule fits; here one that knows no rings."""
    monkeypatch.setattr(beside_products, "has_rings", lambda kind, mesh: False)
    program = decoder(32, 2048, **GPT_7B)
    mesh = MeshConfig(axes={"slice": 4, "data": 4, "model": 4}, tpu="v5e:4x4", slices=4, pipeline="slice")
    passes = ("accumulate:data", *DEFAULT_PASSES)

    def plan() -> autoshard.Plan:
        step = autoshard.jit(
            program.step(), mesh=mesh, donate_argnums=0, microbatches=8, memory_budget="14.96GiB", passes=passes
        )
        return step.plan(*abstract(program))

    found = plan()
    monkeypatch.setattr(stages, "MIN_GAIN", 1.0)
    first = plan()
    assert found.memory.peak <= 14.96 * 2**30
    assert found.cost.seconds < 0.95 * first.cost.seconds


def test_less_memory_is_not_searched_for_where_a_pipeline_is_slower_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, calls = list[float](), list[tuple[float, int, MemoryBudgetError | None]]()
    search, plan_program = stages.search, stages.plan_program

    def counted(graph: Any, strategy: str, budget: float, options: Any) -> Any:
        searches.append(budget)
        return search(graph, strategy, budget, options)

    def recorded(
        traced: Program, passes: Any, request: Any, to_beat: float = math.inf, *, gives_up: bool = False
    ) -> stages.Planned:
        before = len(searches)
        try:
            planned = plan_program(traced, passes, request, to_beat, gives_up=gives_up)
        except MemoryBudgetError as e:
            calls.append((to_beat, len(searches) - before, e))
            raise
        calls.append((to_beat, len(searches) - before, None))
        return planned

    monkeypatch.setattr(stages, "search", counted)
    monkeypatch.setattr(within_budget, "plan_program", recorded)
    program = decoder(64, 2048, **LLAMA_8B)
    mesh = MeshConfig(axes={"slice": 8, "data": 4, "model": 4}, tpu="v5e:4x4", slices=8, pipeline="slice")
    found = autoshard.jit(program.step(), mesh=mesh, donate_argnums=0, microbatches=16).plan(*abstract(program))
    pursued = [(to_beat, count, e) for to_beat, count, e in calls if e is not None]
    assert pursued
    for to_beat, count, e in pursued:
        assert count == 1
        assert e.fastest > (1 - stages.MIN_GAIN) * to_beat >= (1 - stages.MIN_GAIN) * found.cost.seconds


def test_equal_programs_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After different passes a program may be the same."""
    real, searched = stages.search, list[float]()

    def search(graph: Graph, strategy: str, budget: float, *args: Any, **rest: Any) -> Any:
        searched.append(budget)
        return real(graph, strategy, budget, *args, **rest)

    monkeypatch.setattr(stages, "search", search)
    traced, request = program(mlp_step, mlp_args(64, 32, 64), mesh(data=8)), PlanRequest(memory_budget=1e9)
    with stages.keeping_programs():
        plans = [stages.plan_program(traced, passes, request).plan for passes in ((), (DeadCode(),))]
        assert searched == [1e9]
        assert plans[0].inputs == plans[1].inputs
        assert [len(p.passes) for p in plans] == [0, 1]
        for _ in range(2):
            with pytest.raises(MemoryBudgetError, match="each layout of"):
                stages.plan_program(traced, (), replace(request, memory_budget=1.0), gives_up=True)
    assert searched == [1e9, 1.0]
