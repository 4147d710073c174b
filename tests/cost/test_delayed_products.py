"""Delays: which products of a backward pass wait for others, and for which loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard.cost.delayed_products import DelayedProduct, delayed_products
from autoshard.ir.graph import Graph
from tests.programs import graph, mesh

W = (64, 64)


def of(g: Graph, n: int) -> str:
    """What a node makes the gradient of."""
    return "weight" if g.values[g.nodes[n].results[0]].shape == W else "input"


def test_the_gradient_of_a_weight_waits_for_that_of_what_went_in():
    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2).sum()

    g = graph(jax.grad(loss), ((2, *W), (32, 64)), mesh(a=1))
    (found,) = [
        d for d in delayed_products(g) if d.sibling_products
    ]  # nobody asks for the gradient of the first layer's input
    assert (of(g, found.node), [of(g, n) for n in found.sibling_products]) == ("weight", ["input"])
    assert found.completes_at(set()) == found.node
    assert found.completes_at({found.node, *found.sibling_products}) == found.node
    assert found.completes_at(set(found.sibling_products)) == found.sibling_products[0]


def test_a_gradient_that_nothing_reads_before_a_loop_is_over_is_computed_after_it():
    def loss(p, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]
        return ((x @ p["head"]) ** 2).sum()

    def step(p, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, x))

    g = graph(step, ({"layers": (5, *W), "head": W}, (32, 64)), mesh(a=1))
    _, (a, b) = sorted(g.loops)
    (found,) = [d for d in delayed_products(g) if d.node < a]
    assert of(g, found.node) == "weight"
    assert found.completes_at(set()) == b
    assert found.completes_at({found.node}) == found.node


def test_what_is_sent_waits_for_nothing():
    assert DelayedProduct(3, (5, 8), 3).completes_at({3, 5}) == 3
    assert DelayedProduct(3, (5, 8), 3).completes_at({5}) == 5
    assert DelayedProduct(3, (5, 8), 20).completes_at({8}) == 20
