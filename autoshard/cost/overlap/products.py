"""The products of a graph: how long each takes, whose code runs it, and in which loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autoshard.ir.graph import Graph, OpKind
from autoshard.machine.mesh import LogicalMesh

STEP = -1
"""What is in no loop, as a loop's number."""


def product_seconds(kind: OpKind, mesh: LogicalMesh) -> float:
    """Least seconds of one execution of a product: its FLOPs on all devices."""
    rate = mesh.hardware.product_rate(kind.product_dtype, convolution=kind.convolution is not None)
    return kind.flops / rate / mesh.size


def read_after(kind: OpKind, operand: int) -> float:
    """Which part of its own products a node computes before it reads this operand."""
    local = kind.rule.local
    return local.read_after[operand] if local is not None and local.read_after else 0.0


def is_of_xla(kind: OpKind) -> bool:
    """Whether it is a product without halos that has no form of its own on shards."""
    rule = kind.rule
    return bool(kind.flops) and not (rule.local and rule.local.fun) and not rule.halos


def is_kernel(kind: OpKind) -> bool:
    """Whether products run in a local form, beside which XLA gathers nothing; convolutions are XLA's there too."""
    in_own_form = kind.rule.local is not None and kind.rule.local.fun is not None
    return bool(kind.flops) and in_own_form and kind.convolution is None


def innermost_loops(graph: Graph) -> list[int]:
    """Of each node, the number of the innermost loop that it is in, or `STEP`."""
    found = [STEP] * len(graph.nodes)
    for i, (first, last) in reversed([*enumerate(graph.loops)]):
        found[first : last + 1] = [i] * (last + 1 - first)
    return found


def products_by_loop(graph: Graph) -> Iterable[list[int]]:
    """The products of each loop without those of loops inside it, and of what is in none."""
    loop_of, products = innermost_loops(graph), defaultdict[int, list[int]](list)
    for n, node in enumerate(graph.nodes):
        if node.kind.flops and node.trip_count:
            products[loop_of[n]].append(n)
    return products.values()
