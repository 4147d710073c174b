"""Sorting along a split dimension, by what sends least.

Where the rows of a part can be dealt out evenly, parts trade them for the whole length of some: two all-to-alls of the
operands. XLA does that too where one other dimension can be split.

Else columnsort (Leighton, "Tight Bounds on the Complexity of Parallel Sorting", 1985): parts are sorted, dealt out to
all others like cards, sorted, handed back in stretches, sorted. By then no element is further than n**2 places from
where it belongs, n being the number of parts, so that neighbours settle the rest between their edges. That is two
all-to-alls as well, whatever the values; of the position too, as a last key, so that equal elements keep their order,
unless they cannot be told apart. It needs parts of at least 2 * n**2 elements, a multiple of n.

What can be neither traded nor dealt out is gathered, and so is what few parts send no less of otherwise. One all-to-all
would not do: a part may lack just what another holds, so that between any two there would have to be room for a whole
part, which is a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import permute_shards
from autoshard.ir.rule import Aval, Local
from autoshard.jaxpr import find_primitive
from autoshard.machine.collective import ALL_TO_ALL, COLLECTIVE_PERMUTE, CollectiveKind

Arrays = tuple[Any, ...]
Moves = tuple[tuple[CollectiveKind, int], ...]
Sort = Callable[[Arrays], Arrays]
"""Along the last dimension."""


def ordered(operands: Sequence[Aval], axis: int, keys: int) -> Local:
    """`jax.lax.sort` of ``operands``, whole, along ``axis`` by the first ``keys`` of them."""
    size, widths = operands[0].shape[axis], [np.dtype(x.dtype).itemsize for x in operands]
    told_apart = keys < len(operands) or any(jax.dtypes.issubdtype(x.dtype, np.inexact) for x in operands)
    sort = find_primitive("sort")
    assert sort is not None

    def run(xs: Arrays, by: int = keys) -> Arrays:
        return tuple(sort.bind(*xs, dimension=1, is_stable=True, num_keys=by))

    def trade(axes: tuple[str, ...], xs: Arrays) -> Arrays:
        return _trade(run, axes, xs)

    def columns(axes: tuple[str, ...], xs: Arrays) -> Arrays:
        if not told_apart:
            return _columns(run, axes, xs)
        begin = lax.axis_index(axes).astype("int32") * xs[0].shape[1]
        position = begin + lax.broadcasted_iota("int32", xs[0].shape, 1)
        done = _columns(lambda ys: run(ys, keys + 1), axes, (*xs[:keys], position, *xs[keys:]))
        return (*done[:keys], *done[keys + 1 :])

    def way(parts: int, rows: int) -> tuple[Callable[[tuple[str, ...], Arrays], Arrays], Moves] | None:
        """What parts of ``rows`` rows do and send; None where they send no less than in a gather."""
        length = size // parts
        own = [rows * length * w for w in widths]
        cards = [*own, rows * length * 4] if told_apart else own
        fits = length % parts == 0 and length >= 2 * parts**2 and size < 2**31
        sent, edges = (own, []) if rows % parts == 0 else (cards, [n // length * parts**2 for n in cards])
        total = 2 * sum(sent) * (parts - 1) / parts + 2 * sum(edges)
        if not (rows % parts == 0 or fits) or total >= sum(own) * (parts - 1):
            return None
        moves: Moves = (*((ALL_TO_ALL, n) for n in 2 * sent), *((COLLECTIVE_PERMUTE, n) for n in 2 * edges))
        return columns if edges else trade, moves

    def fun(axes: tuple[str, ...], *operands: Any) -> Arrays:
        turned = [jnp.moveaxis(x, axis, -1) for x in operands]
        shape = turned[0].shape
        xs = tuple(x.reshape(-1, shape[-1]) for x in turned)
        found = way(lax.axis_size(axes), xs[0].shape[0])
        assert found is not None
        return tuple(jnp.moveaxis(x.reshape(shape), -1, axis) for x in found[0](axes, xs))

    def moves(parts: int, sizes: Sequence[int]) -> Moves | None:
        found = way(parts, sizes[0] // widths[0] // (size // parts))
        return found and found[1]

    return Local(fun, moves)


def _trade(run: Sort, axes: tuple[str, ...], xs: Arrays) -> Arrays:
    there = tuple(lax.all_to_all(x, axes, 0, 1, tiled=True) for x in xs)
    return tuple(lax.all_to_all(x, axes, 1, 0, tiled=True) for x in run(there))


def _columns(run: Sort, axes: tuple[str, ...], xs: Arrays) -> Arrays:
    """No two elements of a row are alike, or it does not matter which is which."""
    parts, me, (rows, length) = lax.axis_size(axes), lax.axis_index(axes), xs[0].shape

    def dealt(x: Any) -> Any:
        hands = x.reshape(rows, length // parts, parts).swapaxes(1, 2).reshape(rows, length)
        return lax.all_to_all(hands, axes, 1, 1, tiled=True)

    def handed_back(x: Any) -> Any:
        return lax.all_to_all(x, axes, 1, 1, tiled=True)

    xs = run(tuple(map(handed_back, run(tuple(map(dealt, run(xs)))))))
    edge = parts**2
    lows, highs = tuple(x[:, :edge] for x in xs), tuple(x[:, -edge:] for x in xs)
    before = (permute_shards(x, axes, [(p, p + 1) for p in range(parts - 1)]) for x in highs)
    behind = (permute_shards(x, axes, [(p + 1, p) for p in range(parts - 1)]) for x in lows)
    first = run(tuple(lax.concatenate(pair, 1) for pair in zip(before, lows, strict=True)))
    last = run(tuple(lax.concatenate(pair, 1) for pair in zip(highs, behind, strict=True)))
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
