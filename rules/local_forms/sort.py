"""Sorting along a sharded dimension, with whichever algorithm sends least.

Rows are the slices along the sorted dimension. Where the number of devices divides a shard's rows, an all-to-all shards
the rows in place of the sorted dimension, and another one reverses that. (So does XLA, if it can shard one dimension.)

Else columnsort (Leighton, "Tight Bounds on the Complexity of Parallel Sorting", 1985): shards are sorted, an all-to-all
distributes every n-th element to one of the n devices, shards are sorted, another all-to-all sends contiguous elements
back, shards are sorted. By then no element is further than n**2 positions from its place, so that neighbours merge the
edges of their shards. To keep the sort stable, the index of each element is its last key, unless equal elements are
indistinguishable. Shards must have at least 2 * n**2 elements, and a multiple of n.

Where neither is possible, or sends no less than gathering the operands, these are gathered. One all-to-all would not do
for arbitrary values: any device may need a whole shard of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import permute_shards
from autoshard.ir.rule import Aval, CollectiveBytes, Local
from autoshard.jaxpr import dtype_bits, find_primitive
from autoshard.machine.collective import ALL_TO_ALL, COLLECTIVE_PERMUTE

Arrays = tuple[Any, ...]
Sort = Callable[[Arrays], Arrays]
"""Sorts arrays [rows, length] together along the last dimension."""


def sharded_sort(operands: Sequence[Aval], axis: int, keys: int) -> Local:
    """`jax.lax.sort` of ``operands`` (before sharding) along ``axis``, by the first ``keys`` of them."""
    size, bits = operands[0].shape[axis], [dtype_bits(x.dtype) for x in operands]
    equal_keys_differ = keys < len(operands) or any(jax.dtypes.issubdtype(x.dtype, np.inexact) for x in operands)
    sort = find_primitive("sort")
    assert sort is not None

    def sort_rows(xs: Arrays, by: int = keys) -> Arrays:
        return tuple(sort.bind(*xs, dimension=1, is_stable=True, num_keys=by))

    def shard_rows(axes: tuple[str, ...], xs: Arrays) -> Arrays:
        return _shard_rows(sort_rows, axes, xs)

    def columnsort(axes: tuple[str, ...], xs: Arrays) -> Arrays:
        if not equal_keys_differ:
            return _columnsort(sort_rows, axes, xs)
        start = lax.axis_index(axes).astype("int32") * xs[0].shape[1]
        index = start + lax.broadcasted_iota("int32", xs[0].shape, 1)
        done = _columnsort(lambda ys: sort_rows(ys, keys + 1), axes, (*xs[:keys], index, *xs[keys:]))
        return (*done[:keys], *done[keys + 1 :])

    def algorithm(parts: int, rows: int) -> tuple[Callable[[tuple[str, ...], Arrays], Arrays], CollectiveBytes] | None:
        """What devices with ``rows`` rows do, and the collectives in it; None where a gather sends no more."""
        length = size // parts
        own = [-(-rows * length * b // 8) for b in bits]
        with_index = [*own, rows * length * 4] if equal_keys_differ else own
        columnsort_fits = length % parts == 0 and length >= 2 * parts**2 and size < 2**31
        sent, edges = (own, []) if rows % parts == 0 else (with_index, [n // length * parts**2 for n in with_index])
        total = 2 * sum(sent) * (parts - 1) / parts + 2 * sum(edges)
        if not (rows % parts == 0 or columnsort_fits) or total >= sum(own) * (parts - 1):
            return None
        exchanged: CollectiveBytes = (
            *((ALL_TO_ALL, n) for n in 2 * sent),
            *((COLLECTIVE_PERMUTE, n) for n in 2 * edges),
        )
        return columnsort if edges else shard_rows, exchanged

    def fun(axes: tuple[str, ...], *operands: Any) -> Arrays:
        transposed = [jnp.moveaxis(x, axis, -1) for x in operands]
        shape = transposed[0].shape
        xs = tuple(x.reshape(-1, shape[-1]) for x in transposed)
        found = algorithm(lax.axis_size(axes), xs[0].shape[0])
        assert found is not None
        return tuple(jnp.moveaxis(x.reshape(shape), -1, axis) for x in found[0](axes, xs))

    def collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes | None:
        widest = max(range(len(bits)), key=bits.__getitem__)  # its elements have whole bytes
        found = algorithm(parts, 8 * sizes[widest] // bits[widest] // (size // parts))
        return found and found[1]

    return Local(fun, collectives)


def _shard_rows(sort_rows: Sort, axes: tuple[str, ...], xs: Arrays) -> Arrays:
    """Sorts whole rows, of which each device gets an equal number."""
    whole_rows = tuple(lax.all_to_all(x, axes, 0, 1, tiled=True) for x in xs)
    return tuple(lax.all_to_all(x, axes, 1, 0, tiled=True) for x in sort_rows(whole_rows))


def _columnsort(sort_rows: Sort, axes: tuple[str, ...], xs: Arrays) -> Arrays:
    """Sorts rows whose elements are distinct, or where equal elements are interchangeable."""
    parts, me, (rows, length) = lax.axis_size(axes), lax.axis_index(axes), xs[0].shape

    def distribute(x: Any) -> Any:
        strided = x.reshape(rows, length // parts, parts).swapaxes(1, 2).reshape(rows, length)
        return lax.all_to_all(strided, axes, 1, 1, tiled=True)

    def send_back(x: Any) -> Any:
        return lax.all_to_all(x, axes, 1, 1, tiled=True)

    xs = sort_rows(tuple(map(send_back, sort_rows(tuple(map(distribute, sort_rows(xs)))))))
    edge = parts**2
    lows, highs = tuple(x[:, :edge] for x in xs), tuple(x[:, -edge:] for x in xs)
    before = (permute_shards(x, axes, [(p, p + 1) for p in range(parts - 1)]) for x in highs)
    behind = (permute_shards(x, axes, [(p + 1, p) for p in range(parts - 1)]) for x in lows)
    first = sort_rows(tuple(lax.concatenate(pair, 1) for pair in zip(before, lows, strict=True)))
    last = sort_rows(tuple(lax.concatenate(pair, 1) for pair in zip(highs, behind, strict=True)))
    return tuple(
        lax.concatenate(
            [
                jnp.where(me == 0, x[:, :edge], low[:, edge:]),
                x[:, edge:-edge],
                jnp.where(me == parts - 1, x[:, -edge:], high[:, :edge]),
            ],
            1,
        )
        for x, low, high in zip(xs, first, last, strict=True)
    )
