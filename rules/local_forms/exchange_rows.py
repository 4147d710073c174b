"""Rows are sent to the devices that have their groups' matrices, and what is computed of them is sent back.

Shapes are static, loads are not: each device has a block of fixed capacity for every other, a little larger than rows
evenly spread would fill. What does not fit waits for another round, in which all devices exchange blocks again, until
no row is left: one round where the load is even, and never a row dropped. (GShard, arXiv:2006.16668, drops them;
MegaBlocks, arXiv:2211.15841, needs as much room as if all rows went to one device.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autoshard.ir.spec import Axes

SLACK = 1.25
"""Room of a block over the rows that it would have if they were evenly spread."""


def capacity(rows: int, parts: int) -> int:
    """Rows in the block that a device with ``rows`` has for each of ``parts`` devices."""
    return min(rows, -(-int(rows * SLACK) // parts))


def exchange_rows(
    axes: Axes,
    compute: Callable[..., Sequence[Any]],
    group_of: Any,
    rows: Sequence[Any],
    groups: int,
    is_row_result: Sequence[bool],
) -> tuple[Any, ...]:
    """The results of this device's rows, and the sums over all rows for this device's groups.

    Args:
      axes: mesh axes that split the groups, and the rows.
      compute: ``compute(group_of, *rows)`` on rows of this device's groups, numbered from zero; a row of none of them
        counts for nothing.
      group_of: [row], of this device's rows.
      rows: the values of these.
      groups: how many a device has.
      is_row_result: of each result, whether it has a value for each row; else it is a sum for each group.
    """
    parts, n = lax.axis_size(axes), group_of.shape[0]
    block = capacity(n, parts)
    device = jnp.clip(group_of // groups, 0, parts - 1)
    order = jnp.argsort(device)
    counts = jnp.bincount(device, length=parts).astype(jnp.int32)
    starts = jnp.cumsum(counts) - counts
    rounds = lax.pmax(-(-jnp.max(counts) // block), axes)
    firsts = groups * jnp.arange(parts, dtype=group_of.dtype)[:, None]

    def exchange(x: Any) -> Any:
        return lax.all_to_all(x, axes, 0, 0, tiled=True)

    def one_round(i: Any, totals: Sequence[Any]) -> list[Any]:
        place = i * block + jnp.arange(block, dtype=jnp.int32)
        filled = place < counts[:, None]
        source = jnp.where(filled, jnp.take(order, starts[:, None] + place, mode="clip"), n)
        groups_sent = jnp.where(filled, jnp.take(group_of, source, mode="clip") - firsts, groups)
        source = source.reshape(-1)
        received = [exchange(jnp.take(x, source, axis=0, mode="fill", fill_value=0)) for x in rows]
        made = compute(exchange(groups_sent.reshape(-1)), *received)
        return [
            total.at[source].set(exchange(x), mode="drop") if is_row else total + x
            for total, x, is_row in zip(totals, made, is_row_result, strict=True)
        ]

    shapes = jax.eval_shape(compute, group_of, *rows)
    totals = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    done = lax.while_loop(lambda s: s[0] < rounds, lambda s: (s[0] + 1, one_round(*s)), (jnp.int32(0), totals))
    return tuple(done[1])
