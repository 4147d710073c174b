"""Repeated keys and values are read once: the same numbers, however many devices share a key head."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.machine.mesh import AttentionRates, LogicalMesh
from autoshard.rules.local_forms.attention_kernel import attend_fused, gradients_fused
from autoshard.transforms.attention_op import AttentionConfig
from autoshard.transforms.kernel_op import attention_kernel_backward_p, attention_kernel_p
from tests.attentions import HASTY, trained

LENGTH, WIDTH = 128, 8
SPLASH = replace(HASTY, attention=AttentionRates("splash_interpreted", 0.5, 0.4), attention_layouts=True)
ONCE = "{} attentions read repeated keys and values once, 0 weights laid out by head"
RNG = np.random.default_rng(0)


def operands(key_heads, groups):
    heads = (key_heads * groups, key_heads, key_heads)
    return [jnp.asarray(RNG.normal(size=(1, LENGTH, n, WIDTH)), "float32") for n in heads]


def attention(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
    s = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), s, -1e30)
    return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(s, -1), v)


def by_repeat(q, k, v):
    groups = q.shape[2] // k.shape[2]
    return attention(q, *(jnp.repeat(x, groups, axis=2) for x in (k, v)))


def by_broadcast(q, k, v):
    shape = (*k.shape[:3], q.shape[2] // k.shape[2], WIDTH)
    return attention(q, *(jnp.broadcast_to(x[:, :, :, None], shape).reshape(q.shape) for x in (k, v)))


def tiled(q, k, v):
    """Heads in another order: each is followed by the next, not by itself."""
    return attention(q, *(jnp.tile(x, (1, 1, q.shape[2] // k.shape[2], 1)) for x in (k, v)))


def keys_alone(q, k, v):
    return attention(
        q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), jnp.tile(v, (1, 1, q.shape[2] // k.shape[2], 1))
    )


def step_of(fun, hardware=SPLASH, parts=1):
    mesh, heads = LogicalMesh(("h",), (parts,), hardware), P(None, None, "h")
    shardings = {"in_shardings": (heads, P(), P()), "out_shardings": ((P(), heads), (heads, P(), P()))}
    return autoshard.jit(trained(fun), mesh=mesh, strategy="replicated", **shardings)


def said(plan):
    return next(p.change for p in plan.passes if p.name == "attention_operands")


@pytest.mark.parametrize("fun", [by_repeat, by_broadcast])
@pytest.mark.parametrize(
    ("key_heads", "groups", "parts"), [(2, 4, 1), (2, 4, 2), (2, 4, 4), (1, 4, 2), (3, 4, 2), (3, 2, 6)]
)
def test_numbers_are_those_of_one_device(fun, key_heads, groups, parts):
    args, step = operands(key_heads, groups), step_of(fun, parts=parts)
    assert said(step.plan(*args)) == ONCE.format(2)
    for have, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(trained(fun))(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_casts_on_the_way_to_the_sum_are_no_obstacle():
    args = [x.astype("bfloat16") for x in operands(2, 4)]
    assert said(step_of(by_repeat).plan(*args)) == ONCE.format(2)


@pytest.mark.parametrize("fun", [tiled, keys_alone])
def test_other_repeats_are_read_as_they_are(fun):
    args, step = operands(2, 2), step_of(fun)
    assert said(step.plan(*args)) == ONCE.format(0)
    for have, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(trained(fun))(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("heads", "repeats", "read"), [(8, 4, 2), (4, 4, 1), (2, 4, 1), (6, 4, 3), (3, 4, 3), (8, 1, 8)]
)
def test_a_kernel_reads_each_key_head_of_a_device_once(heads, repeats, read):
    """Of six heads in a row where four are alike two are, and of three none."""
    dims = ("bqhd", "bkhd", "bkhe")
    config = AttentionConfig(*dims, "bqhe", "bhq", "q", "k", (), (), *["float32"] * 4, kernel="splash_interpreted")
    config = replace(config, repeated_head="h", head_repeats=repeats, cotangent_dims="bqhe", grad_dims=dims)
    config = replace(config, grad_dtypes=("float32",) * 3)
    x, sums = jnp.ones((1, LENGTH, heads, WIDTH)), jnp.ones((1, heads, LENGTH))
    made = [
        jax.make_jaxpr(lambda *a: attend_fused(config, *a))(x, x, x),
        jax.make_jaxpr(lambda *a: gradients_fused(config, *a))(x, x, x, x, sums, sums, x),
    ]
    kernels = (attention_kernel_p, attention_kernel_backward_p)
    found = [e for m, p in zip(made, kernels, strict=True) for e in m.jaxpr.eqns if e.primitive is p]
    assert [jx.aval(e.invars[1]).shape for e in found] == [(1, LENGTH, read, WIDTH)] * 2


def of_each_copy(q, k, v):
    """The gradients of the copies themselves."""
    groups = q.shape[2] // k.shape[2]
    out, pullback = jax.vjp(attention, q, *(jnp.repeat(x, groups, axis=2) for x in (k, v)))
    return out, pullback(jnp.sin(out))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))


def clipped_copies(q, k, v):
    groups = q.shape[2] // k.shape[2]
    return attention(q, *(clipped(jnp.repeat(x, groups, axis=2)) for x in (k, v)))


@pytest.mark.parametrize("fun", [of_each_copy, trained(clipped_copies)])
def test_where_more_than_the_sum_of_the_gradients_is_read_copies_are_read_too(fun):
    args = operands(2, 4)
    step = autoshard.jit(fun, mesh=LogicalMesh(("h",), (1,), SPLASH), strategy="replicated")
    assert said(step.plan(*args)) == ONCE.format(0)
    for have, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("text", ["bqhe,he->bqh", "bqhe,e->bqh", "bqhe,hf->bqhef"])
def test_other_readers_of_heads_than_a_projection(text):
    weight = jnp.asarray(
        RNG.normal(size=[{"h": 4, "e": WIDTH, "f": 3}[c] for c in text[5:].partition("-")[0]]), "float32"
    )

    def loss(q, k, v):
        return jnp.sin(jnp.einsum(text, by_repeat(q, k, v), weight)).sum()

    args, mesh = operands(2, 2), LogicalMesh(("h",), (1,), replace(SPLASH, matrix_unit=256))
    step = autoshard.jit(jax.grad(loss, (0, 1, 2)), mesh=mesh, strategy="replicated")
    assert said(step.plan(*args)).endswith(", 0 weights laid out by head")
    for have, want in zip(step(*args), jax.grad(loss, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_kernels_that_take_no_shared_keys_get_all():
    cudnn = replace(SPLASH, attention=AttentionRates("cudnn", 0.5, 0.4))
    assert said(step_of(by_repeat, cudnn).plan(*operands(2, 2))) == ONCE.format(0)


def test_a_loop_over_layers_reads_them_once_where_it_recomputes():
    def layers(q, k, v):
        return jax.lax.scan(lambda q, s: (by_repeat(q, k * s, v * s), None), q, jnp.arange(1.0, 4))[0]

    args = operands(2, 2)
    mesh = LogicalMesh(("h",), (1,), SPLASH)
    passes = ["attention", "recompute:full", "attention_operands"]
    plan = autoshard.jit(trained(layers), mesh=mesh, passes=passes).plan(*args)
    assert said(plan) == ONCE.format(3)


def test_where_it_has_not_been_seen_to_pay_all_is_read():
    plan = step_of(by_repeat, replace(SPLASH, attention_layouts=False, matrix_unit=256)).plan(*operands(2, 2))
    assert said(plan) == ONCE.format(0)


def test_one_repeat_is_none():
    args, step = operands(2, 1), step_of(by_repeat)
    assert said(step.plan(*args)) == ONCE.format(0)


def projected(q, k, v, weight):
    return jnp.einsum("bqhe,hed->bqd", by_repeat(q, k, v), weight)


@pytest.mark.parametrize(("unit", "count"), [(WIDTH + 1, 1), (WIDTH, 0), (0, 0)])
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_of_heads_narrower_than_the_matrix_unit_are_laid_out_by_head(unit, count, parts):
    def loss(*args):
        return jnp.sin(projected(*args)).sum()

    args = [*operands(2, 2), jnp.asarray(RNG.normal(size=(4, WIDTH, 12)), "float32")]
    mesh = LogicalMesh(("h",), (parts,), replace(SPLASH, matrix_unit=unit))
    heads, rest = P(None, None, "h"), (P(), P(), P("h"))
    step = autoshard.jit(jax.grad(loss, (0, 1, 2, 3)), mesh=mesh, strategy="replicated", in_shardings=(heads, *rest))
    assert said(step.plan(*args)).endswith(f", {count} weights laid out by head")
    for have, want in zip(step(*args), jax.grad(loss, (0, 1, 2, 3))(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_a_cotangent_that_no_product_of_heads_makes_is_left():
    mesh = LogicalMesh(("h",), (1,), replace(SPLASH, matrix_unit=256))
    plan = autoshard.jit(trained(by_repeat), mesh=mesh, strategy="replicated").plan(*operands(2, 2))
    assert said(plan) == ONCE.format(2)
