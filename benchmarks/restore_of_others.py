"""Restoring what others write onto eight devices: seconds beside reading the bytes and beside Orbax, and the memory.

    python -m benchmarks.restore_of_others [GIGABYTES] [ROUNDS]

GIGABYTES (default 4) of random bfloat16 onto (4, 2) CPU devices: half of the tensors split by rows and columns, the
others by columns alone, so that no device's part is contiguous. They are in 8 safetensors files, and in a folder that
Orbax wrote from where they are. Each round is a process for every contender, in turn; the page cache has the files,
and the disk is done with them. `read` reads the safetensors files to as much new memory and does no more, in one
thread; `safetensors` is `checkpoint.from_safetensors`; `orbax` is `checkpoint.restore` of Orbax's folder, and `Orbax
itself` its own restore of that to the same shardings. Memory is the most that was resident (VmHWM) beyond what was
before.
"""

from __future__ import annotations

import json
import math
import os
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

FILES = 8
SHAPE = (4096, 4096)
TENSOR_BYTES = 2 * math.prod(SHAPE)
Target = dict[str, jax.ShapeDtypeStruct]


def target(gigabytes: float) -> Target:
    """Shape and sharding of each tensor: as many for each file."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("data", "model"), P(None, ("data", "model"))]
    return {
        f"layers_{n}": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, specs[n % 2]))
        for n in range(FILES * round(gigabytes * 2**30 / TENSOR_BYTES / FILES))
    }


def write(folder: Path, like: Target) -> None:
    """The files, and the folder of Orbax."""
    rng = np.random.default_rng(0)
    state = {name: rng.integers(0, 2**14, SHAPE, np.uint16).view(jnp.bfloat16) for name in like}
    checkpoint.to_safetensors(folder / "safetensors", state, max_bytes=len(like) // FILES * TENSOR_BYTES)
    placed = {name: jax.device_put(state.pop(name), like[name].sharding) for name in like}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "orbax", args=ocp.args.PyTreeSave(placed))
    os.sync()


def read(folder: Path, like: Target) -> list[np.ndarray]:
    """The files as they are."""
    kept: list[np.ndarray] = []
    for path in sorted((folder / "safetensors").glob("*.safetensors")):
        buffer = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(memoryview(buffer)[done : done + (8 << 20)]):
                done += count
        kept.append(buffer)
    return kept


def orbax_itself(folder: Path, like: Target) -> Any:
    args = {name: ocp.ArrayRestoreArgs(sharding=leaf.sharding) for name, leaf in like.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = ocp.args.PyTreeRestore(dict.fromkeys(like, 0), restore_args=args)
        return checkpointer.restore(folder / "orbax", args=restored)


CONTENDERS: dict[str, tuple[Callable[[Path, Target], Any], str]] = {
    "read": (read, ""),
    "safetensors": (lambda folder, like: checkpoint.from_safetensors(folder / "safetensors", like=like), "read"),
    "Orbax itself": (orbax_itself, ""),
    "orbax": (lambda folder, like: checkpoint.restore(folder / "orbax", like=like), "Orbax itself"),
}
"""And which one each is held against."""


def highest() -> int:
    """The most bytes that were resident in this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def measured(contender: str, folder: Path, gigabytes: float) -> dict[str, float]:
    """Seconds and bytes of one contender, in a process of its own."""
    like = target(gigabytes)
    jax.block_until_ready(jax.device_put(jnp.zeros(8), next(iter(like.values())).sharding.mesh.devices.flat[0]))
    before, start, busy = highest(), time.perf_counter(), time.process_time()
    kept = jax.block_until_ready(CONTENDERS[contender][0](folder, like))
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert kept
    return {"seconds": seconds, "busy": busy, "bytes": highest() - before}


def child(*words: Any) -> str:
    """What this program prints when it is called with these words."""
    command = [sys.executable, "-m", "benchmarks.restore_of_others", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(gigabytes: float = 4, rounds: int = 5) -> None:
    """Prints a table."""
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    try:
        child("write", folder, gigabytes)
        files = sorted((folder / "safetensors").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(rounds):
            for contender, results in found.items():
                results.append(json.loads(child(contender, folder, gigabytes)))
        print(f"{size / 1e9:.2f} GB in {len(files)} files, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
        print("| | seconds | over | processor time | over | MB beyond the set |\n|---|--:|---|--:|---|--:|")
        for contender, results in found.items():
            cells = [contender]
            for key in ("seconds", "busy"):
                cells.append(f"{statistics.median(r[key] for r in results):.2f}")
                beside = CONTENDERS[contender][1]
                ratios = [r[key] / other[key] for r, other in zip(results, found.get(beside, []), strict=False)]
                cells.append(f"{statistics.median(ratios):.2f} of {beside}" if ratios else "")
            cells.append(f"{(max(r['bytes'] for r in results) - size) / 1e6:,.0f}")
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]), target(float(sys.argv[3])))
    elif sys.argv[1:2] and sys.argv[1] in CONTENDERS:
        print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
    else:
        main(*(float(x) for x in sys.argv[1:2]), *(int(x) for x in sys.argv[2:3]))
