"""Sums of one-hot rows: the numbers are those of the sum, whatever the labels, and one reduction is saved."""

from __future__ import annotations

import chex
import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.hlo.collectives import collectives
from autoshard.ir.trace import trace
from autoshard.passes import OneHot
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline
from tests.programs import mesh

EIGHT = mesh(x=8)
ROWS, CLASSES = 6, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, CLASSES)).astype("float32")
GOOD = RNG.integers(0, CLASSES, ROWS).astype("int32")
BAD = np.asarray([0, CLASSES - 1, CLASSES, -1, -CLASSES, 99], "int32")
WEIGHTS = {
    "plain": RNG.normal(size=ROWS).astype("float32"),
    "odd": np.asarray([0, -0.0, np.inf, -np.inf, np.nan, 3], "float32"),
}


def by_softmax(x, labels, weights):
    return -(weights * jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0]).sum()


def by_one_hot(x, labels, weights):
    return (weights * optax.softmax_cross_entropy(x, jax.nn.one_hot(labels, x.shape[-1]))).sum()


def by_comparison(x, labels, weights):
    hot = (labels[:, None] == jnp.arange(x.shape[-1])[None]).astype(x.dtype)
    return -(weights[:, None] * hot * jax.nn.log_softmax(x)).sum()


def sideways(x, labels, weights):
    return by_softmax(x.T.T, labels, weights) + (jax.nn.log_softmax(x.T, 0).T[..., None] * 0.1).mean()


def in_layers(x, labels, weights):
    return lax.scan(lambda c, s: (c + by_softmax(x * s, labels, weights), None), 0.0, jnp.arange(1.0, 4))[0]


def twice_a_row(x, labels, weights):
    at = jnp.stack([labels, labels[::-1], labels], 1)
    return (weights[:, None] * jnp.take_along_axis(jax.nn.log_softmax(x), at, -1)).sum()


def of_sequences(x, labels, weights):
    x, labels, weights = x.reshape(2, 3, -1), labels.reshape(2, 3), weights.reshape(2, 3)
    return -(weights * jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]).sum()


def clipped(x, labels, weights):
    picked = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1, mode="clip")
    return (picked[:, 0] / weights).sum()


LOSSES = [by_softmax, by_one_hot, by_comparison, sideways, in_layers, twice_a_row, of_sequences, clipped]


def traced(fun, *args):
    avals = tuple(jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in args)
    return trace(jax.jit(fun), avals, {}, EIGHT, rules=SHIPPED)


def long_sums(program):
    """How many sums there are along classes."""

    def within(jaxpr):
        found = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum"]
        own = sum(any(jx.aval(e.invars[0]).shape[d] == CLASSES for d in e.params["axes"]) for e in found)
        return own + sum(within(r.body) for e in jaxpr.eqns for r in jx.regions(e))

    return within(jx.eliminate_dead_code(program.jaxpr))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("labels", [GOOD, BAD], ids=["good", "out of bounds"])
@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_stay_and_a_sum_is_saved(loss, labels, weights):
    args = X, labels, WEIGHTS[weights]
    fun = jax.value_and_grad(loss)
    before = traced(fun, *args)
    after, (report,) = Pipeline((OneHot(),)).run(before)
    assert long_sums(after) < long_sums(before), report
    assert "replaced by the picked elements" in str(report)
    got, want = jax.jit(jx.as_fun(after.jaxpr))(*args), jax.tree.leaves(jax.jit(fun)(*args))
    chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-7, strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32"])
@pytest.mark.parametrize("index", ["int8", "int32"])
def test_other_types(dtype, index):
    def fun(labels, weights):
        at = jnp.zeros((ROWS, CLASSES), dtype).at[jnp.arange(ROWS), labels].add(weights)
        hot = (labels[:, None] == lax.broadcasted_iota(index, (1, CLASSES), 1)).astype(dtype)
        put = jax.vmap(lambda i, w: jnp.zeros(CLASSES, dtype).at[i].add(w))(labels, weights)
        return at.sum(), hot.sum(1), (-put).sum(1)

    with jax.enable_x64(True):
        args = BAD.astype(index), WEIGHTS["plain"].astype(dtype)
        before = traced(fun, *args)
        after, _ = Pipeline((OneHot(),)).run(before)
        assert long_sums(before) == 3
        assert long_sums(after) == 1  # two coordinates are left alone
        for a, b in zip(jax.jit(jx.as_fun(after.jaxpr))(*args), jax.jit(fun)(*args), strict=True):
            np.testing.assert_allclose(np.asarray(a, "float64"), np.asarray(b, "float64"), rtol=2e-2)


def test_a_row_longer_than_its_labels_count():
    one_element = lax.ScatterDimensionNumbers((), (0,), (0,))

    def fun(i, w):
        return jax.vmap(lambda i, w: lax.scatter_add(jnp.zeros(300), i[None], w, one_element))(i, w).sum(1)

    args = np.asarray([0, 5, 127], "int8"), np.asarray([1, 2, 3], "float32")
    before = traced(fun, *args)
    after, _ = Pipeline((OneHot(),)).run(before)
    assert after is not before
    np.testing.assert_array_equal(jax.jit(jx.as_fun(after.jaxpr))(*args)[0], jax.jit(fun)(*args))


HOT = jax.nn.one_hot(GOOD, CLASSES)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, i, w: (jax.nn.one_hot(i, CLASSES) + 0.1).sum(1),
        lambda x, i, w: (jax.nn.one_hot(i, CLASSES) * x).sum(1),
        lambda x, i, w: (x / jax.nn.one_hot(i, CLASSES)).sum(1),
        lambda x, i, w: (i[:, None] == 2 * jnp.arange(CLASSES)).astype("float32").sum(1),
        lambda x, i, w: (jnp.arange(CLASSES)[None] == i[0] + jnp.arange(CLASSES)).astype("float32").sum(1),
        lambda x, i, w: x.at[:, i].add(w).sum(1),
        lambda x, i, w: jnp.exp(jax.nn.one_hot(i, CLASSES)).sum(1),
        lambda x, i, w: jnp.trunc(w[:, None] * jax.nn.one_hot(i, CLASSES)).sum(1),
        lambda x, i, w: jax.vmap(lambda x, i, w: x.at[i].add(w))(x, i, w).sum(1),
        lambda x, i, w: (w[:, None] * jax.nn.one_hot(i, CLASSES)).astype("int32").sum(1),
    ],
    ids=range(10),
)
def test_what_is_no_sum_of_one_hot_rows_is_left_alone(fun):
    before = traced(fun, X, GOOD, WEIGHTS["plain"])
    after, (report,) = Pipeline((OneHot(),)).run(before)
    assert after is before
    assert "no sum of one-hot rows" in str(report)


def test_rows_that_are_full_are_summed_after_they_are_scaled():
    """With both elements picked there is none left that infinity would make NaN."""

    def fun(w, i):
        put = jnp.zeros((1, 2)).at[jnp.zeros((1, 1), "int32"), i].add(jnp.ones((1, 2)))
        row = jax.vmap(lambda i: jnp.zeros(2).at[i].add(jnp.ones(2)))(i)
        return (row * w[:, None]).sum(1), put

    args = np.asarray([np.inf], "float32"), np.asarray([[0, 1]], "int32")
    after, _ = Pipeline((OneHot(),)).run(traced(fun, *args))
    assert jax.jit(jx.as_fun(after.jaxpr))(*args)[0] == np.inf


@pytest.mark.parametrize(("loss", "before"), [(by_softmax, 4), (by_one_hot, 4), (by_comparison, 3)])
def test_a_cross_entropy_over_split_classes_takes_three_reductions_not_four(loss, before):
    rows = 512
    args = RNG.normal(size=(rows, 1024)).astype("float32"), RNG.integers(0, 1024, rows), np.ones(rows, "float32") / rows
    specs, results = (P(None, "x"), P(), P()), (P(), P(None, "x"))

    def reductions(passes):
        step = autoshard.jit(
            jax.value_and_grad(loss), mesh=EIGHT, strategy="replicated", passes=passes,
            in_shardings=specs, out_shardings=results,
        )  # fmt: skip
        found = [c for c in collectives(step.lower(*args).compile().as_text(), EIGHT) if c.kind == "all-reduce"]
        return sum(c.bytes for c in found) // (4 * rows)

    assert (reductions(["dead_code"]), reductions(["dead_code", "one_hot"]), reductions(None)) == (
        before, before - 1, before - 1
    )  # fmt: skip
