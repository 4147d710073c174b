"""Attention as a pass: found exactly, forward and backward, or left alone with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.passes import PASSES, Attention
from autoshard.rules import OWN
from autoshard.transforms.attention_op import attention_backward_p, attention_p
from autoshard.transforms.pipeline import parse_passes
from tests import attentions
from tests.attentions import (
    BIAS,
    FORMS,
    HASTY,
    LAYOUTS,
    B,
    H,
    S,
    W,
    causal,
    close,
    every_form,
    mesh,
    mix,
    normal,
    operands,
    rewritten,
    scores,
    trained,
)


def found(done) -> tuple[list[Any], list[Any]]:
    """The forms of the forward and backward operations, at any depth."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for region in jx.regions(eqn):
                yield from walk(region.body)

    eqns = list(walk(done.jaxpr))
    forward, backward = (
        [e.params["config"] for e in eqns if e.primitive is p] for p in (attention_p, attention_backward_p)
    )
    return forward, backward


def run(done, args):
    return jax.tree.unflatten(done.out_tree, jax.jit(jx.as_fun(done.jaxpr))(*jax.tree.leaves(args)))


@every_form
def test_forward_and_backward_are_found_and_mean_the_same(name):
    fun, heads, steps = FORMS[name]
    args = operands(heads=heads)
    done, report = rewritten(trained(fun), args)
    forward, backward = found(done)
    assert report == "1 forward and 1 backward attentions replaced by one operation each"
    assert [s.kind for s in forward[0].score_ops] == steps.split() == [s.kind for s in backward[0].score_ops]
    assert not any(e.primitive.name in {"dot_general", "exp"} for e in done.jaxpr.eqns)
    close(run(done, args), jax.jit(trained(fun))(*args))


@every_form
def test_forward_alone_is_found(name):
    fun, heads, _ = FORMS[name]
    args = operands(heads=heads)
    done, report = rewritten(fun, args)
    assert report == "1 forward and 0 backward attentions replaced by one operation each"
    close(run(done, args), jax.jit(fun)(*args))


@pytest.mark.parametrize("places", [np.arange(S)[::-1], np.arange(0, 2 * S, 2), np.arange(1, S + 1) % S])
def test_constants_that_do_not_count_up_are_no_positions(places):
    """What is made of them is a mask of any kind."""

    def fun(q, k, v):
        at = jnp.asarray(places.copy(), jnp.int32)
        return mix(jax.nn.softmax(jnp.where(at[:, None] >= at, scores(q, k), -1e9), -1), v)

    done, _ = rewritten(fun, args := operands())
    assert [s.kind for s in found(done)[0][0].score_ops] == ["scale", "mask"]
    close(run(done, args), jax.jit(fun)(*args))


def layer(h, w):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
    return h + jnp.einsum("bshe,hed->bsd", mix(jax.nn.softmax(causal(scores(q, k)), -1), v), w["o"])


def decoder(scanned: bool, remat: bool = False):
    """Three layers, and their gradients."""

    def loss(ws, h):
        one = jax.checkpoint(layer) if remat else layer
        if scanned:
            h, _ = lax.scan(lambda h, w: (one(h, w), None), h, ws)
        else:
            for i in range(3):
                h = one(h, jax.tree.map(lambda x, i=i: x[i], ws))
        return (h**2).mean()

    ws = {n: 0.3 * normal(i, 3, H * W, H, W) for i, n in enumerate("qkv")} | {"o": 0.3 * normal(3, 3, H, W, H * W)}
    return jax.value_and_grad(loss), (ws, normal(4, B, S, H * W))


@pytest.mark.parametrize(
    ("scanned", "remat", "passes", "counts"),
    [
        (False, False, ["attention"], (3, 3)),
        (False, True, ["attention"], (6, 3)),
        (False, False, ["recompute:full", "attention"], (5, 3)),
        (False, False, ["attention", "recompute:full"], (5, 3)),
        (True, True, ["attention"], (2, 1)),
        (True, False, ["attention"], (1, 1)),
        (True, False, ["attention", "recompute:full"], (2, 1)),
        (True, False, ["recompute:full", "attention"], (2, 1)),
    ],
)
def test_layers_unrolled_scanned_and_rematerialized(scanned, remat, passes, counts):
    fun, args = decoder(scanned, remat)
    on, spec = LAYOUTS["sequence and batch"]
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype("float64"), args)
        step = autoshard.jit(fun, mesh=on, strategy="replicated", passes=passes, in_shardings=(P(), spec))
        forward, backward = found(step.trace(*args))
        assert (len(forward), len(backward)) == counts
        assert {tuple(s.kind for s in f.score_ops) for f in (*forward, *backward)} == {("scale", "band")}
        assert len(step.plan(*args).islands) == sum(counts)
        close(step(*args), jax.jit(fun)(*args), rtol=1e-10)


def twice(q, k, v):
    p = jax.nn.softmax(scores(q, k), -1)
    return mix(p, v) + mix(p, v * v)


def dropout(q, k, v):
    p = jax.nn.softmax(scores(q, k), -1)
    return mix(jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, p.shape), p / 0.9, 0), v)


def leaking(q, k, v):
    p = jax.nn.softmax(scores(q, k), -1)
    return mix(p, v) + p.mean(-1).swapaxes(1, 2)[..., None]


def bent(q, k, v):
    return mix(jax.nn.softmax(jnp.sin(scores(q, k)), -1), v)


def tempered(q, k, v):
    return mix(jax.nn.softmax(scores(q, k) * jnp.abs(k).max(), -1), v)


def over_queries(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), -2), v)


def without_sum(q, k, v):
    s = scores(q, k)
    return mix(jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True))), v)


def of_another_maximum(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - lax.stop_gradient((2 * s).max(-1, keepdims=True)))
    return mix(e / e.sum(-1, keepdims=True), v)


def masked_weights(q, k, v):
    p = jax.nn.softmax(scores(q, k), -1)
    return mix(jnp.where(jnp.tril(jnp.ones((S, S), bool)), p, 0), v)


def squared(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), -1) ** 2, v)


def scores_too(q, k, v):
    s = scores(q, k)
    return mix(jax.nn.softmax(s, -1), v) + s.sum((1, 3))[:, :, None, None]


def of_both(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), -1) * jax.nn.softmax(scores(k, q), -1), v)


def turned(q, k, v):
    """There are as many queries as keys, and a reshape transposes the scores."""
    s = lax.reshape(scores(q, k), (B, H, S, S), (0, 1, 3, 2))
    return mix(jax.nn.softmax(causal(s), -1), v)


def by_one_mask(q, k, v):
    return mix(jax.nn.softmax(lax.select_n(q[0, 0, 0, 0] > 0, scores(q, k), -scores(q, k)), -1), v)


def coarse(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), -1).astype("float8_e5m2").astype("float32"), v)


@pytest.mark.parametrize(
    ("fun", "why"),
    [
        (twice, "used twice"),
        (dropout, "weights are masked"),
        (leaking, "no number and no cotangent"),
        (bent, None),
        (tempered, None),
        (over_queries, "not multiplied by values|results are used before"),
        (without_sum, "neither the softmax nor its gradient"),
        (of_another_maximum, None),
        (masked_weights, "weights are masked"),
        (squared, "a power is taken|neither the softmax"),
        (scores_too, None),
        (of_both, "weights of two attentions"),
        (turned, None),
        (by_one_mask, None),
        (coarse, "float8"),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_what_is_no_attention_or_more_than_one_is_not_replaced(fun, why, gradient):
    fun = trained(fun) if gradient else fun
    done, report = rewritten(fun, operands())
    assert found(done) == ([], [])
    if why is not None:
        place, _, reason = report.partition("not replaced: ")[2].partition(", ")
        assert place.startswith((__file__, attentions.__file__))
        assert any(w in reason for w in why.split("|")), report
    close(run(done, operands()), jax.jit(fun)(*operands()))


@jax.custom_vjp
def clipped(p):
    return p


clipped.defvjp(lambda p: (p, None), lambda _, ct: (1.5 * ct,))


@jax.custom_vjp
def held_back(s):
    return s


held_back.defvjp(lambda s: (s, None), lambda _, ct: (jnp.where(jnp.tril(jnp.ones((S, S), bool)), ct, 0),))


@pytest.mark.parametrize(
    "fun",
    [
        lambda q, k, v: mix(clipped(jax.nn.softmax(scores(q, k), -1)), v),
        lambda q, k, v: mix(jax.nn.softmax(clipped(scores(q, k)), -1), v),
        lambda q, k, v: mix(jax.nn.softmax(held_back(scores(q, k)), -1), v),
        lambda q, k, v: mix(jax.nn.softmax(lax.stop_gradient(scores(q, k)) + scores(q, k), -1), v),
        lambda q, k, v: mix(lax.stop_gradient(jax.nn.softmax(scores(q, k), -1)) + jax.nn.softmax(scores(q, k), -1), v),
    ],
)
def test_a_gradient_that_is_not_the_softmax_s_is_not_replaced(fun):
    done, _ = rewritten(trained(fun), operands())
    assert not found(done)[1]
    close(run(done, operands()), jax.jit(trained(fun))(*operands()))


def test_the_gradient_of_a_bias_keeps_an_attention_from_being_replaced():
    def fun(bias, q):
        return mix(jax.nn.softmax(scores(q, q + 1) + bias, -1), q).sum()

    args = (BIAS, operands()[0])
    done, report = rewritten(jax.grad(fun), args)
    assert found(done) == ([], [])
    assert "not replaced" in report
    close(run(done, args), jax.jit(jax.grad(fun))(*args))


def test_gradients_of_only_some_operands():
    fun, _, _ = FORMS["causal"]
    for which in ((0,), (1,), (2,), (0, 2), (1, 2)):
        gradient = jax.grad(lambda *a: jnp.sin(fun(*a)).sum(), which)
        done, _ = rewritten(gradient, operands())
        assert [len(f) for f in found(done)] == [1, 1]
        close(run(done, operands()), jax.jit(gradient)(*operands()))


def test_cross_attention_splits_its_queries_and_keeps_its_keys_whole():
    def fun(q, k, v):
        return mix(jax.nn.softmax(scores(q, k), -1), v)

    args = (operands()[0], normal(1, B, 12, H, W), normal(2, B, 12, H, W))
    on = mesh(s=8)
    step = autoshard.jit(
        trained(fun), mesh=on, strategy="replicated", passes=["attention"], in_shardings=(P(None, "s"), P(), P())
    )
    assert [len(f) for f in found(step.trace(*args))] == [1, 1]
    assert {i.axes for i in step.plan(*args).islands} == {()}
    kinds = {c.kind for c in step.plan(*args).cost.collectives}
    assert kinds == {"all-reduce"}, "terms of the keys' and values' cotangents, and the loss"
    close(step(*args), jax.jit(trained(fun))(*args))
    (config,), _ = found(step.trace(*args))
    rule = OWN[attention_p](*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args), config=config)
    assert rule.kinds == ()
    assert rule.operands[1][1] == ()


def test_the_primitives_differentiate_and_batch():
    fun, _, _ = FORMS["causal"]
    args = operands()
    for one in (fun, jax.grad(lambda *a: jnp.sin(fun(*a)).sum(), (0, 1, 2))):
        done, _ = rewritten(one, args)

        def ours(*a, done=done):
            return tuple(jx.as_fun(done.jaxpr)(*a))

        def theirs(*a, one=one):
            return tuple(jax.tree.leaves(one(*a)))

        close(jax.jit(lambda *a: jax.jvp(ours, a, a))(*args), jax.jit(lambda *a: jax.jvp(theirs, a, a))(*args))
        stacked = tuple(np.stack([a, 2 * a]) for a in args)
        close(jax.jit(jax.vmap(ours))(*stacked), jax.jit(jax.vmap(theirs))(*stacked))
        close(ours(*args), theirs(*args))


def test_it_is_known_by_name_and_no_default():
    assert parse_passes("attention", PASSES) == (Attention(),)
    step = autoshard.jit(FORMS["full"][0], mesh={"s": 8})
    assert found(step.trace(*operands())) == ([], [])


def test_scanned_layers_save_no_scores_for_the_backward_scan():
    step, args = decoder(scanned=True)
    before = attentions.program(step, args, mesh(s=8))
    after, report = rewritten(step, args)
    held = [a.shape[1:] for p in (before, after) for a in _stacks(p)]
    assert (B, H, S, S) in held[: len(_stacks(before))]
    assert (B, H, S, S) not in held[len(_stacks(before)) :]
    assert "not replaced" not in report
    assert found(after)[1]
    close(run(after, args), jax.jit(step)(*args))


def _stacks(program):
    """The stacked results of scans."""
    eqns = [(e, jx.scan_groups(e)) for e in program.jaxpr.eqns if jx.scan_groups(e)]
    return [jx.aval(v) for e, shape in eqns for v in e.outvars[shape.carry :]]


@pytest.mark.parametrize("on_chip", [0.0, 4e3, 1e9])
def test_scores_that_fit_on_the_chip_are_no_large_attention(on_chip):
    """4 x 4 x 16 x 16 scores of 4 bytes: 16 KiB, 2 KiB on each of eight devices."""
    on = replace(mesh(s=8), hardware=replace(HASTY, on_chip=on_chip))
    step = autoshard.jit(trained(FORMS["causal"][0]), mesh=on, passes=["attention:large"])
    assert bool(found(step.trace(*operands()))[0]) == (on_chip == 4e3)


def test_a_minimum_that_is_no_size_is_an_error():
    with pytest.raises(PassError, match=r"attention:soon: 'soon' is not a size in bytes.*or 'large'"):
        Attention.from_option("soon")
    assert str(Attention.from_option("32MiB")) == "attention:32MiB"
