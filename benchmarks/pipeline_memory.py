"""Predicted memory of pipelines against the account of the compiler for TPUs, and planned collectives against emitted.

    ALLOW_MULTIPLE_LIBTPU_LOAD=true python -m benchmarks.pipeline_memory [WORD ...]

Needs the extra ``tpu``, and no TPU. A small decoder on v5e:4x4, as a pipeline by each schedule, with other axes beside
the stages. Of each case (with WORDs, those that have all in their name) the peak bytes per device that the plan
predicts, beside the compiler's, and whether the audit is clean.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import autoshard
from autoshard.api import DEFAULT_PASSES
from autoshard.backend.compilation import memory_usage
from autoshard.machine.mesh_config import MeshConfig
from benchmarks.target_cases import MIB, decoder

SIZES = {"d_model": 1024, "heads": 8, "d_ff": 4096, "vocab": 8192, "seq": 512}


@dataclass(frozen=True)
class Case:
    """A decoder of ``layers`` layers on a mesh, in ``microbatches`` micro-batches by ``schedule``."""

    stages: int
    data: int
    model: int
    schedule: str
    microbatches: int
    layers: int = 8
    strategy: str = "auto"
    recompute: bool = False

    def __str__(self) -> str:
        more = " recompute" if self.recompute else ""
        return (
            f"{self.stages}x{self.data}x{self.model} {self.strategy} {self.schedule} {self.microbatches} of "
            f"{self.layers} layers{more}"
        )

    def step(self) -> Any:
        """Its train step."""
        train, _, _ = decoder(64, layers=self.layers, **SIZES)
        mesh = MeshConfig(
            axes={"stage": self.stages, "data": self.data, "model": self.model}, pipeline="stage", tpu="v5e:4x4"
        )
        return autoshard.jit(
            train,
            mesh=mesh,
            strategy=self.strategy,
            microbatches=self.microbatches,
            schedule=self.schedule,
            donate_argnums=0,
            passes=(*DEFAULT_PASSES, "recompute:full") if self.recompute else None,
        )


CASES = (
    Case(4, 4, 1, "gpipe", 8),
    Case(4, 4, 1, "1f1b", 8),
    Case(4, 4, 1, "1f1b", 16),
    Case(4, 4, 1, "zb-h1", 8),
    Case(4, 1, 4, "1f1b", 8),
    Case(4, 1, 4, "zb-h1", 16, strategy="tp"),
    Case(4, 2, 2, "1f1b", 8),
    Case(4, 2, 2, "gpipe", 4, strategy="fsdp_tp"),
    Case(2, 8, 1, "1f1b", 4, strategy="fsdp"),
    Case(2, 8, 1, "gpipe", 8),
    Case(2, 4, 2, "1f1b", 8),
    Case(2, 1, 8, "1f1b", 8, strategy="tp"),
    Case(8, 2, 1, "1f1b", 16),
    Case(4, 4, 1, "1f1b", 8, recompute=True),
    Case(2, 8, 1, "zb-v", 4),
    Case(2, 8, 1, "interleaved:2", 4),
)


def main() -> None:
    errors: list[float] = []
    print("| stages x data x model, strategy, schedule, micro-batches | predicted MiB | compiler MiB | error | audit |")
    print("|---|--:|--:|--:|---|")
    for case in CASES:
        if not all(word in str(case) for word in sys.argv[1:]):
            continue
        _, state, batch = decoder(64, layers=case.layers, **SIZES)
        step, start = case.step(), time.perf_counter()
        plan = step.plan(state, batch)
        compiled = step.lower(state, batch).compile()
        used, found = memory_usage(compiled, plan.mesh), autoshard.audit(compiled, plan)
        assert used is not None
        errors.append(plan.memory.peak / used.peak - 1)
        sizes = f"{plan.memory.peak / MIB:,.0f} | {used.peak / MIB:,.0f} | {errors[-1]:+.1%}"
        clean = "clean" if found.clean else "; ".join(f"{r.kind} over {r.axes}" for r in found.differences)
        print(f"| {case} | {sizes} | {clean} |", flush=True)
        print(f"{case}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    off = [abs(e) for e in errors]
    print(f"\n{len(off)} cases: median error {statistics.median(off):.1%}, worst {max(off):.1%}")


if __name__ == "__main__":
    main()
