"""Which products are summed in rings, and which gather an operand in one: those for which XLA would wait longer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from autoshard.backend.rings.fused_with_products import FusedWithProducts
from autoshard.backend.rings.operand_gathers import Change
from autoshard.backend.rings.ring import GatherRing, Ring, first_ring
from autoshard.cost.overlap.products import is_of_xla
from autoshard.cost.overlap.rings import MAX_PARTS, MIN_PRODUCT, gathered_axis
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.spec import Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    collective_rate,
)
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island
from autoshard.plan.record import PlanRecord

MAX_FILLED = 0.95
"""Share of the memory that a plan may take with what a ring stores beside it: XLA leaves gaps."""


def room_beside(plan: PlanRecord) -> float:
    """Bytes per device for what rings store beside what the plan counts."""
    return MAX_FILLED * plan.mesh.hardware.memory - plan.memory.peak


def sum_rings(graph: Graph, plan: PlanRecord, gradients: Set[int], fused: FusedWithProducts) -> dict[int, Ring]:
    """The rings in which products are summed, by node.

    For a ring XLA stores operands that it would else compute as the product reads them, as logits' cotangents. Where
    that takes longer than all rings save that need the operand, products that read it have no ring. A gradient's ring
    stores it in any case: what a layer's gradients read, others read too. It stores all of its parts besides, and a
    gradient has no ring where its operand may be too much for the memory.
    """
    found, room = dict[int, Ring](), room_beside(plan)
    saved, stored, anyway = dict[int, float](), dict[int, dict[int, float]](), set[int]()
    for island in plan.islands:
        node = graph.nodes[island.node]
        ring, seconds = product_ring(node.kind, island, plan.mesh)
        of_gradient = not gradients.isdisjoint(node.results)
        if ring is None or (of_gradient and max(operand_bytes(node.kind, island, plan.mesh)) > room):
            continue
        found[island.node], saved[island.node] = ring, seconds
        stored[island.node] = fused.stored_seconds(node.operands, node.kind, island, plan.mesh)
        if of_gradient:
            anyway.update(stored[island.node])
    while too_long := _stored_for_longer(found, saved, stored) - anyway:
        found = {n: ring for n, ring in found.items() if too_long.isdisjoint(stored[n])}
    return found


def _stored_for_longer(
    nodes: Iterable[int], saved: Mapping[int, float], stored: Mapping[int, Mapping[int, float]]
) -> set[int]:
    """The operands that take longer to store than the rings of ``nodes`` save that need them.

    Args:
      saved: seconds that the ring of each node saves, for which its operands share.
      stored: seconds that storing each operand of a node takes.
    """
    takes, gains = dict[int, float](), defaultdict[int, float](float)
    for n in nodes:
        for v, seconds in stored[n].items():
            takes[v] = max(seconds, takes.get(v, 0.0))
            gains[v] += saved[n] / len(stored[n])
    return {v for v, seconds in takes.items() if seconds > gains[v]}


def product_ring(kind: OpKind, island: Island, mesh: LogicalMesh) -> tuple[Ring | None, float]:
    """The ring that sums the result of a product, where XLA would wait for a reduce-scatter, and the seconds that it
    saves; None where it has no parts along the dimension, or waits less without."""
    if not mesh.hardware.blocking_reduce_scatters or not is_of_xla(kind):
        return None, 0.0
    (made,), (reduced,), rule = island.out_specs, island.reduced_specs, kind.rule
    shape = shard_shape(kind, -1, made, mesh)
    orders = (reduced, *_in_other_order(made, reduced, mesh.shape))
    rings = (first_ring(made, order, shape, mesh.shape, MIN_PRODUCT) for order in orders)
    ring = next(filter(None, rings), None)
    factor = rule.results[0][ring.dim] if ring else ()
    if ring is None or len(factor) != 1 or rule.kind(factor[0]) != "parallel":
        return None, 0.0
    size, own = math.prod(shape) * kind.bits[-1] / 8, len(made.dims[ring.dim])
    axes, (_, *rest) = (spec.dims[ring.dim][own:] for spec in (reduced, ring.placed))
    (_, whole), (_, left) = (collective_rate(REDUCE_SCATTER, over, mesh) for over in (axes, tuple(rest)))
    at_once = whole * size - left * size / ring.parts
    saved = _saved(at_once, permuted_seconds(ring.axis, size, mesh), product_seconds(kind, island, mesh))
    places = tuple((i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor)
    return (replace(ring, operands=places), saved) if saved > 0 else (None, 0.0)


def gather_ring(
    kind: OpKind, operand: int, change: Change, island: Island, mesh: LogicalMesh, more: float = 0.0
) -> GatherRing | None:
    """The ring in which an operand of a product with one result is all-gathered; None where it waits less without.

    Args:
      more: seconds that XLA takes for what it would else compute with the product.
    """
    if not is_of_xla(kind) or len(island.out_specs) != 1:
        return None
    (out,), rule, gathered = island.out_specs, kind.rule, gathered_axis(*change)
    if gathered is None:
        return None
    dim, axis = gathered
    factor = rule.operands[operand][dim]
    if len(factor) != 1:
        return None
    in_result = [d for d, f in enumerate(rule.results[0]) if f == factor]
    if rule.kind(factor[0]) != ("parallel" if in_result else "sum"):
        return None
    parts, read = mesh.shape[axis], shard_shape(kind, operand, island.in_specs[operand], mesh)
    made = math.prod(shard_shape(kind, -1, out, mesh))
    if not in_result and made > math.prod(read):  # sums would take longer than the gather
        return None
    least = MIN_PRODUCT * (parts if in_result else 1)
    if not 1 < parts <= MAX_PARTS or read[dim] % parts or made < least:
        return None
    # Each part of what is summed over reads the sum of those before, and writes it with its own.
    moved = 0.0 if in_result else 2 * parts * made * kind.bits[-1] / 8
    size = math.prod(read) * kind.sent_bits[operand] / 8
    longest = max(permuted_seconds(axis, size, mesh), moved / mesh.hardware.memory_rate)
    at_once = collective_rate(ALL_GATHER, (axis,), mesh)[1] * size
    if _saved(at_once, longest, product_seconds(kind, island, mesh)) <= more:
        return None
    others = tuple(
        (i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor and i != operand
    )
    return GatherRing(axis, parts, operand, dim, others, in_result[0] if in_result else None)


def operand_bytes(kind: OpKind, island: Island, mesh: LogicalMesh) -> list[float]:
    """Of each operand, per device."""
    return [b / spec.num_shards(mesh.shape) for b, spec in zip(kind.bytes, island.in_specs, strict=False)]


def shard_shape(kind: OpKind, position: int, spec: Spec, mesh: LogicalMesh) -> list[int]:
    return [n // mesh.axes_size(axes) for n, axes in zip(kind.shapes[position], spec.dims, strict=True)]


def product_seconds(kind: OpKind, island: Island, mesh: LogicalMesh) -> float:
    """Of the product, on one device."""
    axes = {a for spec in (*island.in_specs, *island.out_specs) for a in spec.axes}
    return kind.flops / mesh.axes_size(tuple(axes)) / mesh.hardware.product_rate(kind.product_dtype)


def permuted_seconds(axis: str, size: float, mesh: LogicalMesh) -> float:
    """Of the permutes of a ring that sends ``size`` bytes in all, but for a device's own part."""
    return (1 - 1 / mesh.shape[axis]) * size * collective_rate(COLLECTIVE_PERMUTE, (axis,), mesh)[1]


def _saved(at_once: float, in_ring: float, product: float) -> float:
    """Seconds by which a ring, what runs ``in_ring`` beside the ``product``, takes less time than the product and what
    it replaces, ``at_once``, in turn: that may use more links, or both directions of them, where a permute uses one."""
    return product + at_once - max(product, in_ring)


def _in_other_order(made: Spec, reduced: Spec, sizes: Mapping[str, int]) -> Iterator[Spec]:
    """``reduced`` with, in one dimension, an axis of few enough devices for a ring before the first, of too many."""
    for dim, (before, after) in enumerate(zip(made.dims, reduced.dims, strict=True)):
        first, *others = after[len(before) :] or ("",)
        for axis in others if sizes.get(first, 0) > MAX_PARTS else ():
            yield reduced.with_dim(dim, (*before, axis, *(a for a in after[len(before) :] if a != axis)))
