"""Cumulative operations along a sharded dimension: each device scans its shard, then adds the total of those before it.

Devices all-gather one element per row and shard, the shards' totals, where XLA would gather the whole operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import CollectiveBytes, Local
from autoshard.machine.collective import ALL_GATHER

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "cumlogsumexp": jnp.logaddexp,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumprod": lax.mul,
    "cumsum": lax.add,
}


def sharded_cumulative(name: str, size: int, axis: int, reverse: bool) -> Local:
    """The operation `jax.lax` calls ``name``, along dimension ``axis`` of ``size`` elements over all devices."""
    run: Callable[..., Any] = getattr(lax, name)

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        parts, me = lax.axis_size(axes), lax.axis_index(axes)
        scanned = run(x, axis=axis, reverse=reverse)
        end = 0 if reverse else x.shape[axis] - 1
        totals = lax.all_gather(lax.slice_in_dim(scanned, end, end + 1, axis=axis), axes, axis=axis, tiled=True)
        first, previous = (parts - 1, me + 1) if reverse else (0, me - 1)
        offsets = run(totals, axis=axis, reverse=reverse)
        offset = lax.dynamic_slice_in_dim(offsets, jnp.clip(previous, 0, parts - 1), 1, axis)
        return jnp.where(me == first, scanned, OPERATORS[name](offset, scanned))

    def collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
        return ((ALL_GATHER, sizes[0] * parts * parts // size),)

    return Local(fun, collectives)
