"""delays: products of the backward pass that a compiler does later than the program says.

A gradient goes through two products, to what went in and to the weight, which read the same. What a compiler has to
send it computes first, and the other while that is on its way. And what nothing reads before a loop is over, and is
not sent, is computed after the loop. What a product reads is held until it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from autoshard.cost.liveness import is_fusible
from autoshard.ir.graph import BACKWARD, Graph


@dataclass(frozen=True)
class DelayedProduct:
    """When a product is done that a program says is done at ``node``."""

    node: int
    sibling_products: tuple[int, ...]
    """The next products that read what it reads."""
    loop_end: int
    """The end of the last loop before anything reads what it makes; its own place where there is none."""

    def completes_at(self, sent: Set[int]) -> int:
        """The node that it is done with, where those ``sent`` send what they make."""
        if self.node in sent:
            return self.node
        return max([self.loop_end, *(n for n in self.sibling_products if n in sent)])


def delayed_products(graph: Graph) -> Iterator[DelayedProduct]:
    """The products that may be done later."""
    nodes, ends = graph.nodes, _ends(graph)
    used = _used(graph)
    after: dict[int, int] = {}  # of each value the next product that reads it
    for n in reversed(range(len(nodes))):
        node = nodes[n]
        if not node.kind.flops or node.phase != BACKWARD:
            continue
        others = {after[v] for v in node.operands if v in after and ends.get(after[v]) == ends.get(n)}
        read = min((used.get(v, len(nodes)) for v in node.results), default=n)
        loop = max((b for a, b in graph.loops if n < a and b < read), default=n) if n not in ends else n
        if others or loop > n:
            yield DelayedProduct(n, tuple(sorted(others)), loop)
        after.update(dict.fromkeys(node.operands, n))


def _ends(graph: Graph) -> dict[int, int]:
    """Of each node in loops, the end of the innermost."""
    found: dict[int, int] = {}
    for a, b in graph.loops:
        for n in range(a, b + 1):
            found.setdefault(n, b)
    return found


def _used(graph: Graph) -> dict[int, int]:
    """Of each value, the first node that reads it to make something."""
    found: dict[int, int] = {}
    for n in reversed(range(len(graph.nodes))):
        node = graph.nodes[n]
        passes = node.tie or is_fusible(node)
        first = min((found[v] for v in node.results if v in found), default=None) if passes else n
        if first is not None:
            for v in node.operands:
                found[v] = min(first, found.get(v, first))
    return found
