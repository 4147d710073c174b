"""Samples of operations that change an array's shape, or move elements along a dimension."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample

RESHAPES = (
    ((4, 6), (24,)),
    ((24,), (4, 6)),
    ((4, 6), (2, 12)),
    ((4, 6), (8, 3)),
    ((6, 4), (4, 6)),
    ((2, 3, 4), (3, 2, 4)),
    ((4, 1, 6), (4, 6, 1)),
    ((4, 6, 2), (4, 12)),
    ((12, 2), (2, 3, 4)),
)


def samples(d: RandomArrays) -> Iterator[Sample]:
    x = d.real(4, 6)
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int64), (x,))
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int32), (x,))
    yield Sample("bitcast_convert_type", partial(lax.bitcast_convert_type, new_dtype=np.int64), (d.integer(4, 6, 2),))
    yield Sample(
        "broadcast_in_dim", partial(lax.broadcast_in_dim, shape=(4, 6, 2), broadcast_dimensions=(0, 2)), (d.real(4, 1),)
    )
    yield Sample("concatenate", lambda *xs: lax.concatenate(xs, 1), (x, d.real(4, 2)))
    yield Sample("concatenate", lambda *xs: lax.concatenate(xs, 1), (x, d.real(4, 12), d.real(4, 6)))
    yield Sample("empty", lambda: lax.empty((4, 6), np.float64), ())
    yield Sample("iota", lambda: lax.broadcasted_iota(np.int32, (4, 6), 1), ())
    yield Sample("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (2, 1, 1))), (x, d.real()))
    for edges in (((0, 0, 0), (3, 3, 0)), ((1, 1, 0), (-2, 8, 0)), ((-2, 0, 0), (0, 1, 1)), ((0, 0, 0), (-1, 1, 0))):
        yield Sample("pad", partial(lax.pad, padding_config=edges), (x, d.real()))
    for before, after in RESHAPES:
        yield Sample("reshape", partial(lax.reshape, new_sizes=after), (d.real(*before),))
    yield Sample("rev", partial(lax.rev, dimensions=(1,)), (x,))
    yield Sample("rev", partial(lax.rev, dimensions=(0, 2)), (d.real(4, 3, 6),))
    yield Sample("slice", lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)), (x,))
    for start, limit, step in (((0, 3), (4, 6), (1, 1)), ((1, 0), (3, 4), (1, 1)), ((1, 1), (4, 6), (1, 2))):
        yield Sample("slice", partial(lax.slice, start_indices=start, limit_indices=limit, strides=step), (x,))
    yield Sample("split", lambda x: lax.split(x, (2, 4), 1), (x,))
    yield Sample("split", lambda x: lax.split(x, (6, 3, 3), 1), (d.real(4, 12),))
    yield Sample("squeeze", lambda x: lax.squeeze(x, (1,)), (d.real(4, 1, 6),))
    yield Sample("stack", lambda *xs: lax.stack(xs, 1), (x, d.real(4, 6)))
    yield Sample("tile", lambda x: lax.tile(x, (3, 1, 2)), (d.real(4, 6, 1),))
    yield Sample("tile", lambda x: lax.tile(x, (1, 2)), (d.real(4, 1),))
    yield Sample("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (d.real(4, 6, 3),))
    yield Sample("unstack", lambda x: lax.unstack(x, 1), (x,))
