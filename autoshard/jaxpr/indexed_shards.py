"""Gathers and scatters on shards: each device takes, or writes, what the indices find in its own part.

An index of a dimension that is split is one of the whole dimension: less the position at which the shard begins, it is
one of the shard, or of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as _prims

from autoshard.jaxpr.value import aval

_NEUTRAL = {_prims.scatter_add_p: 0, _prims.scatter_mul_p: 1}
"""What shards that share an operand start from, but for the first: what changes nothing where they are put together."""


def gather_on_shards(eqn: JaxprEqn, split: Sequence[Sequence[str]]) -> Callable[[Any, Any], Any]:
    """A gather as each device runs it inside of a `jax.shard_map`: of what other shards have it takes nothing, -0.0 of
    numbers, so that the sum over the axes that split indexed dimensions (of booleans the or) is the result.

    Args:
      split: the mesh axes that split each dimension of the operand.
    """
    params, numbers, shape = eqn.params, eqn.params["dimension_numbers"], aval(eqn.invars[0]).shape
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

    def run(x: Any, indices: Any) -> Any:
        sizes = tuple(
            x.shape[d] if d not in gone and size == shape[d] else size for d, size in enumerate(params["slice_sizes"])
        )
        columns, inside = _columns(indices), np.True_
        for k, d in enumerate(numbers.start_index_map):
            if not split[d] or d not in gone:
                continue
            index, own = columns[k], x.shape[d]
            beyond = (index < 0) | (index >= shape[d])
            local = jnp.clip(index, 0, shape[d] - 1) - lax.axis_index(tuple(split[d])) * own
            here = (local >= 0) & (local < own)
            local = jnp.clip(local, 0, own - 1)
            if fills:  # what is out of bounds is so on the first shard
                local = jnp.where(beyond, -1, local)
                here = jnp.where(beyond, lax.axis_index(tuple(split[d])) == 0, here)
            columns[k], inside = local, inside & here
        found = _prims.gather_p.bind(x, jnp.stack(columns, -1), **{**params, "slice_sizes": sizes})
        if inside is np.True_:
            return found
        places = [d for d in range(found.ndim) if d not in numbers.offset_dims]
        return jnp.where(lax.broadcast_in_dim(inside, found.shape, places), found, _nothing(found.dtype))

    return run


def scatter_on_shards(
    eqn: JaxprEqn, split: Sequence[Sequence[str]], shared: Sequence[str]
) -> Callable[[Any, Any, Any], Any]:
    """A scatter as each device runs it inside of a `jax.shard_map`: updates of what other shards have are dropped.

    Args:
      split: the mesh axes that split each dimension of the operand.
      shared: those along which devices have updates of their own for one operand; the first has that, the others start
        from what changes nothing.
    """
    params, numbers, (whole, _, updates) = eqn.params, eqn.params["dimension_numbers"], map(aval, eqn.invars)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter([updates.shape[d] for d in numbers.update_window_dims])
    spans = [1 if d in gone else next(windows) for d in range(len(whole.shape))]
    clips = params["mode"] == lax.GatherScatterMode.CLIP

    def run(x: Any, indices: Any, updates: Any) -> Any:
        columns = _columns(indices)
        for k, d in enumerate(numbers.scatter_dims_to_operand_dims):
            index = jnp.clip(columns[k], 0, whole.shape[d] - spans[d]) if clips else columns[k]
            begins = lax.axis_index(tuple(split[d])) * x.shape[d] if split[d] and d in gone else 0
            columns[k] = index - begins
        if shared and eqn.primitive in _NEUTRAL:
            neutral = jnp.full_like(x, _NEUTRAL[eqn.primitive])
            x = jnp.where(lax.axis_index(tuple(shared)) == 0, x, neutral)
        mode = lax.GatherScatterMode.FILL_OR_DROP
        if columns:  # none where all of the operand is one window
            indices = jnp.stack(columns, -1)
        return eqn.primitive.bind(x, indices, updates, **{**params, "mode": mode})

    return run


def _columns(indices: Any) -> list[Any]:
    """The index of each indexed dimension, signed."""
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    if indices.dtype in (jnp.uint32, jnp.uint64):
        indices = jnp.minimum(indices, jnp.iinfo(wide).max)
    return [indices[..., k].astype(wide) for k in range(indices.shape[-1])]


def _nothing(dtype: Any) -> Any:
    """The number that changes no other by addition: -0.0 of floats, since -0.0 + 0.0 is 0.0; of booleans, false."""
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return jnp.asarray(complex(-0.0, -0.0), dtype)
    return jnp.asarray(-0.0 if jax.dtypes.issubdtype(dtype, np.inexact) else 0, dtype)
