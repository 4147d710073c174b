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

from autoshard.transforms.primitive import define


@dataclass(frozen=True, slots=True)
class Step:
    """What is done to every score, on its way to the softmax."""

    kind: str
    """``scale`` or ``shift`` by a number, ``bias`` by an operand, ``keep`` where an operand is ``positive``, or where
    the key's position less the query's lies in a ``band``; what is not kept becomes the number."""
    number: float = 0.0
    operand: int = -1
    """Which of the extras."""
    positive: bool = True
    low: int | None = None
    high: int | None = None
    """The band's ends, inclusive; None where it has none."""

    @property
    def masks(self) -> bool:
        return self.kind in {"keep", "band"}


@dataclass(frozen=True, slots=True)
class Form:
    """How an attention's operands lie, a letter a dimension, and how it is computed."""

    query: str
    key: str
    value: str
    out: str
    rows: str
    """The dimensions of the scores, but for the keys'."""
    row: str
    """The one among them along which queries have positions."""
    col: str
    """The dimension along which keys and values have positions; the last of the scores."""
    steps: tuple[Step, ...]
    extras: tuple[str, ...]
    """How the further operands lie; ``.`` is a dimension of size 1."""
    scores: str
    """Dtype of the product of query and key."""
    softmax: str
    weights: str
    """Dtype in which the softmax meets the values."""
    result: str
    precision: Any = None
    """That of the products of queries and keys."""
    mixing: Any = None
    """That of the products with values."""
    cotangent: str = ""
    grads: tuple[str, str, str] = ("", "", "")
    """How the backward part's results lie."""
    dtypes: tuple[str, str, str] = ("", "", "")
    fused: bool = False
    """Whether a kernel of the target's own library runs it (`autoshard.transforms.cudnn_attention`)."""

    @property
    def wide(self) -> Any:
        """The dtype of sums and exponentials."""
        return jnp.promote_types(self.softmax, "float32")

    @property
    def within(self) -> str:
        """The width of a query and key."""
        return "".join(c for c in self.query if c not in self.rows)

    @property
    def width(self) -> str:
        """The width of a value."""
        return "".join(c for c in self.value if c not in self.rows + self.col)

    def sizes(self, query: Any, key: Any, value: Any) -> dict[str, int]:
        """Size of each letter."""
        sides = ((self.query, query), (self.key, key), (self.value, value))
        return {c: n for letters, x in sides for c, n in zip(letters, x.shape, strict=True)}

    def flops(self, query: Any, key: Any, value: Any, *, backward: bool = False) -> float:
        """Floating-point operations of the products; those of the backward part make the scores again."""
        sizes = self.sizes(query, key, value)
        cells = 1.0
        for c in self.rows + self.col:
            cells *= sizes[c]
        inner, outer = sizes[self.within], sizes[self.width]
        return 2.0 * cells * (3 * inner + 2 * outer if backward else inner + outer)


def logits(form: Form, query: Any, key: Any, extras: Sequence[Any], row: Any = 0, col: Any = 0) -> Any:
    """What the softmax is taken of, of one block: [*rows, col].

    Args:
      row, col: the positions at which the block's queries and keys begin. Extras that depend on keys hold all of them.
    """
    text = f"{form.query},{form.key}->{form.rows}{form.col}"
    s = jnp.einsum(text, query, key, precision=form.precision, preferred_element_type=form.scores)
    s = s.astype(form.wide)
    for step in form.steps:
        if step.kind == "scale":
            s = s * step.number
        elif step.kind == "shift":
            s = s + step.number
        elif step.kind == "bias":
            s = s + _extra(form, step, extras, s, col).astype(s.dtype)
        else:
            s = jnp.where(_kept(form, step, extras, s, row, col), s, jnp.asarray(step.number, s.dtype))
    return s


def _kept(form: Form, step: Step, extras: Sequence[Any], s: Any, row: Any, col: Any) -> Any:
    if step.kind == "keep":
        mask = _extra(form, step, extras, s, col)
        return mask if step.positive else jnp.logical_not(mask)
    ahead = col + lax.broadcasted_iota("int32", s.shape, s.ndim - 1)
    ahead = ahead - row - lax.broadcasted_iota("int32", s.shape, form.rows.index(form.row))
    low = True if step.low is None else ahead >= step.low
    return low if step.high is None else low & (ahead <= step.high)


def _extra(form: Form, step: Step, extras: Sequence[Any], s: Any, col: Any) -> Any:
    """The block's part of an extra, dimensions in the order of the scores."""
    x, letters = extras[step.operand], form.extras[step.operand]
    if form.col in letters and x.shape[letters.index(form.col)] != s.shape[-1]:
        x = lax.dynamic_slice_in_dim(x, col, s.shape[-1], letters.index(form.col))
    x = lax.squeeze(x, [d for d, c in enumerate(letters) if c == "."])
    letters, order = letters.replace(".", ""), form.rows + form.col
    x = jnp.transpose(x, sorted(range(x.ndim), key=lambda d: order.index(letters[d])))
    return lax.expand_dims(x, [d for d, c in enumerate(order) if c not in letters])


def attend(
    query: Any, key: Any, value: Any, *extras: Any, form: Form, flops: float = 0.0, row: Any = 0
) -> tuple[Any, Any, Any]:
    """The plain composition of `attention_p`, of queries whose positions begin at ``row``."""
    del flops
    s = logits(form, query, key, extras, row)
    peak = jnp.max(s, -1)
    e = jnp.exp(s - peak[..., None])
    total = jnp.sum(e, -1)
    weights = (e / total[..., None]).astype(form.weights)
    text = f"{form.rows}{form.col},{form.value}->{form.out}"
    out = jnp.einsum(text, weights, value, precision=form.mixing, preferred_element_type=form.result)
    return out, peak, total


def gradients(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    peak: Any,
    total: Any,
    cotangent: Any,
    *extras: Any,
    form: Form,
    flops: float = 0.0,
) -> tuple[Any, Any, Any]:
    """The plain composition of `attention_backward_p`."""
    del flops
    inner = inwards(form, out, cotangent)
    found = block_gradients(form, query, key, value, peak, total, cotangent, inner, extras)
    return settled(form, found)


def inwards(form: Form, out: Any, cotangent: Any) -> Any:
    """Of each row, the cotangent's part along what came out: [*rows]."""
    sides = (out.astype(form.wide), cotangent.astype(form.wide))
    return jnp.einsum(f"{form.out},{form.cotangent}->{form.rows}", *sides, precision="highest")


def block_gradients(
    form: Form,
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
    cells = form.rows + form.col
    scored, mixed = (
        functools.partial(jnp.einsum, precision=p, preferred_element_type=form.wide)
        for p in (form.precision, form.mixing)
    )
    s = logits(form, query, key, extras, row, col)
    p = jnp.exp(s - peak[..., None]) / total[..., None]
    dv = mixed(f"{cells},{form.cotangent}->{form.value}", p.astype(form.weights), cotangent)
    dp = mixed(f"{form.cotangent},{form.value}->{cells}", cotangent, value)
    ds = p * (dp - inner[..., None])
    for step in reversed(form.steps):
        if step.kind == "scale":
            ds = ds * step.number
        elif step.masks:
            ds = jnp.where(_kept(form, step, extras, s, row, col), ds, 0)
    dq = scored(f"{cells},{form.key}->{form.query}", ds.astype(key.dtype), key)
    dk = scored(f"{cells},{form.query}->{form.key}", ds.astype(query.dtype), query)
    return dq, dk, dv


def settled(form: Form, found: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Cotangents of query, key and value, laid out and typed as the form says."""
    sides = zip((form.query, form.key, form.value), form.grads, found, form.dtypes, strict=True)
    dq, dk, dv = (jnp.transpose(x, [own.index(c) for c in to]).astype(d) for own, to, x, d in sides)
    return dq, dk, dv


def _shapes(query: Any, key: Any, value: Any, *extras: Any, form: Form, flops: float) -> tuple[Any, ...]:
    del extras, flops
    sizes = form.sizes(query, key, value)
    row = query.update(shape=tuple(sizes[c] for c in form.rows), dtype=form.wide, weak_type=False)
    return row.update(shape=tuple(sizes[c] for c in form.out), dtype=jnp.dtype(form.result)), row, row


def _backward_shapes(query: Any, key: Any, value: Any, *rest: Any, form: Form, flops: float) -> tuple[Any, ...]:
    del rest, flops
    sizes = form.sizes(query, key, value)
    return tuple(
        query.update(shape=tuple(sizes[c] for c in letters), dtype=jnp.dtype(d), weak_type=False)
        for letters, d in zip(form.grads, form.dtypes, strict=True)
    )


attention_p = define("attention", attend, _shapes)
"""(query, key, value, *extras) -> (mixed values, peak, total): the last two of each row of scores, the largest and
the sum of the exponentials of what the others fall short of it. (Their logarithmic sum alone would lose the second
where the first is as large as a mask's fill.)"""
attention_backward_p = define("attention_backward", gradients, _backward_shapes)
"""(query, key, value, mixed values, peak, total, their cotangent, *extras) -> cotangents of query, key, value."""
