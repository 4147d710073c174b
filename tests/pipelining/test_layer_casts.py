"""Weights of layers that are cast before the loops that read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import MeshConfig
from autoshard import jaxpr as jx
from autoshard.pipelining.chain import find_chain
from autoshard.pipelining.layer_casts import cast_before_layers
from autoshard.pipelining.stage_dims import stacked_weights
from autoshard.rules import SHIPPED

LAYERS, WIDTH = 4, 8


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    half = jnp.tanh(x @ w["in"].astype(jnp.bfloat16))
    return x + (half @ w["out"].astype(jnp.bfloat16)) * w["scale"].astype(jnp.bfloat16), None


def loss(params: Any, x: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), params)
    return (out.astype(jnp.float32) ** 2).mean()


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def accumulated(params: Any, xs: jax.Array) -> tuple[Any, None]:
    """Gradients added up over micro-batches, the first dimension of ``xs``."""
    added = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(params, x)), None), added, xs)


PARAMS = {
    "in": 0.3 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, 2 * WIDTH)),
    "out": 0.3 * jax.random.normal(jax.random.key(1), (LAYERS, 2 * WIDTH, WIDTH)),
    "scale": jnp.ones((LAYERS, WIDTH)),
}
X = jax.random.normal(jax.random.key(2), (16, WIDTH))


def kept_bytes(jaxpr: jx.Jaxpr) -> int:
    """Of what forwards leave for backwards, in all loops."""
    bodies = [jaxpr, *(jx.regions(e)[0].body for e in jaxpr.eqns if jx.scan_groups(e))]
    forwards = [e for body in bodies for e in body.eqns if jx.scan_groups(e) and e.params["length"] == LAYERS]
    return sum(jx.aval_bytes(jx.aval(v)) for e in forwards if not e.params["reverse"] for v in e.outvars)


@pytest.mark.parametrize(("fun", "x"), [(step, X), (accumulated, X.reshape(4, 4, WIDTH))])
def test_the_same_numbers_with_weights_cast_once(fun: Any, x: jax.Array) -> None:
    before = jx.normalize(jax.make_jaxpr(fun)(PARAMS, x))
    after = cast_before_layers(before, SHIPPED)
    jx.check_jaxpr(after)
    casts = {s: sum(e.primitive.name == "convert_element_type" for e in jx.walk(s)) for s in (before, after)}
    assert casts[after] == casts[before]  # three in the forward's body, as many before it
    assert kept_bytes(before) - kept_bytes(after) == 2 * (PARAMS["in"].size + PARAMS["out"].size)
    flat = [*jax.tree.leaves(PARAMS), x]
    for a, b in zip(jx.as_fun(before)(*flat), jx.as_fun(after)(*flat), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_layers_cast_of_what_a_loop_makes_stays() -> None:
    """Activations: they are of one micro-batch."""

    def with_rows(params: Any, x: jax.Array) -> jax.Array:
        _, rows = jax.lax.scan(lambda c, w: (c, c @ w), x, params["in"])
        out, _ = jax.lax.scan(
            lambda c, row: (c + (row.astype(jnp.bfloat16) ** 2).sum(), None), jnp.zeros((), jnp.bfloat16), rows
        )
        return out.astype(jnp.float32)

    jaxpr = jx.normalize(jax.make_jaxpr(jax.grad(with_rows))(PARAMS, X))
    assert str(cast_before_layers(jaxpr, SHIPPED)) == str(jaxpr)


def test_a_pipeline_reads_weights_cast_before_its_loop() -> None:
    mesh = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")
    planned = autoshard.jit(step, mesh=mesh, microbatches=4, schedule="1f1b")
    found, value = planned(PARAMS, X)
    expected, wanted = jax.jit(step)(PARAMS, X)
    np.testing.assert_allclose(value, wanted, rtol=2e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), expected, found)
    jaxpr = cast_before_layers(jx.normalize(jax.make_jaxpr(accumulated)(PARAMS, X.reshape(4, 4, WIDTH))), SHIPPED)
    chain = find_chain(jaxpr, "step", SHIPPED)
    assert {str(jx.aval(v).dtype) for v in stacked_weights(chain)} == {"bfloat16"}
