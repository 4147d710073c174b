"""What the passes `rotary` and `attention_operands` save, as the compilers for TPUs have it.

``python -m benchmarks.attention_operands [--cache DIR] [WORD ...]`` compiles a decoder of two layers, recomputed, with
grouped heads and rotary positions, as planned with both passes, without each and without both, for the slices that
contain all words, and prints milliseconds of compute a step. Needs the extra ``tpu``. Results are kept in
docs/design/2026-11-29-what-attention-reads.md.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import autoshard
from autoshard.api import MEMORY_SAVING_PASSES
from autoshard.backend.estimate import estimate
from benchmarks.answers import answer, compilers, folder
from benchmarks.baselines import abstract
from benchmarks.cells import LLAMA_8B, Column
from benchmarks.zoo import decoder

SLICES = {"v6e:2x4": (24, 8192)}
"""Batch and sequence on each slice of a chip whose table says `Hardware.attention_layouts`."""
PASSES = ("rotary", "attention_operands")


def main() -> None:
    """Prints the rows."""
    cache, words = folder("--cache", sys.argv[1:])
    print(f"{compilers()}\n")
    print("| slice | batch | without both, ms | with `rotary` | with `attention_operands` | with both |")
    print("|---|---|--:|--:|--:|--:|")
    for name, (batch, seq) in SLICES.items():
        if all(word in name for word in words):
            left_out = (PASSES, PASSES[1:], PASSES[:1], ())
            times = [f"{_compute(name, batch, seq, without, cache) * 1e3:.1f}" for without in left_out]
            print(f"| {name} | {batch} x {seq:,} | {' | '.join(times)} |", flush=True)


def _compute(name: str, batch: int, seq: int, without: tuple[str, ...], cache: Path | None) -> float:
    """Seconds of compute of a step that is planned without these passes."""
    model = decoder(batch, seq, **{**LLAMA_8B, "layers": 2, "vocab": 1024})
    chips = math.prod(int(n) for n in name.partition(":")[2].split("x"))
    passes = [p for p in MEMORY_SAVING_PASSES if p not in without]
    step = autoshard.jit(model.step(), mesh=Column(chips, 1, {"tpu": name}).mesh(), donate_argnums=0, passes=passes)
    plan = step.plan(*abstract(model))
    found = answer(step.lower(*abstract(model)), plan.mesh, cache, options=str(sorted(plan.compiler_options)))
    assert found is not None
    return estimate(found, plan.mesh).compute


if __name__ == "__main__":
    main()
