"""Un-annotated decoders as autoshard plans them, beside MaxText's own steps and the times that it publishes.

    python -m benchmarks.published [--cache DIR] [--maxtext DIR] [WORD ...]
    python -m benchmarks.published --plans [WORD ...]

Shapes, batches and seconds are of MaxText's recipes for TPU v6e and of its tables for v5e and v5p (FLOP/s as seconds).
``--maxtext`` names the folder in which `benchmarks/maxtext_steps.py` kept MaxText's steps as libtpu compiles them: they
are read as autoshard's are, from the HLO as it is scheduled. What is published is of the clock: read the same way,
MaxText's steps come out longer or shorter than it by a tenth and more. Needs the extra ``tpu``, as `make test-targets`
installs it; ``--plans``, which only plans, needs nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoshard
from autoshard import Plan
from autoshard.backend.estimate import estimate
from autoshard.machine.mesh import LogicalMesh
from benchmarks.answers import Answer, answer, compilers, folder
from benchmarks.baselines import abstract
from benchmarks.cells import LLAMA_8B, LLAMA_70B, MIXTRAL, Column
from benchmarks.maxtext_answers import kept_answer
from benchmarks.zoo import Model, decoder

SAVING = ("microbatch", "losses", "recompute", "offload")
MISTRAL_7B = {**LLAMA_8B, "vocab": 32000}
LLAMA_2_70B = {**LLAMA_70B, "vocab": 32000}
LLAMA_2_7B = {"layers": 32, "width": 4096, "heads": 32, "mlp": 11008, "vocab": 32000, "gated": True}
GPT_175B = {"layers": 96, "width": 12288, "heads": 96, "mlp": 49152, "vocab": 50304}
SCALED_32B = {"layers": 32, "width": 8192, "heads": 64, "mlp": 28672, "vocab": 32000, "gated": True}
SCALED_64B = {**SCALED_32B, "layers": 64}
SCALED_16B = {**SCALED_32B, "width": 4096, "head_width": 128}


@dataclass(frozen=True)
class Row:
    """A published step."""

    name: str
    slice: str
    rows: int
    """Sequences for each chip."""
    seq: int
    seconds: float | None
    """As published; None where it is not for this slice."""
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
    Row("Llama-2 7B", "v6e:8x8", 12, 4096, None, LLAMA_2_7B),
    Row("GPT-3 175B", "v6e:16x16", 3, 2048, 17.182, GPT_175B),
    Row("16B", "v5e:16x16", 6, 2048, 9.98, SCALED_16B),
    Row("32B", "v5e:16x16", 4, 2048, 11.89, SCALED_32B),
    Row("64B", "v5e:16x16", 2, 2048, None, SCALED_64B),
    Row("32B", "v5p:4x4x4", 6, 2048, None, SCALED_32B),
    Row("64B", "v5p:4x4x4", 3, 2048, 7.26, SCALED_64B),
)


def main() -> None:
    """Plans, compiles and prints a row each."""
    cache, words = folder("--cache", sys.argv[1:])
    maxtext, words = folder("--maxtext", words)
    if "--plans" in words:
        _plans([word for word in words if word != "--plans"])
        return
    print(f"{compilers()}\n")
    times = "planned in, s | predicted, s | scheduled, s | nothing hidden, s | memory"
    print(f"| model | slice | batch | {times} | MaxText's, scheduled, s | ratio | published, s | ratio |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    ratios: dict[str, list[float]] = {"MaxText's own step": [], "what is published": []}
    for row in _chosen(words):
        plan, planned, found = _compiled(row, cache)
        theirs = _scheduled(maxtext, row, plan.mesh) if maxtext else None
        batch = f"{row.rows * row.chips} x {row.seq:,}"
        first = f"| {row.name} | {row.slice} | {batch} | {planned:.1f} | {plan.cost.seconds:.2f} "
        used, beside = found.memory_usage(plan.mesh), [theirs, row.seconds]
        if used is None:
            cells = [f"{seconds:.2f} | " if seconds else " | " for seconds in beside]
            print(f"{first}| refused for memory | | | {' | '.join(cells)} |", flush=True)
            continue
        took, share = estimate(found, plan.mesh), used.peak / plan.mesh.hardware.memory
        cells = [f"{seconds:.2f} | {took.scheduled / seconds:.2f}" if seconds else " | " for seconds in beside]
        times = f"{took.scheduled:.2f} | {took.seconds:.2f} | {share:.0%} | {' | '.join(cells)}"
        print(f"{first}| {times} |", flush=True)
        for of, seconds in zip(ratios.values(), beside, strict=True):
            of += [took.scheduled / seconds] if seconds else []
    print()
    for beside, of in ratios.items():
        if of:
            mean = math.exp(sum(map(math.log, of)) / len(of))
            print(f"Beside {beside}: geometric mean {mean:.2f} over {len(of)}, worst {max(of):.2f}.")


def _chosen(words: Sequence[str]) -> Iterator[Row]:
    """Rows that have all ``words`` in their name and slice."""
    return (row for row in ROWS if all(word in f"{row.name} {row.slice}" for word in words))


def _plans(words: Sequence[str]) -> None:
    """Plans, and prints a row each: wall-clock and the processor's seconds, and what the plan predicts."""
    print("| model | slice | batch | planned in, s | processor, s | predicted, s | passes that save memory |")
    print("|---|---|---|--:|--:|--:|---|")
    for row in _chosen(words):
        start = time.process_time()
        *_, plan, planned = _planned(row)
        seconds = f"{planned:.1f} | {time.process_time() - start:.1f} | {plan.cost.seconds:.2f}"
        saving = ", ".join(p.written for p in plan.passes if p.name in SAVING)
        print(f"| {row.name} | {row.slice} | {row.rows * row.chips} x {row.seq:,} | {seconds} | {saving} |", flush=True)


def _planned(row: Row) -> tuple[Model, Any, Plan, float]:
    """The model of a row, its step, the plan, and the seconds that planning took."""
    model, mesh = decoder(row.rows * row.chips, row.seq, **row.sizes), row.column.mesh()
    step = autoshard.jit(model.step(), mesh=mesh, donate_argnums=0)
    start = time.perf_counter()
    plan = step.plan(*abstract(model))
    return model, step, plan, time.perf_counter() - start


def _compiled(row: Row, cache: Path | None) -> tuple[Plan, float, Answer]:
    """The plan of a row, the seconds that planning took, and what the compiler made of it."""
    model, step, plan, planned = _planned(row)
    found = answer(step.lower(*abstract(model)), plan.mesh, cache, options=str(sorted(plan.compiler_options)))
    assert found is not None
    return plan, planned, found


def _scheduled(steps: Path, row: Row, mesh: LogicalMesh) -> float | None:
    """Seconds of MaxText's own step; None where it was not compiled, or refused for memory."""
    found = kept_answer(steps, f"{row.name} {row.slice}", row.seq)
    used = found and found.memory_usage(mesh)
    if found is None or used is None or used.peak > mesh.hardware.memory:
        return None
    return estimate(found, mesh).scheduled


if __name__ == "__main__":
    main()
