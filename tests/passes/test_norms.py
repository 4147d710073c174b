"""Norms with fewer sweeps: the same numbers, no reduction waits for another one in vain, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

import autoshard
from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.passes.norms import Norms
from tests.programs import mesh, program

EIGHT = mesh(x=8)
BATCH, SIDE, WIDTH, GROUPS = 8, 16, 16, 4
SHAPE = (BATCH, SIDE, SIDE, WIDTH)
RNG = np.random.default_rng(0)
X = RNG.normal(size=SHAPE).astype("float32")
SCALE = RNG.normal(size=WIDTH).astype("float32")


def batch_norm(x, scale):
    away = x - x.mean((0, 1, 2))
    return away * jax.lax.rsqrt((away * away).mean((0, 1, 2)) + 1e-5) * scale


def by_var(x, scale):
    return (x - x.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(x.var((0, 1, 2), keepdims=True) + 1e-5) * scale


def channels_first(x, scale):
    x = jnp.moveaxis(x, -1, 1)
    away = x - x.mean((0, 2, 3), keepdims=True)
    normed = away * jax.lax.rsqrt((away**2).mean((0, 2, 3), keepdims=True) + 1e-5)
    return jnp.moveaxis(normed * scale[:, None, None], 1, -1)


def instance_norm(x, scale):
    away = x - x.mean((1, 2), keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean((1, 2), keepdims=True) + 1e-5) * scale


def group_norm(x, scale):
    wide = x.reshape(*x.shape[:-1], GROUPS, -1)
    wide = wide - wide.mean((1, 2, 4), keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean((1, 2, 4), keepdims=True) + 1e-5)
    return wide.reshape(x.shape) * scale


def groups_first(x, scale):
    x = jnp.moveaxis(x, -1, 1)
    wide = x.reshape(x.shape[0], GROUPS, -1, *x.shape[2:])
    wide = wide - wide.mean((2, 3, 4), keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean((2, 3, 4), keepdims=True) + 1e-5)
    return jnp.moveaxis(wide.reshape(x.shape) * scale[:, None, None], 1, -1)


NORMS = [batch_norm, by_var, channels_first, instance_norm, group_norm, groups_first]


def step_of(norm):
    """A loss, the gradients of a norm's operands, and what the norm gives."""

    def step(x, scale):
        def loss(x, scale):
            y = norm(x, scale)
            return (jax.nn.silu(y) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum(), y

        (value, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, scale)
        return value, grads, y

    return step


def traced(fun, *args) -> Program:
    return program(fun, args, EIGHT)


def rewritten(fun, *args) -> tuple[Program, Program]:
    before = traced(fun, *args)
    after = Norms()(before)
    jx.check_jaxpr(after.jaxpr)
    return before, after


def results(program: Program, *args) -> list[Any]:
    return [np.asarray(x) for x in jax.jit(jx.as_fun(program.jaxpr))(*args)]


def sweeps(jaxpr: jx.Jaxpr, size: int) -> int:
    """The most sums over large arrays that wait for one another, each a sweep of its own."""
    after: dict[jx.Var, int] = {}
    for eqn in jaxpr.eqns:
        known = max([after.get(a, 0) for a in eqn.invars if isinstance(a, jx.Var)], default=0)
        is_large = eqn.primitive is _prims.reduce_sum_p and np.prod(jx.aval(eqn.invars[0]).shape) >= size
        after.update(dict.fromkeys(eqn.outvars, known + is_large))
    return max(after.values())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("offset", [0, 30])
def test_results_are_those_of_the_step_as_written(norm, offset):
    x = X + np.float32(offset)
    before, after = rewritten(step_of(norm), x, SCALE)
    assert after is not before
    with jax.enable_x64(True):
        made = jax.jit(step_of(norm))(x.astype("float64"), SCALE.astype("float64"))
        exact = [np.asarray(v) for v in jax.tree.leaves(made)]
    for was, now, true in zip(results(before, x, SCALE), results(after, x, SCALE), exact, strict=True):
        largest = np.abs(true).max()
        np.testing.assert_allclose(now, true, rtol=1e-5, atol=(1 + offset) * 2e-6 * largest)
        assert np.abs(now - true).max() < 4 * np.abs(was - true).max() + 1e-6 * largest


@pytest.mark.parametrize("norm", NORMS)
def test_one_sweep_forward_and_one_backward(norm):
    before, after = rewritten(step_of(norm), X, SCALE)
    assert (sweeps(before.jaxpr, X.size), sweeps(after.jaxpr, X.size)) == (4, 2)


def test_each_of_the_rewrites_is_reported_with_its_line():
    before, after = rewritten(step_of(group_norm), X, SCALE)
    text = Norms().change(before, after)
    for what in ("gradients of means", "variances computed", "shape without groups", "same products taken once"):
        assert what in text
    assert text.count("test_norms.py:") > 3
    assert Norms().change(before, before) == "no norm is rewritten"


def test_the_norm_within_a_loop_is_rewritten():
    def step(x, scale):
        def layer(h, s):
            return jnp.tanh(group_norm(h, scale * s)), None

        return jax.grad(lambda x: jax.lax.scan(layer, x, jnp.arange(1.0, 4))[0].sum())(x)

    before, after = rewritten(step, X, SCALE)
    assert after is not before
    for was, now in zip(results(before, X, SCALE), results(after, X, SCALE), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-4, atol=1e-5 * np.abs(was).max())


def test_a_strip_unlike_the_rest_costs_few_digits():
    x = X.copy()
    x[:, 0] += 1e4
    _, after = rewritten(instance_norm, x, SCALE)
    (now,) = results(after, x, SCALE)
    with jax.enable_x64(True):
        exact = np.asarray(instance_norm(x.astype("float64"), SCALE.astype("float64")))
    np.testing.assert_allclose(now, exact, rtol=1e-5, atol=1e-5)


def test_equal_elements_have_no_variance():
    x = np.full(SHAPE, 12345.678, "float32")
    _, after = rewritten(batch_norm, x, SCALE)
    (now,) = results(after, x, SCALE)
    before = results(traced(batch_norm, x, SCALE), x, SCALE)[0]
    assert np.isfinite(now).all()
    assert np.abs(now).max() <= np.abs(before).max() + 2


def test_bfloat16_activations_are_sliced_before_they_are_cast():
    def norm(x, scale):
        return group_norm(x.astype(jnp.float32), scale).astype(jnp.bfloat16)

    x = X.astype(jnp.bfloat16)
    before, after = rewritten(norm, x, SCALE)
    (strip,) = [e for e in after.jaxpr.eqns if e.primitive is _prims.slice_p]
    assert jx.aval(strip.invars[0]).dtype == jnp.bfloat16
    was, now = (results(p, x, SCALE)[0].astype("float32") for p in (before, after))
    np.testing.assert_allclose(now, was, rtol=2**-7)


def test_no_activation_with_groups_is_left_in_a_group_norm():
    shapes = [
        {jx.aval(v).shape for e in p.jaxpr.eqns for v in e.outvars} for p in rewritten(step_of(group_norm), X, SCALE)
    ]
    wide = (*SHAPE[:-1], GROUPS, WIDTH // GROUPS)
    assert [wide in found for found in shapes] == [True, False]


def test_sums_share_what_no_other_factor_varies_along():
    images, rows = SCALE[:BATCH, None, None, None], SCALE[:SIDE, None, None]

    def step(x, scale):
        product = x * jnp.sin(x)
        return [(product * f).sum((0, 1, 2)) for f in (images, scale, images * scale)], (product * images * rows).sum(
            (0, 1, 2)
        )

    before, after = rewritten(step, X, SCALE)
    assert "2 sums of the same products" in Norms().change(before, after)
    for was, now in zip(results(before, X, SCALE), results(after, X, SCALE), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-4, atol=1e-5 * np.abs(was).max())


def layer_norm(x, scale):
    away = x - x.mean(-1, keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean(-1, keepdims=True) + 1e-5) * scale


def heads_normed(x, scale):
    wide = x.reshape(*x.shape[:-1], GROUPS, -1)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.reshape(x.shape) * scale


def of_another_mean(x, scale):
    away = x - x[::-1].mean((0, 1, 2))
    return away * jax.lax.rsqrt((away * away).mean((0, 1, 2)) + 1e-5) * scale


def of_another_count(x, scale):
    away = x - x.sum((0, 1, 2)) / 7
    return away * jax.lax.rsqrt((away * away).mean((0, 1, 2)) + 1e-5) * scale


def over_other_dimensions(x, scale):
    away = x - x.mean((1, 2), keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean((0, 1)) + 1e-5) * scale


def of_a_mean_that_is_elsewhere(x, scale):
    """The mean of another position of a dimension of the same size."""
    away = (square := x[:, :BATCH, :BATCH]) - square.mean((0, 2))[:, None, None]
    normed = away * jax.lax.rsqrt((away * away).mean((1, 2), keepdims=True) + 1e-5) * scale
    return x.at[:, :BATCH, :BATCH].set(normed)


@pytest.mark.parametrize("norm", [layer_norm, heads_normed])
def test_norms_of_rows_are_left_alone(norm):
    before, after = rewritten(step_of(norm), X, SCALE)
    assert after is before


NO_NORMS = [of_another_mean, of_another_count, over_other_dimensions, of_a_mean_that_is_elsewhere]


@pytest.mark.parametrize("norm", NO_NORMS)
def test_what_is_not_centered_is_no_norm(norm):
    before, after = rewritten(step_of(norm), X, SCALE)
    text = Norms().change(before, after)
    assert "variances" not in text
    assert "gradients of means" not in text
    for was, now in zip(results(before, X, SCALE), results(after, X, SCALE), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-4, atol=1e-5 * np.abs(was).max())


def test_means_of_integers_and_of_half_precision_are_left_alone():
    def half(x, scale):
        away = x - x.sum((0, 1, 2)) / np.float16(X.size // WIDTH)
        return away * (away * away).sum((0, 1, 2)) * scale

    before, after = rewritten(half, X.astype("float16"), SCALE.astype("float16"))
    assert after is before


@pytest.mark.parametrize("norm", [batch_norm, group_norm])
def test_sharded_results_are_those_of_the_step_as_written(norm):
    step = step_of(norm)
    sharded = autoshard.jit(step, mesh={"data": 4, "model": 2}, passes=["norms", "pad_uneven"])
    plain = jax.tree.leaves(jax.jit(step)(X, SCALE))
    for was, now in zip(plain, jax.tree.leaves(sharded(X, SCALE)), strict=True):
        np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-5 * np.abs(was).max())


def test_it_runs_by_default():
    step = autoshard.jit(step_of(batch_norm), mesh={"data": 8})
    (said,) = [p for p in step.plan(X, SCALE).passes if p.name == "norms"]
    assert "1 variances computed in the sweep of the mean" in str(said)


def depthwise_step(norm, groups):
    """A loss of a convolution in groups and a norm of what it makes, and its gradients."""

    def step(x, kernel, scale):
        def loss(x, kernel, scale):
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
            )
            return jnp.sin(norm(y, scale)).sum()

        return jax.grad(loss, (0, 1, 2))(x, kernel, scale)

    return step


def layer_norm(x, scale):
    away = x - x.mean(-1, keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean(-1, keepdims=True) + 1e-6) * scale


def kernel(groups: int) -> np.ndarray:
    return RNG.normal(size=(3, 3, WIDTH // groups, WIDTH)).astype("float32")


def test_the_gradient_of_a_layer_norm_is_written_once_for_both_gradients_of_a_depthwise_convolution():
    args = X, kernel(WIDTH), SCALE
    before, after = rewritten(depthwise_step(layer_norm, WIDTH), *args)
    (barrier,) = [e for e in after.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    readers = [e for e in after.jaxpr.eqns if barrier.outvars[0] in e.invars]
    assert [e.primitive for e in readers] == [_prims.conv_general_dilated_p] * 2
    assert "1 gradients written once before a depthwise convolution" in Norms().change(before, after)
    for was, now in zip(results(before, *args), results(after, *args), strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize(
    ("norm", "groups"), [(layer_norm, 1), (layer_norm, 4), (batch_norm, WIDTH), (lambda x, scale: x * scale, WIDTH)]
)
def test_other_gradients_before_convolutions_are_computed_where_they_are_read(norm, groups):
    """XLA computes those as fast within the convolution: of other groups, of norms over the batch, of no norm."""
    _, after = rewritten(depthwise_step(norm, groups), X, kernel(groups), SCALE)
    assert not [e for e in after.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
