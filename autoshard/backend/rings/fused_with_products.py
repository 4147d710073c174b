"""What XLA computes with a product, and not with the products of a ring: an operand of several, a part of a result.

XLA for TPU computes an elementwise operand, such as the cotangent of logits, while a product reads it, and stores it
for those of a ring. What is reduced of a result it reduces in the product, and reads what a ring has put together once
more.
"""

from __future__ import annotations

from autoshard.cost.liveness import Liveness
from autoshard.cost.overlap import weights
from autoshard.ir.graph import Graph


class FusedWithProducts:
    """The values of ``graph`` that XLA computes with products."""

    def __init__(self, graph: Graph) -> None:
        liveness, products = Liveness(graph), {v for n in graph.nodes if n.kind.flops for v in n.results}
        read = {v for n in graph.nodes if n.kind.flops for v in n.operands if liveness.is_computed_where_read(v)}
        self.operands = frozenset(read - weights(graph))
        """Activations that are computed while products read them."""
        reduced = {v for n in graph.nodes if n.kind.traits.reduces and not n.kind.flops for v in n.operands}
        self.reduced = frozenset(products.intersection(r for v in reduced for r in liveness.buffers_of(v)))
        """Results that a reduction reads, or what it reads is computed from."""
