"""Samples of reductions and cumulative operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample


def samples(d: RandomArrays) -> Iterator[Sample]:
    x = d.real(4, 6, 3)
    n = d.integer(4, 6, 3, low=1, high=100)
    for op in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"):
        yield Sample(op, partial(getattr(lax, op), axes=(0, 2)), (x,))
    yield Sample("reduce_sum", partial(lax.reduce_sum, axes=(1,)), (n,))
    dense = d.bits(4, 6, 3) | d.bits(4, 6, 3) | d.bits(4, 6, 3)
    often = d.rng.uniform(size=(24, 4)) < 0.8
    for op, words, flags in (("reduce_and", dense, often), ("reduce_or", ~dense, ~often), ("reduce_xor", dense, often)):
        yield Sample(op, partial(getattr(lax, op), axes=(1,)), (words,))
        yield Sample(op, partial(getattr(lax, op), axes=(1,)), (flags,))
    for op in (lax.argmax, lax.argmin):
        for y in (x, -np.abs(x), np.floor(x), n, n.astype(np.uint8) % 7, n > 30):
            yield Sample(op.__name__, partial(op, axis=1, index_dtype=np.int32), (y,))
    for op in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        yield Sample(op.__name__, partial(op, axis=1), (x,))
        yield Sample(op.__name__, partial(op, axis=1, reverse=True), (x,))
    yield Sample(
        "reduce",
        lambda x, y: lax.reduce((x, y), (np.float64(1), np.float64(2)), _pair, (1,)),
        (d.real(4, 6), d.real(4, 6)),
    )


def _pair(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, Any]:
    return a[0] * b[0], a[1] + b[1] * b[0]
