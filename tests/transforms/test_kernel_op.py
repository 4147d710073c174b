"""Attention as a library's kernel: the numbers of `jax.nn.dot_product_attention`, and what it does not take."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from autoshard.errors import MeshError
from autoshard.transforms import cudnn_attention, kernel_op
from autoshard.transforms.attention_kernels import KernelCall
from autoshard.transforms.kernel_op import attention_kernel_backward_p, attention_kernel_p

CAUSAL = KernelCall("cudnn", 0.3, high=0)


def operands(key_heads, dtype, batch=2, length=16, heads=4, width=8):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(batch, length, n, width)), dtype) for n in (heads, key_heads, key_heads)]


@pytest.mark.parametrize(
    ("causal", "window", "key_heads", "dtype"),
    [
        (False, None, 4, "float32"),
        (True, None, 2, "float32"),
        (True, None, 1, "float32"),
        (True, None, 2, "bfloat16"),
        (True, 5, 2, "float32"),
    ],
)
def test_the_numbers_are_those_of_jax(causal, window, key_heads, dtype):
    q, k, v = operands(key_heads, dtype)
    call = KernelCall("cudnn", 0.3, low=None if window is None else -window, high=0 if causal else None)
    theirs = functools.partial(
        jax.nn.dot_product_attention,
        scale=0.3,
        is_causal=causal,
        local_window_size=None if window is None else (window, 0),
        implementation="xla",
    )
    want, logsum = theirs(q, k, v, return_residual=True)
    out, own = jax.jit(functools.partial(attention_kernel_p.bind, call=call))(q, k, v)
    assert (out.dtype, own.dtype) == (q.dtype, jnp.float32)
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    close = functools.partial(np.testing.assert_allclose, **near)
    close(out.astype("float32"), want.astype("float32"))
    close(own, jnp.swapaxes(logsum, 1, 2).astype("float32"))
    cotangent = jnp.cos(3 * want)
    backward = jax.jit(functools.partial(attention_kernel_backward_p.bind, call=call))
    want = jax.jit(lambda ct, *ours: jax.vjp(theirs, *ours)[1](ct))(cotangent, q, k, v)
    for x, y in zip(backward(q, k, v, out, own, cotangent), want, strict=True):
        assert x.dtype == y.dtype
        close(x.astype("float32"), y.astype("float32"))


def stand_in(query, key, value, *, scale, is_causal, local_window_size, implementation):
    """A stand-in for cuDNN attention with the residuals that JAX saves for its gradient."""
    assert implementation == "cudnn"
    before, after = local_window_size or (None, 0)
    assert after == 0
    low = None if before is None else -before
    params = {"call": KernelCall("cudnn", scale, low=low, high=0 if is_causal else None)}

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


@pytest.mark.parametrize("call", [CAUSAL, KernelCall("cudnn", 0.3, low=-5, high=0)], ids=["causal", "window"])
def test_the_gradient_uses_the_given_output_and_the_forward_kernel_is_dead_code(call, monkeypatch):
    """A block's gradient is of the sums over all blocks, not of its own."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = operands(2, "bfloat16")
    params = {"call": call}
    out, logsum = jax.jit(functools.partial(cudnn_attention.cudnn_forward, **params))(q, k, v)
    further = logsum + 1, (out / 2).astype(out.dtype), jnp.cos(3 * out)
    given = q, k, v, further[1], further[0], further[2]
    have, want = (
        jax.jit(functools.partial(f, **params)).lower(*given).compile()
        for f in (cudnn_attention.cudnn_backward, kernel_op._reference_backward)
    )
    assert have.cost_analysis()["flops"] == want.cost_analysis()["flops"]
    for x, y in zip(have(*given), want(*given), strict=True):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=1e-2, atol=1e-2)


def test_without_the_library_compiling_for_a_gpu_says_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    step = jax.jit(lambda q, k, v: attention_kernel_p.bind(q, k, v, call=CAUSAL)).trace(*operands(2, "bfloat16"))
    with pytest.raises(MeshError, match=r"bfloat16\[2, 16, 4, 8\].*cuDNN not found.*autoshard\[gpu\].*'attention'"):
        step.lower(lowering_platforms=("cuda",))
    step.lower(lowering_platforms=("cpu",))
