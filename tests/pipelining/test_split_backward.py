"""A layer's backward in two parts, one after the other, against the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import find_chain
from autoshard.pipelining.split_backward import split_backward
from autoshard.rules import SHIPPED

WIDTH = 4


def test_both_parts_make_what_the_whole_makes() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, w)[0].sum()

    def step(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda s, x: (s + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[0]

    traced = jax.make_jaxpr(step)(jnp.ones((3, 2, WIDTH, WIDTH)), jnp.ones((2, 5, WIDTH)))
    backward = find_chain(jx.normalize(traced), "step", SHIPPED).backward
    assert backward is not None
    body, groups, split = jx.regions(backward)[0].body, jx.scan_groups(backward), split_backward(backward)
    assert groups is not None
    keys = jax.random.split(jax.random.key(0), len(body.invars))
    operands = [jax.random.normal(k, jx.aval(v).shape) for k, v in zip(keys, body.invars, strict=True)]
    whole = jx.as_fun(body)(*operands)
    carry, kept = np.split(np.arange(len(split.of_input.outvars)), [groups.carry])
    first = jx.as_fun(split.of_input)(*operands)
    others = [*operands[: groups.consts], *operands[groups.consts + groups.carry :]]
    second = jx.as_fun(split.of_weights)(*others, *[first[i] for i in kept])
    for a, b in zip(whole, [*[first[i] for i in carry], *second], strict=True):
        np.testing.assert_array_equal(a, b)
    # Each product is in one of the parts: those of the weights' gradients are not in the first.
    products = [sum(e.primitive.name == "dot_general" for e in j.eqns) for j in (split.of_input, split.of_weights)]
    assert products == [2, 2]
