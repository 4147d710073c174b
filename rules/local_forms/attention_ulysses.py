"""Attention over a sequence in parts: each trades its part of all heads for the whole sequence of a part of the heads.

One all-to-all of each operand and result (DeepSpeed-Ulysses, arXiv:2309.14509). Heads and sequences of the batch count
alike: what query, key and value have in common is made one dimension, which is split. Over the whole sequence keys are
then met block by block, as many at once as a part has, so that no more scores are held than in a ring; or by the
target's own kernel, which holds none.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.rules.local_forms.attention_cudnn import attend_fused, gradients_fused
from autoshard.rules.local_forms.attention_ring import met, nothing, results
from autoshard.transforms.attention_op import (
    AttentionConfig,
    block_gradients,
    finalize_gradients,
    logits,
    out_dot_cotangent,
)

Axes = tuple[str, ...]


def shared(form: AttentionConfig) -> str:
    """The dimensions that can be traded; none where a mask or bias differs by query."""
    both = "".join(c for c in form.row_dims if c in form.query_dims and c in form.key_dims and c in form.value_dims)
    alike = set(form.key_dims) == {*both, form.key_position, form.head_width} and set(form.value_dims) == {
        *both,
        form.key_position,
        form.value_width,
    }
    return both if alike and not any(form.query_position in x for x in form.extra_dims) else ""


def attend_whole(form: AttentionConfig, axes: Axes, query: Any, key: Any, value: Any, *extras: Any) -> tuple[Any, ...]:
    """The results of `attention_p` for one part."""
    trade = _Trade(form, axes, form.sizes(query, key, value))
    flat, parts = trade.form, lax.axis_size(axes)
    q, k, v = (
        trade.there(x, c)
        for x, c in zip((query, key, value), (form.query_dims, form.key_dims, form.value_dims), strict=True)
    )
    extras = tuple(trade.own(x, c) for x, c in zip(extras, form.extra_dims, strict=True))

    def turn(sums: Any, at: Any) -> Any:
        (k_part, v_part), col = trade.keys(k, v, at)
        return met(flat, sums, logits(flat, q, k_part, extras, 0, col), v_part), None

    if form.fused:
        made = attend_fused(flat, q, k, v)
    else:
        sums, _ = lax.scan(turn, nothing(flat, q, k, v), jnp.arange(parts))
        made = results(flat, sums)
    sides = zip(made, (form.out_dims, form.row_dims, form.row_dims), strict=True)
    return tuple(trade.back(x, letters) for x, letters in sides)


def gradients_whole(
    form: AttentionConfig,
    axes: Axes,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    peak: Any,
    total: Any,
    cotangent: Any,
    *extras: Any,
) -> tuple[Any, ...]:
    """The results of `attention_backward_p` for one part."""
    trade = _Trade(form, axes, form.sizes(query, key, value))
    flat, parts = trade.form, lax.axis_size(axes)
    # XLA would otherwise keep what was traded in the forward part, beside what it was traded for.
    query, key, value, cotangent = lax.optimization_barrier((query, key, value, cotangent))
    sides = ((query, form.query_dims), (key, form.key_dims), (value, form.value_dims), (cotangent, form.cotangent_dims))
    q, k, v, ct = (trade.there(x, letters) for x, letters in sides)
    if form.fused:
        came, logsum = trade.there(out, form.out_dims), trade.there(peak + jnp.log(total), form.row_dims)
        made = gradients_fused(flat, q, k, v, came, logsum, jnp.ones_like(logsum), ct)
        return tuple(trade.back(x, c) for x, c in zip(made, form.grad_dims, strict=True))
    highest, sums, inner = (
        trade.there(x, form.row_dims) for x in (peak, total, out_dot_cotangent(form, out, cotangent))
    )
    extras = tuple(trade.own(x, letters) for x, letters in zip(extras, form.extra_dims, strict=True))

    def turn(dq: Any, at: Any) -> Any:
        (k_part, v_part), col = trade.keys(k, v, at)
        more, dk, dv = block_gradients(flat, q, k_part, v_part, highest, sums, ct, inner, extras, 0, col)
        return dq + more, (dk, dv)

    dq, both = lax.scan(turn, jnp.zeros(q.shape, form.accum_dtype), jnp.arange(parts))
    dk, dv = (
        jnp.moveaxis(x, 0, c.index(form.key_position)).reshape(whole.shape)
        for x, c, whole in zip(both, (flat.key_dims, flat.value_dims), (k, v), strict=True)
    )
    return tuple(trade.back(x, c) for x, c in zip(finalize_gradients(flat, (dq, dk, dv)), form.grad_dims, strict=True))


class _Trade:
    """To and from the whole sequence, for the dimensions of one attention."""

    def __init__(self, form: AttentionConfig, axes: Axes, sizes: dict[str, int]) -> None:
        self.axes, self.sizes, self.shared = axes, sizes, shared(form)
        used = form.query_dims + form.key_dims + form.value_dims
        self.letter = next(c for c in string.ascii_letters if c not in used)
        self.form = replace(
            form,
            **{n: self.flat(getattr(form, n)) for n in ("query", "key", "value", "out", "rows", "cotangent")},
            extras=tuple(map(self.flat, form.extra_dims)),
            grads=tuple(map(self.flat, form.grad_dims)),
        )

    def flat(self, letters: str) -> str:
        """``letters`` once the shared ones are one."""
        rest = "".join(c for c in letters if c not in self.shared)
        return self.letter + rest if rest != letters else letters

    def own(self, x: Any, letters: str) -> Any:
        """This part's share of a mask or bias."""
        if self.flat(letters) == letters:
            return x
        missing = [c for c in self.shared if c not in letters]
        x = self.merged(lax.expand_dims(x, range(len(missing))), "".join(missing) + letters)
        size = x.shape[0] // lax.axis_size(self.axes)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * size, size)

    def merged(self, x: Any, letters: str) -> Any:
        rest = [d for d, c in enumerate(letters) if c not in self.shared]
        x = jnp.transpose(x, [*(letters.index(c) for c in self.shared), *rest])
        count = len(self.shared)
        x = jnp.broadcast_to(x, (*(self.sizes[c] for c in self.shared), *x.shape[count:]))
        return x.reshape(-1, *x.shape[count:])

    def there(self, x: Any, letters: str) -> Any:
        """The whole sequence, of the share of this part."""
        return lax.all_to_all(self.merged(x, letters), self.axes, 0, self.place(letters), tiled=True)

    def back(self, x: Any, letters: str) -> Any:
        """What `there` has done is undone; ``letters`` are those of the result."""
        x = lax.all_to_all(x, self.axes, self.place(letters), 0, tiled=True)
        x = x.reshape(*(self.sizes[c] for c in self.shared), *x.shape[1:])
        before = self.shared + self.flat(letters)[1:]
        return jnp.transpose(x, [before.index(c) for c in letters])

    def place(self, letters: str) -> int:
        """Where the sequence lies."""
        letters = self.flat(letters)
        return letters.index(
            self.form.query_position if self.form.query_position in letters else self.form.key_position
        )

    def keys(self, key: Any, value: Any, part: Any) -> tuple[list[Any], Any]:
        """The keys and values of one part of the sequence, and where they begin."""
        size = self.sizes[self.form.key_position]
        sides = ((key, self.form.key_dims), (value, self.form.value_dims))
        return [
            lax.dynamic_slice_in_dim(x, part * size, size, c.index(self.form.key_position)) for x, c in sides
        ], part * size
