"""Rules of pooling and its gradient."""

from __future__ import annotations

import jax
import pytest
from jax import lax
from jax import numpy as jnp


def max_pool(size, stride, padding):
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), padding)


def gradient(fn):
    return jax.grad(lambda y: (fn(y) ** 2).sum())


TILES, OVERLAP = max_pool(2, 2, "VALID"), max_pool(3, 2, "SAME")
CASES = {
    "windows that tile": ("reduce_window_max", TILES, [(2, 8, 8, 3)], "a(bc)(de)f -> abdf {c: whole, e: whole}"),
    "windows that overlap": (
        "reduce_window_max",
        OVERLAP,
        [(2, 8, 8, 3)],
        "a(bc)(de)f -> abdf {b: halo, c: whole, d: halo, e: whole}",
    ),
    "a window over the whole dimension": ("reduce_window_max", max_pool(8, 8, "VALID"), [(2, 8, 8, 3)], "a..b -> a..b"),
    "a window over more than half of it": ("reduce_window_max", max_pool(6, 1, "SAME"), [(2, 8, 8, 3)], "a..b -> a..b"),
    "no common part": ("reduce_window_max", max_pool(2, 1, "VALID"), [(2, 8, 8, 3)], "a..b -> a..b"),
    "gradient, tiles": (
        "select_and_scatter_add",
        gradient(TILES),
        [(2, 8, 8, 3)],
        "abcd, a(be)(cf)d -> a(be)(cf)d {e: whole, f: whole}",
    ),
    "gradient, overlap": (
        "select_and_scatter_add",
        gradient(OVERLAP),
        [(2, 8, 8, 3)],
        "abcd, a(be)(cf)d -> a(be)(cf)d {b: whole, c: whole, e: whole, f: whole}",
    ),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected
