"""Delayed products: backward products that XLA's scheduler places after their position in the program.

The backward pass of a product has two products with an operand in common: the gradient of the input and that of the
weight. XLA schedules first the one whose result a collective reduces, and the other while that collective runs. And a
product without a collective, whose result nothing reads before the end of a later loop, it schedules after that loop.
Either way the operands of the delayed product stay live until it executes. Seen in schedules of compiled TPU programs
(docs/design/2026-11-22-what-is-live-at-the-peak.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from autoshard.cost.liveness import is_fusible
from autoshard.ir.graph import BACKWARD, Graph


@dataclass(frozen=True)
class DelayedProduct:
    """A product that may execute later than at its ``node``."""

    node: int
    sibling_products: tuple[int, ...]
    """For each operand, the next product that reads it, in the same loop."""
    loop_end: int
    """The end of the last loop before the first use of its result; ``node`` where there is none."""

    def completes_at(self, communicating: Set[int]) -> int:
        """The node with which it executes, given the nodes whose results a collective reduces or moves."""
        if self.node in communicating:
            return self.node
        return max([self.loop_end, *(n for n in self.sibling_products if n in communicating)])


def delayed_products(graph: Graph) -> Iterator[DelayedProduct]:
    """The backward products of ``graph`` that may be delayed under some layout, last one first."""
    nodes, ends = graph.nodes, _innermost_loop_ends(graph)
    used = _first_uses(graph)
    after: dict[int, int] = {}  # value -> the next product that reads it
    for n in reversed(range(len(nodes))):
        node = nodes[n]
        if not node.kind.flops or node.phase != BACKWARD:
            continue
        siblings = {after[v] for v in node.operands if v in after and ends.get(after[v]) == ends.get(n)}
        first_use = min((used.get(v, len(nodes)) for v in node.results), default=n)
        loop_end = max((b for a, b in graph.loops if n < a and b < first_use), default=n) if n not in ends else n
        if siblings or loop_end > n:
            yield DelayedProduct(n, tuple(sorted(siblings)), loop_end)
        after.update(dict.fromkeys(node.operands, n))


def _innermost_loop_ends(graph: Graph) -> dict[int, int]:
    """For each node inside a loop, the last node of the innermost one."""
    found: dict[int, int] = {}
    for a, b in graph.loops:
        for n in range(a, b + 1):
            found.setdefault(n, b)
    return found


def _first_uses(graph: Graph) -> dict[int, int]:
    """For each value, the first node that uses it, directly or through ties and fused elementwise values."""
    found: dict[int, int] = {}
    for n in reversed(range(len(graph.nodes))):
        node = graph.nodes[n]
        transparent = node.tie or is_fusible(node)
        first = min((found[v] for v in node.results if v in found), default=None) if transparent else n
        if first is not None:
            for v in node.operands:
                found[v] = min(first, found.get(v, first))
    return found
