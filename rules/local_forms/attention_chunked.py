"""Attention a few heads or queries at a time, so that their scores stay where the chip computes.

Compilers keep a loop's small arrays on the chip, and send an array of all scores to memory and back at every step of a
softmax. All keys of a query are met at once, as in the composition that is replaced. What queries, keys and values have
in common, such as heads, is taken apart first: then nothing is added up from turn to turn. Where one head has too many
scores its queries are (Rabe and Staats, arXiv:2112.05682).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.transforms.attention_op import (
    AttentionConfig,
    attend,
    block_gradients,
    finalize_gradients,
    out_dot_cotangent,
)

BLOCK = 2**25
"""Most bytes of scores that are made at once. A TPU core has 64 or 128 MiB on the chip, an H100 50, a CPU as much."""
ROWS = 16
"""Fewest queries at once: fewer leave a matrix unit idle."""


def attend_few(form: AttentionConfig, query: Any, key: Any, value: Any, *extras: Any) -> tuple[Any, ...]:
    """The results of `attention_p` for one part."""

    def block(row: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        return attend(q, k, v, *rest, form=form, row=row)

    given = (form.query_dims, form.key_dims, form.value_dims, *form.extra_dims)
    return _turns(form, block, given, (form.out_dims, form.row_dims, form.row_dims), (query, key, value, *extras))


def gradients_few(
    form: AttentionConfig,
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

    def block(row: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        highest, whole, ct, inner, *more = rest
        return block_gradients(form, q, k, v, highest, whole, ct, inner, more, row)

    given = (
        form.query_dims,
        form.key_dims,
        form.value_dims,
        form.row_dims,
        form.row_dims,
        form.cotangent_dims,
        form.row_dims,
        *form.extra_dims,
    )
    operands = (query, key, value, peak, total, cotangent, out_dot_cotangent(form, out, cotangent), *extras)
    return finalize_gradients(
        form, _turns(form, block, given, (form.query_dims, form.key_dims, form.value_dims), operands)
    )


@dataclass(frozen=True)
class _Cut:
    """A dimension taken in so many turns."""

    letter: str
    count: int

    def apart(self, x: Any, letters: str) -> Any:
        """``x`` with the turns as its first dimension."""
        d = letters.index(self.letter)
        return jnp.moveaxis(x.reshape(*x.shape[:d], self.count, -1, *x.shape[d + 1 :]), d, 0)

    def together(self, x: Any, letters: str) -> Any:
        """What `apart` has done is undone."""
        d = letters.index(self.letter)
        x = jnp.moveaxis(x, 0, d)
        return x.reshape(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])


def cuts(form: AttentionConfig, query: Any, key: Any, value: Any) -> list[_Cut]:
    """What to take apart, outermost first, until few enough scores are made at once."""
    sizes = form.sizes(query, key, value)
    left = math.prod(sizes[c] for c in form.row_dims + form.key_position) * jnp.dtype(form.accum_dtype).itemsize
    common = [c for c in form.row_dims if c in form.query_dims and c in form.key_dims and c in form.value_dims]
    found: list[_Cut] = []
    for letter in (*sorted(common, key=lambda c: -sizes[c]), form.query_position):
        least = ROWS if letter == form.query_position else 1
        counts = [n for n in range(1, sizes[letter] + 1) if sizes[letter] % n == 0 and sizes[letter] // n >= least]
        count = next((n for n in counts if left <= n * BLOCK), max(counts, default=1))
        if count > 1:
            found.append(_Cut(letter, count))
            left //= count
    return found


def _turns(
    form: AttentionConfig,
    block: Callable[..., Sequence[Any]],
    given: Sequence[str],
    made: Sequence[str],
    operands: Sequence[Any],
) -> tuple[Any, ...]:
    """``block(row, *operands)`` of a few heads or queries after the others; ``row``: where its queries begin.

    Args:
      given, made: a letter for each dimension of the operands and results. What lacks the dimension that is taken
        apart is added up, in the dtype of sums.
    """
    todo = cuts(form, *operands[:3])

    def run(left: Sequence[_Cut], row: Any, xs: Sequence[Any]) -> tuple[Any, ...]:
        if not left:
            return tuple(block(row, *xs))
        cut, *rest = left
        # XLA would otherwise make again in every turn what is cheap to make, such as keys repeated for each head.
        xs = lax.optimization_barrier(tuple(xs))
        mine = [cut.letter in letters for letters in given]
        split = tuple(cut.apart(x, s) for x, s, own in zip(xs, given, mine, strict=True) if own)
        rows = (
            xs[0].shape[form.query_dims.index(form.query_position)] // cut.count
            if cut.letter == form.query_position
            else 0
        )

        def turn(sums: tuple[Any, ...], now: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            at, parts = now
            parts = iter(parts)
            here = [next(parts) if own else x for x, own in zip(xs, mine, strict=True)]
            results = run(rest, row + at * rows, here)
            added = tuple(
                s + x
                for s, x in zip(
                    sums, (x for x, s in zip(results, made, strict=True) if cut.letter not in s), strict=True
                )
            )
            return added, tuple(x for x, s in zip(results, made, strict=True) if cut.letter in s)

        none = tuple(jnp.zeros(xs[given.index(s)].shape, form.accum_dtype) for s in made if cut.letter not in s)
        sums, stacks = lax.scan(turn, none, (jnp.arange(cut.count), split))
        added, apart = iter(sums), iter(stacks)
        return tuple(cut.together(next(apart), s) if cut.letter in s else next(added) for s in made)

    return run(todo, 0, operands)
