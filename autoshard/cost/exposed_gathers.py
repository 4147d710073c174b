"""Values that a product reads as soon as another one has made them: no product can run while they are gathered."""

from __future__ import annotations

from autoshard.ir.graph import Graph
from autoshard.ir.spec import Axes, Spec


def exposed_values(graph: Graph) -> frozenset[int]:
    """The values that a product reads before any other has run since what they are computed from, or since the
    iteration of the loop has begun. Kernels of their own count for nothing: XLA gathers beside its own products alone.
    """
    ties = [n for n in graph.nodes if n.tie and n.operands]
    carried = {n.results[0] for n in ties if n.results[0] < n.operands[0]}  # results of loops too
    made: dict[int, int] = {}  # how many products there are up to the last one that a value is computed from
    products, found = 0, set[int]()
    for node in graph.nodes:
        is_product = bool(node.kind.flops) and (node.kind.rule.local is None or node.kind.rule.local.fun is None)
        if is_product:
            found.update(v for v in node.operands if made.get(v, -1) == products)
            products += 1
        is_slice = node.tie and len(node.kind.shapes[0]) > len(node.kind.shapes[-1])
        now = node.kind.flops or is_slice or not carried.isdisjoint(node.results)
        since = products if now else max((made.get(v, -1) for v in node.operands), default=-1)
        made.update(dict.fromkeys(node.results, since))
    return frozenset(found)


def gathered_axis(before: Spec, after: Spec) -> tuple[int, str] | None:
    """The dimension that a reshard gathers over one mesh axis, and that axis; None where it does another thing."""
    changed = [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    if len(changed) != 1 or before.partial or after.partial:
        return None
    split: Axes = before.dims[changed[0]]
    return (changed[0], split[-1]) if split[:-1] == after.dims[changed[0]] else None
