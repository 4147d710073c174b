"""A product that only a transpose reads is written the other way round; every other one stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import TransposedProducts
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operations(jaxpr: jx.Jaxpr) -> list[str]:
    """The names of the equations, at every depth."""
    return [
        name for e in jaxpr.eqns for name in (e.primitive.name, *(n for r in jx.regions(e) for n in operations(r.body)))
    ]


def rewritten(fun: Any, *args: Any) -> Program:
    """``fun`` as a program with its products turned, which gives what ``fun`` does."""
    program = Pipeline((TransposedProducts(),)).run(trace(jax.jit(fun), args, {}, MESH, rules=SHIPPED))[0]
    got = jx.as_fun(program.jaxpr)(*jax.tree.leaves(args))
    chex.assert_trees_all_close(got, jax.tree.leaves(fun(*args)), rtol=1e-6, atol=1e-6, strict=True)
    return program


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


X, W = normal(8, 16), normal(16, 4, seed=1)


def test_the_gradient_of_a_weight_has_no_transpose() -> None:
    assert "transpose" in operations(trace(jax.jit(jax.grad(product, 1)), (X, W), {}, MESH, rules=SHIPPED).jaxpr)
    program = rewritten(jax.grad(product, 1), X, W)
    assert "transpose" not in operations(program.jaxpr)


def test_nor_has_that_of_a_weight_of_three_dimensions_in_a_loop() -> None:
    heads = normal(3, 16, 2, 8, seed=2)

    def loss(heads: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.einsum("bd,dhk->bhk", h, w).reshape(8, 16)), None

        return lax.scan(layer, X, heads)[0].sum()

    assert "transpose" not in operations(rewritten(jax.grad(loss), heads).jaxpr)


def test_batch_dimensions_stay_first_and_each_precision_with_its_operand() -> None:
    def fun(a: jax.Array, b: jax.Array) -> jax.Array:
        precision = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
        made = lax.dot_general(a, b, (((1,), (2,)), ((0,), (0,))), precision=precision)
        return made.transpose(0, 3, 1, 2)

    program = rewritten(fun, normal(2, 8, 3, 5), normal(2, 4, 8, seed=1))
    (eqn,) = program.jaxpr.eqns
    assert eqn.params["dimension_numbers"] == (((2,), (1,)), ((0,), (0,)))
    assert eqn.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: (made := x @ w, made.T),
        lambda x, w: jnp.einsum("bd,dhk->bhk", x, w.reshape(16, 2, 2)).transpose(2, 1, 0),
        lambda x, w: jnp.sin(x @ w).T,
    ],
    ids=["read otherwise too", "another order", "something between"],
)
def test_other_products_stay(fun: Any) -> None:
    before = operations(trace(jax.jit(fun), (X, W), {}, MESH, rules=SHIPPED).jaxpr)
    assert "transpose" in before
    after = operations(rewritten(fun, X, W).jaxpr)
    assert Counter(after) == Counter(before)
