"""Attention on one device in a loop over chunks of heads or queries, so that a chunk's scores stay in on-chip memory.

Compilers keep the small arrays of a loop on the chip; an array of all scores goes to HBM and back at every step of the
softmax. Each chunk attends to all keys of its queries at once. Dimensions that queries, keys and values share (batch,
heads) are chunked first, since nothing is then accumulated across iterations; queries where the scores of one head are
still too large (Rabe and Staats, arXiv:2112.05682).
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

MAX_CHUNK_BYTES = 2**25
"""The most bytes of scores in one chunk. A TPU core has 64 or 128 MiB of on-chip memory, an H100 and a CPU about 50."""
MIN_CHUNK_QUERIES = 16
"""The fewest queries in one chunk: fewer leave a matrix unit idle."""


def attend_chunked(config: AttentionConfig, query: Any, key: Any, value: Any, *extras: Any) -> tuple[Any, ...]:
    """The results of `attention_p` on one device."""

    def chunk(query_start: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        return attend(q, k, v, *rest, config=config, query_start=query_start)

    operand_dims = (config.query_dims, config.key_dims, config.value_dims, *config.extra_dims)
    result_dims = (config.out_dims, config.row_dims, config.row_dims)
    return _loop_over_chunks(config, chunk, operand_dims, result_dims, (query, key, value, *extras))


def gradients_chunked(
    config: AttentionConfig,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    row_max: Any,
    row_sum: Any,
    cotangent: Any,
    *extras: Any,
) -> tuple[Any, ...]:
    """The results of `attention_backward_p` on one device."""

    def chunk(query_start: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        chunk_max, chunk_sum, ct, delta, *more = rest
        return block_gradients(config, q, k, v, chunk_max, chunk_sum, ct, delta, more, query_start)

    operand_dims = (
        config.query_dims,
        config.key_dims,
        config.value_dims,
        config.row_dims,
        config.row_dims,
        config.cotangent_dims,
        config.row_dims,
        *config.extra_dims,
    )
    delta = out_dot_cotangent(config, out, cotangent)
    operands = (query, key, value, row_max, row_sum, cotangent, delta, *extras)
    result_dims = (config.query_dims, config.key_dims, config.value_dims)
    return finalize_gradients(config, _loop_over_chunks(config, chunk, operand_dims, result_dims, operands))


@dataclass(frozen=True)
class ChunkedDim:
    """A dimension that a loop of ``count`` iterations goes along."""

    letter: str
    count: int

    def split(self, x: Any, letters: str) -> Any:
        """``x`` with its chunks as a new leading dimension."""
        d = letters.index(self.letter)
        return jnp.moveaxis(x.reshape(*x.shape[:d], self.count, -1, *x.shape[d + 1 :]), d, 0)

    def merge(self, x: Any, letters: str) -> Any:
        """The inverse of `split`."""
        d = letters.index(self.letter)
        x = jnp.moveaxis(x, 0, d)
        return x.reshape(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])


def chunked_dims(config: AttentionConfig, query: Any, key: Any, value: Any) -> list[ChunkedDim]:
    """The dimensions to loop over, outermost first, until the scores of one chunk take at most `MAX_CHUNK_BYTES`."""
    sizes = config.sizes(query, key, value)
    left = math.prod(sizes[c] for c in config.row_dims + config.key_position) * jnp.dtype(config.accum_dtype).itemsize
    common = [c for c in config.row_dims if c in config.query_dims and c in config.key_dims and c in config.value_dims]
    found: list[ChunkedDim] = []
    for letter in (*sorted(common, key=lambda c: -sizes[c]), config.query_position):
        least = MIN_CHUNK_QUERIES if letter == config.query_position else 1
        counts = [n for n in range(1, sizes[letter] + 1) if sizes[letter] % n == 0 and sizes[letter] // n >= least]
        count = next((n for n in counts if left <= n * MAX_CHUNK_BYTES), max(counts, default=1))
        if count > 1:
            found.append(ChunkedDim(letter, count))
            left //= count
    return found


def _loop_over_chunks(
    config: AttentionConfig,
    chunk: Callable[..., Sequence[Any]],
    operand_dims: Sequence[str],
    result_dims: Sequence[str],
    operands: Sequence[Any],
) -> tuple[Any, ...]:
    """The merged results of ``chunk(query_start, *operands)`` for every chunk.

    Args:
      chunk: computes one chunk; ``query_start`` is the position of its first query.
      operand_dims, result_dims: subscripts of each operand and result. Results without a chunked dimension are summed
        over its chunks, in ``accum_dtype``.
    """

    def run(dims: Sequence[ChunkedDim], query_start: Any, xs: Sequence[Any]) -> tuple[Any, ...]:
        if not dims:
            return tuple(chunk(query_start, *xs))
        dim, *inner = dims
        # XLA would otherwise recompute cheap operands in every iteration, such as keys repeated for each query head.
        xs = lax.optimization_barrier(tuple(xs))
        has_dim = [dim.letter in letters for letters in operand_dims]
        chunks = tuple(dim.split(x, letters) for x, letters, has in zip(xs, operand_dims, has_dim, strict=True) if has)
        over_queries = dim.letter == config.query_position
        queries = xs[0].shape[config.query_dims.index(config.query_position)] // dim.count if over_queries else 0

        def iteration(sums: tuple[Any, ...], now: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            i, own = now
            own = iter(own)
            here = [next(own) if has else x for x, has in zip(xs, has_dim, strict=True)]
            results = list(zip(run(inner, query_start + i * queries, here), result_dims, strict=True))
            summed = [x for x, letters in results if dim.letter not in letters]
            added = tuple(s + x for s, x in zip(sums, summed, strict=True))
            return added, tuple(x for x, letters in results if dim.letter in letters)

        zeros = tuple(
            jnp.zeros(xs[operand_dims.index(letters)].shape, config.accum_dtype)
            for letters in result_dims
            if dim.letter not in letters
        )
        sums, stacks = lax.scan(iteration, zeros, (jnp.arange(dim.count), chunks))
        summed, stacked = iter(sums), iter(stacks)
        return tuple(
            dim.merge(next(stacked), letters) if dim.letter in letters else next(summed) for letters in result_dims
        )

    return run(chunked_dims(config, *operands[:3]), 0, operands)
