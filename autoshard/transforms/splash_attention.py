"""Attention as JAX's splash attention for TPUs: Pallas kernels, forward and backward.

`jax.experimental.pallas.ops.tpu.splash_attention`, with masks of our own: which blocks are computed, and in which order
they are fetched, follows from the limits of a band by arithmetic, so that a mask is never made of all positions. The
blocks on the border of the band are masked in the kernel, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from autoshard.transforms.attention_kernels import KERNELS, KernelCall
from autoshard.transforms.kernel_residuals import gradients_from

MASKED = splash.DEFAULT_MASK_VALUE
"""The score of a masked key, and about the log-sum-exp of a row without any other."""
COMPUTE_BLOCK = 512
"""Keys of a block whose scores are in registers and on the chip at once."""


def splash_forward(query: Any, key: Any, value: Any, *segments: Any, call: KernelCall) -> tuple[Any, Any]:
    """(output, log-sum-exp), as `autoshard.transforms.kernel_op.attention_kernel_p`."""
    batch, queries, heads, _ = query.shape
    operands = _kernel_operands(query, key, value, segments, call)
    with jax.named_scope(scope_name(call, queries, key.shape[1], backward=False)):
        out, (logsumexp,) = _kernel(call, queries, key.shape[1], bool(segments), save_residuals=True)(*operands)
    if call.some_rows_empty(queries, key.shape[1]):  # of rows in no computed block the output is 0 / 0
        empty = logsumexp <= MASKED / 2
        out = jnp.where(empty[..., None], 0, out)
        logsumexp = jnp.where(empty, MASKED, logsumexp)
    return _from_heads(out, batch), logsumexp.reshape(batch, heads, queries)


def splash_backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cotangent: Any, *segments: Any, call: KernelCall
) -> tuple[Any, ...]:
    """Gradients, as `autoshard.transforms.kernel_op.attention_kernel_backward_p`."""
    batch, queries, *_ = query.shape
    with jax.named_scope(scope_name(call, queries, key.shape[1], backward=True)):
        kernel = _kernel(call, queries, key.shape[1], bool(segments), save_residuals=False)
        q, k, v, *ids = _kernel_operands(query, key, value, segments, call)
        own_out, pullback = jax.vjp(lambda q, k, v: kernel(q, k, v, *ids), q, k, v)
        _, gradients = gradients_from(pullback, own_out, q.shape[:-1], "splash attention")
        lse = logsumexp.reshape(q.shape[:-1])
        given, ct = (_to_heads(x, by_batch=bool(segments)) for x in (out, cotangent))
        dq, dk, dv = gradients(given, lse, ct)
    if call.scales_keys:
        dk = dk * jnp.asarray(call.scale, dk.dtype)
    else:
        dq = dq * jnp.asarray(call.scale, dq.dtype)
    return tuple(_from_heads(x, batch) for x in (dq, dk, dv))


def scope_name(call: KernelCall, queries: int, keys: int, *, backward: bool) -> str:
    """The name in the compiled program's metadata, which says what the kernel computes."""
    blocks = call.computed_blocks(queries, keys, backward=backward)
    return f"splash_blocks_{int(blocks.sum())}_of_{blocks.size}"


def _kernel_operands(query: Any, key: Any, value: Any, segments: Sequence[Any], call: KernelCall) -> tuple[Any, ...]:
    """Batch and heads as one dimension, as [batch * heads, length, width]; with segments, which are of a batch, as
    [batch, heads, length, width], and with their ids. Queries or keys are scaled, which the kernel does not do."""
    if call.scales_keys:
        key = key * jnp.asarray(call.scale, key.dtype)
    else:
        query = query * jnp.asarray(call.scale, query.dtype)
    ids = [splash.SegmentIds(*segments)] if segments else []
    return *(_to_heads(x, by_batch=bool(segments)) for x in (query, key, value)), *ids


def _to_heads(x: Any, *, by_batch: bool) -> Any:
    x = jnp.swapaxes(x, 1, 2)
    return x if by_batch else x.reshape(-1, *x.shape[2:])


def _from_heads(x: Any, batch: int) -> Any:
    return jnp.swapaxes(x.reshape(batch, -1, *x.shape[-2:]), 1, 2)


@dataclass(frozen=True)
class _Band:
    """The mask of a block's scores by position, for the kernel; equal for equal limits, as JAX's caches need it."""

    low: int | None
    high: int | None

    def __call__(self, query: Any, key: Any) -> Any:
        low = None if self.low is None else key >= query + self.low
        high = None if self.high is None else key <= query + self.high
        return high if low is None else low if high is None else low & high


def _kernel(call: KernelCall, queries: int, keys: int, by_batch: bool, *, save_residuals: bool) -> Callable[..., Any]:
    """The kernel of `_kernel_operands`, which are ``by_batch`` with segments."""
    kernel = KERNELS[call.kernel]
    one_backward = kernel.gradient_is_one_kernel(keys)
    rows, columns = kernel.block(queries, keys, backward=False)
    _, gradient_columns = kernel.block(queries, keys, backward=True)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=_compute_block(columns),
        block_q_dkv=rows,
        block_kv_dkv=gradient_columns,
        block_kv_dkv_compute=_compute_block(gradient_columns),
        block_q_dq=None if one_backward else rows,
        block_kv_dq=None if one_backward else columns,
        use_fused_bwd_kernel=one_backward,
    )
    masked = call.low is not None or call.high is not None
    computed, in_gradient = (call.computed_blocks(queries, keys, backward=b) for b in (False, True))
    positions = np.arange(queries, dtype=np.int32) if masked else None
    by_query = _packed_rows(computed) if masked else (None, None)
    by_key = (None, None)
    if masked:  # one backward kernel writes a part of the queries' gradient in every step: none is left out
        by_key = _in_place(in_gradient) if one_backward else tuple(x.T for x in _packed_rows(in_gradient.T))
    forward, by_key = (_mask_info(*x, positions) for x in (by_query, by_key))
    run = splash.SplashAttentionKernel(
        forward,
        None if one_backward else forward,
        by_key,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=save_residuals,
        mask_value=MASKED,
        attn_logits_soft_cap=call.soft_cap,
        residual_checkpoint_name=None,
        mask_function=_Band(call.low, call.high) if masked else None,
        interpret=kernel.interpreted,
    )
    return jax.vmap(run) if by_batch else run


def _compute_block(columns: int) -> int:
    """The largest part of a block of keys that is a multiple of 128, divides it, and is at most `COMPUTE_BLOCK`."""
    return next(n for n in range(min(columns, COMPUTE_BLOCK), 0, -128) if columns % n == 0)


def _mask_info(fetched: Any, computed: Any, positions: Any) -> MaskInfo:
    """Which block each step fetches, and whether it is computed; the same for all heads."""
    if fetched is None:
        return MaskInfo(None, None, None, None, None)
    smallest = np.int8 if fetched.max() < 128 else np.int16 if fetched.max() < 2**15 else np.int32
    return MaskInfo(fetched[None].astype(smallest), None, computed[None].astype(np.int8), None, positions)


def _packed_rows(computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The computed blocks of each row, in as few steps as the longest row needs.

    Returns:
      the column that each step fetches, and whether the step computes: [rows, steps].
    """
    steps = max(1, int(computed.sum(1).max()))
    fetched = np.zeros((len(computed), steps), np.int32)
    for i, row in enumerate(computed):
        (columns,) = np.nonzero(row)
        fetched[i, : len(columns)] = columns
        fetched[i, len(columns) :] = columns[-1] if len(columns) else 0  # what is there already
    return fetched, np.arange(steps)[None, :] < computed.sum(1)[:, None]


def _in_place(computed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_packed_rows` of the transposed blocks, with one step for each row of each column: [rows, columns]."""
    fetched = np.broadcast_to(np.arange(len(computed), dtype=np.int32)[:, None], computed.shape)
    first = np.where(computed.any(0), computed.argmax(0), 0)  # before it, fetch it: above a causal mask
    return np.where(computed, fetched, first[None, :]).astype(np.int32), computed
