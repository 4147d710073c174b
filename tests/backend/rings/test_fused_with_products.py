"""What XLA computes with a product: elementwise operands, and what is reduced of a result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.backend.rings.fused_with_products import FusedWithProducts
from autoshard.machine.mesh_config import MeshConfig
from tests.programs import graph

ON = MeshConfig(axes={"data": 4}, tpu="v5e:2x2").mesh()


def test_exponentials_are_computed_where_a_product_reads_them_and_maxima_where_one_makes_logits() -> None:
    def loss(x: Any, w: Any) -> Any:
        logits = x @ w
        shifted = logits - logits.max(-1, keepdims=True)
        return jnp.exp(shifted) @ w.T

    found = graph(loss, ((8, 4), (4, 64)), ON)
    first, second = (n for n in found.nodes if n.kind.flops)
    fused = FusedWithProducts(found)
    assert fused.operands == {second.operands[0]}
    assert fused.reduced == {*first.results}


def test_weights_and_what_passes_a_barrier_are_in_memory() -> None:
    def step(v: Any, x: Any, w: Any) -> Any:
        h = jax.lax.optimization_barrier(jnp.tanh(x @ w))
        return v + 1, h @ (2 * v)

    found = graph(step, ((8, 16), (8, 4), (4, 8)), ON, donate_argnums=0)
    fused = FusedWithProducts(found)
    assert not fused.operands
    assert not fused.reduced
