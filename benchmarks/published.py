"""Un-annotated decoders as autoshard plans them, beside the step times that MaxText publishes for the same sizes.

    python -m benchmarks.published [--cache DIR] [WORD ...]

Shapes, batches and seconds are of MaxText's recipes for TPU v6e and of its tables for v5e and v5p (FLOP/s as seconds).
Ours are read from what libtpu compiles, as it is scheduled; theirs are of the clock: fifteen of MaxText's own steps,
read the same way, came out at 0.77 to 1.27 of the clock (geometric mean 0.93), so that a difference under a tenth
decides nothing. Needs the extra ``tpu``, as `make test-targets` installs it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import autoshard
from autoshard.backend.estimate import estimate
from benchmarks.answers import answer, asked, compilers
from benchmarks.baselines import abstract
from benchmarks.cells import LLAMA_8B, LLAMA_70B, MIXTRAL, Column
from benchmarks.zoo import decoder

MISTRAL_7B = {**LLAMA_8B, "vocab": 32000}
LLAMA_2_70B = {**LLAMA_70B, "vocab": 32000}
GPT_175B = {"layers": 96, "width": 12288, "heads": 96, "mlp": 49152, "vocab": 50304}
SCALED_32B = {"layers": 32, "width": 8192, "heads": 64, "mlp": 28672, "vocab": 32000, "gated": True}
SCALED_64B = {**SCALED_32B, "layers": 64}


@dataclass(frozen=True)
class Row:
    """A published step."""

    name: str
    slice: str
    rows: int
    """Sequences for each chip."""
    seq: int
    seconds: float
    sizes: Mapping[str, Any]

    @property
    def chips(self) -> int:
        return math.prod(int(n) for n in self.slice.partition(":")[2].split("x"))

    @property
    def column(self) -> Column:
        """The slice as ``data`` and ``model`` of 4."""
        return Column(self.chips // 4, 4, {"tpu": self.slice})


ROWS = (
    Row("Llama-3.1 8B", "v6e:2x4", 3, 8192, 3.443, LLAMA_8B),
    Row("Llama-3.1 8B", "v6e:4x8", 3, 8192, 3.495, LLAMA_8B),
    Row("Llama-3.1 8B", "v6e:16x16", 4, 8192, 4.546, LLAMA_8B),
    Row("Mistral 7B", "v6e:2x4", 6, 8192, 6.320, MISTRAL_7B),
    Row("Llama-3.1 70B", "v6e:8x8", 2, 8192, 18.688, LLAMA_70B),
    Row("Llama-3.1 70B", "v6e:16x16", 5, 8192, 42.656, LLAMA_70B),
    Row("Llama-2 70B", "v6e:16x16", 2, 4096, 9.052, LLAMA_2_70B),
    Row("Mixtral 8x7B", "v6e:16x16", 12, 4096, 13.484, {**MIXTRAL, "layers": 32}),
    Row("GPT-3 175B", "v6e:16x16", 3, 2048, 17.182, GPT_175B),
    Row("32B", "v5e:16x16", 4, 2048, 11.89, SCALED_32B),
    Row("64B", "v5p:4x4x4", 3, 2048, 7.26, SCALED_64B),
)


def main() -> None:
    """Plans, compiles and prints a row each."""
    cache, _, words = asked(sys.argv[1:], "")
    print(f"{compilers()}\n")
    times = "planned in, s | predicted, s | scheduled, s | nothing hidden, s | memory | published, s | ratio"
    print(f"| model | slice | batch | {times} |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    ratios: list[float] = []
    for row in ROWS:
        if not all(word in f"{row.name} {row.slice}" for word in words):
            continue
        model, mesh = decoder(row.rows * row.chips, row.seq, **row.sizes), row.column.mesh()
        step = autoshard.jit(model.step(), mesh=mesh, donate_argnums=0)
        start = time.perf_counter()
        plan = step.plan(*abstract(model))
        planned = time.perf_counter() - start
        found = answer(step.lower(*abstract(model)), plan.mesh, cache, options=str(sorted(plan.compiler_options)))
        assert found is not None
        batch = f"{row.rows * row.chips} x {row.seq:,}"
        first = f"| {row.name} | {row.slice} | {batch} | {planned:.1f} | {plan.cost.seconds:.2f} "
        used = found.memory_usage(plan.mesh)
        if used is None:
            print(f"{first}| refused for memory | | | {row.seconds} | |", flush=True)
            continue
        took, share = estimate(found, plan.mesh), used.peak / plan.mesh.hardware.memory
        ratios.append(took.scheduled / row.seconds)
        times = f"{took.scheduled:.2f} | {took.seconds:.2f} | {share:.0%} | {row.seconds} | {ratios[-1]:.2f}"
        print(f"{first}| {times} |", flush=True)
    if ratios:
        print(f"\nGeometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}, worst {max(ratios):.2f}.")


if __name__ == "__main__":
    main()
