"""Planning a pipeline within a budget."""

from __future__ import annotations

import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.api import DEFAULT_PASSES
from autoshard.cost import overlap
from autoshard.runtime import stages
from benchmarks.baselines import abstract
from benchmarks.cells import GPT_7B
from benchmarks.zoo import decoder


def test_a_layout_leaves_room_for_a_faster_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest layout of a stage may hold so much that only a slow schedule fits; here one that knows no rings."""
    monkeypatch.setattr(overlap, "_with_rings", lambda graph: graph)
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
