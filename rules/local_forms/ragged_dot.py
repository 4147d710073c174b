"""Products of ragged groups on shards of the rows and of the groups.

Rows are in the order of their groups, so that a shard of them has a part of each group: how many rows, the sizes of all
groups tell without communication. A device with some of the groups rotates its rows until theirs come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Local
from autoshard.ir.spec import Axes, Spec

Place = tuple[int, int]
"""A dimension: the position of the operand or result among all of them, and the dimension's index."""


def sharded_ragged_dot(product: Callable[..., Any], rows: Sequence[Place], groups: Place) -> Local:
    """The local form of ``product(lhs, rhs, group_sizes)``.

    Args:
      rows: the ragged dimension of each operand that has it; operand 3 is the result.
      groups: the dimension of the groups, of an operand or of the result.
    """
    operands = [(i, d) for i, d in rows if i < 2]

    def fun(specs: Sequence[Spec], lhs: Any, rhs: Any, sizes: Any) -> Any:
        row_axes, group_axes = (specs[i].dims[d] for i, d in (operands[0], groups))
        found = [lhs, rhs]
        local = _own_rows(sizes, row_axes, found[operands[0][0]].shape[operands[0][1]])
        if not group_axes:
            return product(lhs, rhs, local)
        own = sizes.shape[-1] // lax.axis_size(group_axes)
        first = lax.axis_index(group_axes) * own
        start = jnp.sum(jnp.where(jnp.arange(sizes.shape[-1]) < first, local, 0), dtype=local.dtype)
        local = lax.dynamic_slice_in_dim(local, first, own)
        for i, d in operands:
            found[i] = jnp.roll(found[i], -start, d)
        out = product(*found, local)
        for d in (d for i, d in rows if i == 3):
            mine = lax.broadcasted_iota(local.dtype, out.shape, d) < jnp.sum(local, dtype=local.dtype)
            out = jnp.roll(jnp.where(mine, out, jnp.zeros_like(out)), start, d)
        return out

    return Local(fun, lambda *_: (), takes_specs=True)


def _own_rows(sizes: Any, axes: Axes, rows: int) -> Any:
    """How many rows of each group are among the ``rows`` of this device, where ``axes`` split all rows."""
    if not axes:
        return sizes
    ends = jnp.cumsum(sizes, dtype=sizes.dtype) - (lax.axis_index(axes) * rows).astype(sizes.dtype)
    return jnp.clip(ends, 0, rows) - jnp.clip(ends - sizes, 0, rows)
