"""Samples of gather, scatter, and dynamic slices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.rules.validation.samples.sample import RandomArrays, Sample


def samples(d: RandomArrays) -> Iterator[Sample]:
    table = d.real(6, 4)
    take = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    for mode in ("clip", "fill"):
        yield Sample(
            "gather",
            partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode=mode),
            (table, d.index(8, 2, 3, 1) - 1),
        )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode="fill"),
        (d.integer(6, 4), d.index(8, 2, 3, 1) - 1),
    )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=take, slice_sizes=(1, 4), mode="clip"),
        (d.booleans(6, 4), d.index(6, 2, 3, 1)),
    )
    both = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=both, slice_sizes=(1, 1), mode="clip"),
        (table, d.index(4, 3, 2)),
    )
    part = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,))
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=part, slice_sizes=(2, 4), mode="clip"),
        (table, d.index(6, 3, 1)),
    )
    along = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=along, slice_sizes=(1, 1), mode="clip"),
        (table, d.index(4, 6, 2, 1)),
    )
    rows = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    cells = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1)
    )
    piece = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    lined = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    cases = (
        (rows, d.index(8, 2, 3, 1) - 1, d.real(2, 3, 4)),
        (cells, d.index(4, 8, 2), d.real(8)),
        (piece, d.index(4, 6, 1), d.real(6, 2, 4)),
        (lined, d.index(4, 6, 2, 1), d.real(6, 2)),
    )
    ops = (lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max, lax.scatter)
    for fn in ops:
        name = fn.__name__.replace("_", "-")
        for numbers, indices, updates in cases:
            yield Sample(name, partial(fn, dimension_numbers=numbers), (table, indices, updates))
    lines = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    yield Sample(
        "scatter",
        lambda x, i: lax.scatter_apply(x, i, jnp.sin, lines, update_shape=(3, 4)),
        (table, np.asarray([[1], [4], [5]], np.int32)),
    )
    yield Sample("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, np.int32(0)), (3, 4)), (table, np.int32(2)))
    yield Sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        (table, d.real(1, 4), np.int32(4)),
    )
    yield Sample(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        (table, d.real(3, 4), np.int32(2)),
    )
