"""Attention by a library's kernel as two primitives, forward and backward, so that the scores never reach memory.

Over queries [batch, length, heads, width] and keys and values [batch, length, key heads, width]. Each is lowered as
the kernel that its `KernelCall` names for that kernel's platform, elsewhere as the plain code of
`autoshard.transforms.attention_op`. Segment ids may follow the operands, integers [batch, length]: those of the
queries and those of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import numpy as jnp
from jax.interpreters import mlir

from autoshard.transforms.attention_kernels import KERNELS, KernelCall
from autoshard.transforms.attention_op import (
    AttentionConfig,
    ScoreOp,
    attend,
    block_gradients,
    finalize_gradients,
    out_dot_cotangent,
)
from autoshard.transforms.cudnn_attention import cudnn_backward, cudnn_forward
from autoshard.transforms.primitive import define_primitive
from autoshard.transforms.splash_attention import MASKED, splash_backward, splash_forward


def _reference(query: Any, key: Any, value: Any, *segments: Any, call: KernelCall) -> tuple[Any, Any]:
    if KERNELS[call.kernel].interpreted:
        return splash_forward(query, key, value, *segments, call=call)
    config, extras = _config(query, key, segments, call), _mask(segments)
    out, row_max, row_sum = attend(_grouped(query, key), key, value, *extras, config=config)
    out = out.reshape(*query.shape[:3], value.shape[3])
    return out, (row_max + jnp.log(row_sum)).reshape(_row_shape(query))


def _reference_backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cotangent: Any, *segments: Any, call: KernelCall
) -> tuple[Any, ...]:
    if KERNELS[call.kernel].interpreted:
        return splash_backward(query, key, value, out, logsumexp, cotangent, *segments, call=call)
    config = _config(query, key, segments, call)
    q, o, ct = (_grouped(x, key) for x in (query, out, cotangent))
    lse = logsumexp.reshape(logsumexp.shape[0], key.shape[2], -1, logsumexp.shape[2])
    delta = out_dot_cotangent(config, o, ct)
    grads = block_gradients(config, q, key, value, lse, jnp.ones_like(lse), ct, delta, _mask(segments))
    dq, dk, dv = finalize_gradients(config, grads)
    return dq.reshape(query.shape), dk, dv


def _mask(segments: Sequence[Any]) -> tuple[Any, ...]:
    """Where segment ids let queries see keys: [batch, queries, keys]; nothing without them."""
    return (segments[0][:, :, None] == segments[1][:, None, :],) if segments else ()


def _config(query: Any, key: Any, segments: Sequence[Any], call: KernelCall) -> AttentionConfig:
    """The kernel's attention, with the query heads split into key heads ``h`` and their groups ``g``."""
    dtype, key_dtype = str(query.dtype), str(key.dtype)
    ops = [ScoreOp("scale", call.scale)]
    if call.soft_cap is not None:
        ops += [ScoreOp("scale", 1 / call.soft_cap), ScoreOp("tanh"), ScoreOp("scale", call.soft_cap)]
    if call.low is not None or call.high is not None:
        ops.append(ScoreOp("band", MASKED, low=call.low, high=call.high))
    if segments:
        ops.append(ScoreOp("mask", MASKED, 0))
    return AttentionConfig(
        "bqhgd", "bkhd", "bkhe", "bqhge", "bhgq", "q", "k", tuple(ops), ("bqk",) * bool(segments),
        "float32", "float32", dtype, dtype,
        cotangent_dims="bqhge", grad_dims=("bqhgd", "bkhd", "bkhe"), grad_dtypes=(dtype, key_dtype, key_dtype),
    )  # fmt: skip


def _grouped(x: Any, key: Any) -> Any:
    """[batch, length, heads, width] -> [batch, length, key heads, groups, width]."""
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])


def _row_shape(query: Any) -> tuple[int, int, int]:
    batch, length, heads, _ = query.shape
    return batch, heads, length


def _shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    out = query.update(shape=(*query.shape[:3], value.shape[3]))
    return out, query.update(shape=_row_shape(query), dtype=jnp.dtype("float32"), weak_type=False)


def _backward_shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return query, key, value


def _only_for(name: str, kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` for calls of the kernel ``name``; for others, which are of another platform, ``otherwise``."""

    def lowered(*operands: Any, call: KernelCall) -> Any:
        return (kernel if call.kernel == name else otherwise)(*operands, call=call)

    return lowered


attention_kernel_p = define_primitive("attention_kernel", _reference, _shapes)
"""(query, key, value, *segments) -> (output, the log-sum-exp of each row of scores: [batch, heads, length])."""
attention_kernel_backward_p = define_primitive("attention_kernel_backward", _reference_backward, _backward_shapes)
"""(query, key, value, output, log-sum-exp, cotangent, *segments) -> gradients of query, key and value. Output and
log-sum-exp may be over more keys than are given: the result is then what these keys contribute, as a ring adds it
up."""
for _platform, _name, _forward, _backward in (
    ("cuda", "cudnn", cudnn_forward, cudnn_backward),
    ("tpu", "splash", splash_forward, splash_backward),
):
    for _p, _kernel, _plain in (
        (attention_kernel_p, _forward, _reference),
        (attention_kernel_backward_p, _backward, _reference_backward),
    ):
        _lowering = mlir.lower_fun(_only_for(_name, _kernel, _plain), multiple_results=True)
        mlir.register_lowering(_p, _lowering, platform=_platform)
