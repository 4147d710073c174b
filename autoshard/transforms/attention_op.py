"""Softmax attention as two primitives, forward and backward, and the math of one block of scores.

An `AttentionConfig` holds the static parameters of both primitives. By default they are lowered, differentiated and
batched as plain JAX code (`attend` and `attention_gradients`); the local forms of `autoshard.rules.attention` compute
the same block by block, for a sequence that is sharded or whose scores would not fit on the chip.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.transforms.primitive import define_primitive


@dataclass(frozen=True, slots=True)
class ScoreOp:
    """One elementwise operation on the scores, between the product of queries and keys and the softmax."""

    kind: str
    """``scale``: times ``constant``; ``shift``: plus ``constant``; ``tanh``: its hyperbolic tangent; ``bias``: plus an
    operand; ``mask``: ``constant`` where a boolean operand says so; ``band``: ``constant`` outside a band of key
    position minus query position; ``segments``: ``constant`` where the segment ids at the positions of query and key
    differ, which one operand has for both."""
    constant: float = 0.0
    extra: int = -1
    """Of a ``bias``, ``mask`` or ``segments``: the index of its operand among the extras."""
    keep_true: bool = True
    """Of a ``mask``: whether scores are kept where the operand is True, or where it is False."""
    low: int | None = None
    high: int | None = None
    """Of a ``band``: its inclusive limits; None for no limit. A causal mask is ``high=0``."""

    @property
    def is_mask(self) -> bool:
        """Whether scores are replaced by ``constant``, by an operand or by position."""
        return self.kind in {"mask", "band", "segments"}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The static parameters of one attention: einsum subscripts of its arrays (one letter a dimension, the same
    letter for the same dimension everywhere), what happens to the scores, and the dtypes and precisions."""

    query_dims: str
    """Subscripts of the queries, as ``bqhd``."""
    key_dims: str
    """Subscripts of the keys, as ``bkhd``."""
    value_dims: str
    """Subscripts of the values, as ``bkhe``."""
    out_dims: str
    """Subscripts of the output, as ``bqhe``."""
    row_dims: str
    """Subscripts of what there is one of per softmax row (``row_max``, ``row_sum``): those of the scores without
    ``key_position``, as ``bhq``."""
    query_position: str
    """The letter of the queries' sequence dimension."""
    key_position: str
    """The letter of the keys' and values' sequence dimension. The scores are ``row_dims + key_position``."""
    score_ops: tuple[ScoreOp, ...]
    """What is applied to the scores before the softmax, in this order."""
    extra_dims: tuple[str, ...]
    """Subscripts of each extra operand (a mask, a bias, or segment ids, whose positions are ``key_position``); ``.`` is
    a dimension of size 1."""
    score_dtype: str
    """Dtype of the product of queries and keys (its ``preferred_element_type``)."""
    softmax_dtype: str
    """Dtype of the exponentials in the traced program."""
    weight_dtype: str
    """Dtype of the softmax weights in the products with the values and their cotangents."""
    out_dtype: str
    """Dtype of the output."""
    score_precision: Any = None
    """`jax.lax` precision of the product of queries and keys, and of its transposes in the backward part."""
    value_precision: Any = None
    """`jax.lax` precision of the product of weights and values, and of its transposes in the backward part."""
    cotangent_dims: str = ""
    """Subscripts of the output's cotangent; "" without a backward part."""
    grad_dims: tuple[str, str, str] = ("", "", "")
    """Subscripts of the gradients of query, key and value."""
    grad_dtypes: tuple[str, str, str] = ("", "", "")
    """Dtypes of the gradients of query, key and value."""
    kernel: str = ""
    """The kernel of the target's library that computes it (`autoshard.transforms.attention_kernels`); "" for none."""
    repeated_head: str = ""
    """The letter of the dimension of keys and values that has each head `head_repeats` times in a row; "" for none. Of
    their gradients then only the sum over these is defined, and a kernel gives it to the first."""
    head_repeats: int = 1

    @property
    def accum_dtype(self) -> Any:
        """The dtype in which scores, exponentials and sums are computed: at least float32."""
        return jnp.promote_types(self.softmax_dtype, "float32")

    @property
    def head_width(self) -> str:
        """The letter of the dimension that the product of queries and keys contracts."""
        return "".join(c for c in self.query_dims if c not in self.row_dims)

    @property
    def value_width(self) -> str:
        """The letter of the values' feature dimension."""
        return "".join(c for c in self.value_dims if c not in self.row_dims + self.key_position)

    @property
    def segments(self) -> int | None:
        """The index of the segment ids among the extras, of an attention that has them once; None without."""
        return next((op.extra for op in self.score_ops if op.kind == "segments"), None)

    def sizes(self, query: Any, key: Any, value: Any) -> dict[str, int]:
        """Size of each letter."""
        sides = ((self.query_dims, query), (self.key_dims, key), (self.value_dims, value))
        return {c: n for letters, x in sides for c, n in zip(letters, x.shape, strict=True)}

    def flops(self, query: Any, key: Any, value: Any, *, backward: bool = False) -> float:
        """FLOPs of the products: two forward; five backward, which recomputes the scores."""
        sizes = self.sizes(query, key, value)
        scores = 1.0
        for c in self.row_dims + self.key_position:
            scores *= sizes[c]
        head, value_head = sizes[self.head_width], sizes[self.value_width]
        return 2.0 * scores * (3 * head + 2 * value_head if backward else head + value_head)


def logits(
    config: AttentionConfig, query: Any, key: Any, extras: Sequence[Any], query_start: Any = 0, key_start: Any = 0
) -> Any:
    """The scores of one block of queries and keys after all score ops: [*row_dims, key_position].

    Args:
      extras: masks and biases, over this block's queries and over all keys; segment ids, over all keys.
      query_start, key_start: positions of the block's first query and first key.
    """
    text = f"{config.query_dims},{config.key_dims}->{config.row_dims}{config.key_position}"
    s = jnp.einsum(text, query, key, precision=config.score_precision, preferred_element_type=config.score_dtype)
    return _after_ops(config, config.score_ops, s.astype(config.accum_dtype), extras, query_start, key_start)


def _after_ops(
    config: AttentionConfig,
    score_ops: Sequence[ScoreOp],
    s: Any,
    extras: Sequence[Any],
    query_start: Any,
    key_start: Any,
) -> Any:
    """The scores ``s`` after ``score_ops``."""
    for op in score_ops:
        if op.kind == "scale":
            s = s * op.constant
        elif op.kind == "shift":
            s = s + op.constant
        elif op.kind == "tanh":
            s = jnp.tanh(s)
        elif op.kind == "bias":
            s = s + _block_of_extra(config, op, extras, s, key_start).astype(s.dtype)
        else:
            kept = _kept_scores(config, op, extras, s, query_start, key_start)
            s = jnp.where(kept, s, jnp.asarray(op.constant, s.dtype))
    return s


def _kept_scores(
    config: AttentionConfig, op: ScoreOp, extras: Sequence[Any], s: Any, query_start: Any, key_start: Any
) -> Any:
    """Where a mask or band leaves the block's scores ``s`` as they are: booleans that broadcast against ``s``."""
    if op.kind == "mask":
        mask = _block_of_extra(config, op, extras, s, key_start)
        return mask if op.keep_true else jnp.logical_not(mask)
    if op.kind == "segments":
        own, others = (
            _block_of_extra(config, op, extras, s, start, position)
            for position, start in ((config.query_position, query_start), (config.key_position, key_start))
        )
        return own == others
    offset = key_start + lax.broadcasted_iota("int32", s.shape, s.ndim - 1)
    offset = offset - query_start - lax.broadcasted_iota("int32", s.shape, config.row_dims.index(config.query_position))
    low = True if op.low is None else offset >= op.low
    return low if op.high is None else low & (offset <= op.high)


def _block_of_extra(
    config: AttentionConfig, op: ScoreOp, extras: Sequence[Any], s: Any, start: Any, position: str = ""
) -> Any:
    """The extra of ``op`` for the block's keys, transposed to broadcast against the scores ``s``.

    Args:
      start: the position of the first of these.
      position: ``query_position`` where those of its keys that are the block's queries are asked for.
    """
    x, letters = extras[op.extra], config.extra_dims[op.extra]
    order, position = config.row_dims + config.key_position, position or config.key_position
    size = s.shape[order.index(position)]
    if config.key_position in letters and x.shape[letters.index(config.key_position)] != size:
        x = lax.dynamic_slice_in_dim(x, start, size, letters.index(config.key_position))
    x = lax.squeeze(x, [d for d, c in enumerate(letters) if c == "."])
    letters = letters.replace(".", "").replace(config.key_position, position)
    x = jnp.transpose(x, sorted(range(x.ndim), key=lambda d: order.index(letters[d])))
    return lax.expand_dims(x, [d for d, c in enumerate(order) if c not in letters])


def attend(
    query: Any, key: Any, value: Any, *extras: Any, config: AttentionConfig, flops: float = 0.0, query_start: Any = 0
) -> tuple[Any, Any, Any]:
    """`attention_p` as plain JAX code, over queries whose positions begin at ``query_start`` and all keys."""
    del flops
    s = logits(config, query, key, extras, query_start)
    row_max = jnp.max(s, -1)
    e = jnp.exp(s - row_max[..., None])
    row_sum = jnp.sum(e, -1)
    weights = (e / row_sum[..., None]).astype(config.weight_dtype)
    text = f"{config.row_dims}{config.key_position},{config.value_dims}->{config.out_dims}"
    out = jnp.einsum(text, weights, value, precision=config.value_precision, preferred_element_type=config.out_dtype)
    return out, row_max, row_sum


def attention_gradients(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    row_max: Any,
    row_sum: Any,
    cotangent: Any,
    *extras: Any,
    config: AttentionConfig,
    flops: float = 0.0,
) -> tuple[Any, Any, Any]:
    """`attention_backward_p` as plain JAX code."""
    del flops
    delta = out_dot_cotangent(config, out, cotangent)
    grads = block_gradients(config, query, key, value, row_max, row_sum, cotangent, delta, extras)
    return finalize_gradients(config, grads)


def out_dot_cotangent(config: AttentionConfig, out: Any, cotangent: Any) -> Any:
    """The dot product of output and cotangent, per softmax row: [*row_dims].

    It is D of FlashAttention-2 (arXiv:2307.08691), which turns the softmax's transpose into work per score.
    """
    sides = (out.astype(config.accum_dtype), cotangent.astype(config.accum_dtype))
    return jnp.einsum(f"{config.out_dims},{config.cotangent_dims}->{config.row_dims}", *sides, precision="highest")


def block_gradients(
    config: AttentionConfig,
    query: Any,
    key: Any,
    value: Any,
    row_max: Any,
    row_sum: Any,
    cotangent: Any,
    delta: Any,
    extras: Sequence[Any],
    query_start: Any = 0,
    key_start: Any = 0,
) -> tuple[Any, Any, Any]:
    """What one block of queries and keys adds to the gradients of query, key and value, in ``accum_dtype``.

    Args:
      row_max, row_sum: of the softmax over all keys: [*row_dims].
      delta: `out_dot_cotangent` of the output over all keys: [*row_dims].
      query_start, key_start: positions of the block's first query and first key.
    """
    score_dims = config.row_dims + config.key_position
    score_einsum, value_einsum = (
        functools.partial(jnp.einsum, precision=p, preferred_element_type=config.accum_dtype)
        for p in (config.score_precision, config.value_precision)
    )
    # Scores after each tanh are kept: its derivative is of them.
    capped = [i + 1 for i, op in enumerate(config.score_ops) if op.kind == "tanh"]
    ends = [*capped, len(config.score_ops)]
    s = logits(replace(config, score_ops=config.score_ops[: ends[0]]), query, key, extras, query_start, key_start)
    tanhs: list[Any] = []
    for start, end in pairwise(ends):
        tanhs.append(s)
        s = _after_ops(config, config.score_ops[start:end], s, extras, query_start, key_start)
    p = jnp.exp(s - row_max[..., None]) / row_sum[..., None]
    weights = p.astype(config.weight_dtype)
    dv = value_einsum(f"{score_dims},{config.cotangent_dims}->{config.value_dims}", weights, cotangent)
    dp = value_einsum(f"{config.cotangent_dims},{config.value_dims}->{score_dims}", cotangent, value)
    ds = p * (dp - delta[..., None])
    for op in reversed(config.score_ops):
        if op.kind == "scale":
            ds = ds * op.constant
        elif op.kind == "tanh":
            ds = ds * (1 - tanhs.pop() ** 2)
        elif op.is_mask:
            ds = jnp.where(_kept_scores(config, op, extras, s, query_start, key_start), ds, 0)
    dq = score_einsum(f"{score_dims},{config.key_dims}->{config.query_dims}", ds.astype(key.dtype), key)
    dk = score_einsum(f"{score_dims},{config.query_dims}->{config.key_dims}", ds.astype(query.dtype), query)
    return dq, dk, dv


def finalize_gradients(config: AttentionConfig, grads: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Gradients of query, key and value, transposed from these's dimensions to ``grad_dims`` and cast to
    ``grad_dtypes``."""
    operand_dims = (config.query_dims, config.key_dims, config.value_dims)
    each = zip(operand_dims, config.grad_dims, grads, config.grad_dtypes, strict=True)
    dq, dk, dv = (jnp.transpose(x, [dims.index(c) for c in to]).astype(dtype) for dims, to, x, dtype in each)
    return dq, dk, dv


def _shapes(query: Any, key: Any, value: Any, *extras: Any, config: AttentionConfig, flops: float) -> tuple[Any, ...]:
    del extras, flops
    sizes = config.sizes(query, key, value)
    row = query.update(shape=tuple(sizes[c] for c in config.row_dims), dtype=config.accum_dtype, weak_type=False)
    return row.update(shape=tuple(sizes[c] for c in config.out_dims), dtype=jnp.dtype(config.out_dtype)), row, row


def _backward_shapes(
    query: Any, key: Any, value: Any, *rest: Any, config: AttentionConfig, flops: float
) -> tuple[Any, ...]:
    del rest, flops
    sizes = config.sizes(query, key, value)
    return tuple(
        query.update(shape=tuple(sizes[c] for c in letters), dtype=jnp.dtype(d), weak_type=False)
        for letters, d in zip(config.grad_dims, config.grad_dtypes, strict=True)
    )


attention_p = define_primitive("attention", attend, _shapes)
"""(query, key, value, *extras) -> (output, row_max, row_sum): per row of scores, the largest score and the sum of
``exp(score - row_max)``. (One log-sum-exp in their place would lose ``row_sum`` where ``row_max`` is as large as the
constant of a mask.)"""
attention_backward_p = define_primitive("attention_backward", attention_gradients, _backward_shapes)
"""(query, key, value, output, row_max, row_sum, cotangent of the output, *extras) -> gradients of query, key, value."""
