"""Attention as one operation: what `softmax(scores(q, k)) v` and its gradient are, whole or block by block.

A `Form` says how the operands lie and what is done to the scores; from it follow both primitives. Outside of a plan
they are the plain composition, `attend` and `gradients` over one block. `autoshard.rules.attention` runs the same
blocks round a ring. Under differentiation and batching the primitives dissolve into the plain composition.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.transforms.primitive import define_primitive


@dataclass(frozen=True, slots=True)
class ScoreOp:
    """What is done to every score, on its way to the softmax."""

    kind: str
    """``scale`` or ``shift`` by a number, ``bias`` by an operand, ``keep`` where an operand is ``positive``, or where
    the key's position less the query's lies in a ``band``; what is not kept becomes the number."""
    constant: float = 0.0
    extra: int = -1
    """Which of the extras."""
    keep_true: bool = True
    low: int | None = None
    high: int | None = None
    """The band's ends, inclusive; None where it has none."""

    @property
    def is_mask(self) -> bool:
        return self.kind in {"mask", "band"}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How an attention's operands lie, a letter a dimension, and how it is computed."""

    query_dims: str
    key_dims: str
    value_dims: str
    out_dims: str
    row_dims: str
    """The dimensions of the scores, but for the keys'."""
    query_position: str
    """The one among them along which queries have positions."""
    key_position: str
    """The dimension along which keys and values have positions; the last of the scores."""
    score_ops: tuple[ScoreOp, ...]
    extra_dims: tuple[str, ...]
    """How the further operands lie; ``.`` is a dimension of size 1."""
    score_dtype: str
    """Dtype of the product of query and key."""
    softmax_dtype: str
    weight_dtype: str
    """Dtype in which the softmax meets the values."""
    out_dtype: str
    score_precision: Any = None
    """That of the products of queries and keys."""
    value_precision: Any = None
    """That of the products with values."""
    cotangent_dims: str = ""
    grad_dims: tuple[str, str, str] = ("", "", "")
    """How the backward part's results lie."""
    grad_dtypes: tuple[str, str, str] = ("", "", "")
    fused: bool = False
    """Whether a kernel of the target's own library runs it (`autoshard.transforms.cudnn_attention`)."""

    @property
    def accum_dtype(self) -> Any:
        """The dtype of sums and exponentials."""
        return jnp.promote_types(self.softmax_dtype, "float32")

    @property
    def head_width(self) -> str:
        """The width of a query and key."""
        return "".join(c for c in self.query_dims if c not in self.row_dims)

    @property
    def value_width(self) -> str:
        """The width of a value."""
        return "".join(c for c in self.value_dims if c not in self.row_dims + self.key_position)

    def sizes(self, query: Any, key: Any, value: Any) -> dict[str, int]:
        """Size of each letter."""
        sides = ((self.query_dims, query), (self.key_dims, key), (self.value_dims, value))
        return {c: n for letters, x in sides for c, n in zip(letters, x.shape, strict=True)}

    def flops(self, query: Any, key: Any, value: Any, *, backward: bool = False) -> float:
        """Floating-point operations of the products; those of the backward part make the scores again."""
        sizes = self.sizes(query, key, value)
        cells = 1.0
        for c in self.row_dims + self.key_position:
            cells *= sizes[c]
        inner, outer = sizes[self.head_width], sizes[self.value_width]
        return 2.0 * cells * (3 * inner + 2 * outer if backward else inner + outer)


def logits(form: AttentionConfig, query: Any, key: Any, extras: Sequence[Any], row: Any = 0, col: Any = 0) -> Any:
    """What the softmax is taken of, of one block: [*rows, col].

    Args:
      row, col: the positions at which the block's queries and keys begin. Extras that depend on keys hold all of them.
    """
    text = f"{form.query_dims},{form.key_dims}->{form.row_dims}{form.key_position}"
    s = jnp.einsum(text, query, key, precision=form.score_precision, preferred_element_type=form.score_dtype)
    s = s.astype(form.accum_dtype)
    for step in form.score_ops:
        if step.kind == "scale":
            s = s * step.constant
        elif step.kind == "shift":
            s = s + step.constant
        elif step.kind == "bias":
            s = s + _extra(form, step, extras, s, col).astype(s.dtype)
        else:
            s = jnp.where(_kept(form, step, extras, s, row, col), s, jnp.asarray(step.constant, s.dtype))
    return s


def _kept(form: AttentionConfig, step: ScoreOp, extras: Sequence[Any], s: Any, row: Any, col: Any) -> Any:
    if step.kind == "mask":
        mask = _extra(form, step, extras, s, col)
        return mask if step.keep_true else jnp.logical_not(mask)
    ahead = col + lax.broadcasted_iota("int32", s.shape, s.ndim - 1)
    ahead = ahead - row - lax.broadcasted_iota("int32", s.shape, form.row_dims.index(form.query_position))
    low = True if step.low is None else ahead >= step.low
    return low if step.high is None else low & (ahead <= step.high)


def _extra(form: AttentionConfig, step: ScoreOp, extras: Sequence[Any], s: Any, col: Any) -> Any:
    """The block's part of an extra, dimensions in the order of the scores."""
    x, letters = extras[step.extra], form.extra_dims[step.extra]
    if form.key_position in letters and x.shape[letters.index(form.key_position)] != s.shape[-1]:
        x = lax.dynamic_slice_in_dim(x, col, s.shape[-1], letters.index(form.key_position))
    x = lax.squeeze(x, [d for d, c in enumerate(letters) if c == "."])
    letters, order = letters.replace(".", ""), form.row_dims + form.key_position
    x = jnp.transpose(x, sorted(range(x.ndim), key=lambda d: order.index(letters[d])))
    return lax.expand_dims(x, [d for d, c in enumerate(order) if c not in letters])


def attend(
    query: Any, key: Any, value: Any, *extras: Any, form: AttentionConfig, flops: float = 0.0, row: Any = 0
) -> tuple[Any, Any, Any]:
    """The plain composition of `attention_p`, of queries whose positions begin at ``row``."""
    del flops
    s = logits(form, query, key, extras, row)
    peak = jnp.max(s, -1)
    e = jnp.exp(s - peak[..., None])
    total = jnp.sum(e, -1)
    weights = (e / total[..., None]).astype(form.weight_dtype)
    text = f"{form.row_dims}{form.key_position},{form.value_dims}->{form.out_dims}"
    out = jnp.einsum(text, weights, value, precision=form.value_precision, preferred_element_type=form.out_dtype)
    return out, peak, total


def attention_gradients(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    peak: Any,
    total: Any,
    cotangent: Any,
    *extras: Any,
    form: AttentionConfig,
    flops: float = 0.0,
) -> tuple[Any, Any, Any]:
    """The plain composition of `attention_backward_p`."""
    del flops
    inner = out_dot_cotangent(form, out, cotangent)
    found = block_gradients(form, query, key, value, peak, total, cotangent, inner, extras)
    return finalize_gradients(form, found)


def out_dot_cotangent(form: AttentionConfig, out: Any, cotangent: Any) -> Any:
    """Of each row, the cotangent's part along what came out: [*rows]."""
    sides = (out.astype(form.accum_dtype), cotangent.astype(form.accum_dtype))
    return jnp.einsum(f"{form.out_dims},{form.cotangent_dims}->{form.row_dims}", *sides, precision="highest")


def block_gradients(
    form: AttentionConfig,
    query: Any,
    key: Any,
    value: Any,
    peak: Any,
    total: Any,
    cotangent: Any,
    inner: Any,
    extras: Sequence[Any],
    row: Any = 0,
    col: Any = 0,
) -> tuple[Any, Any, Any]:
    """What one block adds to the cotangents of query, key and value, which lie as these do; in the wide dtype."""
    cells = form.row_dims + form.key_position
    scored, mixed = (
        functools.partial(jnp.einsum, precision=p, preferred_element_type=form.accum_dtype)
        for p in (form.score_precision, form.value_precision)
    )
    s = logits(form, query, key, extras, row, col)
    p = jnp.exp(s - peak[..., None]) / total[..., None]
    dv = mixed(f"{cells},{form.cotangent_dims}->{form.value_dims}", p.astype(form.weight_dtype), cotangent)
    dp = mixed(f"{form.cotangent_dims},{form.value_dims}->{cells}", cotangent, value)
    ds = p * (dp - inner[..., None])
    for step in reversed(form.score_ops):
        if step.kind == "scale":
            ds = ds * step.constant
        elif step.is_mask:
            ds = jnp.where(_kept(form, step, extras, s, row, col), ds, 0)
    dq = scored(f"{cells},{form.key_dims}->{form.query_dims}", ds.astype(key.dtype), key)
    dk = scored(f"{cells},{form.query_dims}->{form.key_dims}", ds.astype(query.dtype), query)
    return dq, dk, dv


def finalize_gradients(form: AttentionConfig, found: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Cotangents of query, key and value, laid out and typed as the form says."""
    sides = zip((form.query_dims, form.key_dims, form.value_dims), form.grad_dims, found, form.grad_dtypes, strict=True)
    dq, dk, dv = (jnp.transpose(x, [own.index(c) for c in to]).astype(d) for own, to, x, d in sides)
    return dq, dk, dv


def _shapes(query: Any, key: Any, value: Any, *extras: Any, form: AttentionConfig, flops: float) -> tuple[Any, ...]:
    del extras, flops
    sizes = form.sizes(query, key, value)
    row = query.update(shape=tuple(sizes[c] for c in form.row_dims), dtype=form.accum_dtype, weak_type=False)
    return row.update(shape=tuple(sizes[c] for c in form.out_dims), dtype=jnp.dtype(form.out_dtype)), row, row


def _backward_shapes(
    query: Any, key: Any, value: Any, *rest: Any, form: AttentionConfig, flops: float
) -> tuple[Any, ...]:
    del rest, flops
    sizes = form.sizes(query, key, value)
    return tuple(
        query.update(shape=tuple(sizes[c] for c in letters), dtype=jnp.dtype(d), weak_type=False)
        for letters, d in zip(form.grad_dims, form.grad_dtypes, strict=True)
    )


attention_p = define_primitive("attention", attend, _shapes)
"""(query, key, value, *extras) -> (mixed values, peak, total): the last two of each row of scores, the largest and
the sum of the exponentials of what the others fall short of it. (Their logarithmic sum alone would lose the second
where the first is as large as a mask's fill.)"""
attention_backward_p = define_primitive("attention_backward", attention_gradients, _backward_shapes)
"""(query, key, value, mixed values, peak, total, their cotangent, *extras) -> cotangents of query, key, value."""
