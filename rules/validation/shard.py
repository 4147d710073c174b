"""How one shard of an operation is computed, where that is not the operation itself on smaller operands.

Some operations have sizes among their parameters, which are smaller for a shard (`SHAPE_PARAMS`). Some depend on the
position of the shard in the whole (`POSITION_AWARE`). All others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.lax import GatherScatterMode

from autoshard.ir.rule import Rule

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Shard:
    """Shard ``index`` of an operation of which ``factor`` is sharded."""

    rule: Rule
    factor: str
    index: int
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole operands."""
    results: tuple[tuple[int, ...], ...]
    """Shapes of the shard's results."""

    def splits(self, operand: int, dim: int) -> bool:
        """Whether the factor is part of this dimension of this operand."""
        return self.factor in self.rule.operands[operand][dim]

    def split_dims(self, operand: int) -> list[int]:
        """The operand's dimensions that the factor is part of."""
        return [d for d, dim in enumerate(self.rule.operands[operand]) if self.factor in dim]


def run_shard(primitive: Primitive, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """The results of one shard of an operation.

    Args:
      primitive, params: the whole operation.
      operands: the shard's.
    """
    if primitive.name in SHAPE_PARAMS:
        params = {**params, **SHAPE_PARAMS[primitive.name](params, [np.shape(x) for x in operands], shard)}

    def run(*xs: Any, **changed: Any) -> list[Any]:
        out = primitive.bind(*xs, **{**params, **changed})
        return list(out) if primitive.multiple_results else [out]

    placed = POSITION_AWARE.get(primitive.name)
    return placed(run, params, operands, shard) if placed else run(*operands)


def _broadcast_in_dim(params: Params, shapes: Sequence[tuple[int, ...]], shard: Shard) -> Params:
    return {"shape": shard.results[0]}


def _convolution(params: Params, shapes: Sequence[tuple[int, ...]], shard: Shard) -> Params:
    (n, c, *_), (_, i, *_), (out, *_) = params["dimension_numbers"]
    lhs, rhs = shapes
    return {"feature_group_count": lhs[c] // rhs[i], "batch_group_count": lhs[n] // shard.results[0][out]}


def _limits(params: Params, shapes: Sequence[tuple[int, ...]], shard: Shard) -> Params:
    return {
        "limit_indices": tuple(shapes[0][d] if shard.splits(0, d) else n for d, n in enumerate(params["limit_indices"]))
    }


def _slice_sizes(params: Params, shapes: Sequence[tuple[int, ...]], shard: Shard) -> Params:
    return {
        "slice_sizes": tuple(
            shapes[0][d] if shard.splits(0, d) and n == shard.shapes[0][d] else n
            for d, n in enumerate(params["slice_sizes"])
        )
    }


SHAPE_PARAMS: dict[str, Callable[[Params, Sequence[tuple[int, ...]], Shard], Params]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _convolution,
    "dynamic_slice": _slice_sizes,
    "empty": _broadcast_in_dim,
    "gather": _slice_sizes,
    "iota": _broadcast_in_dim,
    "reshape": lambda params, shapes, shard: {"new_sizes": shard.results[0]},
    "slice": _limits,
    "tile": lambda params, shapes, shard: {"reps": tuple(np.floor_divide(shard.results[0], shapes[0]).tolist())},
}

Run = Callable[..., list[Any]]


def _iota(run: Run, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Counts from the shard's offset."""
    d = params["dimension"]
    here = shard.factor in shard.rule.results[0][d]
    return [x + (shard.index * shard.results[0][d] if here else 0) for x in run(*operands)]


def _gather(run: Run, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Elements of other shards are zero; for indices out of bounds the first shard has the fill value."""
    x, indices = operands
    numbers, whole = params["dimension_numbers"], shard.shapes[0]
    here = [d for d in shard.split_dims(0) if d in numbers.collapsed_slice_dims]
    if not here:
        return run(*operands)
    limit = np.asarray([whole[d] - params["slice_sizes"][d] for d in numbers.start_index_map])
    outside = jnp.any((indices < 0) | (indices > limit), axis=-1)
    column = numbers.start_index_map.index(here[0])
    local = jnp.clip(indices, 0, limit)[..., column] - shard.index * x.shape[here[0]]
    mine = (local >= 0) & (local < x.shape[here[0]])
    clipped = jnp.clip(indices, 0, limit).at[..., column].set(jnp.clip(local, 0, x.shape[here[0]] - 1))
    out = run(x, clipped, mode=GatherScatterMode.CLIP)[0]
    spread = [d for d in range(out.ndim) if d in numbers.offset_dims]
    out = jnp.where(jnp.expand_dims(mine, spread), out, jnp.zeros((), out.dtype))
    if GatherScatterMode.from_any(params["mode"]) == GatherScatterMode.FILL_OR_DROP:
        fill = _fill(out.dtype, params["fill_value"]) if shard.index == 0 else 0
        out = jnp.where(jnp.expand_dims(outside, spread), jnp.asarray(fill, out.dtype), out)
    return [out]


def _fill(dtype: Any, value: Any) -> Any:
    if value is not None:
        return value
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return np.nan
    return jnp.iinfo(dtype).min if jax.dtypes.issubdtype(dtype, np.signedinteger) else jnp.iinfo(dtype).max


def _scatter(neutral: float | None) -> Callable[[Run, Params, Sequence[Any], Shard], list[Any]]:
    """Drops updates of other shards. Where the indices are sharded, only the first shard starts from the operand.

    Args:
      neutral: what the others start from; None where they may start from the operand too.
    """

    def placed(run: Run, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
        x, indices, updates = operands
        numbers = params["dimension_numbers"]
        here = [d for d in shard.split_dims(0) if d in numbers.inserted_window_dims]
        if here:
            column = numbers.scatter_dims_to_operand_dims.index(here[0])
            if GatherScatterMode.from_any(params["mode"]) != GatherScatterMode.FILL_OR_DROP:
                limit = np.asarray([shard.shapes[0][d] - 1 for d in numbers.scatter_dims_to_operand_dims])
                indices = jnp.clip(indices, 0, limit)
            indices = jnp.asarray(indices).at[..., column].add(-shard.index * x.shape[here[0]])
            return run(x, indices, updates, mode=GatherScatterMode.FILL_OR_DROP)
        if not shard.split_dims(0) and shard.index and neutral is not None:
            x = jnp.full_like(x, neutral)
        return run(x, indices, updates)

    return placed


def _dynamic_update_slice(run: Run, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """The shard of the one updated element takes it."""
    x, update, *starts = operands
    here = [d for d in shard.split_dims(0) if not shard.splits(1, d)]
    if not here:
        return run(*operands)
    (d,) = here
    local = jnp.clip(starts[d], 0, shard.shapes[0][d] - 1) - shard.index * x.shape[d]
    mine = (local >= 0) & (local < x.shape[d])
    starts[d] = jnp.clip(local, 0, x.shape[d] - 1)
    return [jnp.where(mine, run(x, update, *starts)[0], x)]


def _ragged_dot(run: Run, params: Params, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """A shard of the rows has some rows of each group; one of the groups has zeros for the matrices of the others."""
    lhs, rhs, sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    if shard.splits(0, ragged):
        n = lhs.shape[ragged]
        group_of = np.repeat(np.arange(len(sizes)), sizes)[shard.index * n :][:n]
        return run(lhs, rhs, np.bincount(group_of, minlength=len(sizes)).astype(sizes.dtype))
    for d in numbers.rhs_group_dimensions:
        if shard.splits(1, d):
            whole = np.zeros(shard.shapes[1], rhs.dtype)
            own = [slice(None)] * whole.ndim
            own[d] = slice(shard.index * rhs.shape[d], (shard.index + 1) * rhs.shape[d])
            whole[tuple(own)] = rhs
            return run(lhs, whole, sizes)
    out = run(lhs, rhs, sizes)[0]
    own = [slice(None)] * out.ndim
    if shard.factor in shard.rule.results[0][0] and not any(shard.split_dims(i) for i in (0, 1)):
        n = shard.results[0][0]
        own[0] = slice(shard.index * n, (shard.index + 1) * n)
    return [out[tuple(own)]]


POSITION_AWARE: dict[str, Callable[[Run, Params, Sequence[Any], Shard], list[Any]]] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "ragged_dot_general": _ragged_dot,
    "scatter": _scatter(None),
    "scatter-add": _scatter(0),
    "scatter-max": _scatter(None),
    "scatter-min": _scatter(None),
    "scatter-mul": _scatter(1),
    "scatter-sub": _scatter(0),
}
