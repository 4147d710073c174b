"""Which products of a backward pass are scheduled after others, and after which loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard.cost.delayed_products import DelayedProduct, delayed_products
from autoshard.ir.graph import Graph
from tests.programs import graph, mesh

W = (64, 64)


def gradient_of(g: Graph, n: int) -> str:
    """What node ``n`` computes the gradient of."""
    return "weight" if g.values[g.nodes[n].results[0]].shape == W else "input"


def test_a_weight_s_gradient_follows_its_input_s_gradient():
    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2).sum()

    g = graph(jax.grad(loss), ((2, *W), (32, 64)), mesh(a=1))
    (found,) = [
        d for d in delayed_products(g) if d.sibling_products
    ]  # nobody asks for the gradient of the first layer's input
    assert (gradient_of(g, found.node), [gradient_of(g, n) for n in found.sibling_products]) == ("weight", ["input"])
    assert found.completes_at(set()) == found.node
    assert found.completes_at({found.node, *found.sibling_products}) == found.node
    assert found.completes_at(set(found.sibling_products)) == found.sibling_products[0]


def test_a_gradient_first_used_after_a_loop_is_computed_after_it():
    def loss(p, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]
        return ((x @ p["head"]) ** 2).sum()

    def step(p, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, x))

    g = graph(step, ({"layers": (5, *W), "head": W}, (32, 64)), mesh(a=1))
    _, (a, b) = sorted(g.loops)
    (found,) = [d for d in delayed_products(g) if d.node < a]
    assert gradient_of(g, found.node) == "weight"
    assert found.completes_at(set()) == b
    assert found.completes_at({found.node}) == found.node


def test_a_product_with_a_collective_is_not_delayed():
    assert DelayedProduct(3, (5, 8), 3).completes_at({3, 5}) == 3
    assert DelayedProduct(3, (5, 8), 3).completes_at({5}) == 5
    assert DelayedProduct(3, (5, 8), 20).completes_at({8}) == 20
