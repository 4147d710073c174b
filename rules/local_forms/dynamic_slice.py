"""A few elements of a split dimension, and slices of it at computed positions, as a cache that is split needs them.

A part knows which of the asked positions it holds. It reads those and leaves the rest to the others; it writes
those and drops the rest, which takes no communication at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Local
from autoshard.machine.collective import ALL_REDUCE, CollectiveKind


def read(shape: Sequence[int], slice_sizes: Sequence[int], axis: int) -> Local:
    """`jax.lax.dynamic_slice` of an array of ``shape``, split along ``axis``: one all-reduce of the slice."""
    size, length = shape[axis], slice_sizes[axis]

    def fun(axes: tuple[str, ...], x: Any, *starts: Any) -> Any:
        return _told(axes, x, _start(starts[axis], size - length) + jnp.arange(length, dtype="int32"), axis)

    return Local(fun, _one_reduction)


def pick(start: int, step: int, length: int, axis: int) -> Local:
    """``length`` elements along ``axis``, which is split, from ``start`` on in steps: one all-reduce of them."""

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        return _told(axes, x, start + step * jnp.arange(length, dtype="int32"), axis)

    return Local(fun, _one_reduction)


def put(start: int, step: int, size: int, axis: int) -> Local:
    """A whole operand at ``start`` and on in steps of ``size`` elements along ``axis``, which are split; the rest is a
    scalar. Each part takes what falls into it."""

    def fun(axes: tuple[str, ...], x: Any, value: Any) -> Any:
        n = size // lax.axis_size(axes)
        places = jnp.arange(n, dtype="int32") + lax.axis_index(axes) * n - start
        mine = (places >= 0) & (places < x.shape[axis] * step) & (places % step == 0)
        return jnp.where(_along(mine, axis, x.ndim), jnp.take(x, places // step, axis, mode="clip"), value)

    return Local(fun, lambda *_: ())


def _told(axes: tuple[str, ...], x: Any, places: Any, axis: int) -> Any:
    """The elements at ``places`` of the whole, from the parts that have them."""
    n = x.shape[axis]
    rows = places - lax.axis_index(axes) * n
    found = jnp.take(x, rows, axis, mode="clip")
    mine = _along((rows >= 0) & (rows < n), axis, x.ndim)
    terms = found.astype("uint8") if x.dtype == np.bool_ else found
    return lax.psum(jnp.where(mine, terms, _nothing(terms.dtype)), axes).astype(x.dtype)


def _one_reduction(parts: int, sizes: Sequence[int]) -> tuple[tuple[CollectiveKind, int], ...]:
    return ((ALL_REDUCE, sizes[-1]),)


def write(shape: Sequence[int], update: Sequence[int], axis: int) -> Local:
    """`jax.lax.dynamic_update_slice` of an array of ``shape``, split along ``axis``, by a whole ``update``.

    XLA (JAX 0.12) forgets to move a position in that is out of bounds.
    """
    size, length = shape[axis], update[axis]

    def fun(axes: tuple[str, ...], x: Any, new: Any, *starts: Any) -> Any:
        n = x.shape[axis]
        rows = jnp.arange(n, dtype="int32") + lax.axis_index(axes) * n - _start(starts[axis], size - length)
        mine = _along((rows >= 0) & (rows < length), axis, x.ndim)
        spread = jnp.take(new, rows, axis, mode="clip")
        if spread.shape != x.shape:
            spread = lax.dynamic_update_slice(x, spread, [*starts[:axis], 0 * starts[axis], *starts[axis + 1 :]])
        return jnp.where(mine, spread, x)

    def moves(parts: int, sizes: Sequence[int]) -> tuple[tuple[CollectiveKind, int], ...]:
        return ()

    return Local(fun, moves)


def _start(start: Any, last: int) -> Any:
    """Positions out of bounds are moved in, as the operations do."""
    return lax.clamp(np.asarray(0, start.dtype), start, np.asarray(last, start.dtype)).astype("int32")


def _along(x: Any, axis: int, rank: int) -> Any:
    return jnp.expand_dims(x, [d for d in range(rank) if d != axis])


def _nothing(dtype: Any) -> Any:
    """What changes no number it is added to: -0.0, since 0.0 would turn -0.0 into itself."""
    negative = jax.dtypes.issubdtype(dtype, np.inexact)
    return jnp.asarray(
        complex(-0.0, -0.0) if jax.dtypes.issubdtype(dtype, np.complexfloating) else -0.0 if negative else 0, dtype
    )
