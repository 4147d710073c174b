"""Running reductions along a split dimension: each part scans its own, then adds what came before it.

What travels is one element a row and part (the totals of the parts), where a gather would move every row whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Local
from autoshard.machine.collective import ALL_GATHER, CollectiveKind

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "cumlogsumexp": jnp.logaddexp,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumprod": lax.mul,
    "cumsum": lax.add,
}


def scan(name: str, size: int, axis: int, reverse: bool) -> Local:
    """``name`` along dimension ``axis``, of ``size`` elements in the whole."""
    run: Callable[..., Any] = getattr(lax, name)

    def fun(axes: tuple[str, ...], x: Any) -> Any:
        parts, me = lax.axis_size(axes), lax.axis_index(axes)
        scanned = run(x, axis=axis, reverse=reverse)
        end = 0 if reverse else x.shape[axis] - 1
        totals = lax.all_gather(lax.slice_in_dim(scanned, end, end + 1, axis=axis), axes, axis=axis, tiled=True)
        first, before = (parts - 1, me + 1) if reverse else (0, me - 1)
        sums = run(totals, axis=axis, reverse=reverse)
        offset = lax.dynamic_slice_in_dim(sums, jnp.clip(before, 0, parts - 1), 1, axis)
        return jnp.where(me == first, scanned, COMBINE[name](offset, scanned))

    def moves(parts: int, sizes: Sequence[int]) -> tuple[tuple[CollectiveKind, int], ...]:
        return ((ALL_GATHER, sizes[0] * parts * parts // size),)

    return Local(fun, moves)
