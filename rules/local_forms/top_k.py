"""Argmax and top-k along a sharded dimension: devices exchange the candidates of their shards.

`jax.lax.argmax` prefers NaN, then the lowest index; `jax.lax.top_k` orders ties by index. So do these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import CollectiveBytes, Local
from autoshard.jaxpr import dtype_bits, find_primitive
from autoshard.machine.collective import ALL_GATHER, ALL_REDUCE


def sharded_arg_extreme(largest: bool, dtype: Any, index_dtype: Any, size: int, axis: int) -> Local:
    """The index of the largest or smallest element along ``axis``, of ``size`` elements over all devices.

    Two all-reduces of one element per row: of the best key, then of the lowest index that has it.
    """
    position = index_dtype if np.dtype(index_dtype).itemsize == 8 else np.dtype("int32")

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        pick, reduce = (lax.argmax, jnp.max) if largest else (lax.argmin, jnp.min)
        key = _sort_key(reduce(x, axis=axis), largest)
        index = pick(x, axis, position) + (lax.axis_index(axes) * x.shape[axis]).astype(position)
        after_all = jnp.asarray(jnp.iinfo(position).max, position)
        best = lax.pmax(key, axes)
        return lax.pmin(jnp.where(key == best, index, after_all), axes).astype(index_dtype)

    def collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
        rows = 8 * sizes[1] // dtype_bits(np.dtype(index_dtype))
        wide = 8 if np.dtype(dtype).itemsize == 8 else 4
        return (ALL_REDUCE, rows * wide), (ALL_REDUCE, rows * np.dtype(position).itemsize)

    return Local(fun, collectives)


def _sort_key(x: Any, largest: bool) -> Any:
    """Integers of 32 bits or more in the order of ``x`` (or the reverse, without ``largest``), with NaN as the largest.

    An all-reduce (max) of floating-point numbers need not propagate NaN; one of integers is exact on every platform.
    """
    if not jax.dtypes.issubdtype(x.dtype, np.floating):
        key = x if np.dtype(x.dtype).itemsize >= 4 else x.astype("int32")
        return key if largest else ~key
    x = x if x.dtype == np.float64 else x.astype("float32")
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    most = jnp.asarray(np.iinfo(integer).max, integer)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), integer)
    key = jnp.where(bits < 0, bits ^ most, bits)
    return jnp.where(jnp.isnan(x), most, key if largest else ~key)


def sharded_top_k(k: int, size: int, axis: int, params: dict[str, Any]) -> Local:
    """The ``k`` largest elements along ``axis``, out of ``size`` over all devices: all-gathers each shard's.

    It is always an island: XLA gathers the operand even where only other dimensions are sharded.
    """
    top_k = find_primitive("top_k")
    assert top_k is not None

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        if not axes:
            return tuple(top_k.bind(x, k=k, axis=axis, **params))
        n = x.shape[axis]
        values, indices = top_k.bind(x, k=min(k, n), axis=axis, **params)
        indices += (lax.axis_index(axes) * n).astype(indices.dtype)
        values, indices = (lax.all_gather(y, axes, axis=axis, tiled=True) for y in (values, indices))
        best, candidate = top_k.bind(values, k=k, axis=axis, **params)
        return best, jnp.take_along_axis(indices, candidate, axis, mode="clip")

    def collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
        candidates = parts * min(k, size // parts)
        return tuple((ALL_GATHER, n * candidates // k) for n in sizes[1:])

    return Local(fun, collectives, used_when="always")
