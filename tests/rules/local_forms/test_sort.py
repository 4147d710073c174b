"""Sorting along a split dimension: the order of one device, to the bit, and fewer bytes than XLA alone sends."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.forms import EIGHT, HASTY, compared, step

COLUMNS = P(None, "x")


def halves(x):
    return jnp.floor(x / 2) if jnp.issubdtype(x.dtype, jnp.floating) else x // 2


FORMS = {
    "sort": partial(lax.sort, dimension=1),
    "argsort": partial(jnp.argsort, axis=1),
    "descending": partial(jnp.sort, axis=1, descending=True),
    "two keys and others": lambda x: tuple(
        lax.sort((halves(x), x, -x, lax.broadcasted_iota("int32", x.shape, 1)), dimension=1, num_keys=2)
    ),
}
GATHERED = {("argsort", dtype) for dtype in ("float32", "int32", "uint8")} | {("two keys and others", "uint8")}
"""Positions are made anew where they are read, and small keys alone are gathered for less than both are dealt out."""
SPLITS = {"one axis": P(None, "y"), "two": P(None, ("x", "y")), "two, turned": P(None, ("y", "x"))}


def values(kind, dtype, length):
    """[1, length]: few different numbers, with NaN, infinities and both zeros; many; or such as fall over and over."""
    rng = np.random.default_rng(3)
    if kind == "falling":
        x = np.arange(length)[::-1] % 251
    elif kind == "many":
        x = 100 * rng.random(length)
    elif dtype in ("float32", "bfloat16"):
        x = rng.choice(np.asarray([-2, -1, -0.0, 0.0, 1, np.nan, np.inf, -np.inf]), length)
    else:
        x = rng.integers(0, 5, length)
    return x.astype(jnp.dtype(dtype))[None]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_order_of_one_device_to_the_bit(name, dtype):
    for spec in SPLITS.values() if dtype == "float32" else [SPLITS["two"]]:
        ours = step(FORMS[name], (spec,), HASTY)
        for kind in ("few", "many", "falling"):
            bits_equal(ours, FORMS[name], values(kind, dtype, 1024))
        if spec != SPLITS["one axis"] and dtype != "bfloat16" and (name, dtype) not in GATHERED:
            assert "all-to-all" in sent(ours, 1024, dtype)


def test_rows_are_traded_whatever_dimensions_they_are_of():
    x = np.stack([values(kind, "float32", 48)[0] for kind in ("few", "many", "falling", "many") * 2])
    for shape, axis in (((2, 4, 48), 2), ((2, 48, 4), 1), ((48, 8), 0)):
        turned = np.moveaxis(x.reshape(*shape[:axis], *shape[axis + 1 :], 48), -1, axis)
        for fun in (partial(lax.sort, dimension=axis), partial(jnp.argsort, axis=axis)):
            ours = step(fun, (P(*[None] * axis, ("y", "x")),), HASTY)
            bits_equal(ours, fun, turned)
            assert {c.kind for c in ours.plan(turned).cost.collectives} == {"all-to-all"}


@pytest.mark.parametrize("length", [8, 1016, 1032])
def test_parts_too_small_to_deal_out_evenly_are_gathered(length):
    ours = step(FORMS["sort"], (SPLITS["two"],), HASTY)
    bits_equal(ours, FORMS["sort"], values("few", "float32", length))
    assert sent(ours, length, "float32") == {"all-gather"}
    assert not ours.plan(jax.ShapeDtypeStruct((1, length), "float32")).islands


def bits_equal(ours, fun, x):
    for a, b in zip(jax.tree.leaves(ours(x)), jax.tree.leaves(jax.jit(fun)(x)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def sent(ours, length, dtype):
    return {c.kind for c in ours.plan(jax.ShapeDtypeStruct((1, length), dtype)).cost.collectives}


def test_any_zeros_and_ones_are_sorted():
    """What sorts these sorts everything: it looks at values only to compare them (Knuth, volume 3, 5.3.4)."""
    rng, length = np.random.default_rng(0), 1024
    ours = step(FORMS["sort"], (SPLITS["two"],), HASTY)
    for ones in (*range(0, length, 111), 127, 128, 129, 511, 512, 513, 1023):
        x = rng.permutation(np.arange(length) < ones)[None]
        np.testing.assert_array_equal(ours(x), np.sort(x))
    for low in range(0, 128, 9):  # every part begins with as many zeros, which spreads them most unevenly
        x = (np.arange(length) % 128 >= low)[None]
        np.testing.assert_array_equal(ours(x), np.sort(x))


@pytest.mark.parametrize("name", ["sort", "two keys and others"])
def test_gradients(name):
    def total(x):
        return sum((jnp.sin(y) * jnp.arange(y.size)).sum() for y in jax.tree.leaves(FORMS[name](x))[:2])

    x = np.random.default_rng(1).normal(size=(1, 1024)).astype("float32")
    expected = jax.grad(total)(x)
    np.testing.assert_allclose(step(jax.grad(total), (SPLITS["two"],), HASTY)(x), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(step(total, (SPLITS["two"],), HASTY))(x), expected, rtol=1e-5)


REAL, WHOLE = values("many", "float32", 1 << 18), values("many", "int32", 1 << 18)


def test_positions_are_not_sent_where_keys_are_gathered():
    fun = FORMS["argsort"]
    found, (ours, alone), table = compared(step(fun, (COLUMNS,), EIGHT, COLUMNS), fun, (REAL,), (COLUMNS,), COLUMNS)
    assert found.clean, str(found)
    assert ours <= alone, table


@pytest.mark.parametrize(
    ("fun", "x", "most"),
    [
        (FORMS["sort"], REAL, 0.51),
        (FORMS["sort"], WHOLE, 0.26),
        (FORMS["sort"], np.repeat(WHOLE, 3, 0), 0.26),
        (FORMS["descending"], REAL, 0.57),
        (partial(jnp.median, axis=1), REAL, 0.51),
    ],
)
def test_fewer_bytes_travel_than_xla_alone_sends(fun, x, most):
    results = COLUMNS if jax.eval_shape(fun, x).shape == x.shape else P()
    found, (ours, alone), table = compared(step(fun, (COLUMNS,), EIGHT, results), fun, (x,), (COLUMNS,), results)
    assert found.clean, str(found)
    assert ours < most * alone, table
