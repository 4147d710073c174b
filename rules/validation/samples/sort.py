"""Samples of operations that sort."""

from __future__ import annotations

from collections.abc import Iterator

from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample


def samples(d: RandomArrays) -> Iterator[Sample]:
    x = d.real(4, 6, 2)
    yield Sample("sort", lambda a, b: lax.sort((a, b), dimension=1), (x, d.real(4, 6, 2)))
    yield Sample("sort", lambda x: lax.sort(x, dimension=0), (d.integer(90, 2, high=30),))
    yield Sample("sort", lambda a, b: lax.sort((lax.floor(a), b), dimension=1), (d.real(2, 216), d.real(2, 216)))
    yield Sample("top_k", lambda x: lax.top_k(x, 2), (d.real(4, 2, 6),))
    yield Sample("top_k", lambda x: lax.top_k(x, 2, axis=1), (x,))
    yield Sample("top_k", lambda x: lax.top_k(lax.floor(x), 5), (d.real(4, 2, 6),))
    yield Sample("approx_top_k", lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), (x,))
