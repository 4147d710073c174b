"""reading: one walk over a program that finds what takes room: which values are made, and when each is read last.

A compiler keeps what it cannot make again for nothing. So a value takes room if it is *made*: by a product, a
reduction, a gather, a loop. Elementwise results, views and slices are computed where they are read, however often, from
what was made: a value that is read keeps its *sources* alive. Some things are otherwise:

- what follows a product, one reader after another, is computed as it is written: the last of it takes the room;
- what goes into a loop, across a barrier or out of the step has to be there, whatever it is made of;
- so has what goes into a product, where the compiler calls a library for it, and nothing is computed as it is written;
- a conversion to fewer bits of what a loop takes slices of is made once, before the loop, for all of it.

What is made before a loop and read in it lives to the loop's end; what a loop stacks lives from its beginning.
"""

from __future__ import annotations

import math
from collections import defaultdict

from autoshard.ir.graph import BACKWARD, FORWARD, PLAIN, Graph, Node, OpKind

SOURCES = 8
"""Most values that one is computed from where it is read; with more it is made."""


def is_fusible(node: Node, fused: bool = True) -> bool:
    """Whether each element of the node's results is computed from a few elements of its operands: where it is read.

    Args:
      fused: whether the hardware has `fused_products`; where it has not, a scatter is written, too.
    """
    traits = node.kind.traits
    if traits.fused_into_consumer or traits.moves_data or (fused and traits.scatters and _one_element_per_row(node)):
        return True
    rule = node.kind.rule
    return not (node.tie or node.kind.flops or rule.kinds or rule.reason or rule.local)


def _one_element_per_row(node: Node) -> bool:
    """Whether of every row of one dimension one element is taken, or changed: done by comparing with its position."""
    whole, part = node.kind.shapes[0], node.kind.shapes[2]
    return math.prod(whole) in {math.prod(part) * n for n in whole}


class Liveness:
    """What the walk finds; it is done when this is made."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fuses_products = graph.program.mesh.hardware.fused_products
        self.allocated_at: dict[int, int] = {}
        """The node that makes each value that takes room; arguments are made before all."""
        self.last_use: dict[int, int] = {}
        self.alias: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        """Of each value that is computed where it is read: what it is computed from."""
        self.open_fusions: set[int] = set()
        """Products whose results are not written yet: their one reader goes on computing."""
        self.sliced_from: dict[int, int] = {}
        """Of each slice that a loop takes, and of what it takes whole: what of."""
        self.hoisted_converts: dict[tuple[int, int], tuple[int, int]] = {}
        """From and to when what a loop takes is there in fewer bits."""
        self.phase: dict[int, str] = {}
        """Of what takes room."""
        self.gradients: set[int] = set()
        self.residuals: set[int] = set()
        self.views: set[int] = set()
        """What is computed where it is read, and is but another view of one value that takes room."""
        self.read_outside_products: set[int] = set()
        """What something other than a product reads, or a product in another form."""
        self.elementwise_from: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of each value that takes room and is computed element by element: where, and from what."""
        self.read_through: dict[int, set[int]] = defaultdict(set)
        """The values through which one that takes room is read."""
        self.product_readers: dict[int, set[int]] = defaultdict(set)
        """The products that read one that takes room."""
        self.sum_start: dict[int, int] = {}
        """When each sum of products has its first term."""
        self.fused_with_reduction: set[int] = set()
        """What is made last of the several things that a reduction is computed from: the two are made as one."""
        self.computed_at: dict[int, int] = {}
        """The node that each value computed where it is read is the result of."""
        self.loop_carried: set[int] = set()
        """What goes round a loop."""
        self.reader_count: dict[int, int] = defaultdict(int)
        self._fusible: dict[OpKind, bool] = {}
        """Whether nodes of a kind are `is_local`."""
        entered: set[int] = set()
        for node in graph.nodes:
            if node.trip_count or not node.tie:
                for v in node.operands:
                    self.reader_count[v] += 1
            if node.kind.traits.loop:
                self.loop_carried.update(entered.intersection(node.results))
                entered.update(node.results)
        for v in graph.outputs:
            self.reader_count[v] += 1
        self.enclosing_loops = _enclosing_loops(graph)
        self._walk()

    def _walk(self) -> None:
        graph = self.graph
        self.allocated_at.update(dict.fromkeys(graph.inputs, -1))
        for n, node in enumerate(graph.nodes):
            if not node.tie:
                self._visit_operation(n, node)
            elif node.trip_count:
                self._visit_tie(n, node)
        end = len(graph.nodes)
        for v in graph.outputs:
            self._materialize(v, self.computed_at.get(self.root(v), end))
            self._use(v, end)

    def root(self, v: int) -> int:
        while v in self.alias:
            v = self.alias[v]
        return v

    def _buffers_of(self, v: int) -> tuple[int, ...]:
        """What has to be there for ``v`` to be read."""
        v = self.root(v)
        return self.sources.get(v, (v,))

    def _use(self, v: int, n: int) -> None:
        """Node ``n`` reads ``v``."""
        nodes = self.graph.nodes
        phase = nodes[n].phase if n < len(nodes) else PLAIN
        product = n < len(nodes) and nodes[n].kind.flops
        if not product:
            self.read_outside_products.add(self.root(v))
        product = product and self._is_view(v)
        for r in self._buffers_of(v):
            if not product:
                self.read_outside_products.add(r)
            self.read_through[r].add(self.root(v))
            if n < len(nodes) and nodes[n].kind.flops:
                self.product_readers[r].add(n)
            self.open_fusions.discard(r)
            made, until = self.allocated_at.get(r, -1), n
            for a, b in self.enclosing_loops.get(n, ()):
                if made <= a:
                    until = max(until, b)
            self.last_use[r] = max(self.last_use.get(r, 0), until)
            self._mark_phase(r, phase)

    def _mark_phase(self, v: int, phase: str) -> None:
        """``v`` is read in ``phase``."""
        before = self.phase.get(v)
        if before == FORWARD and phase == BACKWARD:
            self.residuals.add(v)
        elif before == BACKWARD and phase == PLAIN and self.graph.values[v].shape:
            self.gradients.add(v)

    def _is_view(self, v: int) -> bool:
        """Whether ``v`` takes room, or is another view of what does."""
        v = self.root(v)
        return v not in self.sources or v in self.views

    def _is_permutation(self, v: int) -> bool:
        """Whether ``v`` is what takes room in another order."""
        v, values = self.root(v), self.graph.values
        return v in self.views and [values[r].bytes for r in self.sources.get(v, ())] == [values[v].bytes]

    def _is_broadcast(self, v: int) -> bool:
        """Whether ``v`` is computed where it is read, from less than it is."""
        sources, values = self.sources.get(self.root(v)), self.graph.values
        return sources is not None and sum(values[r].bytes for r in sources) < values[v].bytes

    def _materialize(self, v: int, n: int) -> None:
        """``v`` has to be there by node ``n``."""
        v = self.root(v)
        if v in self.sources:
            for r in self.sources[v]:
                self.last_use[r] = max(self.last_use.get(r, 0), n)
                self.open_fusions.discard(r)
                self.read_outside_products.add(r)
                self.read_through[r].add(v)
            self.elementwise_from[v] = n, self.sources[v]
            del self.sources[v]
            self.allocated_at[v] = n

    def _visit_operation(self, n: int, node: Node) -> None:
        values, traits = self.graph.values, node.kind.traits
        self.phase.update(dict.fromkeys(node.results, node.phase))
        local = self._fusible.get(node.kind)
        if local is None:
            local = self._fusible[node.kind] = is_fusible(node, self.fuses_products)
        if not local:
            reduces = not node.kind.flops and traits.reduces
            heavy = (
                (node.kind.flops and self.fuses_products)
                or reduces
                or (traits.gathers and _one_element_per_row(node))
            )
            if reduces and self.fuses_products:
                sizes = {r: math.prod(values[r].shape) for v in node.operands for r in self._buffers_of(v)}
                several = [r for r, n in sizes.items() if n > 1]
                if len(several) > 1:
                    self.fused_with_reduction.add(max(several, key=lambda r: (sizes[r], self.allocated_at.get(r, -1))))
            for v in node.operands:
                if not (heavy or (node.kind.flops and self._is_permutation(v))):
                    self._materialize(v, n)
                self._use(v, n)
            if traits.in_place_operand is not None:
                target = node.operands[traits.in_place_operand]
                if self.reader_count[target] == 1 and self.allocated_at.get(self.root(target), -1) >= 0:
                    self.alias[node.results[0]] = target
                    return
            if traits.sums_products:
                self.sum_start[n] = self._first_term_ready(n, node)
            for v in node.results:
                self.allocated_at[v] = n
                if node.kind.flops and self.fuses_products and self.reader_count[v] == 1:
                    self.open_fusions.add(v)
            return
        found: list[int] = []
        written: list[int] = []
        for v in filter(None, node.operands):
            for r in self._buffers_of(v):
                self._mark_phase(r, node.phase)
                if r in self.open_fusions and not written and self.reader_count[v] == 1:
                    written.append(r)
                else:
                    self.open_fusions.discard(r)
                    found.append(r)
        for v in node.results:
            first = node.operands[0] if node.operands else 0
            same = traits.fused_into_consumer and first and values[first].shape == values[v].shape
            if same and values[first].bits == values[v].bits:
                self.alias[v] = first
                continue
            if same and values[v].bits < values[first].bits and n in self.enclosing_loops:
                self._hoist_convert(self.sliced_from.get(self.root(first), 0), values[v].bits, n)
            if written and len(node.results) == 1 and values[v].bytes <= values[written[0]].bytes:
                self._extend_fusion(v, n, written[0], found)
            else:
                if traits.fused_into_consumer and len(found) + len(written) == 1 and self._is_view(node.operands[0]):
                    self.views.add(v)
                else:
                    self.read_outside_products.update(found, written)
                self.open_fusions.difference_update(written)
                self.sources[v], self.computed_at[v] = tuple(dict.fromkeys((*found, *written))), n
                if len(self.sources[v]) > SOURCES:
                    self._materialize(v, n)

    def _first_term_ready(self, n: int, node: Node) -> int:
        """When the first of the products that node ``n`` adds up can be done."""
        there = [max([self.allocated_at.get(r, -1) for r in self._buffers_of(v)], default=-1) for v in node.operands]
        first = min(max(pair) for pair in zip(there[::2], there[1::2], strict=True))
        return max([first, *(a for a, _ in self.enclosing_loops.get(n, ()))])

    def _extend_fusion(self, v: int, n: int, product: int, others: list[int]) -> None:
        """``v`` is what is written in place of ``product``."""
        self.allocated_at[v] = self.allocated_at.pop(product)
        self.elementwise_from[v] = n, tuple(others)
        self.open_fusions.discard(product)
        for r in others:
            self.last_use[r] = max(self.last_use.get(r, 0), n)
            self.read_outside_products.add(r)
            self.read_through[r].add(v)
        if self.reader_count[v] == 1:
            self.open_fusions.add(v)

    def _hoist_convert(self, stack: int, bits: int, n: int) -> None:
        """The loops around node ``n`` take ``stack``, an argument, in fewer bits."""
        if self.allocated_at.get(stack) != -1:
            return
        a, b = self.enclosing_loops[n][-1]
        first, last = self.hoisted_converts.get((stack, bits), (a, b))
        self.hoisted_converts[stack, bits] = min(first, a), max(last, b)

    def _visit_tie(self, n: int, node: Node) -> None:
        """A value enters, leaves or goes round a region."""
        values = self.graph.values
        self.phase.update((v, node.phase) for v in node.results if v not in self.phase)
        if not node.operands:  # results of a region that is not looked into
            self.allocated_at.update(dict.fromkeys(node.results, n))
            return
        (a,), (b,) = node.operands, node.results
        loop = self.enclosing_loops.get(n, ()) if node.kind.traits.loop else ()
        stacked = len(values[a].shape) != len(values[b].shape)
        if node.kind.traits.barrier:
            self._materialize(a, n)
            self.alias[b] = a
        elif not loop:  # the border of a call is nothing; and what comes round to an argument has its room
            if b not in self.allocated_at:
                self.alias[b] = a
        elif stacked and len(values[b].shape) > len(values[a].shape):
            self._use(a, n)
            self.allocated_at[b] = loop[0][0]
            if self.reader_count[a] == 1 and self.allocated_at.get(self.root(a), -1) >= loop[0][0]:
                self.allocated_at.pop(self.root(a), None)  # written where it is stacked
        elif stacked:
            self._materialize(a, loop[0][0])
            self._use(a, n)
            self.sources[b] = self._buffers_of(a)
            self.sliced_from[b] = self.root(a)
        elif b in self.allocated_at or b in self.alias or b in self.sources:  # round: into the room of what came in
            self._materialize(a, n)
            self._use(a, n)
        elif b not in self.loop_carried and self._is_broadcast(a):  # the loop is given what it is spread from
            self.alias[b] = a
        else:
            enters = b in self.loop_carried or self.allocated_at.get(self.root(a), -1) < loop[0][0]
            self._materialize(a, loop[0][0] if enters else n)
            self._use(a, n)
            self.alias[b] = a
            if b not in self.loop_carried:
                self.sliced_from[self.root(a)] = self.root(a)


def _enclosing_loops(graph: Graph) -> dict[int, tuple[tuple[int, int], ...]]:
    """The loops around each node, innermost first."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for a, b in graph.loops:
        for n in range(a, b + 1):
            found[n] = (*found.get(n, ()), (a, b))
    return found
