"""Whether a pipeline pays, as the planner predicts it: the plan that it chooses beside others of the same step.

    python -m benchmarks.pipelines [WORD ...]

Needs no device and no compiler: nothing is compiled, and all figures are predictions. Of each cell (with WORDs, those
that have all in their name) it prints what the planner takes when it may take a pipeline over any axis of the mesh, the
best that it finds without one and with one between nodes or slices, and grids that a person would set: FSDP, or FSDP
with tensor parallelism, without a pipeline and with one of 1F1B between nodes or slices, in twice and in eight times as
many micro-batches as stages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import autoshard
from autoshard.errors import AutoshardError
from autoshard.machine.mesh_config import MeshConfig
from benchmarks.baselines import abstract
from benchmarks.cells import GPT_7B, GPT_66B, GPT_175B, LLAMA_8B, LLAMA_70B, LLAMA_405B, RESERVE
from benchmarks.figures import GIB
from benchmarks.zoo import decoder


@dataclass(frozen=True)
class Cluster:
    """A machine whose first axis is a slow link, maybe others too, and the mesh on it."""

    axes: Mapping[str, int]
    where: Mapping[str, Any]

    def mesh(self, pipeline: str | None) -> MeshConfig:
        """As autoshard takes it."""
        bare = MeshConfig(axes=dict(self.axes), **self.where)
        budget = int(bare.mesh().hardware.memory * (1 - RESERVE))
        return bare.model_copy(update={"memory_budget": budget, "pipeline": pipeline})

    @property
    def slow(self) -> tuple[str, int]:
        """The axis over the slow link, and its size."""
        return next(iter(self.axes.items()))


CLUSTERS = {
    "4x8 H100": Cluster({"node": 4, "model": 8}, {"gpu": "h100", "nodes": 4}),
    "16x8 H100": Cluster({"stage": 4, "data": 4, "model": 8}, {"gpu": "h100", "nodes": 16}),
    "2 x v5e:16x16": Cluster({"slice": 2, "data": 32, "model": 8}, {"tpu": "v5e:16x16", "slices": 2}),
    "2 x v5p:4x4x4": Cluster({"slice": 2, "data": 16, "model": 4}, {"tpu": "v5p:4x4x4", "slices": 2}),
    "8 x v5p:4x4x4": Cluster({"slice": 8, "data": 16, "model": 4}, {"tpu": "v5p:4x4x4", "slices": 8}),
}
MODELS = {
    "GPT-3 7B": GPT_7B,
    "LLaMA-3 8B": LLAMA_8B,
    "GPT-3 66B": GPT_66B,
    "LLaMA-3 70B": LLAMA_70B,
    "GPT-3 175B": GPT_175B,
    "LLaMA-3 405B": LLAMA_405B,
}
SEQUENCE = 2048
BATCHES = {
    "4x8 H100": (32, 128),
    "16x8 H100": (256, 512),
    "2 x v5e:16x16": (512,),
    "2 x v5p:4x4x4": (256,),
    "8 x v5p:4x4x4": (512, 1024),
}


@dataclass(frozen=True)
class Row:
    """One plan of a cell: seconds of a step, bytes per device at the peak, and how it runs."""

    plan: str
    seconds: float
    peak: int
    how: str
    planning: float
    """Seconds of a processor."""

    def __str__(self) -> str:
        figures = f"{self.seconds * 1e3:,.0f} | {self.peak / GIB:.1f} | {self.how} | {self.planning:.1f}"
        return f"| {self.plan} | {figures} |"


def rows(cluster: Cluster, model: str, batch: int) -> Iterator[Row]:
    """The plans of a cell; those that have none, as their batch does not split so far, are left out."""
    axis, stages = cluster.slow
    asked: list[tuple[str, str | None, dict[str, Any]]]
    asked = [("chosen", "auto", {}), ("chosen without", None, {}), (f"chosen with one over {axis}", axis, {})]
    for strategy in ("fsdp", "fsdp_tp"):
        asked.append((strategy, None, {"strategy": strategy}))
        for count in (2 * stages, 8 * stages):
            given = {"strategy": strategy, "schedule": "1f1b", "microbatches": count}
            asked.append((f"{strategy}, 1f1b over {axis}, {count} micro-batches", axis, given))
    program = decoder(batch, SEQUENCE, **MODELS[model])
    for name, pipeline, options in asked:
        step = autoshard.jit(program.step(), mesh=cluster.mesh(pipeline), donate_argnums=0, **options)
        start = time.process_time()
        try:
            plan = step.plan(*abstract(program))
        except AutoshardError:
            continue
        yield Row(name, plan.cost.seconds, plan.memory.peak, _how(plan), time.process_time() - start)


def _how(plan: autoshard.Plan) -> str:
    words = [p.written for p in plan.passes if p.name in ("recompute", "microbatch", "accumulate")]
    if (p := plan.pipeline) is not None:
        words.append(f"{p.order} over {p.axis}, {p.microbatches} micro-batches, bubble {p.bubble:.0%}")
    return ", ".join(words)


def main() -> None:
    for name, cluster in CLUSTERS.items():
        for model in MODELS:
            for batch in BATCHES[name]:
                cell = f"{model} on {name}, batch {batch} x {SEQUENCE}"
                if not all(word in cell for word in sys.argv[1:]):
                    continue
                print(f"## {cell}\n\n| plan | ms | GiB | how | planned in, s |\n|---|--:|--:|---|--:|")
                found: list[Row] = []
                for row in rows(cluster, model, batch):
                    found.append(row)
                    print(row, flush=True)
                chosen, *others = found
                best = min(others, key=lambda r: r.seconds)
                print(f"\nThe chosen plan takes {chosen.seconds / best.seconds:.2f} of the best other.\n", flush=True)


if __name__ == "__main__":
    main()
