"""Rules of operations that order a dimension."""

from __future__ import annotations

from functools import partial

import pytest
from jax import lax
from jax import numpy as jnp

CASES = {
    "sort": ("sort", partial(jnp.sort, axis=1), [(4, 6)], "ab -> ab {b: local}"),
    "argsort": ("sort", partial(jnp.argsort, axis=0), [(4, 6)], "ab, ab -> ab, ab {a: local}"),
    "top_k": ("top_k", partial(lax.top_k, k=2), [(4, 3, 6)], "abc -> ab., ab. {c: local}"),
    "approx_top_k": ("approx_top_k", partial(lax.approx_max_k, k=2), [(4, 6)], "ab -> a., a. {b: whole}"),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected
