"""Layers one after the other as scans: the same results, and only what repeats and is wired in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import jaxpr as jx
from autoshard.transforms.layer_loops.roll import roll_layers

WIDTH = 4


def scans(fun: Callable[..., Any], *args: Any) -> list[tuple[int, bool]]:
    """Length and direction of the scans in ``fun`` rolled, whose results are those of ``fun``."""
    jaxpr = jx.normalize(jax.make_jaxpr(fun)(*args))
    new = roll_layers(jaxpr)
    flat = jax.tree.leaves(args)
    for a, b in zip(jx.as_fun(jaxpr)(*flat), jx.as_fun(new)(*flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return [(e.params["length"], e.params["reverse"]) for e in new.eqns if jx.scan_groups(e)]


def weights(layers: int) -> list[jax.Array]:
    return list(0.5 * jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH)))


X = jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def deep(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Each layer multiplies by a number of its own, and all read one array."""
    scale = jnp.arange(1.0, WIDTH + 1)
    for n, w in enumerate(ws):
        x = x + jnp.tanh(x @ w) * (n + 1) / scale
    return x


@pytest.mark.parametrize("layers", [2, 5])
def test_forward_and_backward_become_a_scan_and_its_transpose(layers: int) -> None:
    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        return jax.value_and_grad(lambda ws, x: (deep(ws, x) ** 2).mean(), argnums=(0, 1))(ws, x)

    assert scans(step, weights(layers), X) == [(layers, False), (layers, True)]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_a_backward_that_runs_layers_again_reads_what_they_were_given(policy: Any) -> None:
    """Each layer's result is the next one's input; the product of a backward is in the equation that runs it again."""

    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in ws:
                x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), policy=policy)(x, w)
            return (x**2).mean()

        return jax.value_and_grad(loss, (0, 1))(ws, x)

    new = roll_layers(jx.normalize(jax.make_jaxpr(step)(weights(5), X)))
    assert scans(step, weights(5), X) == [(5, False), (5, True)]
    forward, backward = (e for e in new.eqns if jx.scan_groups(e))
    entered = forward.outvars[jx.scan_groups(forward).carry :]
    assert not {*entered}.isdisjoint(backward.invars)


def test_layers_whose_backward_is_another_are_left_out() -> None:
    """No gradient is taken of the first one's input; the sum of gradients of what all read begins at the last one."""

    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        return jax.grad(lambda ws: (deep(ws, x) ** 2).mean())(ws)

    def shared(ws: list[jax.Array], x: jax.Array, s: jax.Array) -> Any:
        def loss(ws: list[jax.Array], x: jax.Array, s: jax.Array) -> jax.Array:
            for w in ws:
                x = jnp.tanh(x @ w) * s
            return x.sum()

        return jax.grad(loss, (0, 1, 2))(ws, x, s)

    assert scans(step, weights(5), X) == [(4, False), (4, True)]
    assert scans(shared, weights(5), X, X) == [(4, False), (4, True)]


def test_what_each_layer_leaves_is_returned_apart() -> None:
    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        h, found = x, []
        for w in ws:
            h = jnp.sin(h @ w)
            found.append(h.sum())
        return found, h

    assert scans(step, weights(3), X) == [(3, False)]


def test_layers_that_are_no_chain_stay_as_they_are() -> None:
    def apart(ws: list[jax.Array], x: jax.Array) -> Any:
        return [jnp.tanh(x @ w) for w in ws]

    def skipping(ws: list[jax.Array], x: jax.Array) -> Any:
        a, b = x, jnp.cos(x)
        for w in ws:
            a, b = b, jnp.tanh(a @ w)  # each reads what the layer before the last left
        return a, b

    def of_two_kinds(ws: list[jax.Array], x: jax.Array) -> Any:
        return jnp.sin(jnp.tanh(x @ ws[0]) @ ws[1])

    assert scans(apart, weights(4), X) == []
    assert scans(skipping, weights(3), X) == []
    assert scans(of_two_kinds, weights(2), X) == []


def test_carries_that_layers_pass_through_are_not_mistaken() -> None:
    """Two values go from layer to layer; the last layer's are both read."""

    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        a, b = x, jnp.cos(x)
        for w in ws:
            a, b = jnp.tanh(a @ w) + b, b * a
        return a, b

    assert scans(step, weights(4), X) == [(4, False)]
