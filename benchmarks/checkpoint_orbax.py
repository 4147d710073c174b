"""Saving and restoring beside plain Orbax: seconds, and memory beside the state.

    python -m benchmarks.checkpoint_orbax [ROUNDS] [CASE ...]

States of random float32 over a mesh of (4, 2) CPU devices. Times are of one process, in which each contender saves and
restores in turn, ROUNDS times (default 7), so that all meet the same disturbances: the median of the ratios within a
round, on the clock and of the processor (on a busy machine the second is the better witness). Memory is of a process
for each contender and operation: the most that was resident beyond what was before, of a restore less the state itself.
`unchecked` is autoshard without the chunks' checksums.
"""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import checkpoint
from autoshard.checkpoint import array_store

CASES = {
    "100 MB": (4, (1280, 5120)),
    "1 GB": (32, (2048, 4096)),
    "4 GB": (128, (2048, 4096)),
    "5,000 leaves": (5000, (64, 64)),
}
"""Leaves, and the shape of each."""
CODECS = array_store.CODECS
UNCHECKED = ({"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}})
State = dict[str, Any]


def target(case: str) -> State:
    """Shape and sharding of each leaf."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    leaves, shape = CASES[case]
    sharding = NamedSharding(mesh, P("data", "model"))
    return {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for i in range(leaves)}


def state(case: str) -> State:
    def leaf(number: int, like: Any) -> jax.Array:
        values = np.random.default_rng(number).standard_normal(like.shape, np.float32)
        return jax.make_array_from_callback(like.shape, like.sharding, values.__getitem__)

    return jax.block_until_ready({name: leaf(i, like) for i, (name, like) in enumerate(target(case).items())})


def _save(path: Path, saved: State) -> None:
    checkpoint.save(path, 1, saved, wait=True)


def _restore(path: Path, like: State) -> State:
    return checkpoint.restore(path, like=like)


def _orbax_save(path: Path, saved: State) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(saved))


def _orbax_restore(path: Path, like: State) -> State:
    args = {name: ocp.ArrayRestoreArgs(sharding=leaf.sharding) for name, leaf in like.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(dict.fromkeys(like, 0), restore_args=args))


CONTENDERS: dict[str, tuple[Callable[[Path, State], None], Callable[[Path, State], State]]] = {
    "autoshard": (_save, _restore),
    "orbax": (_orbax_save, _orbax_restore),
    "unchecked": (_save, _restore),
}


def choose(name: str) -> tuple[Callable[[Path, State], None], Callable[[Path, State], State]]:
    array_store.CODECS = UNCHECKED if name == "unchecked" else CODECS
    return CONTENDERS[name]


def times(case: str, rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Seconds on the clock and of the processor by operation and contender, round by round, after one that does not
    count."""
    saved, like = state(case), target(case)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            names = list(CONTENDERS) if number % 2 else list(reversed(CONTENDERS))
            for operation in ("save", "restore"):
                for name in names:
                    path = Path(folder) / name
                    if operation == "save":
                        shutil.rmtree(path, ignore_errors=True)
                        os.sync()
                    gc.collect()
                    start = time.perf_counter(), time.process_time()
                    jax.block_until_ready(
                        choose(name)[operation == "restore"](path, saved if operation == "save" else like)
                    )
                    took = time.perf_counter() - start[0], time.process_time() - start[1]
                    found.setdefault((operation, name), []).append(took)
    return {key: seconds[1:] for key, seconds in found.items()}


def resident(line: str) -> float:
    """Bytes of this process in memory: now (``VmRSS``) or at most (``VmHWM``)."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def peak(case: str, name: str, operation: str, path: Path) -> float:
    """Bytes in memory beyond those before, at most; called in a process of its own."""
    save, restore = choose(name)
    small = {"w": jnp.zeros((8, 8))}
    save(path.with_name(f"warm-{operation}"), small)  # what is loaded at first use counts for neither
    argument = state(case) if operation == "save" else target(case)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM anew
    before = resident("VmRSS")
    if operation == "save":
        save(path, argument)
        return resident("VmHWM") - before
    jax.block_until_ready(restore(path, argument))
    return resident("VmHWM") - before - sum(4 * math.prod(leaf.shape) for leaf in argument.values())


def main() -> None:
    if sys.argv[1:2] == ["peak"]:
        case, name, operation, path = sys.argv[2:]
        print(peak(case, name, operation, Path(path)))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"JAX {jax.__version__}, Orbax {ocp.__version__}, {os.cpu_count()} CPU cores, {rounds} rounds\n")
    print("| state | operation | seconds | over Orbax | processor | over unchecked | processor | MB beside | Orbax's |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for case in sys.argv[2:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            peaks: dict[tuple[str, str], float] = {}
            for name in ("autoshard", "orbax"):
                for operation in ("save", "restore"):
                    command = [sys.executable, "-m", "benchmarks.checkpoint_orbax", "peak", case, name, operation]
                    path = Path(folder) / name / "step"
                    path.parent.mkdir(exist_ok=True)
                    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True)
                    peaks[operation, name] = float(done.stdout)
        seconds = times(case, rounds)
        for operation in ("save", "restore"):
            row = [f"{statistics.median(clock for clock, _ in seconds[operation, 'autoshard']):.2f}"]
            for other in ("orbax", "unchecked"):
                pairs = list(zip(seconds[operation, "autoshard"], seconds[operation, other], strict=True))
                row += [f"{statistics.median(a[n] / b[n] for a, b in pairs):.2f}" for n in (0, 1)]
            beside = [f"{peaks[operation, name] / 1e6:,.0f}" for name in ("autoshard", "orbax")]
            print(f"| {case} | {operation} | {' | '.join(row + beside)} |", flush=True)


if __name__ == "__main__":
    main()
