"""What the TPU compiler makes of one planned program under options that bear on sharded programs.

``python -m benchmarks.options [WORD]`` prints a row for each set of options whose name contains the word; each compiles
for a minute or two. Results are kept in benchmarks/results/options.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import autoshard
from autoshard.estimate import estimate
from benchmarks.tpu_cases import MIB, SLICE, decoder

OPTIONS: Mapping[str, dict[str, str]] = {
    "none": {},
    "asynchronous collectives in fusions off": {"xla_tpu_enable_async_collective_fusion": "false"},
    "combiner threshold 1 GiB": {"xla_jf_crs_combiner_threshold_in_bytes": str(2**30)},
    "latency hiding scheduler off": {"xla_tpu_enable_latency_hiding_scheduler": "false"},
    "scoped memory 64 MiB": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    "windowed einsum never": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def main(word: str = "") -> None:
    """Prints the rows."""
    step, state, batch = decoder(32, layers=2, d_model=1024, heads=8, d_ff=4096, vocab=8192, seq=512)
    mesh = autoshard.MeshConfig(axes={"data": 4, "model": 4}, tpu=SLICE)
    jitted = autoshard.jit(step, mesh=mesh, strategy="fsdp_tp", donate_argnums=0)
    plan, lowered = jitted.plan(state, batch), jitted.lower(state, batch)
    print("| options | compute ms | collectives ms | peak MiB | temporaries MiB |\n|---|--:|--:|--:|--:|")
    for name, chosen in OPTIONS.items():
        if word in name:
            compiled = lowered.compile(compiler_options=chosen or None)
            e, m = estimate(compiled, plan.mesh), compiled.memory_analysis()
            sizes = f"{m.peak_memory_in_bytes / MIB:.0f} | {m.temp_size_in_bytes / MIB:.0f}"
            print(f"| {name} | {e.compute * 1e3:.3f} | {e.transfers * 1e3:.3f} | {sizes} |", flush=True)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
