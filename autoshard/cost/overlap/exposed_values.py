"""Values that a product waits for: no other has run since they are there, or none for long enough to gather them."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.cost.overlap.products import is_kernel, product_seconds
from autoshard.cost.overlap.rings import MAX_PARTS, gathered_axis, ring_dims
from autoshard.cost.overlap.weights_and_gradients import carried_by_loops, weights
from autoshard.ir.graph import Graph
from autoshard.ir.spec import Spec
from autoshard.machine.collective import ALL_GATHER, collective_seconds

Resharding = Callable[[int, int], tuple[Spec, Spec] | None]
"""Of a node and a value that it reads: its specs before and after the node reshards it."""


def exposed_values(graph: Graph, resharded: Resharding = lambda node, value: None) -> frozenset[int]:
    """The values that a product reads before any other has run since what they are computed from, or since the
    iteration of the loop has begun; activations, before others have run for as long as it takes to gather them.

    Kernels of their own count for nothing, nor do products that gather such a value in a ring: XLA gathers beside its
    own products alone.

    Args:
      resharded: the specs of a value before and after a node reshards it; None where it does not.
    """
    carried, of_weights, mesh = carried_by_loops(graph), weights(graph), graph.program.mesh
    made: dict[int, float] = {}  # seconds of products up to the last one that a value is computed from
    defined, read = dict[int, int](), dict[int, int]()  # by which node a value is made, and first gathered
    now, found = 0.0, set[int]()
    for n, node in enumerate(graph.nodes):
        if node.kind.flops and not is_kernel(node.kind):
            in_ring = False
            for i, v in enumerate(node.operands):
                if v not in made:
                    continue
                specs = resharded(n, v)
                axis = gathered_axis(*specs) if specs else None
                size = node.kind.sent_bytes[i] // specs[1].num_shards(mesh.shape) if specs else 0
                takes = collective_seconds(ALL_GATHER, axis[1:], size, mesh) if axis and v not in of_weights else 0.0
                if made[v] == now or now - made[v] < takes:
                    found.add(v)
                    if axis and mesh.shape[axis[1]] <= MAX_PARTS and axis[0] in ring_dims(node.kind, i):
                        first = read.setdefault(v, n)
                        in_ring |= all(defined.get(u, -1) < first for u in node.operands)
            now += 0.0 if in_ring else product_seconds(node.kind, mesh)
        is_slice = node.tie and len(node.kind.shapes[0]) > len(node.kind.shapes[-1])
        begins = node.kind.flops or is_slice or not carried.isdisjoint(node.results)
        since = now if begins else max((made.get(v, -1.0) for v in node.operands), default=-1.0)
        made.update(dict.fromkeys(node.results, since))
        defined.update(dict.fromkeys(node.results, n))
    return frozenset(found)
