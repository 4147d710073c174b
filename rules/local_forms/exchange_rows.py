"""Rows are sent to the devices that have their groups' matrices, and what is computed of them is sent back.

Shapes are static, loads are not: each device has a block of fixed capacity for every other, a little larger than rows
evenly spread would fill. What does not fit waits for another round, in which all devices exchange blocks again, until
no row is left, and never a row is dropped. With an even load one round suffices; where blocks are large it is two of
half blocks, of which one can be computed while the other is sent. (GShard, arXiv:2006.16668, drops them;
MegaBlocks, arXiv:2211.15841, needs as much room as if all rows went to one device.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.spec import Axes
from autoshard.transforms.grouped_rows import device_of, evenly_filled, take_rows
from autoshard.transforms.row_rounds import Finish, capacity, exchanges, in_rounds


def exchange_rows(
    axes: Axes,
    compute: Callable[..., Sequence[Any]],
    group_of: Any,
    rows: Sequence[Any],
    groups: int,
    is_row_result: Sequence[bool],
    finish: Finish | None = None,
) -> tuple[Any, ...]:
    """The results of this device's rows, and the sums over all rows for this device's groups.

    Args:
      axes: mesh axes that split the groups, and the rows.
      compute: ``compute(group_of, *rows)`` on rows of this device's groups, numbered from zero; a row of none of them
        counts for nothing.
      group_of: [row], of this device's rows.
      rows: the values of these, one for each or for several on end.
      groups: how many a device has.
      is_row_result: of each result, whether it has a value for each row; else it is a sum for each group.
      finish: what is made of the results; None: nothing more.
    """
    n, parts = group_of.shape[0], lax.axis_size(axes)
    at_once, places = exchanges(capacity(n, parts))
    device, number = device_of(group_of, groups, axes)

    def exchange(x: Any) -> Any:
        return lax.all_to_all(x, axes, 0, 0, tiled=True)

    def once(source: Any, filled: Any) -> list[Any]:
        group = jnp.take(number.astype(group_of.dtype), source, mode="clip").reshape(filled.shape)
        received = [exchange(take_rows(x, source, n)) for x in rows]
        with evenly_filled(n // at_once, filled.size):
            made = compute(exchange(jnp.where(filled, group, groups).reshape(-1)), *received)
        return [exchange(x) if is_row else x for x, is_row in zip(made, is_row_result, strict=True)]

    most = functools.partial(lax.pmax, axis_name=axes)
    return in_rounds(once, device, (parts, places), is_row_result, most, at_once, finish=finish)
