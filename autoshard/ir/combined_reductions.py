"""Reductions whose all-reduces XLA combines into one.

A global gradient norm adds one scalar per array. XLA combines their all-reduces into one collective, so each is charged
its share of one collective's latency (`OpKind.combined_count`). Where the hardware table says so, that holds for any
all-reduces that do not depend on each other: the statistics of a batch norm, the gradients of all parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from autoshard.ir.graph import Node, Value
from autoshard.ir.spec import REDUCTION_KINDS


def combined_reduction_counts(nodes: Sequence[Node], values: Sequence[Value], *, any_shape: bool) -> dict[int, int]:
    """By node number, for reductions: how many all-reduces XLA combines with this one's, itself included, where they
    are more than one.

    Args:
      any_shape: whether XLA combines independent all-reduces of any shape; otherwise scalars that are added up.
    """
    reductions = [i for i, n in enumerate(nodes) if _reduces(n) and len(n.results) == 1]
    scalars = [i for i in reductions if not values[nodes[i].results[0]].shape]
    roots = _roots_of_sums(nodes, values)
    found = _counts((roots[nodes[i].results[0]], i) for i in scalars)
    if any_shape:
        heights = _heights(nodes, len(values))
        others = [i for i in reductions if i not in found and nodes[i].trip_count == 1]
        found |= _counts(((heights[i], values[nodes[i].results[0]].dtype), i) for i in others)
    return found


def _reduces(node: Node) -> bool:
    return any(kind in REDUCTION_KINDS for _, kind in node.kind.rule.kinds)


def _counts(members: Iterable[tuple[Hashable, int]]) -> dict[int, int]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for key, i in members:
        groups[key].append(i)
    return {i: len(group) for group in groups.values() if len(group) > 1 for i in group}


def _roots_of_sums(nodes: Sequence[Node], values: Sequence[Value]) -> list[int]:
    """For each value, another that stands for all scalars that are added up or cast into one another."""
    leader = list(range(len(values)))

    def root(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    for node in nodes:
        added = node.kind.traits.adds or node.kind.traits.casts
        if added and len(node.results) == 1 and not values[node.results[0]].shape:
            for v in filter(None, node.operands):
                leader[root(v)] = root(node.results[0])
    return [root(v) for v in leader]


def _heights(nodes: Sequence[Node], values: int) -> list[int]:
    """For each node, the most reductions that follow on a path from its results, its own one included. Of two
    reductions of one height neither depends on the other."""
    after, found = [0] * values, [0] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        found[i] = max((after[v] for v in node.results), default=0) + _reduces(node)
        for v in node.operands:
            after[v] = max(after[v], found[i])
    return found
