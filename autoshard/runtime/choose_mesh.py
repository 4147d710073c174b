"""The mesh, where the user leaves it open: every candidate is planned for, and the cheapest plan wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import AutoshardError, SpecError
from autoshard.ir.graph import Graph
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh
from autoshard.plan.decisions import Alternative
from autoshard.plan.record import PlanRecord


def candidate_meshes(pins: Any) -> list[LogicalMesh]:
    """The meshes to weigh where none is given.

    That of the shardings given, if one names any, or every factoring of the devices into ``data`` and ``model``.
    """
    leaves = jax.tree.leaves(pins, is_leaf=lambda x: isinstance(x, NamedSharding))
    named = dict.fromkeys(p.mesh for p in leaves if isinstance(p, NamedSharding))
    if len({tuple(mesh.shape.items()) for mesh in named}) > 1:
        raise SpecError(f"the shardings given are over {' and '.join(str(dict(m.shape)) for m in named)}: choose one")
    if named:
        return [resolve_mesh(next(iter(named)))]
    return MeshConfig(axes="auto").meshes()


def cheapest_mesh(
    planned: Callable[[LogicalMesh], tuple[PlanRecord, Graph]], meshes: Sequence[LogicalMesh], name: str
) -> tuple[PlanRecord, Graph]:
    """What is ``planned`` for the mesh that it is fastest on; meshes that do not serve what was asked are left out.

    Raises:
      AutoshardError: no mesh serves; of the kind of the first refusal, and the refusal itself where all are alike.
    """
    made: list[tuple[PlanRecord, Graph]] = []
    refused: dict[str, Exception] = {}
    for mesh in meshes:
        try:
            made.append(planned(mesh))
        except (AutoshardError, ValueError) as e:  # JAX has ValueError for a spec of an axis that the mesh lacks
            refused[str(mesh)] = e
    if made:
        plan, graph = min(made, key=lambda m: m[0].cost.seconds)
        others = [Alternative(f"the mesh {p.mesh}", p.cost.seconds, p.memory.peak) for p, _ in made if p is not plan]
        return replace(plan, alternatives=(*plan.alternatives, *others)), graph
    first = next(iter(refused.values()))
    if len({(type(e), str(e)) for e in refused.values()}) == 1 or not isinstance(first, AutoshardError):
        raise first
    reasons = "; ".join(f"{mesh}: {e}" for mesh, e in refused.items())
    raise type(first)(f"{name}: no mesh of these devices serves what was asked; give one as mesh=. {reasons}")
