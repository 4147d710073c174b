"""Rules of operations that act on each element by itself."""

from __future__ import annotations

import jax
import pytest
from jax import lax
from jax import numpy as jnp

CASES = {
    "unary": ("exp", jnp.exp, [(4, 6)], "ab -> ab"),
    "binary": ("add", lax.add, [(4, 6), (4, 6)], "ab, ab -> ab"),
    "a scalar stretches": ("mul", lambda x: x * 2.0, [(4, 6)], "ab,  -> ab"),
    "size 1 stretches": ("mul", lambda x, y: x * y, [(4, 6), (4, 1)], "ab, a. -> ab"),
    "both stretch": ("eq", lambda x, y: x == y, [(4, 1), (1, 6)], "a., .b -> ab"),
    "all of size 1": ("add", lax.add, [(4, 1), (4, 1)], "ab, ab -> ab"),
    "zero-size": ("add", lambda x, y: x + y, [(0, 1), (0, 3)], "a., ab -> ab"),
    "0-d": ("exp", jnp.exp, [()], "->"),
    "select": ("select_n", jnp.where, [("bool", 4, 6), (4, 6), (4, 6)], "ab, ab, ab -> ab"),
    "clamp": ("clamp", lambda x: lax.clamp(0.0, x, 1.0), [(4, 6)], ", ab,  -> ab"),
    "barrier": ("optimization_barrier", lambda *x: lax.optimization_barrier(x), [(4, 6), (2,)], "ab, c -> ab, c"),
}
LETS = {
    "exp": ("exp", jnp.exp, [(4,)], "max: 0, min: 0"),
    "log of a term may be NaN": ("log", jnp.log, [(4,)], ""),
    "neg": ("neg", lax.neg, [(4,)], "sum: 0"),
    "add": ("add", lax.add, [(4,), (4,)], "max: 0 1, min: 0 1, sum: 0+1"),
    "integers wrap": ("add", lax.add, [("int32", 4), ("int32", 4)], "sum: 0+1"),
    "mul": ("mul", lax.mul, [(4,), (4,)], "prod: 0+1, sum: 0 1"),
    "div": ("div", lax.div, [(4,), (4,)], "prod: 0+1, sum: 0"),
    "integer division rounds": ("div", lax.div, [("int32", 4), ("int32", 4)], ""),
    "max": ("max", lax.max, [(4,), (4,)], "max: 0 1 0+1, min: 0 1"),
    "odd power": ("integer_pow", lambda x: lax.integer_pow(x, 3), [(4,)], "max: 0, min: 0, prod: 0"),
    "even power": ("integer_pow", lambda x: lax.integer_pow(x, 2), [(4,)], "prod: 0"),
    "wider": (
        "convert_element_type",
        lambda x: x.astype("float32"),
        [("bfloat16", 4)],
        "max: 0, min: 0, prod: 0, sum: 0",
    ),
    "narrower": ("convert_element_type", lambda x: x.astype("bfloat16"), [(4,)], "max: 0, min: 0"),
    "truncated": ("convert_element_type", lambda x: x.astype("int32"), [(4,)], ""),
    "to float": ("convert_element_type", lambda x: x.astype("float32"), [("int32", 4)], "max: 0, min: 0"),
    "modular": ("convert_element_type", lambda x: x.astype("uint8"), [("int32", 4)], "and: 0, or: 0, prod: 0, sum: 0"),
    "fp8 to float32": (
        "convert_element_type",
        lambda x: x.astype("float32"),
        [("float8_e4m3fn", 4)],
        "max: 0, min: 0, prod: 0, sum: 0",
    ),
    "too large a number has no cast": ("convert_element_type", lambda x: x.astype("float8_e4m3fn"), [(4,)], ""),
    "too large a number is infinite": (
        "convert_element_type",
        lambda x: x.astype("float8_e5m2"),
        [(4,)],
        "max: 0, min: 0",
    ),
    "int4 to int32": (
        "convert_element_type",
        lambda x: x.astype("int32"),
        [("int4", 4)],
        "and: 0, max: 0, min: 0, or: 0",
    ),
    "int32 to int4": (
        "convert_element_type",
        lambda x: x.astype("int4"),
        [("int32", 4)],
        "and: 0, or: 0, prod: 0, sum: 0",
    ),
    "int4 to fp8": ("convert_element_type", lambda x: x.astype("float8_e4m3fn"), [("int4", 4)], "max: 0, min: 0"),
    "int8 to fp4": ("convert_element_type", lambda x: x.astype("float4_e2m1fn"), [("int8", 4)], ""),
    "or": ("or", lax.bitwise_or, [("bool", 4), ("bool", 4)], "and: 0 1, or: 0 1 0+1"),
    "select": (
        "select_n",
        jnp.where,
        [("bool", 4), (4,), (4,)],
        "and: 1 2 1+2, max: 1 2 1+2, min: 1 2 1+2, or: 1 2 1+2, prod: 1+2, sum: 1+2",
    ),
    "real": ("real", jnp.real, [("complex64", 4)], "sum: 0"),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected


@pytest.mark.parametrize(("name", "fn", "args", "expected"), LETS.values(), ids=LETS)
def test_what_partials_pass(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args, passthrough=True) == expected


def test_keys_compare_by_dimension(rule_of):
    keys = jax.random.split(jax.random.key(0), 4)
    assert rule_of("eq", lambda a, b: a == b, keys, keys) == "a, a -> a"
