"""Liveness: one walk over a graph that finds which values XLA materializes as buffers, and when each is used last.

The results of products, reductions, gathers and loops are *materialized*. Elementwise results, views and slices are
*fused*: recomputed at their uses from materialized *sources*, so a use extends the live ranges of those. Exceptions:

- elementwise operations after a product, each the only reader of the one before, are fused into the product: the result
  of the last one is the buffer;
- a value that enters a loop, crosses an optimization barrier or leaves the step is materialized;
- so is an operand of a product, where the compiler calls a library for products; nothing is fused into those at all;
- a conversion to fewer bits of an array that a loop slices is hoisted: done once, before the loop, for the whole array.

A value defined before a loop and read in it is live to the loop's end; an array that a loop stacks is live from the
loop's beginning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autoshard.ir.graph import BACKWARD, FORWARD, PLAIN, Graph, Node, OpKind

MAX_FUSED_SOURCES = 8
"""Most sources of a fused value; a value with more is materialized."""
SMALL_SHARE = 1024
"""Where the compiler calls a library for products, as for GPUs, a source with this many times fewer elements than the
fused value does not count: kernels there take any number of operands."""


def is_fusible(node: Node, fused: bool = True) -> bool:
    """Whether the node is recomputed at the uses of its results: each element depends on few elements of the operands.

    Args:
      fused: `Hardware.fused_products`; without it, scatters are never fused.
    """
    traits = node.kind.traits
    if traits.fused_into_consumer or traits.moves_data or (fused and traits.scatters and _one_element_per_row(node)):
        return True
    rule = node.kind.rule
    return not (node.tie or node.kind.flops or rule.kinds or rule.reason or rule.local)


def _one_element_per_row(node: Node) -> bool:
    """Whether a gather or scatter takes one element of each row of one dimension.

    XLA computes it as a comparison with an iota, which it fuses.
    """
    whole, part = node.kind.shapes[0], node.kind.shapes[2]
    return math.prod(whole) in {math.prod(part) * n for n in whole}


class Liveness:
    """Which values of ``graph`` are materialized, and their uses. Values and nodes are numbers of the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fuses_products = graph.program.mesh.hardware.fused_products
        self.allocated_at: dict[int, int] = {}
        """Materialized value -> the node at which its buffer is allocated; -1 for arguments."""
        self.last_use: dict[int, int] = {}
        """Materialized value -> the last node that needs it; the number of nodes if the step returns it."""
        self._alias: dict[int, int] = {}
        """Value -> the value whose buffer it shares; only `_share_buffer` adds to it."""
        self._sources: dict[int, tuple[int, ...]] = {}
        """Fused value -> the materialized values that it is computed from."""
        self.open_fusions: set[int] = set()
        """Results of products that their only reader may still be fused into."""
        self._sliced_from: dict[int, int] = {}
        """Value that a loop reads, whole or slice by slice -> the array outside the loop."""
        self.hoisted_converts: dict[tuple[int, int], tuple[int, int]] = {}
        """(array, bits): first and last node of the loops that read it converted to so many bits."""
        self._phase: dict[int, str] = {}
        """Value -> the phase of the node that defines it."""
        self.gradients: set[int] = set()
        """Materialized values that the backward pass defines and the rest of the step reads."""
        self.residuals: set[int] = set()
        """Materialized values that the forward pass defines and the backward pass reads."""
        self._views: set[int] = set()
        """Fused values that are only a view of one materialized value."""
        self.read_outside_products: set[int] = set()
        """Values that something other than a product that rounds them reads, or a product not as they are."""
        self.elementwise_from: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Materialized elementwise value -> the node at which it is computed, and its (other) sources."""
        self.read_through: dict[int, set[int]] = defaultdict(set)
        """Materialized value -> the values through which it is read: itself, and fused values."""
        self.product_readers: dict[int, set[int]] = defaultdict(set)
        """Materialized value -> the products that read it."""
        self.sum_start: dict[int, int] = {}
        """Node of several steps -> the node at which its first step can execute."""
        self.fused_with_reduction: set[int] = set()
        """The largest source (of equals the last) of each reduction that has several: XLA computes it and the reduction
        in one multi-output fusion."""
        self.fused_into_product: set[int] = set()
        """Results of products into which an elementwise operation is fused, and of such operations."""
        self.computed_at: dict[int, int] = {}
        """Fused value -> the node that defines it."""
        self._loop_carried: set[int] = set()
        """Loop-carried values."""
        self._reader_count: dict[int, int] = defaultdict(int)
        """Value -> how many times it is read."""
        self._reads: dict[int, int] = defaultdict(int)
        """Value -> how many of these the walk has met."""
        self._donated = {v for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if leaf.donated}
        self._fusible: dict[OpKind, bool] = {}
        """`is_fusible` by kind of node."""
        entered: set[int] = set()
        for node in graph.nodes:
            if node.trip_count or not node.tie:
                for v in node.operands:
                    self._reader_count[v] += 1
            if node.kind.traits.loop:
                self._loop_carried.update(entered.intersection(node.results))
                entered.update(node.results)
        for v in graph.outputs:
            self._reader_count[v] += 1
        self.enclosing_loops = _enclosing_loops(graph)
        """Node -> (first, last) node of the loops around it, innermost first."""
        self._walk()

    def _walk(self) -> None:
        graph = self.graph
        self.allocated_at.update(dict.fromkeys(graph.inputs, -1))
        for n, node in enumerate(graph.nodes):
            for v in node.operands if node.trip_count or not node.tie else ():
                self._reads[v] += 1
            if not node.tie:
                self._visit_operation(n, node)
            elif node.trip_count:
                self._visit_tie(n, node)
        end = len(graph.nodes)
        for v in graph.outputs:
            self._materialize(v, self.computed_at.get(self.root(v), end))
            self._use(v, end)

    def root(self, v: int) -> int:
        """The value whose buffer ``v`` shares; itself if it shares none."""
        while v in self._alias:
            v = self._alias[v]
        return v

    def _share_buffer(self, v: int, other: int) -> None:
        """Puts ``v`` in the buffer of ``other``, unless ``other`` is in that of ``v``: a value that a loop carries from
        a literal has no other buffer than its own, and may come round to itself.

        `_alias` is a forest, so that `root` ends: an edge leads to a root, and never to the value that it starts from.
        """
        buffer = self.root(other)
        if buffer != v:
            self._alias[v] = buffer

    def is_fused(self, v: int) -> bool:
        """Whether ``v`` is recomputed where it is read."""
        return self.root(v) in self._sources

    def is_computed_where_read(self, v: int) -> bool:
        """Whether an elementwise operation computes ``v``, or what it is a view or a cast of, anew where it is read."""
        v = self.root(v)
        while self._sources.get(v) and v in self.computed_at:
            node = self.graph.nodes[self.computed_at[v]]
            if not node.kind.traits.fused_into_consumer:
                return not node.kind.traits.moves_data
            v = self.root(node.operands[0])
        return False

    def buffers_of(self, v: int) -> tuple[int, ...]:
        """The materialized values that a use of ``v`` reads."""
        v = self.root(v)
        return self._sources.get(v, (v,))

    def _use(self, v: int, n: int) -> None:
        """Records that node ``n`` reads ``v``: its buffers are live to ``n``, or to the end of a loop entered since."""
        nodes = self.graph.nodes
        phase = nodes[n].phase if n < len(nodes) else PLAIN
        product = n < len(nodes) and nodes[n].kind.factor_bits is not None
        if not product:
            self.read_outside_products.add(self.root(v))
        product = product and self._is_view(v)
        for r in self.buffers_of(v):
            if not product:
                self.read_outside_products.add(r)
            self.read_through[r].add(self.root(v))
            if n < len(nodes) and nodes[n].kind.flops:
                self.product_readers[r].add(n)
            self.open_fusions.discard(r)
            start, end = self.allocated_at.get(r, -1), n
            for a, b in self.enclosing_loops.get(n, ()):
                if start <= a:
                    end = max(end, b)
            self.last_use[r] = max(self.last_use.get(r, 0), end)
            self._mark_phase(r, phase)

    def _mark_phase(self, v: int, phase: str) -> None:
        """Classifies ``v``, read in ``phase``, as residual or gradient."""
        before = self._phase.get(v)
        if before == FORWARD and phase == BACKWARD:
            self.residuals.add(v)
        elif before == BACKWARD and phase == PLAIN and self.graph.values[v].shape:
            self.gradients.add(v)

    def _is_view(self, v: int) -> bool:
        """Whether ``v`` is materialized, or a view of one materialized value."""
        v = self.root(v)
        return v not in self._sources or v in self._views

    def _is_permutation(self, v: int) -> bool:
        """Whether ``v`` is a view of all of a materialized value: the same bytes, perhaps in another order."""
        v, values = self.root(v), self.graph.values
        return v in self._views and [values[r].bytes for r in self._sources.get(v, ())] == [values[v].bytes]

    def _is_broadcast(self, v: int) -> bool:
        """Whether ``v`` is fused and larger than its sources together."""
        sources, values = self._sources.get(self.root(v)), self.graph.values
        return sources is not None and sum(values[r].bytes for r in sources) < values[v].bytes

    def _materialize(self, v: int, n: int) -> None:
        """Makes ``v``, if it is fused, a buffer that is written at node ``n``."""
        v = self.root(v)
        if v in self._sources:
            for r in self._sources[v]:
                self.last_use[r] = max(self.last_use.get(r, 0), n)
                self.open_fusions.discard(r)
                self.read_outside_products.add(r)
                self.read_through[r].add(v)
            self.elementwise_from[v] = n, self._sources[v]
            del self._sources[v]
            self.allocated_at[v] = n

    def _visit_operation(self, n: int, node: Node) -> None:
        """Decides whether the results of an operation are materialized, fused, or aliases."""
        values, traits = self.graph.values, node.kind.traits
        self._phase.update(dict.fromkeys(node.results, node.phase))
        fusible = self._fusible.get(node.kind)
        if fusible is None:
            fusible = self._fusible[node.kind] = is_fusible(node, self.fuses_products)
        if not fusible:
            reduces = not node.kind.flops and traits.reduces
            fuses_operands = (
                (node.kind.flops and self.fuses_products) or reduces or (traits.gathers and _one_element_per_row(node))
            )
            if reduces and self.fuses_products:
                sizes = {r: math.prod(values[r].shape) for v in node.operands for r in self.buffers_of(v)}
                several = [r for r, n in sizes.items() if n > 1]
                if len(several) > 1:
                    self.fused_with_reduction.add(max(several, key=lambda r: (sizes[r], self.allocated_at.get(r, -1))))
            for v in node.operands:
                if not (fuses_operands or (node.kind.flops and self._is_permutation(v))):
                    self._materialize(v, n)
                self._use(v, n)
            if traits.in_place_operand is not None:
                target = node.operands[traits.in_place_operand]
                if self._reads[target] == self._reader_count[target] and self._may_overwrite(self.root(target)):
                    self._share_buffer(node.results[0], target)
                    return
            if node.kind.rule.local is not None and (starts := node.kind.rule.local.starts):
                self.sum_start[n] = self._first_step_ready(n, node, starts)
            for v in node.results:
                self.allocated_at[v] = n
                if node.kind.flops and self.fuses_products and self._reader_count[v] == 1:
                    self.open_fusions.add(v)
            return
        found: list[int] = []
        written: list[int] = []  # the product that this operation is fused into, if any
        for v in filter(None, node.operands):
            for r in self.buffers_of(v):
                self._mark_phase(r, node.phase)
                if r in self.open_fusions and not written and self._reader_count[v] == 1:
                    written.append(r)
                else:
                    self.open_fusions.discard(r)
                    found.append(r)
        for v in node.results:
            first = node.operands[0] if node.operands else 0
            same = traits.fused_into_consumer and first and values[first].shape == values[v].shape
            if same and values[first].bits == values[v].bits:
                self._share_buffer(v, first)
                continue
            if same and values[v].bits < values[first].bits and n in self.enclosing_loops:
                self._hoist_convert(self._sliced_from.get(self.root(first), 0), values[v].bits, n)
            if written and len(node.results) == 1 and values[v].bytes <= values[written[0]].bytes:
                self._extend_fusion(v, n, written[0], found)
            else:
                if traits.fused_into_consumer and len(found) + len(written) == 1 and self._is_view(node.operands[0]):
                    self._views.add(v)
                else:
                    self.read_outside_products.update(found, written)
                self.open_fusions.difference_update(written)
                self._sources[v], self.computed_at[v] = tuple(dict.fromkeys((*found, *written))), n
                if self._large_sources(v) > MAX_FUSED_SOURCES:
                    self._materialize(v, n)

    def _large_sources(self, v: int) -> int:
        """How many sources of a fused value count."""
        values, sources = self.graph.values, self._sources[v]
        if self.fuses_products:
            return len(sources)
        return sum(math.prod(values[s].shape) * SMALL_SHARE > math.prod(values[v].shape) for s in sources)

    def _may_overwrite(self, buffer: int) -> bool:
        """Whether nothing needs what is in ``buffer`` once all that reads it has: an intermediate, or donated."""
        return buffer in self._donated or self.allocated_at.get(buffer, -1) >= 0

    def _first_step_ready(self, n: int, node: Node, starts: Sequence[Sequence[int]]) -> int:
        """The node at which the first step of node ``n`` can execute: the operands that it takes are computed."""
        ready = [max([self.allocated_at.get(r, -1) for r in self.buffers_of(v)], default=-1) for v in node.operands]
        first = min(max(ready[i] for i in reads) for reads in starts)
        return max([first, *(a for a, _ in self.enclosing_loops.get(n, ()))])

    def _extend_fusion(self, v: int, n: int, product: int, others: list[int]) -> None:
        """Fuses node ``n`` into ``product``: its result ``v`` is the buffer, and it also reads ``others``."""
        self.allocated_at[v] = self.allocated_at.pop(product)
        self.fused_into_product.update((product, v))
        self.elementwise_from[v] = n, tuple(others)
        self.open_fusions.discard(product)
        for r in others:
            self.last_use[r] = max(self.last_use.get(r, 0), n)
            self.read_outside_products.add(r)
            self.read_through[r].add(v)
        if self._reader_count[v] == 1:
            self.open_fusions.add(v)

    def _hoist_convert(self, stack: int, bits: int, n: int) -> None:
        """The loops around node ``n`` read ``stack``, if it is an argument, converted to fewer bits."""
        if self.allocated_at.get(stack) != -1:
            return
        a, b = self.enclosing_loops[n][-1]
        first, last = self.hoisted_converts.get((stack, bits), (a, b))
        self.hoisted_converts[stack, bits] = min(first, a), max(last, b)

    def _visit_tie(self, n: int, node: Node) -> None:
        """A value that enters or leaves a region, or is carried by a loop."""
        values = self.graph.values
        self._phase.update((v, node.phase) for v in node.results if v not in self._phase)
        if not node.operands:  # results of an opaque region
            self.allocated_at.update(dict.fromkeys(node.results, n))
            return
        (a,), (b,) = node.operands, node.results
        if node.kind.host_transfer and self.graph.program.mesh.hardware.host_bandwidth:
            self._materialize(a, n)
            self._use(a, n)
            self.allocated_at[b] = n
            return
        loop = self.enclosing_loops.get(n, ()) if node.kind.traits.loop else ()
        stacked = len(values[a].shape) != len(values[b].shape)
        if node.kind.traits.barrier:
            self._materialize(a, n)
            self._share_buffer(b, a)
        elif not loop:  # a call moves nothing; a value carried into an argument is in its buffer
            if b not in self.allocated_at:
                self._share_buffer(b, a)
        elif stacked and len(values[b].shape) > len(values[a].shape):
            self._use(a, n)
            self.allocated_at[b] = loop[0][0]
            if self._reader_count[a] == 1 and self.allocated_at.get(self.root(a), -1) >= loop[0][0]:
                self.allocated_at.pop(self.root(a), None)  # written straight into the stack
        elif stacked:
            self._materialize(a, loop[0][0])
            self._use(a, n)
            self._sources[b] = self.buffers_of(a)
            self._sliced_from[b] = self.root(a)
        elif (
            b in self.allocated_at or b in self._alias or b in self._sources
        ):  # carried: written into the initial value's buffer
            self._materialize(a, n)
            self._use(a, n)
        elif b not in self._loop_carried and self._is_broadcast(a):  # the loop reads the sources of the broadcast
            self._share_buffer(b, a)
        else:
            enters = b in self._loop_carried or self.allocated_at.get(self.root(a), -1) < loop[0][0]
            self._materialize(a, loop[0][0] if enters else n)
            self._use(a, n)
            self._share_buffer(b, a)
            if b not in self._loop_carried:
                self._sliced_from[self.root(a)] = self.root(a)


def _enclosing_loops(graph: Graph) -> dict[int, tuple[tuple[int, int], ...]]:
    """The (first, last) nodes of the loops around each node, innermost first."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for a, b in graph.loops:
        for n in range(a, b + 1):
            found[n] = (*found.get(n, ()), (a, b))
    return found
