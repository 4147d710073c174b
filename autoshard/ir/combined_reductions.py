"""Scalar reductions whose all-reduces XLA combines into one.

A global gradient norm adds one scalar per array. XLA combines their all-reduces into one collective, so each is charged
its share of one collective's latency (`OpKind.combined_count`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoshard.ir.graph import Node, Value
from autoshard.ir.spec import REDUCTION_KINDS


def combined_reduction_counts(nodes: Sequence[Node], values: Sequence[Value]) -> dict[int, int]:
    """By node number, for reductions to a scalar that are summed with others: how many scalars go into the same sum."""
    leader = list(range(len(values)))

    def root(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    reductions: list[int] = []
    for i, node in enumerate(nodes):
        if len(node.results) != 1 or values[node.results[0]].shape:
            continue
        if node.kind.traits.adds or node.kind.traits.casts:
            for v in filter(None, node.operands):
                leader[root(v)] = root(node.results[0])
        elif any(kind in REDUCTION_KINDS for _, kind in node.kind.rule.kinds):
            reductions.append(i)
    groups: dict[int, list[int]] = defaultdict(list)
    for i in reductions:
        groups[root(nodes[i].results[0])].append(i)
    return {i: len(members) for members in groups.values() if len(members) > 1 for i in members}
