"""Losses in chunks of the tokens against whole logits, compiled by the real TPU compiler; no TPU need be here.

    python -m benchmarks.losses [--cache DIR] [WORD ...]

A decoder's train step (bfloat16, AdamW, layers scanned) on v5e:4x4 for vocabularies of 32k, 128k and 256k, with whole
logits and in chunks, in two ways:

- "alike": 4 layers, all of them recomputed, and ``losses:data`` before that or not: what the loss itself costs;
- "planned": 12 layers, their MLPs 5,632 wide, a multiple of 128 as in published models, and four times the batch: by
  default, and by default but for the pass ``losses``. The memory that whole logits take other values cannot have, and
  are made again. Into 0.95 of the chip's memory, or, where the compiler refuses what comes of it, into 11 GiB.

For each: the compiler's peak bytes per device, and seconds estimated from the compiled HLO (cycles as the compiler
estimates them, collectives by the link model), without overlap and as scheduled; compute alone beside them. ``WORD``:
only the rows with all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import autoshard
from autoshard import Plan, api
from autoshard.backend.estimate import estimate
from autoshard.passes import Losses
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from autoshard.transforms.pipeline import Pass
from benchmarks.answers import Answer, answer, asked, compilers
from benchmarks.cells import COLUMNS

BATCH, SEQ, WIDTH, LAYERS = 64, 2048, 2048, 4
VOCABULARIES = (32768, 131072, 262144)

PASSES = (
    "dead_code",
    "one_hot",
    "transposed_products",
    "recompute:full",
    "attention:large",
    "sum_products",
    "pad_uneven",
)
CONTENDERS: Mapping[str, tuple[str | Pass, ...]] = {"whole": PASSES, "chunks": (Losses("data"), *PASSES)}
"""Without and with chunks; layers are recomputed in both."""
BUDGETS = (None, "11GiB")
"""Of a planned step, the second where the first is refused; None: the column's."""
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "whole": tuple(p for p in api.OPTIONAL_PASSES if p != Losses.name),
    "chunks": api.OPTIONAL_PASSES,
}
"""The passes that the planner may add."""


class Row(NamedTuple):
    """A step, with whole logits or in chunks."""

    way: str
    vocabulary: int
    loss: str
    batch: int
    layers: int
    d_ff: int | None
    sizes: tuple[int, int]
    strategy: str

    def __str__(self) -> str:
        data, model = self.sizes
        return f"| {self.way} | {self.vocabulary} | {data}x{model} | {self.strategy} | {self.loss} |"

    def steps(self) -> Any:
        """The steps of the decoder."""
        model = ModelConfig(
            layers=self.layers,
            d_model=WIDTH,
            heads=WIDTH // 128,
            d_ff=self.d_ff,
            vocab=self.vocabulary,
            seq=SEQ,
            dtype="bfloat16",
        )
        return make_steps(model, OptimizerConfig(), 1000)

    def step(self, budget: str | None = None) -> autoshard.Step:
        """The train step, to be planned into ``budget``."""
        data, model = self.sizes
        fun = self.steps().train
        if self.way == "planned":
            mesh = COLUMNS["v5e:4x4"].mesh()
            with mock.patch.object(api, "OPTIONAL_PASSES", OPTIONAL[self.loss]):
                return autoshard.jit(fun, mesh=mesh, donate_argnums=0, memory_budget=budget)
        mesh = autoshard.MeshConfig(axes={"data": data, "model": model}, tpu="v5e:4x4")
        passes = CONTENDERS[self.loss]
        return autoshard.jit(
            fun, mesh=mesh, strategy=self.strategy, donate_argnums=0, passes=passes, memory_budget="100GiB"
        )


ROWS = [
    Row(way, vocabulary, loss, batch, layers, d_ff, sizes, strategy)
    for way, batch, layers, d_ff, forms in (
        ("alike", BATCH, LAYERS, None, (((16, 1), "fsdp"), ((4, 4), "fsdp_tp"))),
        ("planned", 4 * BATCH, 3 * LAYERS, 5632, (((4, 4), "auto"),)),
    )
    for vocabulary in VOCABULARIES
    for sizes, strategy in forms
    for loss in CONTENDERS
]


def taken(row: Row, cache: Path | None) -> tuple[Plan, Answer, str]:
    """The first of a row's plans that the compiler takes, else the last; and what it does to save memory."""
    tokens = jax.ShapeDtypeStruct((row.batch, SEQ), jnp.int32)
    args = jax.eval_shape(row.steps().init, jax.random.key(0)), {"inputs": tokens, "targets": tokens}

    def tried(budget: str | None) -> tuple[Plan, Answer, str]:
        step = row.step(budget)
        plan = step.plan(*args)
        made = answer(step.lower(*args), plan.mesh, cache, options=str(sorted(plan.compiler_options)))
        assert made is not None
        saves = [p.written for p in plan.passes if p.name in ("losses", "recompute", "microbatch")]
        return plan, made, ", ".join(saves) + (f", into {budget}" if budget else "")

    first, second = BUDGETS
    found = tried(first)
    return tried(second) if found[1].refusal and row.way == "planned" else found


def main() -> None:
    """Prints a table in Markdown."""
    cache, _, words = asked(sys.argv[1:], "--kept")
    print(f"{compilers()}; v5e:4x4, width {WIDTH}\n")
    print(
        "| | vocabulary | mesh | strategy | loss | peak GiB | seconds | scheduled | compute | predicted | compile s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        if not all(word in f"{row}" for word in words):
            continue
        plan, made, chosen = taken(row, cache)
        if made.refusal:
            print(f"{row} refused | | | | {chosen} | |", flush=True)
            continue
        found = estimate(made, plan.mesh)
        print(
            f"{row} {made.peak / 2**30:.2f} | {found.seconds:.4f} | {found.scheduled:.4f} | {found.compute:.4f} | "
            f"{plan.cost.seconds:.4f}, {plan.memory.peak / 2**30:.2f} GiB, {chosen} | {made.seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
