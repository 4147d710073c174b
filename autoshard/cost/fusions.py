"""Memory traffic of fusions: what each product, elementwise operation and reduction reads and writes in device memory.

An elementwise operation whose result `autoshard.cost.liveness` finds fused into what reads it moves nothing. All others
write their results and read each buffer that their operands are computed from, once; what is fused into a product reads
its other operands alone, and a slice no more than it takes. Elementwise operations between which no other sort stands
share a fusion of several results, in which no buffer is read twice, nor what it writes: an optimizer's update reads
each array of its state once. Where the compiler fuses into products, a reduction shares the fusion of the product or
of the elementwise operation that makes what it reduces, unless it needs another reduction of that first (`_Sweeps`): a
norm's statistics are computed beside the product before it.

Where all that a small step has at any time fits into on-chip memory, XLA for TPUs leaves there what is neither an
argument nor a result. Its bytes count for less then, by how much faster fusions pass over them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.cost.liveness import Liveness, is_fusible
from autoshard.ir.graph import Graph, Node, OpKind


def with_memory_traffic(graph: Graph) -> Graph:
    """``graph`` with `OpKind.traffic` of its products, elementwise operations and reductions; itself if it has that."""
    if any(node.kind.traffic is not None for node in graph.nodes):
        return graph
    liveness, nodes = Liveness(graph), list(graph.nodes)
    sweeps, share = _Sweeps(), _share_on_chip(liveness)
    fusions: dict[OpKind, bool | None] = {}
    at_hand = set[int]()
    """Buffers that the elementwise operations before read or write, since the last operation of another sort."""
    for n, node in enumerate(nodes):
        kind = node.kind
        if kind.traits.fused_into_consumer:
            sweeps.join(node)
            continue
        if kind not in fusions:
            fusions[kind] = _is_elementwise(node, liveness.fuses_products)
        if (written := _written_in_place(liveness, node)) is not None:
            nodes[n] = node._replace(kind=graph.kinds.variant(kind, traffic=written))
        elementwise = fusions[kind]
        reduction = liveness.fuses_products and elementwise is False and not kind.flops
        at_hand = at_hand if elementwise else sweeps.reduce(n, node) if reduction else set()
        if elementwise is not None:
            traffic = _traffic(liveness, node, at_hand, share)
            nodes[n] = node._replace(kind=graph.kinds.variant(kind, traffic=traffic))
        if elementwise and all(map(liveness.is_fused, node.results)):
            sweeps.join(node)
        elif not reduction:
            sweeps.begin(n, node, None if elementwise is None else at_hand)
        at_hand = at_hand if elementwise else set()
    return replace(graph, nodes=tuple(nodes))


def _share_on_chip(liveness: Liveness) -> dict[int, float]:
    """Of each buffer that stays in on-chip memory, the seconds that a byte takes there of those that it takes in device
    memory; empty where not all that the step has at any time fits, split over all devices."""
    graph, hardware = liveness.graph, liveness.graph.program.mesh.hardware
    capacity, values = hardware.on_chip * graph.program.mesh.size, graph.values
    if not hardware.on_chip_bandwidth or sum(values[v].bytes for v in graph.inputs) > capacity:
        return {}
    change = Counter[int]()
    for v, begin in liveness.allocated_at.items():
        change[begin] += values[v].bytes
        change[max(begin, liveness.last_use.get(v, begin)) + 1] -= values[v].bytes
    if max(itertools.accumulate(change[n] for n in sorted(change)), default=0) > capacity:
        return {}
    outside = {liveness.root(v) for v in (*graph.inputs, *graph.outputs)}
    return dict.fromkeys(liveness.allocated_at.keys() - outside, hardware.bandwidth / hardware.on_chip_bandwidth)


class _Sweeps:
    """What is computed in one pass over a product's tiles, or over arrays: the product or elementwise operation with
    which a sweep begins, and reductions of what it makes. What needs such a reduction is in a later sweep over them."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}
        """Value -> the sweep in which it is there: the node with which the first over these arrays began, and how many
        have ended since. Values that are arguments of the step are in none."""
        self._buffers: dict[tuple[int, int], set[int]] = {}
        """Sweep -> the buffers that it reads and writes."""

    def _latest(self, node: Node) -> tuple[int, int]:
        """The sweep in which all operands are there."""
        return max([self._of[v] for v in node.operands if v in self._of], default=(-1, 0))

    def join(self, node: Node) -> None:
        """Computes what is elementwise in the sweep of its operands."""
        self._of.update(dict.fromkeys(node.results, self._latest(node)))

    def begin(self, n: int, node: Node, buffers: set[int] | None) -> None:
        """Begins a sweep with node ``n``; with no ``buffers``, one that nothing else shares."""
        self._of.update(dict.fromkeys(node.results, (n, 0)))
        if buffers is not None:
            self._buffers[n, 0] = buffers

    def reduce(self, n: int, node: Node) -> set[int]:
        """Computes node ``n``, a reduction, in the sweep of its operands, or in one of its own: its results are there
        in the next. Returns the buffers of the sweep, to which what it reads is to be added."""
        latest = self._latest(node)
        first, count = latest if latest in self._buffers else (n, 0)
        self._buffers.setdefault((first, count + 1), set())
        self._of.update(dict.fromkeys(node.results, (first, count + 1)))
        return self._buffers.setdefault((first, count), set())


def _written_in_place(liveness: Liveness, node: Node) -> tuple[float, ...] | None:
    """`OpKind.traffic` of a node that writes into an argument of the step, as into the state that a loop updates layer
    by layer: as many bytes as its other operands have, and none in the host's memory. None of any other node."""
    kind, at = node.kind, node.kind.traits.in_place_operand
    if at is None or (root := liveness.root(node.results[0])) != liveness.root(node.operands[at]):
        return None
    if root not in liveness.graph.inputs:
        return None
    values = liveness.graph.values
    share = sum(size for i, size in enumerate(kind.bytes[: len(node.operands)]) if i != at) / max(1, kind.bytes[at])
    read = (float(i != at and not values[v].host) for i, v in enumerate(node.operands))
    return *read, *(0.0 if values[v].host else min(1.0, share) for v in node.results)


def _is_elementwise(node: Node, fuses_products: bool) -> bool | None:
    """True of elementwise operations, false of what they are fused into, products and reductions; else None."""
    if node.kind.tie or not node.results:
        return None
    if (node.kind.flops and fuses_products) or node.kind.traits.reduces:
        return False
    return True if not node.kind.flops and is_fusible(node, fuses_products) else None


def _traffic(liveness: Liveness, node: Node, at_hand: set[int], share: Mapping[int, float]) -> tuple[float, ...]:
    """`OpKind.traffic` of a node; adds the buffers that it reads and writes to ``at_hand``.

    Args:
      share: `_share_on_chip`.
    """
    kind, product = node.kind, bool(node.kind.flops)
    if not product and all(map(liveness.is_fused, node.results)):
        return (0.0,) * len(kind.shapes)
    moved = sum(kind.bytes[len(node.operands) :]) if kind.traits.moves_data else math.inf
    read = (min(size, moved) for size in _bytes_read(liveness, node, at_hand, share))
    shares = [size / own if own else 0.0 for size, own in zip(read, kind.bytes, strict=False)]
    written = [v for v in node.results if product or not (v in liveness.fused_into_product or liveness.is_fused(v))]
    at_hand.update(written)
    values = liveness.graph.values
    return (*shares, *(share.get(v, 1.0) * (v in written and not values[v].host) for v in node.results))


def _bytes_read(liveness: Liveness, node: Node, at_hand: set[int], share: Mapping[int, float]) -> Iterator[float]:
    """For each operand, the bytes of the buffers that it is computed from and that are not ``at_hand``; of a buffer of
    which the operand has a part, the part, and of one on chip its ``share``."""
    values = liveness.graph.values
    for v, shape in zip(node.operands, node.kind.shapes, strict=False):
        buffers = {r for r in liveness.buffers_of(v) if r not in at_hand and _is_in_memory(liveness, r)} if v else set()
        at_hand |= buffers
        sizes = {r: min(values[r].bytes, math.prod(shape) * values[r].bits / 8) for r in buffers}
        yield sum(size * share.get(r, 1.0) for r, size in sizes.items() if not values[r].host)


def _is_in_memory(liveness: Liveness, v: int) -> bool:
    """Whether ``v`` is a buffer at some time, and not only a part of the product that it is fused into."""
    return v not in liveness.fused_into_product or v in liveness.allocated_at
