"""Losses in chunks of the tokens against whole logits, compiled by the real TPU compiler; no TPU need be here.

    python -m benchmarks.losses [--cache DIR] [WORD]

A decoder's train step (bfloat16, AdamW, layers scanned) on v5e:4x4 for vocabularies of 32k, 128k and 256k, each planned
with layers recomputed, and with ``losses:data`` before that. For both: the compiler's peak
bytes per device, and seconds estimated from the compiled HLO (cycles as the compiler estimates them, collectives by
the link model), without overlap and as scheduled; compute alone beside them. ``WORD``: only the rows with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.backend.estimate import estimate
from autoshard.passes import Losses
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from autoshard.transforms.pipeline import Pass
from benchmarks.answers import answer, asked, compilers

BATCH, SEQ, WIDTH, LAYERS = 64, 2048, 2048, 4
ROWS = [
    (vocab, sizes, strategy)
    for vocab in (32768, 131072, 262144)
    for sizes, strategy in (((16, 1), "fsdp"), ((4, 4), "fsdp_tp"))
]


def step(vocab: int) -> tuple[Any, Any, Any]:
    """A train step, and the shapes of its state and batch."""
    model = ModelConfig(layers=LAYERS, d_model=WIDTH, heads=WIDTH // 128, vocab=vocab, seq=SEQ, dtype="bfloat16")
    steps = make_steps(model, OptimizerConfig(), 1000)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    return steps.train, jax.eval_shape(steps.init, jax.random.key(0)), {"inputs": tokens, "targets": tokens}


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


def main() -> None:
    """Prints a table in Markdown."""
    cache, _, words = asked(sys.argv[1:], "--kept")
    print(f"{compilers()}; v5e:4x4, batch {BATCH} x {SEQ}, width {WIDTH}, {LAYERS} layers\n")
    print("| vocabulary | mesh | strategy | loss | peak GiB | seconds | scheduled | compute | predicted | compile s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for vocab, sizes, strategy in ROWS:
        for name, passes in CONTENDERS.items():
            row = f"| {vocab} | {sizes[0]}x{sizes[1]} | {strategy} | {name} |"
            if not all(w in row for w in words):
                continue
            fun, state, batch = step(vocab)
            mesh = autoshard.MeshConfig(axes={"data": sizes[0], "model": sizes[1]}, tpu="v5e:4x4")
            jitted = autoshard.jit(
                fun, mesh=mesh, strategy=strategy, donate_argnums=0, passes=passes, memory_budget="100GiB"
            )
            plan = jitted.plan(state, batch)
            made = answer(jitted.lower(state, batch), plan.mesh, cache)
            if made is None or made.refusal:
                print(f"{row} refused | | | | | |", made.refusal[:200] if made else "")
                continue
            found = estimate(made, plan.mesh)
            print(
                f"{row} {made.peak / 2**30:.2f} | {found.seconds:.4f} | {found.scheduled:.4f} | {found.compute:.4f} | "
                f"{plan.cost.seconds:.4f}, {plan.memory.peak / 2**30:.2f} GiB | {made.seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
