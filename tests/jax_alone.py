"""Runs exported steps where JAX is alone: a fresh process, eight CPU devices, no autoshard to import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_PROGRAM = """
import sys
sys.modules["autoshard"] = None
import jax, numpy as np
folder = sys.argv[1]
for name in sys.argv[2:]:
    exported = jax.export.deserialize(bytearray(open(f"{folder}/{name}.bin", "rb").read()))
    abstract = exported.in_shardings_jax()[0].mesh
    mesh = jax.make_mesh(abstract.axis_sizes, abstract.axis_names, axis_types=abstract.axis_types)
    given = np.load(f"{folder}/{name}.npz")
    leaves = jax.device_put([given[f"arr_{n}"] for n in range(len(given))], list(exported.in_shardings_jax(mesh)))
    args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
    results = jax.tree.leaves(jax.jit(exported.call)(*args, **kwargs))
    np.savez(f"{folder}/{name}_out.npz", *map(np.asarray, results))
assert not [name for name in sys.modules if name.startswith("autoshard.")]
"""


def run(folder: Path, steps: Mapping[str, tuple[bytes, Any]]) -> dict[str, list[np.ndarray]]:
    """The leaves of what each step gives, by name, of an artifact and its arguments, whose leaves are arrays."""
    for name, (content, args) in steps.items():
        (folder / f"{name}.bin").write_bytes(content)
        np.savez(folder / f"{name}.npz", *map(np.asarray, jax.tree.leaves(args)))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", _PROGRAM, str(folder), *steps]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[np.ndarray]] = {}
    for name in steps:
        with np.load(folder / f"{name}_out.npz") as results:
            found[name] = [results[f"arr_{n}"] for n in range(len(results))]
    return found
