"""What the TPU compiler makes of planned programs under options that bear on sharded ones.

``python -m benchmarks.options [--cache DIR] [--kept] [WORD]`` prints a row for each program and set of options, those
that contain the word; each compiles for a minute or two. Results are kept in benchmarks/results/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from autoshard.backend.estimate import estimate
from autoshard.cost.compiler_options import SCOPED_VMEM
from benchmarks.answers import answer
from benchmarks.target_cases import MIB, Case, options, planned

CASES = (
    Case("decoder-scanned", (4, 4), "fsdp_tp"),
    Case("decoder-unrolled", (4, 4), "tp"),
    Case("experts", (4, 4), "auto"),
    Case("conv", (4, 4), "fsdp"),
)
COMBINERS = ("xla_jf_crs", "xla_tpu_agf", "xla_tpu_arf", "xla_tpu_ars")
"""Of the thresholds up to which collectives of one kind are put together."""
FUSED = (
    "xla_enable_async_all_gather",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "collectives combined to 1 GiB": {f"{name}_combiner_threshold_in_bytes": str(2**30) for name in COMBINERS},
    "collectives fused, none": {"xla_tpu_enable_async_collective_fusion": "false"},
    "collectives fused, all kinds": dict.fromkeys(FUSED, "true"),
    "gathers not fused": {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false"},
    "collectives pipelined over loops": dict.fromkeys(
        ("xla_tpu_enable_ag_backward_pipelining", "xla_tpu_enable_collective_pipeliner"), "true"
    ),
    "latency hiding scheduler off": {"xla_tpu_enable_latency_hiding_scheduler": "false"},
    "windowed einsum always": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"},
    "windowed einsum never": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
    **{f"{mib} MiB on the chip for a fusion": {SCOPED_VMEM: str(mib * 1024)} for mib in (16, 32, 48, 64)},
}


@dataclass(frozen=True)
class WithOptions:
    """A step lowered, to be compiled under options."""

    lowered: jax.stages.Lowered
    under: Mapping[str, str]

    def as_text(self) -> str:
        """As `jax.stages.Lowered` has it."""
        return self.lowered.as_text()

    def compile(self) -> jax.stages.Compiled:
        """As `jax.stages.Lowered` does."""
        return self.lowered.compile(compiler_options=dict(self.under) or None)


def main() -> None:
    """Prints the rows."""
    asked = options()
    print("| program | options | compute ms | collectives ms | sum ms | bound ms | peak MiB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for case in CASES:
        plan, lowered, _ = planned(case)
        for name, under in OPTIONS.items():
            row = f"| {case} {case.strategy} | {name} |"
            if asked.word not in row:
                continue
            try:
                options_text = str(sorted(under.items()))
                found = answer(
                    WithOptions(lowered, under), plan.mesh, asked.cache, options=options_text, kept=asked.kept
                )
            except jax.errors.JaxRuntimeError as error:
                print(row, f"refused: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            if found is not None and found.refusal:
                print(row, f"refused: {found.refusal.splitlines()[0][:120]}", flush=True)
            elif found is not None:
                e = estimate(found, plan.mesh)
                times = " | ".join(f"{x * 1e3:.3f}" for x in (e.compute, e.transfers, e.seconds, e.overlapped))
                print(row, f"{times} | {found.peak / MIB:.0f} |" + ("" if e.exact else " trips unknown"), flush=True)


if __name__ == "__main__":
    main()
