"""Masks of segment ids: found however they are written where a kernel takes them, and left as they are if unsure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp

import autoshard
from autoshard import jaxpr as jx
from autoshard.machine.mesh import AttentionRates, LogicalMesh
from autoshard.passes import PASSES
from autoshard.transforms.attention_op import attention_backward_p, attention_p
from autoshard.transforms.pipeline import Pipeline, parse_passes
from tests.attentions import HASTY, B, H, S, W, causal, close, mix, normal, operands, scores, trained
from tests.programs import program

KERNELS = {name: replace(HASTY, attention=AttentionRates(name, 0.5, 0.4)) for name in ("splash_interpreted", "cudnn")}
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, S)), 1).astype("int32")
MASKED = -0.7 * float(np.finfo(np.float32).max)


def rewritten(fun, args, hardware=KERNELS["splash_interpreted"]):
    passes = Pipeline(parse_passes(["attention"], PASSES))
    done, reports = passes.run(program(fun, args, LogicalMesh(("s",), (8,), hardware)))
    return done, next(r.change for r in reports if r.name == "attention")


def run(done, args):
    return jax.tree.unflatten(done.out_tree, jax.jit(jx.as_fun(done.jaxpr))(*jax.tree.leaves(args)))


def configs(done) -> list[Any]:
    eqns = [e for e in jx.walk(done.jaxpr) if e.primitive in (attention_p, attention_backward_p)]
    return [e.params["config"] for e in eqns]


def same(ids, others=None):
    return ids[:, None, :, None] == (ids if others is None else others)[:, None, None, :]


def other(ids):
    return ids[:, None, :, None] != ids[:, None, None, :]


def lower():
    return jnp.tril(jnp.ones((S, S), bool))


def by(mask, fill: Any = -1e9):
    """Attention whose scores are kept where the mask of the ids is True."""
    return lambda q, k, v, ids: mix(jax.nn.softmax(jnp.where(mask(ids), scores(q, k), fill), -1), v)


def without(mask):
    return lambda q, k, v, ids: mix(jax.nn.softmax(jnp.where(mask(ids), -1e9, scores(q, k)), -1), v)


def one_sequence(q, k, v, ids):
    s = jnp.where(ids[:, None] == ids, jnp.einsum("qhe,khe->hqk", q, k) / np.sqrt(W), -1e30)
    return jnp.einsum("hqk,khe->qhe", jax.nn.softmax(s, -1), v)


def as_numbers(q, k, v, ids):
    """A mask that is added to scores elsewhere, compared to its constant."""
    number = jnp.where(same(ids) & lower(), 0.0, MASKED)
    return mix(jax.nn.softmax(jnp.where(number >= 0.5 * MASKED, scores(q, k), MASKED), -1), v)


def combined(library, **options):
    def fun(q, k, v, ids):
        mask = library.combine_masks(library.make_attention_mask(ids, ids, jnp.equal), library.make_causal_mask(ids))
        return library.dot_product_attention(q, k, v, mask=mask, **options)

    return fun


WRITTEN = {
    "minus a lot": (by(same), "segments"),
    "the least float": (by(same, jnp.finfo("float32").min), "segments"),
    "minus infinity": (by(same, -jnp.inf), "segments"),
    "of all heads": (by(lambda ids: jnp.broadcast_to(same(ids), (B, H, S, S))), "segments"),
    "and causal": (by(lambda ids: same(ids) & lower()), "band segments"),
    "and causal, chosen": (by(lambda ids: jnp.where(lower(), same(ids), False)), "band segments"),
    "after causal": (
        lambda q, k, v, ids: mix(jax.nn.softmax(jnp.where(same(ids), causal(scores(q, k)), -1e9), -1), v),
        "band segments",
    ),
    "causal twice": (
        lambda q, k, v, i: mix(jax.nn.softmax(jnp.where(same(i) & lower(), causal(scores(q, k)), -1e9), -1), v),
        "band band segments",
    ),
    "the others": (without(other), "segments"),
    "the others or later": (without(lambda ids: ~lower() | other(ids)), "band segments"),
    "a number": (by(lambda ids: jnp.where(same(ids), 1, 0) > 0), "segments"),
    "numbers": (as_numbers, "band segments"),
    "positions first": (by(lambda ids: (ids.T[:, None] == ids.T).transpose(2, 0, 1)[:, None]), "segments"),
    "sequence by sequence": (jax.vmap(one_sequence), "segments"),
    "of all sequences": (by(lambda ids: ids[0][:, None] == ids[0]), "segments"),
    "blocks": (by(lambda _: (jnp.arange(S) // 4)[:, None] == jnp.arange(S) // 4), "segments"),
    "cast": (by(lambda ids: same(ids.astype("int8").astype("int32"))), "segments"),
    "jax.nn": (lambda q, k, v, ids: jax.nn.dot_product_attention(q, k, v, mask=same(ids)), "segments"),
    "jax.nn, causal": (
        lambda q, k, v, ids: jax.nn.dot_product_attention(q, k, v, mask=same(ids), is_causal=True),
        "band segments",
    ),
    "flax.linen": (combined(nn), "band segments"),
    "flax.nnx": (combined(nnx), "band segments"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_they_are_found_however_they_are_written(name):
    fun, masks = WRITTEN[name]
    args = (*operands(), IDS)
    done, _ = rewritten(trained(fun), args)
    forward, backward = configs(done)
    assert sorted(op.kind for op in forward.score_ops if op.is_mask) == masks.split()
    assert forward.score_ops == backward.score_ops
    assert [letters[-1] for letters in forward.extra_dims] == [forward.key_position], "no mask is an operand"
    close(run(done, args), jax.jit(trained(fun))(*args))


@pytest.mark.parametrize(
    "mask",
    [
        lambda ids: same(ids) & (ids > 0)[:, None, None, :],  # rows of padding see nothing
        lambda ids: same(ids, ids + 1),
        lambda ids: same(ids, ids[::-1]),
        lambda ids: ids[:, None, :, None] >= ids[:, None, None, :],
        lambda ids: same(jnp.where(ids == 1, jnp.nan, ids)),  # which is no number, not even its own
        lambda ids: same(ids.astype("int8").astype("uint16").astype("int32"), ids - 2),
        lambda ids: same(ids) | lower(),
        lambda ids: ~(same(ids) & lower()),
    ],
)
def test_what_may_leave_a_query_without_its_own_key_stays_a_mask(mask):
    args = (*operands(), IDS)
    done, _ = rewritten(trained(by(mask)), args)
    assert [[op.kind for op in c.score_ops if op.is_mask] for c in configs(done)] == [["mask"]] * 2
    close(run(done, args), jax.jit(trained(by(mask)))(*args))


def test_ids_of_64_bits_are_not_cut():
    with jax.enable_x64(True):
        ids = IDS.astype("int64") << 32
        args = (*operands(), ids)
        done, _ = rewritten(trained(by(same)), args)
        assert [op.kind for op in configs(done)[0].score_ops] == ["scale", "mask"]


def test_kernels_that_take_no_segments_have_masks():
    args = (*(jnp.asarray(x, "bfloat16") for x in operands()), IDS)
    done, report = rewritten(trained(by(same)), args, KERNELS["cudnn"])
    assert [[op.kind for op in c.score_ops] for c in configs(done)] == [["scale", "mask"]] * 2
    assert "of masks and biases cuDNN is used for the causal mask and causal windows (mask)" in report


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda ids: same(ids) & same(ids % 2), "splash attention takes one array of segment ids, not 2"),
        (
            lambda ids: same(ids, ids * 2),
            "the causal mask and windows, and segment ids that are one array for queries and keys (mask)",
        ),
    ],
)
def test_the_report_says_which_segments_the_kernel_does_not_take(mask, reason):
    args = (*operands(), IDS)
    done, report = rewritten(trained(by(mask)), args)
    assert reason in report
    close(run(done, args), jax.jit(trained(by(mask)))(*args))


def layers(recomputed: bool, scanned: bool, outside: bool):
    """Three layers on packed rows, and their gradients; the mask is made in each layer or ``outside``."""

    def loss(ws: Any, h: Any, ids: Any) -> Any:
        def layer(h: Any, w: Any, mask: Any) -> Any:
            q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
            seen = mask if outside else same(ids) & lower()
            weights = jax.nn.softmax(jnp.where(seen, scores(q, k), -1e9), -1)
            return h + jnp.einsum("bshe,hed->bsd", mix(weights, v), w["o"])

        one = jax.checkpoint(layer) if recomputed else layer
        mask = same(ids) & lower()
        if scanned:
            return (lax.scan(lambda h, w: (one(h, w, mask), None), h, ws)[0] ** 2).mean()
        for i in range(3):
            h = one(h, jax.tree.map(lambda x, i=i: x[i], ws), mask)
        return (h**2).mean()

    ws = {n: 0.3 * normal(i, 3, H * W, H, W) for i, n in enumerate("qkv")} | {"o": 0.3 * normal(3, 3, H, W, H * W)}
    return jax.value_and_grad(loss), (ws, normal(4, B, S, H * W), IDS)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("recomputed", "scanned", "count"), [(False, False, 6), (True, False, 9), (False, True, 2), (True, True, 3)]
)
def test_layers_read_ids_and_no_mask(recomputed, scanned, count, outside):
    step, (ws, h, ids) = layers(recomputed, scanned, outside)
    with jax.enable_x64(True):
        args = (*jax.tree.map(lambda x: x.astype("float64"), (ws, h)), ids)
        done, report = rewritten(step, args)
        assert "not replaced" not in report
        assert len(configs(done)) == count
        for eqn in jx.walk(done.jaxpr):
            assert not any(x.dtype == bool and x.size >= B * S * S for x in map(jx.aval, (*eqn.invars, *eqn.outvars)))
        close(run(done, args), jax.jit(step)(*args), rtol=1e-10)


def test_a_packed_decoder_runs_by_the_kernel():
    """Of layers that are scanned over, with the mask made before: one attention forward, one backward."""
    length = 128

    def loss(ws: Any, h: Any, ids: Any) -> Any:
        at = jnp.arange(length)
        mask = same(ids) & (at[:, None] >= at)

        def layer(h: Any, w: Any) -> tuple[Any, None]:
            q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
            return h + jnp.einsum(
                "bshe,hed->bsd", mix(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e9), -1), v), w["o"]
            ), None

        return (lax.scan(layer, h, ws)[0] ** 2).mean()

    ws = {n: 0.1 * normal(i, 2, 2 * W, 2, W) for i, n in enumerate("qkv")} | {"o": 0.1 * normal(3, 2, 2, W, 2 * W)}
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, length)), 1).astype("int32")
    args = (ws, normal(4, 2, length, 2 * W), ids)
    mesh = LogicalMesh(("b",), (2,), KERNELS["splash_interpreted"])
    step = autoshard.jit(jax.value_and_grad(loss), mesh=mesh, strategy="dp", passes=["attention"])
    said = next(p.change for p in step.plan(*args).passes if p.name == "attention")
    assert said == (
        "1 forward and 1 backward attentions replaced by one operation each, all of them run by splash attention"
    )
    close(step(*args), jax.jit(jax.value_and_grad(loss))(*args))
