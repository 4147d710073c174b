"""Rules of reductions and of cumulative operations."""

from __future__ import annotations

from functools import partial

import pytest
from jax import lax
from jax import numpy as jnp

CASES = {
    "sum": ("reduce_sum", partial(jnp.sum, axis=(0, 2)), [(4, 6, 3)], "abc -> b {a: sum, c: sum} | sum: 0"),
    "sum to 0-d": ("reduce_sum", jnp.sum, [(4,)], "a ->  {a: sum} | sum: 0"),
    "max": ("reduce_max", partial(jnp.max, axis=1), [(4, 6)], "ab -> a {b: max} | max: 0"),
    "min": ("reduce_min", partial(jnp.min, axis=1), [(4, 6)], "ab -> a {b: min} | min: 0"),
    "prod": ("reduce_prod", partial(jnp.prod, axis=0), [(4, 6)], "ab -> b {a: prod} | prod: 0"),
    "all": ("reduce_and", partial(jnp.all, axis=1), [("bool", 4, 6)], "ab -> a {b: and} | and: 0"),
    "any": ("reduce_or", partial(jnp.any, axis=1), [("bool", 4, 6)], "ab -> a {b: or} | or: 0"),
    "bits have no collective": (
        "reduce_or",
        partial(lax.reduce_or, axes=(1,)),
        [("uint32", 4, 6)],
        "ab -> a {b: whole}",
    ),
    "complex maxima have no collective": (
        "reduce_max",
        partial(lax.reduce_max, axes=(1,)),
        [("complex64", 4, 6)],
        "ab -> a {b: whole}",
    ),
    "argmax": ("argmax", partial(jnp.argmax, axis=1), [(4, 6)], "ab -> a {b: local}"),
    "positions that count too short": (
        "argmax",
        partial(lax.argmax, axis=0, index_dtype=jnp.int8),
        [(200,)],
        "a ->  {a: whole}",
    ),
    "cumsum": ("cumsum", partial(jnp.cumsum, axis=1), [(4, 6)], "ab -> ab {b: local} | sum: 0"),
    "cummax": ("cummax", lax.cummax, [(4, 6)], "ab -> ab {a: local} | max: 0"),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    body, _, passthrough = expected.partition(" | ")
    assert rule_of(name, fn, *args) == body
    assert rule_of(name, fn, *args, passthrough=True) == passthrough
