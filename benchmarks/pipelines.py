"""Whether a pipeline pays: the plan that the planner chooses beside others of the same step, predicted and compiled.

    python -m benchmarks.pipelines [--compile] [--cache DIR] [WORD ...]

Of each cell (with WORDs, those that have all in their name) it prints what the planner takes when it may take a
pipeline over any axis of the mesh, the best that it finds without one and with one between nodes or slices, and grids
that a person would set: FSDP, or FSDP with tensor parallelism, without a pipeline and with one of 1F1B between nodes or
slices, in twice and in eight times as many micro-batches as stages.

Predictions need no device and no compiler. With ``--compile`` each plan is compiled by the compiler of its target too
(the extra ``tpu`` or ``gpu``), and read as `benchmarks.pipeline_reading` says; ``--cache`` keeps what compilers answer.

Batches are of 1,024, 2,048 and 4,096 tokens a device. Llama 3 405B was trained with 16 million tokens on 16,384 GPUs,
about 1,000 a GPU (arXiv:2407.21783, table 4), Megatron's models of 145.6 to 1,008 billion parameters with 2,048 to
3,072 a GPU (arXiv:2104.04473, table 1).
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

import autoshard
from autoshard.errors import AutoshardError
from autoshard.machine.mesh_config import MeshConfig
from benchmarks.answers import Answer, answer, asked, compilers
from benchmarks.baselines import abstract
from benchmarks.cells import GPT_7B, GPT_13B, GPT_66B, GPT_175B, LLAMA_8B, LLAMA_70B, LLAMA_405B, RESERVE
from benchmarks.figures import GIB
from benchmarks.pipeline_reading import step_seconds
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
    "4 x v5e:4x4": Cluster({"slice": 4, "data": 4, "model": 4}, {"tpu": "v5e:4x4", "slices": 4}),
    "8 x v5e:4x4": Cluster({"slice": 8, "data": 4, "model": 4}, {"tpu": "v5e:4x4", "slices": 8}),
    "2 x v5e:16x16": Cluster({"slice": 2, "data": 32, "model": 8}, {"tpu": "v5e:16x16", "slices": 2}),
    "2 x v5p:4x4x4": Cluster({"slice": 2, "data": 16, "model": 4}, {"tpu": "v5p:4x4x4", "slices": 2}),
    "8 x v5p:4x4x4": Cluster({"slice": 8, "data": 16, "model": 4}, {"tpu": "v5p:4x4x4", "slices": 8}),
}
MODELS = {
    "GPT-3 7B": GPT_7B,
    "GPT-3 13B": GPT_13B,
    "LLaMA-3 8B": LLAMA_8B,
    "GPT-3 66B": GPT_66B,
    "LLaMA-3 70B": LLAMA_70B,
    "GPT-3 175B": GPT_175B,
    "LLaMA-3 405B": LLAMA_405B,
}
SEQUENCE = 2048
TOKENS = (1024, 2048, 4096)
"""Of a batch, on each device."""


@dataclass(frozen=True)
class Row:
    """One plan of a cell: seconds of a step, bytes per device at the peak, and how it runs."""

    plan: str
    seconds: float
    peak: int
    how: str
    planning: float
    """Seconds of a processor."""
    read: float | None = None
    """Seconds of the step as compiled; None where it was not."""
    compiled_peak: int | None = None
    """Bytes; None where it was not compiled."""

    def __str__(self) -> str:
        read = "-" if self.read is None else f"{self.read * 1e3:,.0f}"
        peak = "-" if self.compiled_peak is None else f"{self.compiled_peak / GIB:.1f}"
        sizes = f"{self.seconds * 1e3:,.0f} | {read} | {self.peak / GIB:.1f} | {peak}"
        return f"| {self.plan} | {sizes} | {self.how} | {self.planning:.1f} |"


def rows(cluster: Cluster, model: str, tokens: int, compiled: Callable[[Any, Any], Answer] | None) -> Iterator[Row]:
    """The plans of a cell; those that have none, as their batch does not split so far, are left out.

    Args:
      tokens: of the batch, on each device.
      compiled: takes a step's lowering and its plan; None: nothing is compiled.
    """
    axis, stages = cluster.slow
    plans: list[tuple[str, str | None, dict[str, Any]]]
    plans = [("chosen", "auto", {}), ("chosen without", None, {}), (f"chosen with one over {axis}", axis, {})]
    for strategy in ("fsdp", "fsdp_tp"):
        plans.append((strategy, None, {"strategy": strategy}))
        for count in (2 * stages, 8 * stages):
            given = {"strategy": strategy, "schedule": "1f1b", "microbatches": count}
            plans.append((f"{strategy}, 1f1b over {axis}, {count} micro-batches", axis, given))
    program = decoder(math.prod(cluster.axes.values()) * tokens // SEQUENCE, SEQUENCE, **MODELS[model])
    for name, pipeline, options in plans:
        step = autoshard.jit(program.step(), mesh=cluster.mesh(pipeline), donate_argnums=0, **options)
        start = time.process_time()
        try:
            plan = step.plan(*abstract(program))
        except AutoshardError:
            continue
        row = Row(name, plan.cost.seconds, plan.memory.peak, _how(plan), time.process_time() - start)
        if compiled is not None:
            try:
                found = compiled(step.lower(*abstract(program)), plan)
            except jax.errors.JaxRuntimeError as e:
                row = replace(row, how=f"{row.how}; refused: {str(e).splitlines()[0][:80]}")
            else:
                if (used := found.memory_usage(plan.mesh)) is not None:
                    row = replace(row, read=step_seconds(found.text, plan), compiled_peak=used.peak)
        yield row


def _how(plan: autoshard.Plan) -> str:
    words = [p.written for p in plan.passes if p.name in ("recompute", "microbatch", "accumulate", "offload")]
    if (p := plan.pipeline) is not None:
        words.append(f"{p.order} over {p.axis}, {p.microbatches} micro-batches, bubble {p.bubble:.0%}")
    return ", ".join(words)


def main() -> None:
    cache, compiles, words = asked(sys.argv[1:], "--compile")

    def compiled(lowered: Any, plan: autoshard.Plan) -> Answer:
        found = answer(lowered, plan.mesh, cache, options=str(sorted(plan.compiler_options)))
        assert found is not None
        return found

    print(f"JAX {jax.__version__}, {compilers()}\n" if compiles else f"JAX {jax.__version__}, predictions\n")
    for name, model, tokens in itertools.product(CLUSTERS, MODELS, TOKENS):
        cell = f"{model} on {name}, {tokens} tokens a device"
        if not all(word in cell for word in words):
            continue
        print(f"## {cell}\n\n| plan | predicted ms | read ms | predicted GiB | compiled GiB | how | planned in, s |")
        print("|---|--:|--:|--:|--:|---|--:|")
        found: list[Row] = []
        for row in rows(CLUSTERS[name], model, tokens, compiled if compiles else None):
            found.append(row)
            print(row, flush=True)
        for what, of in (("read", [(r, r.read) for r in found]), ("predicted", [(r, r.seconds) for r in found])):
            known = {r.plan: seconds for r, seconds in of if seconds is not None}
            if "chosen" in known and len(known) > 1:
                best = min(seconds for plan, seconds in known.items() if plan != "chosen")
                print(f"\nThe chosen plan takes {known['chosen'] / best:.2f} of the best other, {what}.", flush=True)
        print()


if __name__ == "__main__":
    main()
