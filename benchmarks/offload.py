"""An 8B decoder with AdamW on eight v5e chips, which it fits only with its optimizer's state on the host, and on four,
which it fits only with the parameters of its layers there too.

It is planned with no hint but the mesh; the chosen step is compiled by libtpu, and the memory of device and host held
against the prediction. `python -m benchmarks.offload` takes about six minutes and needs the extra ``tpu``, as
`make test-targets` installs it.
"""

from __future__ import annotations

import time

import autoshard
from autoshard.backend.compilation import memory_usage
from autoshard.units import size_text, time_text
from benchmarks.target_cases import decoder

SIZES = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256, "seq": 2048}


CASES = (
    (8, autoshard.MeshConfig(axes={"data": 4, "model": 2}, tpu="v5e:2x4")),
    (4, autoshard.MeshConfig(axes={"data": 2, "model": 2}, tpu="v5e:2x2")),
)
"""Sequences, and the mesh."""


def measure(sequences: int, mesh: autoshard.MeshConfig) -> None:
    """Plans, compiles and prints."""
    train, state, batch = decoder(sequences, **SIZES)
    step = autoshard.jit(train, mesh=mesh, donate_argnums=0)
    start = time.perf_counter()
    plan = step.plan(state, batch)
    passes = ", ".join(p.written for p in plan.passes)
    print(f"{mesh.tpu}: planned in {time.perf_counter() - start:.0f} s: {passes}")
    used = memory_usage(step.lower(state, batch).compile(), plan.mesh)
    assert used is not None
    for what, predicted, compiled in (("device", plan.memory.peak, used.peak), ("host", plan.memory.host, used.host)):
        ratio = predicted / compiled if compiled else float("nan")
        print(f"{what}: predicted {size_text(predicted, 2)}, compiled {size_text(compiled, 2)}, ratio {ratio:.3f}")
    print(f"transfers: {time_text(plan.cost.host)} of {time_text(plan.cost.seconds)} a step")


if __name__ == "__main__":
    for case in CASES:
        measure(*case)
