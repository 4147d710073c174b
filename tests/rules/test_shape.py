"""Rules of operations that change an array's shape, or make an array."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp

from autoshard.rules.builders import build
from autoshard.rules.shape import common_factors

CASES = {
    "bitcast": ("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=jnp.int32), [(4, 6)], "ab -> ab"),
    "bitcast to narrower": (
        "bitcast_convert_type",
        partial(lax.bitcast_convert_type, new_dtype=jnp.int8),
        [(4, 6)],
        "ab -> ab.",
    ),
    "bitcast to wider": (
        "bitcast_convert_type",
        partial(lax.bitcast_convert_type, new_dtype=jnp.int32),
        [("int8", 6, 4)],
        "a. -> a",
    ),
    "broadcast": ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 6)), [(6,)], "a -> ba"),
    "stretch": (
        "broadcast_in_dim",
        partial(lax.broadcast_in_dim, shape=(4, 6), broadcast_dimensions=(0, 1)),
        [(4, 1)],
        "a. -> ab",
    ),
    "full": ("broadcast_in_dim", lambda: jnp.zeros((4, 6)), [], "-> ab"),
    "iota": ("iota", lambda: lax.iota("int32", 6), [], "-> a"),
    "squeeze": ("squeeze", partial(lax.squeeze, dimensions=(1,)), [(4, 1, 6)], "a.b -> ab"),
    "stack": ("stack", lambda x, y: lax.stack([x, y], 1), [(4, 6), (4, 6)], "ab, ab -> a.b"),
    "transpose": ("transpose", jnp.transpose, [(4, 6)], "ab -> ba"),
    "rotation": ("transpose", partial(jnp.transpose, axes=(1, 2, 0)), [(4, 6, 8)], "abc -> bca"),
    "unstack": ("unstack", lambda x: lax.unstack(x, 1), [(4, 2, 6)], "a.b -> ab, ab"),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), "ab -> (ab)"),
        ((24,), (4, 6), "(ab) -> ab"),
        ((4, 6), (2, 12), "(ab)c -> a(bc)"),
        ((4, 6), (8, 3), "a(bc) -> (ab)c"),
        ((8, 3, 4), (2, 4, 12), "(ab)cd -> ab(cd)"),
        ((4, 1, 6), (4, 6), "a.b -> ab"),
        ((4, 6), (4, 1, 6, 1), "ab -> a.b."),
        ((6, 4), (4, 6), "(ab)c -> (ad)e {b: whole, c: whole, d: whole, e: whole}"),
        ((2, 3, 5), (3, 2, 5), "abc -> dec {a: whole, b: whole, d: whole, e: whole}"),
        ((0, 4), (2, 0), ".. -> .."),
        ((1,), (), ". ->"),
    ],
)
def test_reshape(rule_of, before, after, expected):
    assert rule_of("reshape", partial(lax.reshape, new_sizes=after), before) == expected


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=5), st.data())
def test_reshape_factors_make_up_both_shapes(before, data):
    primes = [p for n in before for p in {4: (2, 2), 6: (2, 3)}.get(n, (n,))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(primes)), max_size=4)))
    order = data.draw(st.permutations(primes))
    after = [math.prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(primes)], strict=True)]
    left, right, sizes, kinds = common_factors(before, after)
    for shape, labels in ((before, left), (after, right)):
        assert [math.prod(sizes[f] for f in label or ()) for label in labels] == list(shape)
    # a factor that may be split stands in the same place of the flat order on both sides
    free = [[f for label in labels for f in label or () if f not in kinds] for labels in (left, right)]
    assert free[0] == free[1]
    build([left], [right], kinds, sizes=sizes).factor_sizes([before, after])
