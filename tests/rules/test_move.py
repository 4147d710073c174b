"""Rules of operations that put elements at other positions of a dimension."""

from __future__ import annotations

from functools import partial

import pytest
from jax import lax
from jax import numpy as jnp

CASES = {
    "concatenate": (
        "concatenate",
        lambda x, y: jnp.concatenate([x, y], 1),
        [(4, 6), (4, 2)],
        "a(bc), ab -> a(bd) {b: local, c: whole, d: whole}",
    ),
    "nothing in common": ("concatenate", lambda x, y: jnp.concatenate([x, y], 1), [(4, 6), (4, 5)], "a., a. -> a."),
    "pad": ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))), [(4, 6)], "a.,  -> ab {b: local}"),
    "rev": ("rev", partial(lax.rev, dimensions=(1,)), [(4, 6)], "ab -> ab {b: local}"),
    "slice": ("slice", lambda x: x[:, 1:3], [(4, 6)], "a(bc) -> ab {b: local, c: whole}"),
    "slice of two dimensions": ("slice", lambda x: x[1:3, 1:3], [(4, 6)], ".(ab) -> .a {a: local, b: whole}"),
    "every second": ("slice", lambda x: x[:, 1::2], [(4, 6)], "a(bc) -> ab {c: whole}"),
    "every second, shifted": ("slice", lambda x: x[:, 2::2], [(4, 6)], "ab -> a. {b: local}"),
    "zeros between": ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 1, 1))), [(4, 6)], "ab,  -> a(bc) {c: whole}"),
    "pad to twice": (
        "pad",
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (3, 3, 0))),
        [(4, 6)],
        "ab,  -> a(bc) {b: local, c: whole}",
    ),
    "split": ("split", lambda x: jnp.split(x, 2, 1), [(4, 6)], "a(bc) -> ab, ab {b: local, c: whole}"),
    "tile": ("tile", partial(lax.tile, reps=(1, 3)), [(4, 6)], "ab -> a(bc) {b: local, c: whole}"),
    "tile of one": ("tile", partial(lax.tile, reps=(1, 3)), [(4, 1)], "a. -> ab"),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected
