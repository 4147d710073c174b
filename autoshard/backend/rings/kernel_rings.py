"""Rings around kernels: their weights are all-gathered, and their partial sums reduce-scattered, beside other kernels.

XLA for TPUs without SparseCores gathers beside its own products alone, which kernels of local forms are not, and
computes nothing while a reduce-scatter runs (`Hardware.blocking_gathers`, `Hardware.blocking_reduce_scatters`). A
permute runs beside anything. Of one operation a ring begins when the one before it is done: XLA would start all of them
at once, and wait for all before the first kernel, though only the last one reads the last weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from autoshard.backend.on_shards import reduce_in_rings, reduce_partials
from autoshard.backend.rings import ring as one_ring
from autoshard.backend.rings.ring import device_before, first_ring, put_part, sent_on, when_done
from autoshard.cost.overlap.products import is_kernel, read_after
from autoshard.cost.overlap.rings import gathered_axis
from autoshard.cost.overlap.weights_and_gradients import weights
from autoshard.ir.graph import Graph
from autoshard.ir.rule import halo_axes
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord


class WeightRing(NamedTuple):
    """An operand of a kernel that is all-gathered over one mesh axis."""

    operand: int
    before: Spec
    """Of the operand, before it is gathered."""
    dim: int
    axis: str
    parts: int


def weight_rings(graph: Graph, plan: PlanRecord) -> dict[int, tuple[WeightRing, ...]]:
    """The weights that kernels gather in rings, by node, in the order in which their products read them."""
    mesh, shape = plan.mesh, plan.mesh.shape
    if not mesh.hardware.blocking_gathers:
        return {}
    before = {(c.node, c.value): c.resharded_from for c in plan.intermediates if not c.waypoints}
    of_weights, found = weights(graph), dict[int, tuple[WeightRing, ...]]()
    for island in plan.islands:
        node = graph.nodes[island.node]
        if not is_kernel(node.kind) or halo_axes(node.kind.rule, island.in_specs, island.out_specs):
            continue
        rings: list[WeightRing] = []
        for i, (v, spec) in enumerate(zip(node.operands, island.in_specs, strict=True)):
            given = before.get((island.node, v))
            gathered = gathered_axis(given, spec) if given is not None and v in of_weights else None
            if given is None or gathered is None or shape[gathered[1]] > one_ring.MAX_PARTS:
                continue
            if math.prod(graph.values[v].shape) // given.num_shards(shape) >= one_ring.MIN_SUM:
                rings.append(WeightRing(i, given, *gathered, shape[gathered[1]]))
        if rings:
            in_turn = sorted(rings, key=lambda ring: read_after(node.kind, ring.operand))
            found[island.node] = tuple(in_turn)
    return found


def gathered_in_turn(operands: Sequence[Any], rings: Sequence[WeightRing]) -> list[Any]:
    """The operands with those of ``rings`` gathered; inside a `jax.shard_map`."""
    found, last = [*operands], None
    for ring in rings:
        found[ring.operand] = last = _gathered(when_done(found[ring.operand], last), ring)
    return found


def reduced_in_turn(
    results: Sequence[Any], made: Sequence[Spec], reduced: Sequence[Spec], mesh: LogicalMesh
) -> tuple[Any, ...]:
    """The results with what is partial reduced, sums that are scattered in rings; inside a `jax.shard_map`."""
    found, last = [], None
    for x, before, after in zip(results, made, reduced, strict=True):
        if first_ring(before, after, x.shape, mesh.shape, one_ring.MIN_SUM):
            x = last = reduce_in_rings(when_done(x, last), before, after, mesh)
        else:
            x = reduce_partials(x, before, after, mesh)
        found.append(x)
    return tuple(found)


def _gathered(x: Any, ring: WeightRing) -> Any:
    whole = None
    for step in range(ring.parts):
        whole = put_part(whole, x, ring.dim, device_before(ring.axis, ring.parts, step), ring.parts)
        if step < ring.parts - 1:
            x = sent_on(x, ring.axis, ring.parts)
    return whole
