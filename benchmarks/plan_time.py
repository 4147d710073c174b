"""How long a plan takes, from the function to the plan, on a machine that has none of the devices.

    python -m benchmarks.plan_time [--compile] [NAME ...]

Each row is a decoder's whole train step (forward, backward, AdamW) on abstract arguments, in a process of its own:
nothing is computed. "trace" is what `jax.jit(step).trace` takes by itself, which is part of the plan's time; with
``--compile`` stands beside it what XLA takes to compile the same unplanned program for one CPU device.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autoshard
from autoshard.config import MeshConfig
from autoshard.models import ModelConfig, OptimizerConfig, make_steps

LLAMA_8B = {"d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256, "seq": 8192}
LLAMA_405B = {"d_model": 16384, "heads": 128, "kv_heads": 8, "d_ff": 53248, "vocab": 128256, "seq": 8192}
SLIM = {"d_model": 1024, "heads": 16, "d_ff": 4096, "vocab": 32000, "seq": 2048}
FLAT, CUBE = {"data": 8, "model": 8}, {"pod": 2, "data": 8, "model": 8}
ROWS = {
    "8b-scanned": (LLAMA_8B, 32, True, FLAT),
    "8b": (LLAMA_8B, 32, False, FLAT),
    "405b-scanned": (LLAMA_405B, 126, True, CUBE),
    "405b": (LLAMA_405B, 126, False, CUBE),
    "slim-64": (SLIM, 64, False, FLAT),
    "slim-256": (SLIM, 256, False, FLAT),
    "slim-1024": (SLIM, 1024, False, FLAT),
}
"""Sizes, layers, whether they are scanned, and the mesh."""


def measure(name: str, compiled: bool) -> None:
    """Prints one row."""
    sizes, layers, scan, axes = ROWS[name]
    model = ModelConfig(layers=layers, dtype="bfloat16", scan=scan, **sizes)
    steps = make_steps(model, OptimizerConfig(), 1000)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((256, model.seq), jnp.int32) for k in ("inputs", "targets")}
    start = time.perf_counter()
    traced = jax.jit(steps.train, donate_argnums=0).trace(state, batch)
    alone = time.perf_counter() - start
    jax.clear_caches()
    mesh = MeshConfig(axes=axes, hardware="tpu-v5p", memory_budget="95TB")
    start = time.perf_counter()
    plan = autoshard.jit(steps.train, mesh=mesh, donate_argnums=0).plan(state, batch)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gap = max(0.0, 1 - plan.bound / plan.cost.seconds)
    words = [name, f"{layers}", "x".join(map(str, axes.values())), f"{alone:.1f}", f"{seconds:.1f}", f"{gap:.1%}"]
    words.append(f"{peak:.1f} GiB")
    if compiled:
        start = time.perf_counter()
        traced.lower().compile()
        words.append(f"{time.perf_counter() - start:.1f}")
    print(" | ".join(words), flush=True)


def main() -> None:
    args = sys.argv[1:]
    if args[:1] == ["--row"]:
        measure(args[1], "--compile" in args)
        return
    flags, names = [a for a in args if a == "--compile"], [a for a in args if a != "--compile"]
    print("row | layers | mesh | trace, s | plan, s | gap | most memory" + (" | XLA, s" if flags else ""))
    for name in names or ROWS:
        subprocess.run([sys.executable, "-m", "benchmarks.plan_time", "--row", name, *flags], check=True)


if __name__ == "__main__":
    main()
