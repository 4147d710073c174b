"""Chooses the mesh where the user leaves it open: plans the step on each candidate and takes the fastest plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import AutoshardError, SpecError
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh
from autoshard.plan.decisions import Alternative
from autoshard.runtime.stages import Planned


def candidate_meshes(pins: Any) -> list[LogicalMesh]:
    """The candidate meshes where the user gives none: the mesh of the given shardings if they name one, else every
    factoring of the devices into ``data`` and ``model``.

    Args:
      pins: pytree of `PartitionSpec`, `NamedSharding` or None.

    Raises:
      SpecError: the shardings are over different meshes.
    """
    leaves = jax.tree.leaves(pins, is_leaf=lambda x: isinstance(x, NamedSharding))
    named = dict.fromkeys(p.mesh for p in leaves if isinstance(p, NamedSharding))
    if len({tuple(mesh.shape.items()) for mesh in named}) > 1:
        raise SpecError(f"the shardings given are over {' and '.join(str(dict(m.shape)) for m in named)}: choose one")
    if named:
        return [resolve_mesh(next(iter(named)))]
    return MeshConfig(axes="auto").meshes()


def plan_each_mesh(
    plan_on: Callable[[LogicalMesh], Planned], meshes: Sequence[LogicalMesh], name: str
) -> list[Planned]:
    """The plan on each mesh that has one.

    Raises:
      AutoshardError: no mesh has a plan. Of the class of the first mesh's error; that error itself where all are equal.
    """
    planned: list[Planned] = []
    errors: dict[str, Exception] = {}
    for mesh in meshes:
        try:
            planned.append(plan_on(mesh))
        except (AutoshardError, ValueError) as e:  # JAX raises ValueError for a spec that names no axis of the mesh
            errors[str(mesh)] = e
    if planned:
        return planned
    first = next(iter(errors.values()))
    if len({(type(e), str(e)) for e in errors.values()}) == 1 or not isinstance(first, AutoshardError):
        raise first
    reasons = "; ".join(f"{mesh}: {e}" for mesh, e in errors.items())
    raise type(first)(f"{name}: none of the candidate meshes has a plan; give one as mesh=. {reasons}")


def fastest(candidates: Sequence[Planned]) -> Planned:
    """The plan with the least predicted time, with the others' meshes among its alternatives."""
    best = min(candidates, key=lambda c: c.plan.cost.seconds)
    others = [
        Alternative(f"the mesh {c.plan.mesh}", c.plan.cost.seconds, c.plan.memory.peak)
        for c in candidates
        if c is not best
    ]
    return best._replace(plan=replace(best.plan, alternatives=(*best.plan.alternatives, *others)))
