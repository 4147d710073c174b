"""What the tests of local forms have in common: meshes, and what our program sends beside what XLA's own does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import Audit, audit
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.mesh import Link, LogicalMesh
from tests.programs import CHIP, mesh

EIGHT, GRID = mesh(x=8), mesh(x=2, y=4)
HASTY = LogicalMesh(("x", "y"), (2, 4), replace(CHIP, links={"link": Link("link", 1.0, 0.0)}, overhead=0.0))
"""Bytes are dear and collectives cost nothing else: every local form pays."""


def step(fun: Callable[..., Any], specs: Any, on: LogicalMesh, results: Any = None) -> Any:
    return autoshard.jit(fun, mesh=on, strategy="replicated", in_shardings=specs, out_shardings=results)


def compared(ours: Any, fun: Callable[..., Any], args: Any, specs: Any, results: Any) -> tuple[Audit, list[float], str]:
    """The audit of `step`'s program of ``fun``, the bytes that it and XLA's own move, and what they are."""
    plan = ours.plan(*args)
    compiled = ours.lower(*args).compile()
    devices = plan.mesh.concrete()

    def place(spec: P) -> NamedSharding:
        return NamedSharding(devices, spec)

    placed = jax.tree.map(place, (specs, results), is_leaf=lambda p: isinstance(p, P))
    alone = jax.jit(fun, in_shardings=placed[0], out_shardings=placed[1]).lower(*args).compile()
    sent = [collectives(c.as_text(), plan.mesh) for c in (compiled, alone)]
    table = "\n".join(f"{who}: {', '.join(map(str, cs))}" for who, cs in zip(("ours", "xla"), sent, strict=True))
    return audit(compiled, plan), [sum(c.wire_bytes(plan.mesh) for c in cs) for cs in sent], table


def same(got: Any, expected: Any, scale: float = 1e-30) -> None:
    """Equal up to rounding of the largest element, or of ``scale``."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not jax.dtypes.issubdtype(b.dtype, np.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        wide = "complex128" if jax.dtypes.issubdtype(b.dtype, np.complexfloating) else "float64"
        a, b, close = np.asarray(a).astype(wide), np.asarray(b).astype(wide), 8 * float(jnp.finfo(b.dtype).eps)
        np.testing.assert_allclose(a, b, rtol=close, atol=close * np.abs(b[np.isfinite(b)]).max(initial=scale))
