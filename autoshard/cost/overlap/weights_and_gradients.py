"""Which values are weights, and which are gradients of weights: the two sorts that have time for their collectives.

- *weights*, computed of carried arguments alone: there from the beginning of a step, or of an iteration of the loop
  over layers, to the product that reads them;
- *gradients* of weights, which no product reads: from the product that makes them to the end of the iteration or step.

On GPUs loops gather weights of the next layer beside all products of this one (`gathered_ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.cost.overlap.products import STEP, innermost_loops
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph

MIN_LAYERS = 3
"""Fewest layers that are gathered ahead: the last one's weights are gathered once more."""


def weights(graph: Graph) -> set[int]:
    """The values that are computed of arguments alone that calls carry, without a product: parameters, slices of them
    in loops, casts, and on GPUs, which gather them ahead, stacks of these that a loop leaves to the next."""
    carried, on_gpus = carried_by_loops(graph), graph.program.mesh.platform == "gpu"
    batch = argument_roles(graph).batch
    found = {v for i, v in enumerate(graph.inputs) if i not in batch}
    for node in graph.nodes:
        read = [v for v in node.operands if v]
        if read and not node.kind.flops and found.issuperset(read):
            stacks = on_gpus and node.tie and len(node.kind.shapes[0]) < len(node.kind.shapes[-1])
            found.update(v for v in node.results if stacks or v not in carried)
    return found


def carried_by_loops(graph: Graph) -> set[int]:
    """What a loop's iterations carry from one to the next, and results of loops."""
    ties = [n for n in graph.nodes if n.tie and n.operands]
    return {n.results[0] for n in ties if n.results[0] < n.operands[0]}


def gathered_ahead(graph: Graph) -> Mapping[int, int]:
    """The values that a loop can gather an iteration ahead (`autoshard.backend.gathers.rows_ahead`), each with the
    number of its loop: rows of what is stacked, and casts of them."""
    program, found = graph.program, dict[int, int]()
    if program.mesh.platform != "gpu" or program.pipeline is not None:
        return found
    loop_of, of_weights = innermost_loops(graph), weights(graph)
    for n, node in enumerate(graph.nodes):
        shapes = node.kind.shapes
        is_row = node.tie and len(shapes[0]) > len(shapes[-1]) and shapes[0][0] >= MIN_LAYERS
        same = node.kind.traits.casts or node.kind.traits.constrains
        if loop_of[n] != STEP and (is_row or (same and found.keys() >= {*node.operands})):
            found.update(dict.fromkeys(of_weights.intersection(node.results), loop_of[n]))
    return found


def gradients_of(graph: Graph) -> set[int]:
    """The results of products that no other product reads, nor what is computed of them."""
    read, before, inputs = set[int](), -1, set(graph.inputs)
    while len(read) > before:  # once more for what goes round a loop
        before = len(read)
        for node in reversed(graph.nodes):
            if node.kind.flops or not read.isdisjoint(node.results):
                read.update(v for v in node.operands if v not in inputs)  # the next call's products do not count
    return {v for node in graph.nodes if node.kind.flops for v in node.results if v not in read}


def loops_with_gradients(graph: Graph) -> set[int]:
    """The loops in which products make gradients of weights."""
    gradients, loop_of = gradients_of(graph), innermost_loops(graph)
    return {loop_of[n] for n, node in enumerate(graph.nodes) if not gradients.isdisjoint(node.results)}
