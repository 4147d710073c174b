"""How operands and parameters of the operations of random programs are drawn.

A function that draws takes the generator, then what there is to choose from, and gives None where nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from jax.sharding import PartitionSpec as P

SIZES = (1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16)

Shape = tuple[int, ...]
Picked = tuple[tuple[int, ...], tuple[Any, ...]]
"""Numbers of the operands, and parameters."""


@dataclass(frozen=True)
class Op:
    """How an operation is drawn (None where it does not apply) and run."""

    pick: Callable[[Random, Sequence[Any]], Picked | None]
    apply: Callable[..., Any]


def spec(rng: Random, dims: Shape, axes: dict[str, int]) -> P:
    """A random spec that fits: any axes on any dimension, in any order."""
    free, entries = rng.sample(list(axes), len(axes)), []
    for n in dims:
        mine: list[str] = []
        for axis in list(free):
            if rng.random() < 0.6 and n % math.prod(axes[a] for a in (*mine, axis)) == 0:
                mine.append(axis)
                free.remove(axis)
        entries.append(None if not mine else mine[0] if len(mine) == 1 else tuple(mine))
    return P(*entries)


def some(rng: Random, values: Sequence[Any], rank: int = 0, kind: str = "f", most: int = 9) -> int | None:
    """A value of a kind and of at least ``rank`` dimensions; late ones more often."""
    found = [i for i, v in enumerate(values) if v.dtype.kind == kind and rank <= v.ndim <= most and v.size]
    return rng.choice(found[-5:] if rng.random() < 0.7 else found) if found else None


def unary(
    apply: Callable[..., Any],
    rank: int = 0,
    more: Callable[[Random, Any], tuple[Any, ...] | None] | None = None,
    most: int = 9,
) -> Op:
    """An operation of one array of floats; ``more`` draws parameters from its shape."""

    def pick(rng: Random, values: Sequence[Any]) -> Picked | None:
        v = some(rng, values, rank, most=most)
        params = () if v is None or more is None else more(rng, values[v].shape)
        return None if v is None or params is None else ((v,), params)

    return Op(pick, apply)


def binary(rng: Random, values: Sequence[Any]) -> Picked | None:
    """Two arrays that broadcast against each other."""
    a = some(rng, values)
    if a is None:
        return None

    def fits(s: Shape) -> bool:
        return all(1 in (n, m) or n == m for n, m in zip(s[::-1], values[a].shape[::-1], strict=False))

    others = [i for i, v in enumerate(values) if v.dtype.kind == "f" and fits(v.shape)]
    return (a, rng.choice(others)), ()


def axis(rng: Random, dims: Shape) -> tuple[int]:
    return (rng.randrange(len(dims)),)


def axes_of(rng: Random, dims: Shape) -> tuple[tuple[int, ...]]:
    return (tuple(sorted(rng.sample(range(len(dims)), rng.randint(1, len(dims))))),)


def product(rng: Random, values: Sequence[Any]) -> Picked | None:
    """An einsum of two arrays: equal sizes are contracted, batched or kept apart."""
    a, b = some(rng, values, 1, most=3), some(rng, values, 1, most=3)
    if a is None or b is None:
        return None
    left = "ijk"[: values[a].ndim]
    sizes = dict(zip(left, values[a].shape, strict=True))
    free, right = list(left), ""
    for n in values[b].shape:
        equal = [f for f in free if sizes[f] == n and rng.random() < 0.8]
        right += rng.choice(equal) if equal else "xyz"[len(right)]
        free = [f for f in free if f not in right]
    both = [f for f in left if f in right]
    summed = [f for f in both if rng.random() < 0.7]
    out = [f for f in (*left, *(f for f in right if f not in left)) if f not in summed]
    rng.shuffle(out)
    return (a, b), (f"{left},{right}->{''.join(out)}",)


def same_rank(rng: Random, values: Sequence[Any]) -> Picked | None:
    """Two arrays to put one after the other, equal in all dimensions but one."""
    a = some(rng, values, 1)
    if a is None:
        return None
    d = rng.randrange(values[a].ndim)
    rest = [*values[a].shape[:d], None, *values[a].shape[d + 1 :]]
    others = [
        i
        for i, v in enumerate(values)
        if v.dtype.kind == "f" and v.ndim == len(rest) and [*v.shape[:d], None, *v.shape[d + 1 :]] == rest
    ]
    return (a, rng.choice(others)), (d,)


def indexed(rng: Random, values: Sequence[Any]) -> Picked | None:
    """An array, whole numbers to index it with, and one of its dimensions."""
    v, i = some(rng, values, 1, most=3), some(rng, values, 0, "i", 2)
    return None if v is None or i is None else ((v, i), axis(rng, values[v].shape))


def whole(rng: Random, values: Sequence[Any]) -> Picked | None:
    """Whole numbers, and a size."""
    v = some(rng, values, 0, "i", 2)
    return None if v is None else ((v,), (rng.choice(SIZES),))


def annotated(rng: Random, values: Sequence[Any], axes: dict[str, int]) -> Picked | None:
    v = some(rng, values, 1)
    return None if v is None else ((v,), (spec(rng, values[v].shape, axes),))


def reshaped(rng: Random, dims: Shape) -> tuple[Shape]:
    """Dimensions merged and split anew."""
    left, made = math.prod(dims), []
    while left > 1 and len(made) < 3:
        made.append(rng.choice([n for n in (2, 3, 4, 6, 8, 16, left) if left % n == 0]))
        left //= made[-1]
    made += [left] if left > 1 else []
    rng.shuffle(made)
    return (tuple(made),)


def sliced(rng: Random, dims: Shape) -> tuple[tuple[tuple[int, int, int], ...]]:
    parts = []
    for n in dims:
        start = rng.choice([0, 0, rng.randrange(n)])
        parts.append((start, rng.choice([n, rng.randint(start + 1, n)]), rng.choice([1, 1, 2])))
    return (tuple(parts),)


def padded(rng: Random, dims: Shape) -> tuple[tuple[tuple[int, int, int], ...]]:
    return (
        tuple(
            (rng.choice([0, 0, 1, -1 if n > 2 else 2]), rng.choice([0, 0, 2, 3]), rng.choice([0, 0, 1])) for n in dims
        ),
    )


def window(rng: Random, dims: Shape) -> tuple[Any, ...]:
    """Window sizes, strides and padding."""
    sizes = tuple(rng.choice([m for m in (1, 2, 3) if m <= n]) for n in dims)
    return sizes, tuple(rng.choice([1, k]) for k in sizes), rng.choice(["SAME", "VALID"])


def filtered(rng: Random, values: Sequence[Any]) -> Picked | None:
    """An image [n, h, w, c], and a filter made from a drawn size, stride, padding, and number of features."""
    v = some(rng, values, 4, most=4)
    if v is None:
        return None
    groups = rng.choice([1, 1, values[v].shape[3]])
    return (v,), (rng.choice([1, 3]), rng.choice([1, 2]), rng.choice([1, 2, 4]) * groups, groups)
