"""Gathers from padded arrays and scatters into them: positions are those of the array without its padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.lax import GatherScatterMode

from autoshard import jaxpr as jx
from autoshard.passes.pad_uneven.state import PaddingState


def gather_padded(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Gathers from a padded operand; False where that cannot be, and nothing was done.

    A position behind the end, which the padding would make valid, is clamped, or made invalid where it is filled.
    """
    x, indices = eqn.invars
    n, params = eqn.params["dimension_numbers"], eqn.params
    sizes, shape = params["slice_sizes"], jx.aval(x).shape
    whole = [d for d, (m, k) in enumerate(zip(shape, sizes, strict=True)) if m == k and d not in n.start_index_map]
    single = [d for d in n.start_index_map if sizes[d] == 1 and d not in n.operand_batching_dims]
    padded = _padded_dims(state, x, [*whole, *single])
    gone = (*n.collapsed_slice_dims, *n.operand_batching_dims)
    if any(d in padded for d in whole if d in gone):
        return False
    columns = {c: d for c, d in enumerate(n.start_index_map) if d in padded}
    limited = _limit(jx.aval(indices).dtype, {c: (shape[d], padded[d]) for c, d in columns.items()}, params["mode"])
    if not padded or limited is None:
        return False
    new = {**params, "slice_sizes": tuple(padded.get(d, k) if d in whole else k for d, k in enumerate(sizes))}
    operands = [state.padded(x, _longer(shape, padded), eqn), state.unpadded(indices)]
    run = lambda x, at: eqn.primitive.bind(x, limited(at), **new)  # noqa: E731
    state.replace_eqn(eqn, run, operands, [jx.aval(eqn.outvars[0]).shape])
    return True


def scatter_padded(state: PaddingState, eqn: jx.JaxprEqn) -> bool:
    """Scatters into a padded operand; False where that cannot be, and nothing was done.

    What falls behind the end goes into the padding, or is clamped to the last element, as the mode says.
    """
    x, indices, updates = eqn.invars
    n, params = eqn.params["dimension_numbers"], eqn.params
    shape, update_shape = jx.aval(x).shape, jx.aval(updates).shape
    gone = (*n.inserted_window_dims, *n.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in gone]
    update_dim = dict(zip(kept, n.update_window_dims, strict=True))
    indexed = n.scatter_dims_to_operand_dims
    whole = [d for d in kept if update_shape[update_dim[d]] == shape[d] and d not in indexed]
    single = [d for d in indexed if d in n.inserted_window_dims]
    padded = _padded_dims(state, x, [*whole, *single])
    window = state.window_of(updates)
    for d in whole:
        u = update_dim[d]
        size = state.padded_size(window.shape[u], window.base_shape[u])
        if size is not None and size > shape[d]:
            padded.setdefault(d, size)
    columns = {c: d for c, d in enumerate(indexed) if d in padded}
    mode = GatherScatterMode.from_any(params["mode"])
    limits = {c: (shape[d], padded[d]) for c, d in columns.items()} if mode == GatherScatterMode.CLIP else {}
    limited = _limit(jx.aval(indices).dtype, limits, mode)
    if not padded or limited is None:
        return False
    longer = {update_dim[d]: size for d, size in padded.items() if d in whole}
    operands = [
        state.padded(x, _longer(shape, padded), eqn),
        state.unpadded(indices),
        state.padded(updates, _longer(update_shape, longer), eqn),
    ]
    run = lambda x, at, new: eqn.primitive.bind(x, limited(at), new, **params)  # noqa: E731
    state.replace_eqn(eqn, run, operands, [shape])
    return True


def _padded_dims(state: PaddingState, x: jx.Atom, dims: Sequence[int]) -> dict[int, int]:
    """Which of ``dims`` of ``x`` are computed with padding, and their sizes with it."""
    window = state.window_of(x)
    sizes = {d: state.padded_size(window.shape[d], window.base_shape[d]) for d in dims}
    return {d: m for d, m in sizes.items() if m is not None and m > window.shape[d]}


def _longer(shape: Sequence[int], padded: Mapping[int, int]) -> list[int]:
    return [padded.get(d, n) for d, n in enumerate(shape)]


def _limit(dtype: Any, sizes: Mapping[int, tuple[int, int]], mode: Any) -> Any:
    """What makes of positions, of an array of the first of ``sizes`` by column, those of one of the second; None where
    ``dtype`` has no number for it."""
    last = int(jnp.iinfo(dtype).max)
    if any(padded > last for _, padded in sizes.values()):
        return None
    filled = GatherScatterMode.from_any(mode) in (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.ONE_HOT)

    def limited(at: Any) -> Any:
        column = lax.broadcasted_iota("int32", at.shape, at.ndim - 1)
        for c, (size, padded) in sizes.items():
            outside = padded if filled else size - 1
            beyond = lax.bitwise_and(column == c, at > np.asarray(size - 1, dtype))
            at = lax.select(beyond, jnp.full(at.shape, outside, dtype), at)
        return at

    return limited
