"""Restoring safetensors files onto eight devices: seconds beside reading the bytes, and the most memory.

    python -m benchmarks.safetensors_restore [GIGABYTES] [ROUNDS]

GIGABYTES (default 4) of random bfloat16 in 8 files, restored onto (4, 2) CPU devices: half of the tensors split by rows
and columns, the others by columns alone, so that no device's part is contiguous. Each round is a process for every
contender, in turn; the page cache has the files, and the disk is done with them. `read` reads the files to as much new
memory and does no more, in one thread; `restore` is `checkpoint.from_safetensors`. Memory is the most that was resident
(VmHWM) beyond what was before.
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
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import checkpoint

FILES = 8
SHAPE = (4096, 4096)
TENSOR_BYTES = 2 * math.prod(SHAPE)


def names(gigabytes: float) -> list[str]:
    """Of tensors: as many in each file."""
    return [f"layers/{n}/w" for n in range(FILES * round(gigabytes * 2**30 / TENSOR_BYTES / FILES))]


def target(gigabytes: float) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and sharding of each tensor."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("data", "model"), P(None, ("data", "model"))]
    return {
        name: jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, specs[n % 2]))
        for n, name in enumerate(names(gigabytes))
    }


def write(folder: Path, gigabytes: float) -> None:
    """The files."""
    rng = np.random.default_rng(0)
    found = names(gigabytes)
    state = {name: rng.integers(0, 2**14, SHAPE, np.uint16).view(jnp.bfloat16) for name in found[: len(found) // FILES]}
    whole = {name: state[found[n % len(state)]].copy() for n, name in enumerate(found)}
    checkpoint.to_safetensors(folder, whole, max_bytes=len(state) * TENSOR_BYTES)


def highest() -> int:
    """The most bytes that were resident in this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def measured(contender: str, folder: Path, gigabytes: float) -> dict[str, float]:
    """Seconds and bytes of one contender, in a process of its own."""
    like = target(gigabytes)
    jax.block_until_ready(jax.device_put(jnp.zeros(8), next(iter(like.values())).sharding.mesh.devices.flat[0]))
    before, start = highest(), time.perf_counter()
    if contender == "read":
        kept = []
        for path in sorted(folder.glob("*.safetensors")):
            buffer = np.empty(path.stat().st_size, np.uint8)
            with path.open("rb", buffering=0) as file:
                done = 0
                while count := file.readinto(memoryview(buffer)[done : done + (8 << 20)]):
                    done += count
            kept.append(buffer)
    else:
        kept = jax.block_until_ready(checkpoint.from_safetensors(folder, like=like))
    seconds = time.perf_counter() - start
    assert kept
    return {"seconds": seconds, "bytes": highest() - before}


def main(gigabytes: float = 4, rounds: int = 5) -> None:
    """Prints a table."""
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    try:
        write(folder, gigabytes)
        os.sync()
        files = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        found: dict[str, list[dict[str, float]]] = {"read": [], "restore": []}
        for _ in range(rounds):
            for contender, results in found.items():
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.safetensors_restore",
                    contender,
                    str(folder),
                    str(gigabytes),
                ]
                results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        ratio = statistics.median(
            b["seconds"] / a["seconds"] for a, b in zip(found["read"], found["restore"], strict=True)
        )
        print(f"{size / 1e9:.2f} GB in {len(files)} files, {rounds} rounds")
        print("| | seconds | over reading | MB beyond the set |\n|---|--:|--:|--:|")
        for contender, results in found.items():
            seconds = statistics.median(result["seconds"] for result in results)
            beyond = max(result["bytes"] for result in results) - size
            told = f"{ratio:.2f}" if contender == "restore" else "1.00"
            print(f"| {contender} | {seconds:.2f} | {told} | {beyond / 1e6:,.0f} |")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] in (["read"], ["restore"]):
        print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
    else:
        main(*(float(x) for x in sys.argv[1:2]), *(int(x) for x in sys.argv[2:3]))
