"""Attention a few heads or queries at a time: the same numbers, and only so many scores at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.rules.local_forms import attention_chunked
from autoshard.rules.local_forms.attention_chunked import attend_chunked, chunked_dims, gradients_chunked
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp, attend, attention_gradients

BAND = ScoreOp("band", -1e9, high=0)
MASK = ScoreOp("mask", -1e9, extra=0)
BIAS = ScoreOp("bias", extra=0)
SCALE = ScoreOp("scale", 0.3)
NARROW = ("float32", "float32", "bfloat16", "bfloat16")
FORMS = {
    "heads": AttentionConfig("bqhd", "bkhd", "bkhe", "bqhe", "bhq", "q", "k", (SCALE, BAND), (), *["float32"] * 4),
    "groups": AttentionConfig("bqghd", "bkgd", "bkge", "bqghe", "bghq", "q", "k", (BAND,), (), *["float32"] * 4),
    "one head": AttentionConfig("qd", "kd", "ke", "qe", "q", "q", "k", (BAND,), (), *["float32"] * 4),
    "mask": AttentionConfig("hqd", "hkd", "hke", "hqe", "hq", "q", "k", (MASK,), (".qk",), *["float32"] * 4),
    "bias": AttentionConfig("hqd", "hkd", "hke", "hqe", "hq", "q", "k", (BIAS, BAND), ("hqk",), *["float32"] * 4),
    "narrow": AttentionConfig("bhqd", "bhkd", "bhke", "bhqe", "bhq", "q", "k", (), (), *NARROW),
}  # fmt: skip
SIZES = {"b": 2, "h": 6, "g": 3, "q": 32, "k": 32, "d": 8, "e": 4, ".": 1}


def operands(config, dtype="float32"):
    rng = np.random.default_rng(0)
    made = [
        jnp.asarray(rng.normal(size=[SIZES[c] for c in s]), dtype)
        for s in (config.query_dims, config.key_dims, config.value_dims)
    ]
    extras = [rng.normal(size=[SIZES[c] for c in s]) for s in config.extra_dims]
    return made, [jnp.asarray(x > -1 if config.score_ops[0] is MASK else x) for x in extras]


def with_backward(config):
    grads = {
        "cotangent_dims": config.out_dims,
        "grad_dims": (config.query_dims, config.key_dims, config.value_dims),
        "grad_dtypes": (config.out_dtype,) * 3,
    }
    return AttentionConfig(**{f: getattr(config, f) for f in config.__slots__} | grads)


@pytest.mark.parametrize("block", [2048, 600])
@pytest.mark.parametrize("name", FORMS)
def test_the_numbers_are_those_of_the_composition(name, block, monkeypatch):
    monkeypatch.setattr(attention_chunked, "MAX_CHUNK_BYTES", block)
    monkeypatch.setattr(attention_chunked, "MIN_CHUNK_QUERIES", 4)
    config = with_backward(FORMS[name])
    dtype = config.out_dtype
    ours, extras = operands(config, dtype)
    assert chunked_dims(config, *ours), "or nothing is tested"
    want = attend(*ours, *extras, config=config)
    have = jax.jit(functools.partial(attend_chunked, config))(*ours, *extras)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5)
    for a, b in zip(have, want, strict=True):
        assert a.dtype == b.dtype
        close(a.astype("float32"), b.astype("float32"))
    cotangent = jnp.cos(jnp.arange(want[0].size, dtype="float32")).reshape(want[0].shape).astype(dtype)
    want = attention_gradients(*ours, *want, cotangent, *extras, config=config)
    have = jax.jit(functools.partial(gradients_chunked, config))(*ours, *have, cotangent, *extras)
    close = functools.partial(close, atol=2e-2 if dtype == "bfloat16" else 1e-5)
    for a, b in zip(have, want, strict=True):
        assert a.dtype == b.dtype
        close(a.astype("float32"), b.astype("float32"))


def test_heads_are_chunked_before_queries_and_queries_only_as_far_as_needed(monkeypatch):
    ours, _ = operands(FORMS["heads"])
    one = 4 * 32 * 32
    for limit, want in (
        (12 * one, []),
        (4 * one, [("h", 3)]),
        (2 * one, [("h", 6)]),
        (one, [("h", 6), ("b", 2)]),
        (one // 2, [("h", 6), ("b", 2), ("q", 2)]),
        (1, [("h", 6), ("b", 2), ("q", 2)]),
    ):
        monkeypatch.setattr(attention_chunked, "MAX_CHUNK_BYTES", limit)
        assert [(c.letter, c.count) for c in chunked_dims(FORMS["heads"], *ours)] == want


def test_no_array_of_all_scores_is_computed(monkeypatch):
    monkeypatch.setattr(attention_chunked, "MAX_CHUNK_BYTES", 4 * 32 * 32)
    ours, _ = operands(FORMS["heads"])
    few, all_ = (
        str(jax.make_jaxpr(f)(*ours))
        for f in (functools.partial(attend_chunked, FORMS["heads"]), functools.partial(attend, config=FORMS["heads"]))
    )
    assert "f32[2,6,32,32]" in all_
    assert "f32[2,6,32,32]" not in few
    assert "f32[1,1,32,32]" in few
