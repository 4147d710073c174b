"""The share of the peak that splash attention reaches on TPUs, by the instructions that libtpu emits for a block.

``python -m benchmarks.attention_bundles [WORD ...]`` compiles the forward and the backward kernel, with blocks as plans
have them, for each chip that contains a word, and counts the bundles of instructions of one turn of the kernel's loop:
all of them, also those that only the first or the last block of a row executes. A bundle takes a cycle, if it waits for
nothing. Needs the extra ``tpu``. The shares are in configs/hardware.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from autoshard.machine.mesh import Hardware
from autoshard.machine.mesh_config import MeshConfig
from autoshard.transforms.attention_kernels import KERNELS, KernelCall
from autoshard.transforms.splash_attention import splash_backward, splash_forward

SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LENGTH, WIDTH = 8192, 128
PRODUCTS = {"forward": 2, "backward": 5}
_ADDRESS = re.compile(r"\s*0x([0-9a-f]+)\s+(LB)?\s*:")


def main() -> None:
    """Prints a row for each kernel and chip."""
    if sys.argv[1:2] == ["--compile"]:
        _compile(*sys.argv[2:])
        return
    print("| chip | kernel | block | bundles | cycles of its products at the peak | share |")
    print("|---|---|---|--:|--:|--:|")
    for chip, slice_ in SLICES.items():
        if not all(word in chip for word in sys.argv[1:]):
            continue
        hardware = MeshConfig(axes={"data": 4}, tpu=slice_).mesh().hardware
        for kernel, products in PRODUCTS.items():
            rows, columns = KERNELS["splash"].block(LENGTH, LENGTH, backward=False)
            if kernel == "backward":
                columns = KERNELS["splash"].block(LENGTH, LENGTH, backward=True)[1]
            bundles = _bundles(chip, kernel)
            cycles = _cycles(products * 2.0 * rows * columns * WIDTH, hardware)
            share = f"{cycles:,.0f} | {cycles / bundles:.3f}"
            print(f"| {chip} | {kernel} | {rows:,} x {columns:,} | {bundles:,} | {share} |", flush=True)


def _cycles(flops: float, hardware: Hardware) -> float:
    return flops / hardware.peak_flops("bfloat16") * hardware.clock


def _bundles(chip: str, kernel: str) -> int:
    """Bundles of a turn of the loop over blocks, as another process has libtpu write them: it reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "benchmarks.attention_bundles", "--compile", chip, kernel]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LIBTPU_INIT_ARGS": flags})
        (listing,) = Path(folder).glob("*splash_mha*-final_bundles.txt")
        found = [m for line in listing.read_text().splitlines() if (m := _ADDRESS.match(line))]
    (start,) = (int(m[1], 16) for m in found if m[2])
    return int(found[-1][1], 16) - start


def _compile(chip: str, kernel: str) -> None:
    mesh = MeshConfig(axes={"data": 4}, tpu=SLICES[chip]).mesh()
    sharding = jax.sharding.SingleDeviceSharding(mesh.concrete().devices.flat[0])
    call = KernelCall("splash", WIDTH**-0.5, None, None, 0)
    heads = jax.ShapeDtypeStruct((1, LENGTH, 4, WIDTH), jnp.bfloat16, sharding=sharding)
    sums = jax.ShapeDtypeStruct((1, 4, LENGTH), jnp.float32, sharding=sharding)
    options = {"xla_tpu_scoped_vmem_limit_kib": mesh.hardware.scoped_vmem // 1024} if mesh.hardware.scoped_vmem else {}
    if kernel == "forward":
        lowered = jax.jit(lambda q, k, v: splash_forward(q, k, v, call=call)).lower(heads, heads, heads)
    else:
        step = jax.jit(lambda q, k, v, out, lse, ct: splash_backward(q, k, v, out, lse, ct, call=call))
        lowered = step.lower(heads, heads, heads, heads, sums, heads)
    lowered.compile(compiler_options=options)


if __name__ == "__main__":
    main()
