"""What XLA computes with a product: elementwise operands, and what is reduced of a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp

from autoshard.backend.rings.fused_with_products import FusedWithProducts
from autoshard.ir.graph import Graph, Node
from autoshard.ir.spec import Spec
from autoshard.machine.mesh_config import MeshConfig
from autoshard.plan.decisions import Constraint
from autoshard.plan.record import PlanRecord
from tests.programs import graph

ON = MeshConfig(axes={"data": 4}, tpu="v5e:2x2").mesh()


def fused(fun: Any, *shapes: tuple[int, ...], reshards: Any = None, **options: Any) -> tuple[Graph, FusedWithProducts]:
    found = graph(fun, shapes, ON, **options)
    plan = SimpleNamespace(mesh=ON, intermediates=[] if reshards is None else reshards(found))
    return found, FusedWithProducts(found, cast("PlanRecord", plan))


def products(found: Graph) -> list[Node]:
    return [n for n in found.nodes if n.kind.flops]


def softmax_times(x: Any, w: Any) -> Any:
    logits = 30 * jnp.tanh((x @ w + w[0]) / 30)
    return jnp.exp(logits - logits.max(-1, keepdims=True)) @ w.T


def test_exponentials_are_computed_where_a_product_reads_them_and_maxima_where_one_makes_logits() -> None:
    found, made = fused(softmax_times, (8, 4), (4, 64))
    first, second = products(found)
    assert made.operands == {second.operands[0]}
    assert made.reduced == {*first.results}


def test_what_is_gathered_for_a_product_is_in_memory() -> None:
    whole, split = Spec(((), ())), Spec((("data",), ()))

    def gathered(found: Graph) -> Any:
        read = products(found)[1].operands[0]
        return [Constraint(read, whole, "", "", (), "resharded", resharded_from=split)]

    assert not fused(softmax_times, (8, 4), (4, 64), reshards=gathered)[1].operands


def test_a_reduction_that_needs_what_comes_later_is_computed_with_no_earlier_product() -> None:
    def fun(x: Any, w: Any) -> Any:
        first = x @ w
        second = jnp.sin(first) @ w.T
        return (first * second.sum()).sum(), (first - first.max(-1, keepdims=True)).sum(0)

    found, made = fused(fun, (8, 4), (4, 64))
    first, second = products(found)
    assert made.reduced == {*first.results, *second.results}

    def needs_a_sum(x: Any, w: Any) -> Any:
        y = x @ w
        return (y * jnp.sin(x).sum()).sum()

    assert not fused(needs_a_sum, (8, 4), (4, 64))[1].reduced


def test_weights_parts_and_what_passes_a_barrier_are_in_memory() -> None:
    def step(v: Any, x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        read = jax.lax.optimization_barrier(jnp.sin(h))
        parts = h[:, :4] @ h[:, 4:].T
        return v + 1, read @ (2 * v), parts, jnp.ones((8, 8)) @ read

    assert not fused(step, (8, 16), (8, 4), (4, 8), donate_argnums=0)[1].operands
