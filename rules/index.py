"""Rules of gather, scatter, and slices at computed indices.

A dimension that windows span whole is parallel, as are batching dimensions. The dimensions of the indices are
dimensions of a gather's result; of a scatter they are reduced. A dimension indexed one element at a time may be
sharded too: a shard gathers the elements that it has, and zeros for the others, which leaves a partial sum (for
booleans an or); it scatters the updates that fall into it and drops the others, which leaves nothing to combine.

``sum`` and ``prod`` of a scatter's indices mean that shards scatter different updates into one operand: the first
shard starts from the operand, the others from the neutral element. (So does XLA, but of a scatter that subtracts it
gathers the updates: there the indices are whole.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.jaxpr import represents
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.rules.builders import (
    ANY_PARTIAL,
    Label,
    build,
    dim_labels,
    is_key,
    rounded_kinds,
    selection_passthrough,
    table,
)
from autoshard.rules.local_forms.dynamic_slice import sharded_dynamic_slice, sharded_dynamic_update_slice

IDEMPOTENT = "max: 0, min: 0, and: 0, or: 0"


def _positions(rank: int, prefix: str = "n") -> list[str]:
    """Labels of the dimensions of indices, without the last, which is the index vector."""
    return [f"{prefix}{d}" for d in range(rank - 1)]


def gather(
    x: Aval,
    indices: Aval,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any = None,
    fill_value: Any = None,
    **_: Any,
) -> Rule:
    """Dimensions with full windows and batching dimensions are parallel; of indexed ones see above."""
    n = dimension_numbers
    labels = dim_labels(x.shape)
    positions = _positions(len(indices.shape))
    gone = (*n.collapsed_slice_dims, *n.operand_batching_dims)
    for i, d in zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True):
        positions[i] = labels[d]
    full = [size == have for size, have in zip(slice_sizes, x.shape, strict=True)]
    single = [d for d in n.start_index_map if slice_sizes[d] == 1 and d not in n.operand_batching_dims]
    masked = [d for d in single if d in n.collapsed_slice_dims and x.shape[d] > 1 and not is_key(x.dtype)]
    operand = [
        f if d in (*n.operand_batching_dims, *masked) or (full[d] and d not in n.collapsed_slice_dims) else None
        for d, f in enumerate(labels)
    ]
    window = iter([operand[d] for d in range(len(labels)) if d not in gone])
    batch = iter(positions)
    rank = len(n.offset_dims) + len(positions)
    out = [next(window) if d in n.offset_dims else next(batch) for d in range(rank)]
    passthrough = ANY_PARTIAL if _fill_combines(mode, fill_value) else IDEMPOTENT
    kinds = {labels[d]: _masked_kind(x.dtype) for d in masked}
    return build([operand, [*positions, None]], [out], kinds, passthrough)


def _masked_kind(dtype: Any) -> str:
    """The kind of partial results of which all but one are zero; one dtype, of powers of two alone, has no zero."""
    return "or" if dtype == np.bool_ else "sum" if represents(dtype, np.dtype(bool)) else "whole"


def _fill_combines(mode: Any, fill_value: Any) -> bool:
    """Whether the value for indices out of bounds stays the same, combined with itself by any reduction."""
    if GatherScatterMode.from_any(mode) != GatherScatterMode.FILL_OR_DROP:
        return True
    return bool(np.isnan(fill_value)) or fill_value == 0


def scatter(kind: str, passthrough: str) -> RuleFn:
    """The rule of a scatter, with the kind of the indices' factors and its passthrough."""

    def rule(x: Aval, indices: Aval, updates: Aval, *, dimension_numbers: Any, **_: Any) -> Rule:
        n = dimension_numbers
        labels = dim_labels(x.shape)
        positions = _positions(len(indices.shape))
        kinds = rounded_kinds(dict.fromkeys(positions, kind), x.dtype)
        for i, d in zip(n.scatter_indices_batching_dims, n.operand_batching_dims, strict=True):
            positions[i] = labels[d]
        gone = (*n.inserted_window_dims, *n.operand_batching_dims)
        sizes = iter([updates.shape[d] for d in n.update_window_dims])
        span = [1 if d in gone else next(sizes) for d in range(len(labels))]
        masked = [d for d in n.scatter_dims_to_operand_dims if d in n.inserted_window_dims and x.shape[d] > 1]
        operand = [
            f if d in (*n.operand_batching_dims, *masked) or (d not in gone and span[d] == x.shape[d]) else None
            for d, f in enumerate(labels)
        ]
        window = iter([operand[d] for d in range(len(labels)) if d not in gone])
        batch = iter(positions)
        update = [next(window) if d in n.update_window_dims else next(batch) for d in range(len(updates.shape))]
        return build([operand, [*positions, None], update], [operand], kinds, passthrough)

    return rule


def scatter_set(*avals: Aval, update_jaxpr: Any = None, **params: Any) -> Rule:
    """The order of repeated indices matters, so these are kept whole. With ``update_jaxpr`` it applies a function."""
    passthrough = "" if update_jaxpr is not None else selection_passthrough(0, 2)
    return scatter("whole", passthrough)(*avals, **params)


def dynamic_slice(x: Aval, *starts: Aval, slice_sizes: Sequence[int], **_: Any) -> Rule:
    """Full dimensions are parallel; a single other one has a local form, in which each shard sends what it has,
    except in the host's memory."""
    names = dim_labels(x.shape)
    labels: list[Label] = [f if n == size else None for f, n, size in zip(names, x.shape, slice_sizes, strict=True)]
    rest: list[list[Label]] = [[] for _ in starts]
    if labels.count(None) != 1 or 0 in slice_sizes or is_key(x.dtype):
        return build([labels, *rest], [labels], passthrough=ANY_PARTIAL)
    axis = labels.index(None)
    if in_host_memory(x):
        return build([names, *rest], [labels], {names[axis]: "whole"})
    local = sharded_dynamic_slice(x.shape, slice_sizes, axis)
    return build([names, *rest], [labels], {names[axis]: "local"}, ANY_PARTIAL, local=local)


def dynamic_update_slice(x: Aval, update: Aval, *starts: Aval, **_: Any) -> Rule:
    """Dimensions replaced whole are parallel; the largest other one has a local form, in which a shard takes what
    falls into it, except in the host's memory."""
    labels = dim_labels(x.shape)
    full = [n == m for n, m in zip(x.shape, update.shape, strict=True)]
    passing = [f if a else None for f, a in zip(labels, full, strict=True)]
    rest = [[] for _ in starts]
    if all(full) or is_key(x.dtype):
        return build([passing, passing, *rest], [passing], passthrough=selection_passthrough(0, 1))
    axis = max((d for d, a in enumerate(full) if not a), key=lambda d: x.shape[d])
    sharded = [f if d == axis else passing[d] for d, f in enumerate(labels)]
    if in_host_memory(x):
        return build([sharded, passing, *rest], [sharded], {labels[axis]: "whole"})
    return build(
        [sharded, passing, *rest],
        [sharded],
        {labels[axis]: "local"},
        selection_passthrough(0, 1),
        local=sharded_dynamic_update_slice(x.shape, update.shape, axis),
    )


RULES: dict[str, RuleFn] = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": scatter_set,
    "scatter-add": scatter("sum", "sum: 0+2"),
    "scatter-max": scatter("max", "max: 0 2 0+2, min: 0"),
    "scatter-min": scatter("min", "min: 0 2 0+2, max: 0"),
    "scatter-mul": scatter("prod", "sum: 0, prod: 0+2"),
    "scatter-sub": scatter("whole", "sum: 0+2"),
}
TABLE = table(RULES)
