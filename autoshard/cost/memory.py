"""memory: bytes per device over one call of the step.

Arguments are there from beginning to end, donated ones until their result is written in their place. What takes room in
between, and when, is the program's (`autoshard.cost.live_ranges`); how much, the layout's:

- each array in the tiles that the hardware stores it in, laid out so that they hold the least of nothing;
- beside a value, every other layout of it that some operation needs, from the first to the last that does: weights
  gathered at use, activations gathered for a product;
- at an operation, its result before it is brought to where it lies: a gradient ahead of its reduction;
- what a product reads for longer where it is done later, as it sends nothing (`autoshard.cost.delayed_products`).

What is handed on from product to product, other layouts too, is not counted as far as the chip keeps it: up to half of
the room that its compiler has there, for the rest is taken by what is on its way in and out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.cost.cost import CostModel
from autoshard.cost.live_ranges import IntArray, find_live_ranges
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec

ON_CHIP_SHARE = 1 / 2
"""What of the memory on the chip holds what is handed on; what is on its way in and out has the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    """Values that the backward pass hands to the update."""
    residuals: int
    """Values that the forward pass keeps for the backward pass."""
    temporaries: int
    """What else is alive when memory peaks, results that are not donated included."""
    peak: int

    def items(self) -> list[tuple[str, int]]:
        """Name and bytes of each part, then of the peak."""
        return list(asdict(self).items())


class MemoryModel:
    """From when to when each value of a graph takes room; under any layout.

    Where it is asked for ``apart``, the compiler is told to make no gather part of a product.
    """

    def __init__(self, graph: Graph, costing: CostModel | None = None) -> None:
        self.graph, self.mesh = graph, graph.program.mesh
        self.cost_model = costing or CostModel(graph)
        self.live_ranges, self.roles = find_live_ranges(graph), argument_roles(graph)
        self._measured = sorted(
            {*graph.inputs, *map(int, self.live_ranges.values), *map(int, self.live_ranges.gradients)}
        )
        self._bytes: dict[tuple[tuple[int, ...], int, tuple[Axes, ...]], int] = {}

    def sizes(self, layout: Layout) -> IntArray:
        """Bytes per device of every value that takes room; of others, and of scalars, nothing."""
        found = np.zeros(len(self.graph.values), dtype=np.int64)
        found[self._measured] = [self.size(v, layout.specs[v]) for v in self._measured]
        return found

    def size(self, v: int, spec: Spec) -> int:
        """Bytes per device of value ``v`` under ``spec``."""
        value = self.graph.values[v]
        key = value.shape, value.bits, spec.dims
        found = self._bytes.get(key)
        if found is None:
            parts = [-(-n // self.mesh.axes_size(a)) for n, a in zip(value.shape, spec.dims, strict=True)]
            found = self._bytes[key] = tiled_bytes(parts, value.bits, self.mesh.hardware.tile) if parts else 0
        return found

    def live_bytes(self, sizes: IntArray) -> IntArray:
        """Bytes of values in between that are alive while each node runs."""
        r = self.live_ranges
        return _sum_over_ranges(len(self.graph.nodes), r.first, r.last, (sizes[r.values] * r.scale).astype(np.int64))

    def live_values(self, node: int) -> dict[int, float]:
        """The values in between that are alive while ``node`` runs, each with its bytes over all devices."""
        r, found = self.live_ranges, dict[int, float]()
        for i in np.flatnonzero((r.first <= node) & (node <= r.last)):
            v = int(r.values[i])
            found[v] = found.get(v, 0.0) + self.graph.values[v].bytes * float(r.scale[i])
        return found

    def usage(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> IntArray:
        """Bytes in memory, arguments aside, while each node runs."""
        r, nodes = self.live_ranges, len(self.graph.nodes)
        own = (
            r.first,
            r.last,
            (self.sizes(layout)[r.values] * r.scale).astype(np.int64),
            r.on_chip_candidate.astype(np.int64),
        )
        copies = np.array(
            self.layout_ranges(layout, all_gather_fusion_disabled=all_gather_fusion_disabled) or [(0, 0, 0, 0)],
            dtype=np.int64,
        ).T
        first, last, size, handed = (np.concatenate(pair) for pair in zip(own, copies, strict=True))
        room = int(self.mesh.hardware.on_chip * ON_CHIP_SHARE)
        on = (handed > 0) & (size <= room)
        on_chip = _sum_over_ranges(nodes, first[on], last[on], size[on])
        return _sum_over_ranges(nodes, first, last, size) - np.minimum(on_chip, room)

    def largest_at_peak(self, layout: Layout) -> tuple[int, int]:
        """The value that takes most while most is held, and its bytes per device; arguments are there all the time."""
        sizes = self.sizes(layout)
        moment = int(self.usage(layout).argmax())
        there = (*self.graph.inputs, *self.live_values(moment))
        v = max(there, key=lambda v: (int(sizes[v]), -v), default=0)
        return v, int(sizes[v])

    def layout_ranges(
        self, layout: Layout, *, all_gather_fusion_disabled: bool = False
    ) -> list[tuple[int, int, int, bool]]:
        """What is held beside each value where that lies: first and last node, bytes, and whether it is handed on."""
        nodes, specs, r = self.graph.nodes, layout.specs, self.live_ranges
        bits = self.mesh.hardware.operand_bits
        readers: dict[tuple[int, Spec], list[int]] = {}
        sent: set[int] = set()
        rows: list[tuple[int, int, int, bool]] = []
        for i, (node, run) in enumerate(zip(nodes, self.cost_model.node_costs(layout), strict=True)):
            if not node.trip_count or node.tie or not run.resharded:
                continue
            for v, need in zip(node.operands, run.in_specs, strict=True):
                if need != specs[v]:
                    readers.setdefault((v, need), []).append(i)
            for v, give in zip(node.results, run.out_specs, strict=True):
                if give != specs[v]:
                    sent.add(i)
                    begun, end = r.sum_start.get(i, i), i - (give.dims == specs[v].dims)  # reduced in its place
                    if begun <= end:
                        rows.append((begun, end, self.size(v, give), begun == i))
            if i in sent and i in r.in_place_products:  # what is sent cannot be written over what it is added to later
                v, end = r.in_place_products[i]
                rows.append((i, end, self.size(v, specs[v]), False))
        hiding = (
            self._products_overlapping_gathers(layout, readers)
            if r.overwritable_products and not all_gather_fusion_disabled
            else set[int]()
        )
        rows += [
            (n, n, self.size(v, specs[v]), False)
            for (v, n), by in r.overwritable_products.items()
            if hiding.issuperset(by)
        ]
        later = {d.node: n for d in r.delayed_products if (n := d.completes_at(sent)) > d.node}
        for (v, need), at in readers.items():
            x, products = self.graph.values[v], {i for i in at if nodes[i].kind.flops}
            narrow = products.issuperset(at) and x.bits > bits and x.dtype.startswith("float")
            size = self.size(v, need) * (bits if narrow else x.bits) // x.bits
            first, last, until = at[0], at[-1], max(later.get(i, i) for i in at)
            between = r.product_count[last] - r.product_count[first] + bool(nodes[first].kind.flops)
            rows.append((first, last, size, len(products) == between))
            if until > last:
                rows.append((last + 1, until, size, False))
        return rows + self._delayed_operand_ranges(layout, later)

    def _products_overlapping_gathers(self, layout: Layout, readers: Mapping[tuple[int, Spec], list[int]]) -> set[int]:
        """The products beside which something is gathered: gathers go one after the other, each until it is read by a
        product, so that there are such until the last is."""
        specs, nodes, sizes = layout.specs, self.graph.nodes, self.mesh.shape
        gathered = (at for (v, need), at in readers.items() if need.num_shards(sizes) < specs[v].num_shards(sizes))
        read = [min(products) for at in gathered if (products := [i for i in at if nodes[i].kind.flops])]
        return {i for i, node in enumerate(nodes[: max(read, default=0)]) if node.kind.flops}

    def _delayed_operand_ranges(self, layout: Layout, later: Mapping[int, int]) -> list[tuple[int, int, int, bool]]:
        """The values that products read that are done ``later``: from their last node to that, bytes, not handed on."""
        r, until = self.live_ranges, dict[int, int]()
        for node, n in later.items():
            for i in r.product_reads.get(node, ()):
                until[i] = max(until.get(i, 0), n)
        found = ((i, int(r.values[i]), int(r.last[i]), n) for i, n in until.items())
        return [(b + 1, n, int(self.size(v, layout.specs[v]) * r.scale[i]), False) for i, v, b, n in found if n > b]

    def memory(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> Memory:
        """Bytes per device of one call under ``layout``."""
        size = self.sizes(layout)
        role = self.roles
        parameters, optimizer, inputs = (
            int(sum(size[self.graph.inputs[i]] for i in part)) for part in (role.parameters, role.optimizer, role.batch)
        )
        held = int(self.usage(layout, all_gather_fusion_disabled=all_gather_fusion_disabled).max())
        kept = int(size[self.live_ranges.values[self.live_ranges.residuals]].sum())
        grads = int(size[self.live_ranges.gradients].sum())
        peak = parameters + optimizer + inputs + held
        return Memory(parameters, optimizer, inputs, grads, kept, max(0, held - kept), peak)


def _sum_over_ranges(nodes: int, first: IntArray, last: IntArray, size: IntArray) -> IntArray:
    """The sum of the sizes that are alive at each of so many nodes, and after the last."""
    change = np.zeros(nodes + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    return np.cumsum(change)


def tiled_bytes(shape: list[int], bits: int, tile: tuple[int, int]) -> int:
    """Bytes of an array in tiles of (rows, columns), its dimensions in the order that fills them best.

    Of the two that run within a tile, each is rounded up to whole tiles; of one dimension alone, to one tile.
    """
    rows, columns = tile
    whole = math.prod(shape)
    if whole == 0:
        return 0
    if len(shape) == 1:
        best = -(-whole // (rows * columns)) * rows * columns if whole > columns else columns
    else:
        best = min(
            whole // (shape[a] * shape[b]) * (-(-shape[a] // rows) * rows) * (-(-shape[b] // columns) * columns)
            for a, b in itertools.permutations(range(len(shape)), 2)
        )
    return -(-best * bits // 8)
