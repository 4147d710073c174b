"""What a plan holds for the backward part, and what is made again there, with the price of each."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard import jaxpr as jx
from autoshard.cost.memory import MemoryModel
from autoshard.ir.graph import BACKWARD, Graph, Node
from autoshard.ir.propagate import Layout
from autoshard.plan.decisions import HeldValue
from autoshard.transforms.residual_names import ResidualGroup, residual_groups


def held_values(graph: Graph, layout: Layout, model: MemoryModel) -> tuple[HeldValue, ...]:
    """The values of ``graph``'s program that may be held, in order of first execution, priced under ``layout``."""
    groups = residual_groups(graph.program)
    if not groups:
        return ()
    maker = {v: i for i, node in enumerate(graph.nodes) if not node.tie for v in node.results}
    return tuple(_held_value(g, graph, layout, model, maker) for g in groups)


def _held_value(
    group: ResidualGroup, graph: Graph, layout: Layout, model: MemoryModel, maker: dict[int, int]
) -> HeldValue:
    held, size, seconds = 0, 0, 0.0
    for member in group.members:
        made = [graph.ids[v] for v in member.eqn.outvars if v in graph.ids]
        if any(_is_read_backward(graph, v) for v in made):
            held += member.layers
        size = max(size, sum(model.size(v, layout.specs[v]) for v in made))
        nodes = {maker[v] for v in made if v in maker}
        seconds = max(seconds, sum(model.cost_model.node_cost(n, layout).seconds for n in nodes))
    again, source = min(group.again, group.layers), jx.source(group.members[0].eqn)
    return HeldValue(group.name, source, group.layers, min(held, group.layers - again), again, size, seconds)


def _is_read_backward(graph: Graph, v: int) -> bool:
    """Whether the backward part reads value ``v``, as it is or as a view of it."""
    todo, seen = [v], {v}
    while todo:
        for node in _readers(graph, todo.pop()):
            if node.phase == BACKWARD and not node.tie:
                return True
            traits = node.kind.traits
            if (node.tie and node.trip_count) or traits.view or traits.fused_into_consumer or traits.casts:
                new = set(node.results) - seen
                seen |= new
                todo += new
    return False


def _readers(graph: Graph, v: int) -> Iterator[Node]:
    return (graph.nodes[i] for i in graph.uses[v] if v in graph.nodes[i].operands)
