"""Attention as a library's kernel: the numbers of `jax.nn.dot_product_attention`, and what it does not take."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from autoshard.errors import MeshError
from autoshard.transforms import cudnn_attention
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp
from autoshard.transforms.cudnn_attention import (
    attention_kernel_backward_p,
    attention_kernel_p,
    kernel_flops_at_peak,
    peak_share,
    unsupported_reason,
)

SCALE, BAND = ScoreOp("scale", 0.3), ScoreOp("band", -1e9, high=0)
CONFIG = AttentionConfig(
    "bqhd", "bkhd", "bkhe", "bqhe", "bhq", "q", "k", (SCALE, BAND), (), *["float32"] * 2, *["bfloat16"] * 2
)


def operands(key_heads, dtype, batch=2, length=16, heads=4, width=8):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(batch, length, n, width)), dtype) for n in (heads, key_heads, key_heads)]


@pytest.mark.parametrize(
    ("causal", "key_heads", "dtype"),
    [(False, 4, "float32"), (True, 2, "float32"), (True, 1, "float32"), (True, 2, "bfloat16")],
)
def test_the_numbers_are_those_of_jax(causal, key_heads, dtype):
    q, k, v = operands(key_heads, dtype)
    theirs = functools.partial(jax.nn.dot_product_attention, scale=0.3, is_causal=causal, implementation="xla")
    want, logsum = theirs(q, k, v, return_residual=True)
    out, own = jax.jit(functools.partial(attention_kernel_p.bind, scale=0.3, causal=causal))(q, k, v)
    assert (out.dtype, own.dtype) == (q.dtype, jnp.float32)
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    close = functools.partial(np.testing.assert_allclose, **near)
    close(out.astype("float32"), want.astype("float32"))
    close(own, jnp.swapaxes(logsum, 1, 2).astype("float32"))
    cotangent = jnp.cos(3 * want)
    backward = jax.jit(functools.partial(attention_kernel_backward_p.bind, scale=0.3, causal=causal))
    want = jax.jit(lambda ct, *ours: jax.vjp(theirs, *ours)[1](ct))(cotangent, q, k, v)
    for x, y in zip(backward(q, k, v, out, own, cotangent), want, strict=True):
        assert x.dtype == y.dtype
        close(x.astype("float32"), y.astype("float32"))


def stand_in(query, key, value, *, scale, is_causal, implementation):
    """A stand-in for cuDNN attention with the residuals that JAX saves for its gradient."""
    assert implementation == "cudnn"
    params = {"scale": scale, "causal": is_causal}

    @jax.custom_vjp
    def attend(q, k, v):
        return attention_kernel_p.bind(q, k, v, **params)[0]

    def forward(q, k, v):
        out, logsum = attention_kernel_p.bind(q, k, v, **params)
        return out, (q, k, v, jnp.zeros((0,), q.dtype), logsum, out)

    def backward(residuals, cotangent):
        q, k, v, _, logsum, out = residuals
        return tuple(attention_kernel_backward_p.bind(q, k, v, out, logsum, cotangent, **params))

    attend.defvjp(forward, backward)
    return attend(query, key, value)


def test_the_gradient_uses_the_given_output_and_the_forward_kernel_is_dead_code(monkeypatch):
    """A block's gradient is of the sums over all blocks, not of its own."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = operands(2, "bfloat16")
    params = {"scale": 0.3, "causal": True}
    out, logsum = jax.jit(functools.partial(cudnn_attention._cudnn, **params))(q, k, v)
    further = logsum + 1, (out / 2).astype(out.dtype), jnp.cos(3 * out)
    given = q, k, v, further[1], further[0], further[2]
    have, want = (
        jax.jit(functools.partial(f, **params)).lower(*given).compile()
        for f in (cudnn_attention._cudnn_backward, cudnn_attention._reference_backward)
    )
    assert have.cost_analysis()["flops"] == want.cost_analysis()["flops"]
    for x, y in zip(have(*given), want(*given), strict=True):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=1e-2, atol=1e-2)


def test_without_the_library_compiling_for_a_gpu_says_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    step = jax.jit(lambda q, k, v: attention_kernel_p.bind(q, k, v, scale=0.3, causal=True)).trace(
        *operands(2, "bfloat16")
    )
    with pytest.raises(MeshError, match=r"bfloat16\[2, 16, 4, 8\].*cuDNN not found.*autoshard\[gpu\].*'attention'"):
        step.lower(lowering_platforms=("cuda",))
    step.lower(lowering_platforms=("cpu",))


UNSUPPORTED = {
    "": CONFIG,
    "takes queries, keys and values of bfloat16 or float16, not float32": (CONFIG, "float32"),
    "the dtype of its operands, bfloat16, not float32": replace(CONFIG, out_dtype="float32"),
    "the causal mask only (mask)": replace(CONFIG, score_ops=(ScoreOp("mask", -1e9, 0),), extra_dims=("b..k",)),
    "the causal mask only (bias)": replace(CONFIG, score_ops=(ScoreOp("bias", extra=0),), extra_dims=(".hqk",)),
    "the causal mask only (window)": replace(CONFIG, score_ops=(replace(BAND, low=-4),)),
    "these have one by their score of -3": replace(CONFIG, score_ops=(replace(BAND, constant=-10.0), SCALE)),
    "as many queries as keys, not 16 and 32": (CONFIG, "bfloat16", {"k": 32}),
    "multiple of 8 and at most 128, not 12": (CONFIG, "bfloat16", {"d": 12, "e": 12}),
    "multiple of 8 and at most 128, not 256": (CONFIG, "bfloat16", {"d": 256, "e": 256}),
    "keys and values of the same heads": replace(CONFIG, value_dims="bke"),
    "no key head without a query head": replace(CONFIG, query_dims="bqd"),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_kernel_does_not_support(reason):
    case = UNSUPPORTED[reason]
    config, dtype, sizes, *_ = (*case, {}) if isinstance(case, tuple) else (case, "bfloat16", {})
    sizes = {"b": 2, "q": 16, "k": 16, "h": 4, "d": 8, "e": 8} | sizes
    sides = [
        jax.ShapeDtypeStruct([sizes[c] for c in s], dtype)
        for s in (config.query_dims, config.key_dims, config.value_dims)
    ]
    said = unsupported_reason(config, *sides)
    assert reason in said if reason else not said


def test_time_is_that_of_the_work_below_a_causal_mask_and_of_heads_of_full_width():
    q = jax.ShapeDtypeStruct((2, 16, 4, 128), "bfloat16")
    narrow = jax.ShapeDtypeStruct((2, 16, 4, 64), "bfloat16")
    products = 2 * (2 * 4 * 16 * 16) * 128
    assert kernel_flops_at_peak(replace(CONFIG, score_ops=()), q, q, q, 0.5) == 2 * products / peak_share(0.5, 16)
    assert kernel_flops_at_peak(CONFIG, q, q, q, 0.5) == 2 * products / peak_share(0.5, 16) / 2
    assert kernel_flops_at_peak(CONFIG, q, q, q, 0.25, backward=True) == 5 * products / peak_share(0.25, 16) / 2
    assert kernel_flops_at_peak(CONFIG, narrow, narrow, narrow, 0.5) == kernel_flops_at_peak(CONFIG, q, q, q, 0.5)


def test_short_sequences_run_at_less_of_the_peak():
    assert peak_share(0.4, 1024) == 0.4
    assert peak_share(0.4, 512) == pytest.approx(0.32, rel=1e-3)
    assert peak_share(0.4, 16) < 0.03
    assert peak_share(0.4, 2**20) < 0.54
