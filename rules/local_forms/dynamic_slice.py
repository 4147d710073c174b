"""Slices and updates of a sharded dimension, at constant or computed indices, as of a sharded KV cache.

Each device knows which of the indices are in its shard. To read, it takes these elements, and an all-reduce adds those
of the other devices; to write, it takes what falls into its shard, which needs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import CollectiveBytes, Local
from autoshard.jaxpr import dtype_bits, is_narrow_float
from autoshard.machine.collective import ALL_REDUCE


def sharded_dynamic_slice(shape: Sequence[int], slice_sizes: Sequence[int], axis: int) -> Local:
    """`jax.lax.dynamic_slice` of an array of ``shape``, sharded along ``axis``: one all-reduce of the slice."""
    size, length = shape[axis], slice_sizes[axis]

    def fun(axes: tuple[str, ...], x: Any, *starts: Any) -> Any:
        indices = _clamped_start(starts[axis], size - length) + jnp.arange(length, dtype="int32")
        return _take_by_all_reduce(axes, x, indices, axis)

    return Local(fun, _all_reduce_of_result)


def sharded_slice(start: int, step: int, length: int, axis: int) -> Local:
    """``length`` elements along the sharded ``axis``, every ``step``-th from ``start`` on: one all-reduce of them."""

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        return _take_by_all_reduce(axes, x, start + step * jnp.arange(length, dtype="int32"), axis)

    return Local(fun, _all_reduce_of_result)


def sharded_pad(start: int, step: int, size: int, axis: int) -> Local:
    """A whole operand, at every ``step``-th index from ``start`` on of ``size`` sharded elements; a scalar elsewhere.

    Each device takes what falls into its shard.
    """

    def fun(axes: tuple[str, ...], x: Any, value: Any) -> Any:
        n = size // lax.axis_size(axes)
        offset = jnp.arange(n, dtype="int32") + lax.axis_index(axes) * n - start
        covered = (offset >= 0) & (offset < x.shape[axis] * step) & (offset % step == 0)
        return jnp.where(_broadcast_along(covered, axis, x.ndim), jnp.take(x, offset // step, axis, mode="clip"), value)

    return Local(fun, lambda *_: ())


def _take_by_all_reduce(axes: tuple[str, ...], x: Any, indices: Any, axis: int) -> Any:
    """The elements at ``indices`` of the whole dimension ``axis``, of which ``x`` is this device's shard."""
    n = x.shape[axis]
    local = indices - lax.axis_index(axes) * n
    taken = jnp.take(x, local, axis, mode="clip")
    in_shard = _broadcast_along((local >= 0) & (local < n), axis, x.ndim)
    if x.dtype == np.bool_:
        return lax.psum(jnp.where(in_shard, taken.astype("uint8"), 0), axes).astype(x.dtype)
    if not is_narrow_float(x.dtype):
        return lax.psum(jnp.where(in_shard, taken, _additive_identity(x.dtype)), axes)
    integer = f"uint{dtype_bits(x.dtype)}"  # not every dtype of few bits has a zero
    numbers = jnp.where(in_shard, lax.bitcast_convert_type(taken, integer), jnp.zeros((), integer))
    return lax.bitcast_convert_type(lax.psum(numbers, axes), x.dtype)


def _all_reduce_of_result(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
    return ((ALL_REDUCE, sizes[-1]),)


def sharded_dynamic_update_slice(shape: Sequence[int], update: Sequence[int], axis: int) -> Local:
    """`jax.lax.dynamic_update_slice` of an array of ``shape``, sharded along ``axis``, by a whole ``update``.

    XLA's own partitioning (JAX 0.12) does not clamp indices that are out of bounds.
    """
    size, length = shape[axis], update[axis]

    def fun(axes: tuple[str, ...], x: Any, new: Any, *starts: Any) -> Any:
        n = x.shape[axis]
        offset = jnp.arange(n, dtype="int32") + lax.axis_index(axes) * n - _clamped_start(starts[axis], size - length)
        updated = _broadcast_along((offset >= 0) & (offset < length), axis, x.ndim)
        values = jnp.take(new, offset, axis, mode="clip")
        if values.shape != x.shape:
            values = lax.dynamic_update_slice(x, values, [*starts[:axis], 0 * starts[axis], *starts[axis + 1 :]])
        return jnp.where(updated, values, x)

    return Local(fun, lambda *_: ())


def _clamped_start(start: Any, last: int) -> Any:
    """The start of a slice, clamped to [0, last] as dynamic slices do."""
    return lax.clamp(np.asarray(0, start.dtype), start, np.asarray(last, start.dtype)).astype("int32")


def _broadcast_along(x: Any, axis: int, rank: int) -> Any:
    """A vector as dimension ``axis`` of an array of this rank, whose other dimensions have size 1."""
    return jnp.expand_dims(x, [d for d in range(rank) if d != axis])


def _additive_identity(dtype: Any) -> Any:
    """The number that changes no other by addition: -0.0 of floats, since -0.0 + 0.0 is 0.0."""
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return jnp.asarray(complex(-0.0, -0.0), dtype)
    return jnp.asarray(-0.0 if jax.dtypes.issubdtype(dtype, np.inexact) else 0, dtype)
