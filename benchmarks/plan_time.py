"""How long a plan takes, from the function to the plan, on a machine that has none of the devices.

    python -m benchmarks.plan_time [--compile] [NAME ...]

Each row is a decoder's whole train step (forward, backward, AdamW) on abstract arguments, in a process of its own:
nothing is computed. "processor" is the part of the plan's time in which it was not kept waiting by other programs, and
"trace" what `jax.jit(step).trace` takes by itself, which is part of the plan's time; with
``--compile`` stands beside it what lowering the planned step takes and XLA, which compiles it for as many virtual CPU
devices as the mesh has.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autoshard
from autoshard.machine.mesh_config import MeshConfig
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig

LLAMA_8B = {"d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256, "seq": 8192}
LLAMA_405B = {"d_model": 16384, "heads": 128, "kv_heads": 8, "d_ff": 53248, "vocab": 128256, "seq": 8192}
SLIM = {"d_model": 1024, "heads": 16, "d_ff": 4096, "vocab": 32000, "seq": 2048}
MIXTRAL = LLAMA_8B | {"vocab": 32000, "experts": 8}
DEEPSEEK = {
    "d_model": 2048,
    "heads": 16,
    "d_ff": 1408,
    "vocab": 102400,
    "seq": 4096,
    "experts": 64,
    "experts_per_token": 6,
}
DEEPSEEK |= {"shared": 2}
FLAT, CUBE = {"data": 8, "model": 8}, {"pod": 2, "data": 8, "model": 8}
FOUR = {"pod": 2, "data": 4, "fsdp": 4, "model": 4}
ROWS = {
    "8b-scanned": (LLAMA_8B, 32, True, FLAT),
    "8b": (LLAMA_8B, 32, False, FLAT),
    "8b-scanned-4d": (LLAMA_8B, 32, True, FOUR),
    "405b-scanned": (LLAMA_405B, 126, True, CUBE),
    "405b": (LLAMA_405B, 126, False, CUBE),
    "mixtral-scanned": (MIXTRAL, 32, True, FLAT),
    "mixtral": (MIXTRAL, 32, False, FLAT),
    "deepseek-scanned": (DEEPSEEK, 28, True, FLAT),
    "deepseek": (DEEPSEEK, 28, False, FLAT),
    "slim-16": (SLIM, 16, False, FLAT),
    "slim-64": (SLIM, 64, False, FLAT),
    "slim-256": (SLIM, 256, False, FLAT),
    "slim-1024": (SLIM, 1024, False, FLAT),
}
"""Sizes, layers, whether they are scanned, and the mesh."""
PIPELINED = {f"{name}-pipeline": name for name in ("8b-scanned", "8b", "405b-scanned", "405b")}
"""Rows whose plan may take any axis of the mesh, or none, for the stages of a pipeline, and as which they are else."""
ROWS |= {name: ROWS[row] for name, row in PIPELINED.items()}
TIGHT = {f"{name}-tight": name for name in ("8b-scanned", "8b")}
"""Rows for which memory is short, and as which they are else."""
ROWS |= {name: ROWS[row] for name, row in TIGHT.items()}
PLENTY, SHORT = "95TB", "20GiB"
"""Budgets of memory of a device."""


def measure(name: str, compiled: bool) -> None:
    """Prints one row."""
    sizes, layers, scan, axes = ROWS[name]
    model = ModelConfig(layers=layers, dtype="bfloat16", scan=scan, **sizes)
    steps = make_steps(model, OptimizerConfig(), 1000)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((256, model.seq), jnp.int32) for k in ("inputs", "targets")}
    start = time.perf_counter()
    jax.jit(steps.train, donate_argnums=0).trace(state, batch)
    alone = time.perf_counter() - start
    jax.clear_caches()
    mesh = MeshConfig(
        axes=axes,
        hardware="tpu-v5p",
        memory_budget=SHORT if name in TIGHT else PLENTY,
        pipeline="auto" if name in PIPELINED else None,
    )
    start, busy = time.perf_counter(), time.process_time()
    step = autoshard.jit(steps.train, mesh=mesh, donate_argnums=0)
    plan = step.plan(state, batch)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gap = max(0.0, 1 - plan.bound / plan.cost.seconds)
    words = [name, f"{layers}", "x".join(map(str, axes.values())), f"{alone:.1f}", f"{seconds:.1f}", f"{busy:.1f}"]
    words.append(f"{gap:.1%}" if plan.bound else "not known")
    words.append(f"{peak:.1f} GiB")
    if compiled:
        start = time.perf_counter()
        step.lower(state, batch).compile()
        words.append(f"{time.perf_counter() - start:.1f}")
    print(" | ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.plan_time", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows, all where none is named: {', '.join(ROWS)}")
    parser.add_argument("--compile", action="store_true", help="lower and compile the planned step, too")
    parser.add_argument("--row", metavar="NAME", choices=ROWS, help="measure one row in this very process")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if args.row:
        measure(args.row, args.compile)
        return
    head = "row | layers | mesh | trace, s | plan, s | processor, s | gap | most memory"
    print(head + (" | XLA, s" if args.compile else ""), flush=True)
    for name in args.names or ROWS:
        devices = {"JAX_NUM_CPU_DEVICES": str(math.prod(ROWS[name][3].values()))}
        row = [sys.executable, "-m", "benchmarks.plan_time", "--row", name, *["--compile"] * args.compile]
        subprocess.run(row, check=True, env={**os.environ, **devices})


if __name__ == "__main__":
    main()
