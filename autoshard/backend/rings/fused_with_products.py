"""What XLA for TPU computes with a product and not with the parts that a ring makes of it, and what that costs.

It computes an elementwise operand, such as the cotangent of logits, while a product reads it; for a ring it stores it.
What a reduction makes of a result it computes with the product; what a ring has put together it reads once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autoshard.cost.liveness import Liveness, is_fusible
from autoshard.cost.overlap.weights_and_gradients import weights
from autoshard.ir.graph import Graph, OpKind
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island
from autoshard.plan.record import PlanRecord


class FusedWithProducts:
    """The values of ``graph`` that XLA computes with products."""

    def __init__(self, graph: Graph, plan: PlanRecord) -> None:
        self._graph, self._plan = graph, plan

    @functools.cached_property
    def _liveness(self) -> Liveness:
        return Liveness(self._graph)

    @functools.cached_property
    def operands(self) -> frozenset[int]:
        """Activations that are computed while products read them: not what is gathered for these."""
        products = (n for n in self._graph.nodes if n.kind.flops)
        read = {v for n in products for v in n.operands if self._liveness.is_computed_where_read(v)}
        in_memory = {c.value for c in self._plan.intermediates if c.gathers(self._plan.mesh.shape)}
        return frozenset(read - weights(self._graph) - in_memory)

    @functools.cached_property
    def reduced(self) -> frozenset[int]:
        """Results of products of which XLA computes a reduction with the product."""
        return _reduced(self._graph, self._liveness.fuses_products)

    def stored_seconds(
        self, values: Sequence[int], kind: OpKind, island: Island, mesh: LogicalMesh
    ) -> dict[int, float]:
        """What it takes to store the operands, ``values``, of a product in a ring that XLA would else compute as it
        reads them: to write each once, and to read as much for it."""
        shards = [spec.num_shards(mesh.shape) for spec in island.in_specs]
        sizes = zip(values, kind.sent_bytes, shards, strict=False)
        return {v: 2 * size / n / mesh.hardware.memory_rate for v, size, n in sizes if v in self.operands}

    def reduced_seconds(self, result: int, kind: OpKind, island: Island, mesh: LogicalMesh) -> float:
        """What it takes to read the result of a product in a ring again, where a reduction does that XLA would else
        compute with the product."""
        size = kind.bytes[-1] / island.out_specs[-1].num_shards(mesh.shape)
        return size / mesh.hardware.memory_rate if result in self.reduced else 0.0


def _reduced(graph: Graph, fuses_products: bool) -> frozenset[int]:
    """The products of which a reduction is computed that needs nothing that is there later than their results."""
    made_at, product_of, found = dict[int, int](), dict[int, int](), set[int]()
    for n, node in enumerate(graph.nodes):
        latest = max((made_at.get(v, -1) for v in node.operands), default=-1)
        if node.kind.flops:
            product_of[n] = node.results[0]
        elif node.kind.traits.reduces and latest in product_of:
            found.add(product_of[latest])
        elementwise = not node.tie and not node.kind.flops and is_fusible(node, fuses_products)
        made_at.update(dict.fromkeys(node.results, latest if elementwise else n))
    return frozenset(found)
