"""lays: how values lie under each of many options, and what it takes to bring them from one to the other, all at once.

Worked out once for all equations that ask the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.mesh import LogicalMesh
from autoshard.moves import put
from autoshard.problem import Array, Labels
from autoshard.routes import prices
from autoshard.spec import Axes, Spec

Places = tuple[int, ...]
"""For each dimension of a value, that of its variable's options, or -1."""
Terms = tuple[tuple[int, str], ...]
"""Dimensions of the options along whose axes a value is in terms, and of what kind."""


@dataclass(frozen=True, eq=False)
class Lay:
    """A spec for each of many options."""

    specs: tuple[Spec, ...]
    """Those that differ."""
    which: Labels
    """For each option, which of them."""


def lay(specs: Iterable[Spec]) -> Lay:
    number: dict[Spec, int] = {}
    which = np.array([number.setdefault(s, len(number)) for s in specs], dtype=np.intp)
    return Lay(tuple(number), which)


class Lays:
    """How values lie under the options of a problem's variables."""

    def __init__(self, options: Sequence[Sequence[Spec]], mesh: LogicalMesh) -> None:
        self.options, self.mesh = options, mesh
        self._lays: dict[tuple[int, Places, Terms], Lay] = {}
        self._moves: dict[tuple[Lay, Lay, Places, int], Array] = {}
        self._parts: dict[Lay, Array] = {}

    def lies(self, i: int, where: Places, terms: Terms = ()) -> Lay:
        """How a value with these places lies under each option of variable ``i``; in terms along what splits some."""
        found = self._lays.get((i, where, terms))
        if found is None:
            found = self._lays[i, where, terms] = lay([lies(o, where, terms) for o in self.options[i]])
        return found

    def moves(self, src: Lay, dst: Lay, shape: Places, bits: int) -> Array:
        """Seconds from each of ``src`` to each of ``dst``."""
        key = src, dst, shape, bits
        found = self._moves.get(key)
        if found is None:
            each = prices(src.specs, dst.specs, shape, bits, self.mesh)
            found = self._moves[key] = each[np.ix_(src.which, dst.which)]
        return found

    def along(self, src: Lay, dst: Lay, shape: Places, bits: int) -> Array:
        """Seconds from each of ``src`` to the one of ``dst`` in the same place."""
        if src is dst or (src.specs == dst.specs and np.array_equal(src.which, dst.which)):
            return np.zeros(len(src.which))
        return prices(src.specs, dst.specs, shape, bits, self.mesh)[src.which, dst.which]

    def parts(self, lay: Lay) -> Array:
        """Into how many parts each of ``lay`` splits a value."""
        found = self._parts.get(lay)
        if found is None:
            each = np.array([s.shards(self.mesh.shape) for s in lay.specs])
            found = self._parts[lay] = each[lay.which]
        return found


def lies(option: Spec, places: Places, terms: Terms = ()) -> Spec:
    """How a value with these places lies where its group lies so; in terms of a kind along what splits a dimension."""
    dims = option.dims
    partial = tuple(sorted([(a, kind) for d, kind in terms if d not in places for a in dims[d]])) if terms else ()
    return Spec(tuple([dims[p] if p >= 0 else () for p in places]), partial)


@functools.lru_cache(maxsize=4096)
def splits(sizes: tuple[int, ...], axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """Every way to split dimensions of ``sizes``: each axis on one or none, in mesh order where several meet."""
    found: list[tuple[tuple[Axes, ...], tuple[int, ...]]] = [(((),) * len(sizes), sizes)]
    for axis in axes:
        n = mesh.shape[axis]
        found = [
            new
            for dims, left in found
            for new in (
                (dims, left),
                *(
                    (put(dims, d, (*dims[d], axis)), (*left[:d], m // n, *left[d + 1 :]))
                    for d, m in enumerate(left)
                    if sizes[d] > 1 and m % n == 0
                ),
            )
        ]
    return tuple(Spec(dims) for dims, _ in found)
