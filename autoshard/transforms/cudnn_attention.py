"""Attention as one cuDNN flash-attention kernel, forward and backward, so that the scores never reach HBM.

Two primitives over queries [batch, length, heads, width] and keys and values [batch, length, key heads, width]. For
NVIDIA GPUs they are lowered as `jax.nn.dot_product_attention(implementation="cudnn")`, elsewhere as the plain code of
`autoshard.transforms.attention_op`. Planning needs no cuDNN; compiling for a GPU without it is an error that says so.
Here too: which attentions the kernel supports, and how many FLOPs at the peak its time is worth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import mlir

from autoshard.errors import MeshError
from autoshard.transforms.attention_op import (
    AttentionConfig,
    ScoreOp,
    attend,
    block_gradients,
    finalize_gradients,
    out_dot_cotangent,
)
from autoshard.transforms.primitive import define_primitive

MAX_HEAD_WIDTH = 128
"""The widest head that cuDNN supports on every GPU, forward and backward. Narrower heads are priced as if they were as
wide: on an H100 they run at 0.65 to 0.8 of its FLOP/s (FlashAttention-3, arXiv:2407.08608, figure 5: 64 beside 128)."""
MEASURED_KEYS = 1024
"""The number of keys at which the shares of the peak in hardware tables (`Hardware.attention`) were measured."""
STARTUP_KEYS = 341
"""The fixed cost of a kernel, in keys: on an H100 it runs at 0.32 of the peak with 512 keys and at 0.4 with 1,024 (the
same figure, with a causal mask)."""
NEGLIGIBLE_SCORE = -1e6
"""A masked score at or below this has no weight beside any unmasked one. cuDNN gives masked keys no weight at all."""
DTYPES = ("bfloat16", "float16")


def unsupported_reason(config: AttentionConfig, query: Any, key: Any, value: Any) -> str:
    """Why cuDNN does not support an attention over operands of these shapes and dtypes; "" where it does."""
    dtypes = {str(x.dtype) for x in (query, key, value)}
    sizes = config.sizes(query, key, value)
    width, fill = sizes[config.head_width], causal_fill(config)
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"cuDNN takes queries, keys and values of {' or '.join(DTYPES)}, not {', '.join(sorted(dtypes))}"
    if other := next((op.kind for op in config.score_ops if op.kind not in {"scale", "band"}), ""):
        return f"of masks and biases cuDNN's kernel is used for the causal mask only ({other})"
    if fill is not None and [(op.low, op.high) for op in config.score_ops if op.kind == "band"] != [(None, 0)]:
        return "of masks and biases cuDNN's kernel is used for the causal mask only (window)"
    if fill is not None and fill > NEGLIGIBLE_SCORE:
        return f"cuDNN gives masked keys no weight, and these have one by their score of {fill:g}"
    if fill is not None and sizes[config.query_position] != sizes[config.key_position]:
        queries, keys = sizes[config.query_position], sizes[config.key_position]
        return f"cuDNN's causal mask needs as many queries as keys, not {queries} and {keys}"
    own_key_dims = set(config.key_dims) ^ set(config.value_dims)
    widths = {config.head_width, config.value_width}
    if set(config.query_dims) != {*config.row_dims, config.head_width} or own_key_dims != widths:
        return "cuDNN takes keys and values of the same heads, and no key head without a query head"
    if config.out_dtype not in dtypes:
        return f"cuDNN's output has the dtype of its operands, {dtypes.pop()}, not {config.out_dtype}"
    if width % 8 or width > MAX_HEAD_WIDTH or sizes[config.value_width] != width:
        return f"cuDNN takes head widths that are a multiple of 8 and at most {MAX_HEAD_WIDTH}, not {width}"
    return ""


def causal_fill(config: AttentionConfig) -> float | None:
    """The score of masked keys after all score ops, which must be scales and bands only; None without a band."""
    score = None
    for op in config.score_ops:
        score = op.constant if op.kind == "band" else score and score * op.constant
    return score


def kernel_flops_at_peak(
    config: AttentionConfig, query: Any, key: Any, value: Any, share: float, *, backward: bool = False
) -> float:
    """The kernel's time in FLOPs at the chip's peak.

    Args:
      share: FLOP/s of the kernel over the peak, as `Hardware.attention` states it for `MEASURED_KEYS` keys.
    """
    sizes, flops = config.sizes(query, key, value), config.flops(query, key, value, backward=backward)
    return flops_at_peak(
        flops,
        sizes[config.head_width],
        peak_share(share, sizes[config.key_position]),
        causal=causal_fill(config) is not None,
    )


def flops_at_peak(flops: float, width: int, share: float, *, causal: bool) -> float:
    """The kernel's time in FLOPs at the chip's peak: a causal mask halves the work, a narrow head costs a wide one.

    Args:
      flops: of the products without a mask.
      width: of a head.
      share: FLOP/s of the kernel over the peak, for this number of keys (`peak_share`).
    """
    return flops * max(1.0, MAX_HEAD_WIDTH / width) / share / (2 if causal else 1)


def peak_share(share: float, keys: int) -> float:
    """FLOP/s of the kernel over the peak with ``keys`` keys, where it is ``share`` with `MEASURED_KEYS`."""
    return share * (1 + STARTUP_KEYS / MEASURED_KEYS) / (1 + STARTUP_KEYS / keys)


def _config(query: Any, key: Any, scale: float, causal: bool) -> AttentionConfig:
    """The kernel's attention, with the query heads split into key heads ``h`` and their groups ``g``."""
    dtype, key_dtype = str(query.dtype), str(key.dtype)
    score_ops = (ScoreOp("scale", scale), *([ScoreOp("band", -math.inf, high=0)] if causal else []))
    return AttentionConfig(
        "bqhgd", "bkhd", "bkhe", "bqhge", "bhgq", "q", "k", score_ops, (), "float32", "float32", dtype, dtype,
        cotangent_dims="bqhge", grad_dims=("bqhgd", "bkhd", "bkhe"), grad_dtypes=(dtype, key_dtype, key_dtype),
    )  # fmt: skip


def _grouped(x: Any, key: Any) -> Any:
    """[batch, length, heads, width] -> [batch, length, key heads, groups, width]."""
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])


def _reference(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
    out, row_max, row_sum = attend(_grouped(query, key), key, value, config=_config(query, key, scale, causal))
    return out.reshape(query.shape), (row_max + jnp.log(row_sum)).reshape(_row_shape(query))


def _reference_backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cotangent: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Any]:
    config = _config(query, key, scale, causal)
    q, o, ct = (_grouped(x, key) for x in (query, out, cotangent))
    lse = logsumexp.reshape(logsumexp.shape[0], key.shape[2], -1, logsumexp.shape[2])
    delta = out_dot_cotangent(config, o, ct)
    grads = block_gradients(config, q, key, value, lse, jnp.ones_like(lse), ct, delta, ())
    dq, dk, dv = finalize_gradients(config, grads)
    return dq.reshape(query.shape), dk, dv


def _cudnn_with_vjp(
    query: Any, key: Any, value: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Callable[..., tuple[Any, ...]]]:
    """The output, the log-sum-exp of each row, and the function (output, logsumexp, cotangent) -> gradients.

    JAX returns the log-sum-exp to a caller in the output's dtype, which is too narrow, and saves it for its own
    gradient in float32: it is the one float32 residual of `jax.vjp` of shape [batch, heads, length].
    """
    cudnn = functools.partial(jax.nn.dot_product_attention, scale=scale, is_causal=causal, implementation="cudnn")
    try:
        out, pullback = jax.vjp(cudnn, query, key, value)
    except RuntimeError as e:
        raise MeshError(
            f"attention of {query.dtype}{list(query.shape)} is to run as a cuDNN kernel, and JAX has no cuDNN to "
            f"compile it for ({e}): pip install 'autoshard[gpu]'; or leave the pass 'attention' out of passes=[...]"
        ) from None
    residuals, tree = jax.tree.flatten(pullback)
    sums = [i for i, x in enumerate(residuals) if (x.shape, str(x.dtype)) == (_row_shape(query), "float32")]
    outs = [i for i, x in enumerate(residuals) if x is out]
    if len(sums) != 1 or len(outs) != 1:
        raise MeshError(
            f"attention of {query.dtype}{list(query.shape)}: JAX {jax.__version__} saves other residuals for the "
            "gradient of cuDNN attention than autoshard knows; leave the pass 'attention' out of passes=[...]"
        )

    def gradients(out: Any, logsumexp: Any, cotangent: Any) -> tuple[Any, ...]:
        replaced = list(residuals)
        replaced[outs[0]], replaced[sums[0]] = out, logsumexp
        return jax.tree.unflatten(tree, replaced)(cotangent)

    return out, residuals[sums[0]], gradients


def _cudnn(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
    return _cudnn_with_vjp(query, key, value, scale=scale, causal=causal)[:2]


def _cudnn_backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cotangent: Any, *, scale: float, causal: bool
) -> tuple[Any, ...]:
    return _cudnn_with_vjp(query, key, value, scale=scale, causal=causal)[2](out, logsumexp, cotangent)


def _row_shape(query: Any) -> tuple[int, int, int]:
    batch, length, heads, _ = query.shape
    return batch, heads, length


def _shapes(query: Any, key: Any, value: Any, **_: Any) -> tuple[Any, Any]:
    return query, query.update(shape=_row_shape(query), dtype=jnp.dtype("float32"), weak_type=False)


def _backward_shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return query, key, value


attention_kernel_p = define_primitive("attention_kernel", _reference, _shapes)
"""(query, key, value) -> (output, the log-sum-exp of each row of scores: [batch, heads, length])."""
attention_kernel_backward_p = define_primitive("attention_kernel_backward", _reference_backward, _backward_shapes)
"""(query, key, value, output, log-sum-exp, cotangent) -> gradients of query, key and value. Output and log-sum-exp may
be over more keys than are given: the result is then what these keys contribute, as a ring adds it up."""
for _p, _fun in ((attention_kernel_p, _cudnn), (attention_kernel_backward_p, _cudnn_backward)):
    mlir.register_lowering(_p, mlir.lower_fun(_fun, multiple_results=True), platform="cuda")
