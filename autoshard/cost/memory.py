"""Memory model: bytes per device at the peak of one call of the step, under a `Layout`.

Arguments are live throughout the call; the result of a donated argument reuses its buffer. Which intermediates are
materialized, and when each is live, does not depend on the layout (`autoshard.cost.live_ranges`). The layout gives the
sizes and adds buffers:

- a buffer is stored in the hardware's tiles, its dimensions in the order that needs the least padding;
- a value read in a spec other than its own has a second buffer in that spec, live from the first such read to the last:
  weights all-gathered at use, activations all-gathered for a product;
- a result produced in a spec other than its own has a buffer there too: a gradient before its reduction;
- a result that is gathered is gathered elsewhere before it is copied into a donated argument's buffer;
- an operation of several steps stores what one step writes and another reads;
- a product that no collective waits for may be scheduled later, which keeps its operands live
  (`autoshard.cost.delayed_products`).

The peak is the bytes of all arguments plus the largest sum of live buffers at any node, less the buffers that XLA keeps
in on-chip memory: those that every product between the definition and the last use reads, up to `ON_CHIP_SHARE` of that
memory. The model was found by comparison with the buffer assignments of compiled programs
(docs/design/2026-11-22-what-is-live-at-the-peak.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.cost.cost import CostModel
from autoshard.cost.live_ranges import IntArray, find_live_ranges
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph, Value
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.units import size_text

ON_CHIP_SHARE = 1 / 2
"""Share of the on-chip memory that holds whole buffers. The rest holds operands and results being copied in and out:
at the peak of compiled programs 50 to 110 of 128 MiB were in use."""


class BufferRange(NamedTuple):
    """A buffer that exists because of the layout, and its live range."""

    first: int
    """First node at which it is live."""
    last: int
    """Last node at which it is live."""
    bytes: int
    """Bytes per device."""
    on_chip_candidate: bool
    """Whether XLA may keep it in on-chip memory (`LiveRanges.on_chip_candidate`)."""
    value: int = 0
    """The value that is in it; 0 of what an operation stores between its own steps."""


class Buffers(NamedTuple):
    """The buffers of a call without its arguments: those of `LiveRanges`, row for row, then what the layout adds."""

    values: IntArray
    """As `BufferRange.value`."""
    first: IntArray
    last: IntArray
    bytes: IntArray
    """Per device."""
    fits_on_chip: npt.NDArray[np.bool_]
    """Whether XLA may keep it in on-chip memory, and it is small enough."""


@dataclass(frozen=True, repr=False)
class Memory:
    """Predicted bytes per device of one call, by role. The parts overlap: gradients are also in ``temporaries``."""

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    """Values that the backward pass computes and the optimizer update reads."""
    residuals: int
    """Values that the forward pass saves for the backward pass."""
    temporaries: int
    """Intermediates live at the peak beyond the bytes of ``residuals``, results without a donated buffer included."""
    peak: int
    """Arguments plus all intermediates live at the peak."""
    host: int = 0
    """Arguments, results and what waits for the backward part in the host's memory; in none of the above."""

    def items(self) -> list[tuple[str, int]]:
        """Name and bytes of each part, then of the peak, and then of host memory where there is any."""
        return [(name, size) for name, size in asdict(self).items() if size or name != "host"]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in self.items() if name != "peak")
        return f"<Memory per device: {size_text(self.peak)} at the peak; {parts}>"


class MemoryModel:
    """Predicts the memory of layouts of one graph.

    ``all_gather_fusion_disabled``, in several methods: the compiler is asked not to fuse all-gathers into convolutions
    (`autoshard.cost.compiler_options`).
    """

    def __init__(self, graph: Graph, cost_model: CostModel | None = None) -> None:
        self.graph, self.mesh = graph, graph.program.mesh
        self.cost_model = cost_model or CostModel(graph)
        self.live_ranges, self.roles = find_live_ranges(graph), argument_roles(graph)
        self._measured = sorted(
            {*graph.inputs, *map(int, self.live_ranges.values), *map(int, self.live_ranges.gradients)}
        )
        self._copied_beside = [*_copied_beside(self.cost_model.graph)]
        self._bytes: dict[tuple[tuple[int, ...], int, tuple[Axes, ...]], int] = {}

    def sizes(self, layout: Layout) -> IntArray:
        """[values]: bytes per device of each value that is ever a buffer; 0 for the others, and for scalars."""
        found = np.zeros(len(self.graph.values), dtype=np.int64)
        found[self._measured] = [self.size(v, layout.specs[v]) for v in self._measured]
        return found

    def size(self, v: int, spec: Spec) -> int:
        """Bytes of device memory that value ``v`` takes under ``spec``; none if it is in the host's."""
        value = self.graph.values[v]
        return 0 if value.host else self._stored(value, spec)

    def _stored(self, value: Value, spec: Spec) -> int:
        key = value.shape, value.bits, spec.dims
        found = self._bytes.get(key)
        if found is None:
            parts = [-(-n // self.mesh.axes_size(a)) for n, a in zip(value.shape, spec.dims, strict=True)]
            found = self._bytes[key] = tiled_bytes(parts, value.bits, self.mesh.hardware.tile) if parts else 0
        return found

    def live_bytes(self, sizes: IntArray) -> IntArray:
        """[nodes + 2]: bytes of the intermediates live at each node, each in its own spec. ``sizes``: see `sizes`."""
        r = self.live_ranges
        return sum_over_ranges(len(self.graph.nodes), r.first, r.last, (sizes[r.values] * r.scale).astype(np.int64))

    def least_peak(self, sizes: Mapping[int, float]) -> tuple[int, float]:
        """The node at which values take most, and the bytes per device in use there at least, arguments included, in
        every layout in which each value takes its bytes of ``sizes`` at least; values that are not in it count nothing.
        """
        least = np.zeros(len(self.graph.values), dtype=np.int64)
        known = [v for v in sizes if v not in self.cost_model.free_to_reshard]
        least[known] = [int(sizes[v]) for v in known]
        live = self.live_bytes(least)
        node = int(live.argmax())
        arguments = sum(sizes.get(v, 0.0) for v in self.graph.inputs)
        return node, arguments + max(0, int(live[node]) - self._on_chip_capacity)

    def live_values(self, node: int) -> dict[int, float]:
        """The intermediates live at ``node``, each with its global bytes of device memory."""
        r, found = self.live_ranges, dict[int, float]()
        for i in np.flatnonzero((r.first <= node) & (node <= r.last)):
            v = int(r.values[i])
            found[v] = found.get(v, 0.0) + self.graph.values[v].device_bytes * float(r.scale[i])
        return found

    def usage(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> IntArray:
        """[nodes + 2]: bytes per device in use at each node, without arguments and on-chip buffers."""
        found = self.buffers(layout, all_gather_fusion_disabled=all_gather_fusion_disabled)
        total, on_chip = self.usage_of(found)
        return total - on_chip

    def usage_of(self, found: Buffers) -> tuple[IntArray, IntArray]:
        """[nodes + 2] twice: bytes of these buffers at each node, and how many of them are in on-chip memory."""
        nodes, fits = len(self.graph.nodes), found.fits_on_chip
        on_chip = sum_over_ranges(nodes, found.first[fits], found.last[fits], found.bytes[fits])
        total = sum_over_ranges(nodes, found.first, found.last, found.bytes)
        return total, np.minimum(on_chip, self._on_chip_capacity)

    @property
    def _on_chip_capacity(self) -> int:
        return int(self.mesh.hardware.on_chip * ON_CHIP_SHARE)

    def buffers(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> Buffers:
        """The buffers of a call under ``layout``, without its arguments."""
        r, sizes = self.live_ranges, self.sizes(layout)
        sizes[[v for v in self.cost_model.free_to_reshard if not self._is_read(v, layout)]] = 0
        own = (
            r.first,
            r.last,
            (sizes[r.values] * r.scale).astype(np.int64),
            r.on_chip_candidate.astype(np.int64),
            r.values,
        )
        ranges = self.layout_ranges(layout, all_gather_fusion_disabled=all_gather_fusion_disabled)
        added = np.array(ranges or [(0, 0, 0, 0, 0)], dtype=np.int64).T
        first, last, size, candidate, values = (np.concatenate(pair) for pair in zip(own, added, strict=True))
        return Buffers(values, first, last, size, (candidate > 0) & (size <= self._on_chip_capacity))

    def _is_read(self, v: int, layout: Layout) -> bool:
        """Whether an operation reads value ``v`` in its own spec."""
        runs, nodes = self.cost_model.node_costs(layout), self.graph.nodes
        return not layout.specs[v].rank or any(
            nodes[n].tie or (u == v and spec == layout.specs[v])
            for n in self.graph.uses[v]
            for u, spec in zip(nodes[n].operands, runs[n].in_specs, strict=True)
        )

    def largest_at_peak(self, layout: Layout) -> tuple[int, int]:
        """The largest value live at the peak, arguments included, and its bytes per device."""
        sizes = self.sizes(layout)
        live = (*self.graph.inputs, *self.live_values(int(self.usage(layout).argmax())))
        v = max(live, key=lambda v: (int(sizes[v]), -v), default=0)
        return v, int(sizes[v])

    def layout_ranges(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> list[BufferRange]:
        """The buffers that the layout adds to the program's live ranges."""
        nodes, specs, r = self.graph.nodes, layout.specs, self.live_ranges
        readers: dict[tuple[int, Spec], list[int]] = {}
        communicating: set[int] = set()
        ranges = [BufferRange(*loop, self.size(v, specs[v]), False, v) for v, loop in self._copied_beside]
        for i, (node, run) in enumerate(zip(nodes, self.cost_model.node_costs(layout), strict=True)):
            if run.stored_bytes:
                ranges.append(BufferRange(i, i, run.stored_bytes, False))
            if not node.trip_count or node.tie or not run.resharded:
                continue
            for v, spec in zip(node.operands, run.in_specs, strict=True):
                if spec != specs[v]:
                    readers.setdefault((v, spec), []).append(i)
            for v, spec in zip(node.results, run.out_specs, strict=True):
                if spec != specs[v]:
                    communicating.add(i)
                    start, end = r.sum_start.get(i, i), i - (spec.dims == specs[v].dims)  # an all-reduce is in place
                    if start <= end:
                        ranges.append(BufferRange(start, end, self.size(v, spec), start == i, v))
                    if v in r.in_donated and _is_gathered(spec, specs[v]):
                        ranges.append(BufferRange(i, i, self.size(v, specs[v]), False, v))
            if i in communicating and i in r.in_place_products:  # it is reduced first, so it needs a buffer of its own
                v, end = r.in_place_products[i]
                ranges.append(BufferRange(i, end, self.size(v, specs[v]), False, v))
        if r.overwritable_products and not all_gather_fusion_disabled:
            fused = self._products_overlapping_gathers(layout, readers)
            ranges += [
                BufferRange(n, n, self.size(v, specs[v]), False, v)
                for (v, n), products in r.overwritable_products.items()
                if fused.issuperset(products)
            ]
        delayed = {d.node: n for d in r.delayed_products if (n := d.completes_at(communicating)) > d.node}
        for (v, spec), reads in readers.items():
            sent = max(nodes[i].kind.sent_bits[nodes[i].operands.index(v)] for i in reads)
            size = self.size(v, spec) * sent // self.graph.values[v].bits
            products = {i for i in reads if nodes[i].kind.flops}
            first, last, end = reads[0], reads[-1], max(delayed.get(i, i) for i in reads)
            between = r.product_count[last] - r.product_count[first] + bool(nodes[first].kind.flops)
            ranges.append(BufferRange(first, last, size, len(products) == between, v))
            if end > last:
                ranges.append(BufferRange(last + 1, end, size, False, v))
        return ranges + self._delayed_operand_ranges(layout, delayed)

    def _products_overlapping_gathers(self, layout: Layout, readers: Mapping[tuple[int, Spec], list[int]]) -> set[int]:
        """The products that XLA fuses an asynchronous all-gather into, by node.

        All-gathers follow one another, each overlapping the products before the one that reads it, so every product
        before the last such reader has one.
        """
        specs, nodes, sizes = layout.specs, self.graph.nodes, self.mesh.shape
        gathered = (at for (v, spec), at in readers.items() if spec.num_shards(sizes) < specs[v].num_shards(sizes))
        first_reads = [min(products) for at in gathered if (products := [i for i in at if nodes[i].kind.flops])]
        return {i for i, node in enumerate(nodes[: max(first_reads, default=0)]) if node.kind.flops}

    def _delayed_operand_ranges(self, layout: Layout, delayed: Mapping[int, int]) -> list[BufferRange]:
        """The operands of delayed products, from after their last use in program order until the product executes.

        Args:
          delayed: product -> the node at which it executes.
        """
        r, ends = self.live_ranges, dict[int, int]()
        for node, n in delayed.items():
            for i in r.product_reads.get(node, ()):
                ends[i] = max(ends.get(i, 0), n)
        found = ((i, int(r.values[i]), int(r.last[i]), n) for i, n in ends.items())
        return [
            BufferRange(last + 1, n, int(self.size(v, layout.specs[v]) * r.scale[i]), False, v)
            for i, v, last, n in found
            if n > last
        ]

    def memory(self, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> Memory:
        """Predicted bytes per device of one call under ``layout``."""
        size = self.sizes(layout)
        role = self.roles
        parameters, optimizer, inputs = (
            int(sum(size[self.graph.inputs[i]] for i in part)) for part in (role.parameters, role.optimizer, role.batch)
        )
        intermediates = int(self.usage(layout, all_gather_fusion_disabled=all_gather_fusion_disabled).max())
        residuals = int(size[self.live_ranges.values[self.live_ranges.residuals]].sum())
        gradients = int(size[self.live_ranges.gradients].sum())
        peak = parameters + optimizer + inputs + intermediates
        temporaries, host = max(0, intermediates - residuals), self._host_bytes(layout)
        return Memory(parameters, optimizer, inputs, gradients, residuals, temporaries, peak, host)

    def _host_bytes(self, layout: Layout) -> int:
        """Bytes, for each device, of the arguments, results and stacks of loops in the host's memory; a donated one
        counts once."""
        graph, program = self.graph, self.graph.program
        kept = {o for i, o in program.carries if program.inputs[i].donated and program.inputs[i].memory_kind}
        places = [*zip(graph.inputs, program.inputs, strict=True)]
        results = enumerate(zip(graph.outputs, program.outputs, strict=True))
        places += [place for o, place in results if o not in kept]
        stacked = (n for n in graph.nodes if n.tie and n.trip_count and len(n.kind.shapes[0]) < len(n.kind.shapes[-1]))
        held = [v for v, leaf in places if v and leaf.memory_kind]
        held += {n.results[0] for n in stacked if graph.values[n.results[0]].host} - {*held}
        return sum(self._stored(graph.values[v], layout.specs[v]) for v in held)


def _copied_beside(graph: Graph) -> Iterator[tuple[int, tuple[int, int]]]:
    """The values on the device that loops copy to the host or back beside their products, each with the first and the
    last node of its loop: XLA has one of an iteration on its way beside that of the next."""
    for n, node in enumerate(graph.nodes):
        if node.kind.copied_beside is not None:
            (v,) = (v for v in node.values if not graph.values[v].host)
            yield v, next((a, b) for a, b in graph.loops if a <= n <= b)


def _is_gathered(spec: Spec, to: Spec) -> bool:
    """Whether a reshard from ``spec`` ``to`` another fills one buffer of the whole result before the one that it ends
    in: XLA gathers along the major dimension (libtpu 0.0.50, for a donated result of 320 MiB: temporaries of 1.0 of it,
    also where several dimensions are gathered).
    """
    return any(len(b) < len(a) for a, b in zip(spec.dims, to.dims, strict=True))


def sum_over_ranges(nodes: int, first: IntArray, last: IntArray, size: IntArray) -> IntArray:
    """[nodes + 2]: total size of the ranges that include each node; entry ``nodes`` is the end of the call."""
    change = np.zeros(nodes + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    return np.cumsum(change)


def tiled_bytes(shape: list[int], bits: int, tile: tuple[int, int]) -> int:
    """Bytes of an array stored in tiles of (rows, columns), with the minor-to-major order that pads least.

    The two minor dimensions are rounded up to whole tiles. A one-dimensional array is rounded up to whole tiles, or to
    one row of a tile if that holds it.
    """
    rows, columns = tile
    elements = math.prod(shape)
    if elements == 0:
        return 0
    if len(shape) == 1:
        stored = -(-elements // (rows * columns)) * rows * columns if elements > columns else columns
    else:
        stored = min(
            elements // (shape[a] * shape[b]) * elements_in_tiles(shape[a], shape[b], tile)
            for a, b in itertools.permutations(range(len(shape)), 2)
        )
    return -(-stored * bits // 8)


def elements_in_tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    """Elements that a matrix takes in whole tiles of (rows, columns)."""
    return -(-rows // tile[0]) * tile[0] * -(-columns // tile[1]) * tile[1]
