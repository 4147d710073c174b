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

from autoshard.cost.cost import VIEWS
from autoshard.ir.graph import BACKWARD, FORWARD, PLAIN, Graph, Kind, Node

MOVED = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice", "split", "stack", "tile", "unstack"})
"""Operations that only take elements from elsewhere: done where they are read."""
SCATTERS = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"})
IN_PLACE = frozenset({"dynamic_update_slice", *SCATTERS})
"""Operations that write into their first operand where nothing else reads it any more."""
LOOPS = frozenset({"scan", "while"})
SUM = "sum_of_products"
SOURCES = 8
"""Most values that one is computed from where it is read; with more it is made."""


def is_local(node: Node, fused: bool = True) -> bool:
    """Whether each element of the node's results is computed from a few elements of its operands: where it is read.

    Args:
      fused: whether the hardware has `fused_products`; where it has not, a scatter is written, too.
    """
    if node.kind.op in VIEWS or node.kind.op in MOVED or (fused and node.kind.op in SCATTERS and _one_a_row(node)):
        return True
    rule = node.kind.rule
    return not (node.tie or node.kind.flops or rule.kinds or rule.reason or rule.local)


def _one_a_row(node: Node) -> bool:
    """Whether of every row of one dimension one element is taken, or changed: done by comparing with its position."""
    whole, part = node.kind.shapes[0], node.kind.shapes[2]
    return math.prod(whole) in {math.prod(part) * n for n in whole}


class Reading:
    """What the walk finds; it is done when this is made."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fused = graph.program.mesh.hardware.fused_products
        self.made: dict[int, int] = {}
        """The node that makes each value that takes room; arguments are made before all."""
        self.last: dict[int, int] = {}
        self.alias: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        """Of each value that is computed where it is read: what it is computed from."""
        self.open: set[int] = set()
        """Products whose results are not written yet: their one reader goes on computing."""
        self.slices: dict[int, int] = {}
        """Of each slice that a loop takes, and of what it takes whole: what of."""
        self.narrow: dict[tuple[int, int], tuple[int, int]] = {}
        """From and to when what a loop takes is there in fewer bits."""
        self.phase: dict[int, str] = {}
        """Of what takes room."""
        self.gradients: set[int] = set()
        self.residuals: set[int] = set()
        self.views: set[int] = set()
        """What is computed where it is read, and is but another view of one value that takes room."""
        self.read_whole: set[int] = set()
        """What something other than a product reads, or a product in another form."""
        self.built: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of each value that takes room and is computed element by element: where, and from what."""
        self.via: dict[int, set[int]] = defaultdict(set)
        """The values through which one that takes room is read."""
        self.multiplied: dict[int, set[int]] = defaultdict(set)
        """The products that read one that takes room."""
        self.begun: dict[int, int] = {}
        """When each sum of products has its first term."""
        self.reduced: set[int] = set()
        """What is made last of the several things that a reduction is computed from: the two are made as one."""
        self.born: dict[int, int] = {}
        """The node that each value computed where it is read is the result of."""
        self.carried: set[int] = set()
        """What goes round a loop."""
        self.readers: dict[int, int] = defaultdict(int)
        self.local: dict[Kind, bool] = {}
        """Whether nodes of a kind are `is_local`."""
        entered: set[int] = set()
        for node in graph.nodes:
            if node.times or not node.tie:
                for v in node.operands:
                    self.readers[v] += 1
            if node.kind.op in LOOPS:
                self.carried.update(entered.intersection(node.results))
                entered.update(node.results)
        for v in graph.outputs:
            self.readers[v] += 1
        self.loops = _enclosing(graph)
        self._walk()

    def _walk(self) -> None:
        graph = self.graph
        self.made.update(dict.fromkeys(graph.inputs, -1))
        for n, node in enumerate(graph.nodes):
            if not node.tie:
                self.operation(n, node)
            elif node.times:
                self.tie(n, node)
        end = len(graph.nodes)
        for v in graph.outputs:
            self.settle(v, self.born.get(self.root(v), end))
            self.read(v, end)

    def root(self, v: int) -> int:
        while v in self.alias:
            v = self.alias[v]
        return v

    def roots(self, v: int) -> tuple[int, ...]:
        """What has to be there for ``v`` to be read."""
        v = self.root(v)
        return self.sources.get(v, (v,))

    def read(self, v: int, n: int) -> None:
        """Node ``n`` reads ``v``."""
        nodes = self.graph.nodes
        phase = nodes[n].phase if n < len(nodes) else PLAIN
        product = n < len(nodes) and nodes[n].kind.flops
        if not product:
            self.read_whole.add(self.root(v))
        product = product and self.is_view(v)
        for r in self.roots(v):
            if not product:
                self.read_whole.add(r)
            self.via[r].add(self.root(v))
            if n < len(nodes) and nodes[n].kind.flops:
                self.multiplied[r].add(n)
            self.open.discard(r)
            made, until = self.made.get(r, -1), n
            for a, b in self.loops.get(n, ()):
                if made <= a:
                    until = max(until, b)
            self.last[r] = max(self.last.get(r, 0), until)
            self.crosses(r, phase)

    def crosses(self, v: int, phase: str) -> None:
        """``v`` is read in ``phase``."""
        before = self.phase.get(v)
        if before == FORWARD and phase == BACKWARD:
            self.residuals.add(v)
        elif before == BACKWARD and phase == PLAIN and self.graph.values[v].shape:
            self.gradients.add(v)

    def is_view(self, v: int) -> bool:
        """Whether ``v`` takes room, or is another view of what does."""
        v = self.root(v)
        return v not in self.sources or v in self.views

    def is_same(self, v: int) -> bool:
        """Whether ``v`` is what takes room in another order."""
        v, values = self.root(v), self.graph.values
        return v in self.views and [values[r].bytes for r in self.sources.get(v, ())] == [values[v].bytes]

    def spread(self, v: int) -> bool:
        """Whether ``v`` is computed where it is read, from less than it is."""
        sources, values = self.sources.get(self.root(v)), self.graph.values
        return sources is not None and sum(values[r].bytes for r in sources) < values[v].bytes

    def settle(self, v: int, n: int) -> None:
        """``v`` has to be there by node ``n``."""
        v = self.root(v)
        if v in self.sources:
            for r in self.sources[v]:
                self.last[r] = max(self.last.get(r, 0), n)
                self.open.discard(r)
                self.read_whole.add(r)
                self.via[r].add(v)
            self.built[v] = n, self.sources[v]
            del self.sources[v]
            self.made[v] = n

    def operation(self, n: int, node: Node) -> None:
        values = self.graph.values
        self.phase.update(dict.fromkeys(node.results, node.phase))
        local = self.local.get(node.kind)
        if local is None:
            local = self.local[node.kind] = is_local(node, self.fused)
        if not local:
            reduces = not node.kind.flops and node.kind.op.startswith(("reduce", "arg"))
            heavy = (node.kind.flops and self.fused) or reduces or (node.kind.op == "gather" and _one_a_row(node))
            if reduces and self.fused:
                sizes = {r: math.prod(values[r].shape) for v in node.operands for r in self.roots(v)}
                several = [r for r, n in sizes.items() if n > 1]
                if len(several) > 1:
                    self.reduced.add(max(several, key=lambda r: (sizes[r], self.made.get(r, -1))))
            for v in node.operands:
                if not (heavy or (node.kind.flops and self.is_same(v))):
                    self.settle(v, n)
                self.read(v, n)
            if (
                node.kind.op in IN_PLACE
                and self.readers[node.operands[0]] == 1
                and self.made.get(self.root(node.operands[0]), -1) >= 0
            ):
                self.alias[node.results[0]] = node.operands[0]
                return
            if node.kind.op == SUM:
                self.begun[n] = self.ready(n, node)
            for v in node.results:
                self.made[v] = n
                if node.kind.flops and self.fused and self.readers[v] == 1:
                    self.open.add(v)
            return
        found: list[int] = []
        written: list[int] = []
        for v in filter(None, node.operands):
            for r in self.roots(v):
                self.crosses(r, node.phase)
                if r in self.open and not written and self.readers[v] == 1:
                    written.append(r)
                else:
                    self.open.discard(r)
                    found.append(r)
        for v in node.results:
            first = node.operands[0] if node.operands else 0
            same = node.kind.op in VIEWS and first and values[first].shape == values[v].shape
            if same and values[first].bits == values[v].bits:
                self.alias[v] = first
                continue
            if same and values[v].bits < values[first].bits and n in self.loops:
                self.convert(self.slices.get(self.root(first), 0), values[v].bits, n)
            if written and len(node.results) == 1 and values[v].bytes <= values[written[0]].bytes:
                self.write(v, n, written[0], found)
            else:
                if node.kind.op in VIEWS and len(found) + len(written) == 1 and self.is_view(node.operands[0]):
                    self.views.add(v)
                else:
                    self.read_whole.update(found, written)
                self.open.difference_update(written)
                self.sources[v], self.born[v] = tuple(dict.fromkeys((*found, *written))), n
                if len(self.sources[v]) > SOURCES:
                    self.settle(v, n)

    def ready(self, n: int, node: Node) -> int:
        """When the first of the products that node ``n`` adds up can be done."""
        there = [max([self.made.get(r, -1) for r in self.roots(v)], default=-1) for v in node.operands]
        first = min(max(pair) for pair in zip(there[::2], there[1::2], strict=True))
        return max([first, *(a for a, _ in self.loops.get(n, ()))])

    def write(self, v: int, n: int, product: int, others: list[int]) -> None:
        """``v`` is what is written in place of ``product``."""
        self.made[v] = self.made.pop(product)
        self.built[v] = n, tuple(others)
        self.open.discard(product)
        for r in others:
            self.last[r] = max(self.last.get(r, 0), n)
            self.read_whole.add(r)
            self.via[r].add(v)
        if self.readers[v] == 1:
            self.open.add(v)

    def convert(self, stack: int, bits: int, n: int) -> None:
        """The loops around node ``n`` take ``stack``, an argument, in fewer bits."""
        if self.made.get(stack) != -1:
            return
        a, b = self.loops[n][-1]
        first, last = self.narrow.get((stack, bits), (a, b))
        self.narrow[stack, bits] = min(first, a), max(last, b)

    def tie(self, n: int, node: Node) -> None:
        """A value enters, leaves or goes round a region."""
        values = self.graph.values
        self.phase.update((v, node.phase) for v in node.results if v not in self.phase)
        if not node.operands:  # results of a region that is not looked into
            self.made.update(dict.fromkeys(node.results, n))
            return
        (a,), (b,) = node.operands, node.results
        loop = self.loops.get(n, ()) if node.kind.op in LOOPS else ()
        stacked = len(values[a].shape) != len(values[b].shape)
        if node.kind.op == "optimization_barrier":
            self.settle(a, n)
            self.alias[b] = a
        elif not loop:  # the border of a call is nothing; and what comes round to an argument has its room
            if b not in self.made:
                self.alias[b] = a
        elif stacked and len(values[b].shape) > len(values[a].shape):
            self.read(a, n)
            self.made[b] = loop[0][0]
            if self.readers[a] == 1 and self.made.get(self.root(a), -1) >= loop[0][0]:
                self.made.pop(self.root(a), None)  # written where it is stacked
        elif stacked:
            self.settle(a, loop[0][0])
            self.read(a, n)
            self.sources[b] = self.roots(a)
            self.slices[b] = self.root(a)
        elif b in self.made or b in self.alias or b in self.sources:  # round: into the room of what came in
            self.settle(a, n)
            self.read(a, n)
        elif b not in self.carried and self.spread(a):  # the loop is given what it is spread from
            self.alias[b] = a
        else:
            enters = b in self.carried or self.made.get(self.root(a), -1) < loop[0][0]
            self.settle(a, loop[0][0] if enters else n)
            self.read(a, n)
            self.alias[b] = a
            if b not in self.carried:
                self.slices[self.root(a)] = self.root(a)


def _enclosing(graph: Graph) -> dict[int, tuple[tuple[int, int], ...]]:
    """The loops around each node, innermost first."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for a, b in graph.loops:
        for n in range(a, b + 1):
            found[n] = (*found.get(n, ()), (a, b))
    return found
