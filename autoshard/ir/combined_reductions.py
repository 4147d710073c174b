"""together: sums that become one number are sent together.

The norm of a gradient adds a number for each of its arrays. A compiler combines their reductions into one collective,
and a round trip is paid once, not once for every array; so each bears its share of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoshard.ir.graph import Node, Value
from autoshard.ir.spec import REDUCTION_KINDS


def combined_reduction_counts(nodes: Sequence[Node], values: Sequence[Value]) -> dict[int, int]:
    """Of each node whose result is a number that is only added to others: how many such numbers are sent together."""
    leader = list(range(len(values)))

    def root(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    sums: list[int] = []
    for i, node in enumerate(nodes):
        if len(node.results) != 1 or values[node.results[0]].shape:
            continue
        if node.kind.traits.adds or node.kind.traits.casts:
            for v in filter(None, node.operands):
                leader[root(v)] = root(node.results[0])
        elif any(kind in REDUCTION_KINDS for _, kind in node.kind.rule.kinds):
            sums.append(i)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in sums:
        alike[root(nodes[i].results[0]), nodes[i].trip_count].append(i)
    return {i: len(members) for members in alike.values() if len(members) > 1 for i in members}
