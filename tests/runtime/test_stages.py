"""Planning a pipeline within a budget."""

from __future__ import annotations

import math
from typing import Any

import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.api import DEFAULT_PASSES
from autoshard.cost.overlap import beside_products
from autoshard.errors import MemoryBudgetError
from autoshard.ir.program import Program
from autoshard.runtime import stages
from autoshard.runtime.fit_memory import within_budget
from benchmarks.baselines import abstract
from benchmarks.cells import GPT_7B, LLAMA_8B
from benchmarks.zoo import decoder


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
