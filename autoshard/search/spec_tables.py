"""lays: how values lie under each of many options, and what it takes to bring them from one to the other, all at once.

Worked out once for all equations that ask the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.reshard_moves import put
from autoshard.cost.reshard_tables import each, prices
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.problem import Array, Labels

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

    @property
    def distinct(self) -> bool:
        """Whether no two options are alike."""
        return len(self.specs) == len(self.which)


class Lays:
    """How values lie under the options of a problem's variables. Options and lays that are equal are one object."""

    def __init__(self, options: Iterable[Sequence[Spec]], mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self.options: list[Sequence[Spec]] = []
        """Of each variable."""
        self.alike: list[int] = []
        """Of each variable the first with its options."""
        self._first: dict[tuple[Spec, ...], int] = {}
        self._known: dict[tuple[tuple[Spec, ...], bytes], Lay] = {}
        self._lays: dict[tuple[int, Places, Terms], Lay] = {}
        self._moves: dict[tuple[Lay, Lay, Places, int], Array] = {}
        self._along: dict[tuple[Lay, Lay, Places, int], Array] = {}
        self._parts: dict[Lay, Array] = {}
        for o in options:
            self.add(o)

    def add(self, options: Sequence[Spec]) -> None:
        """The options of the next variable."""
        self.alike.append(self._first.setdefault(tuple(options), len(self.options)))
        self.options.append(self.options[self.alike[-1]] if self.alike[-1] < len(self.options) else options)

    def lay(self, specs: Iterable[Spec]) -> Lay:
        """A spec for each option."""
        number: dict[Spec, int] = {}
        which = np.array([number.setdefault(s, len(number)) for s in specs], dtype=np.intp)
        key = tuple(number), which.tobytes()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Lay(key[0], which)
        return found

    def lies(self, i: int, where: Places, terms: Terms = ()) -> Lay:
        """How a value with these places lies under each option of variable ``i``; in terms along what splits some."""
        key = self.alike[i], where, terms
        found = self._lays.get(key)
        if found is None:
            found = self._lays[key] = self.lay([lies(o, where, terms) for o in self.options[i]])
        return found

    def moves(self, src: Lay, dst: Lay, shape: Places, bits: int) -> Array:
        """Seconds from each of ``src`` to each of ``dst``."""
        key = src, dst, shape, bits
        found = self._moves.get(key)
        if found is None:
            apart = prices(src.specs, dst.specs, shape, bits, self.mesh)
            found = self._moves[key] = apart if src.distinct and dst.distinct else apart[src.which[:, None], dst.which]
        return found

    def along(self, src: Lay, dst: Lay, shape: Places, bits: int) -> Array:
        """Seconds from each of ``src`` to the one of ``dst`` in the same place."""
        if src is dst:
            return np.zeros(len(src.which))
        key = src, dst, shape, bits
        found = self._along.get(key)
        if found is None:
            pairs: dict[tuple[int, int], int] = {}
            at = [pairs.setdefault(p, len(pairs)) for p in zip(src.which.tolist(), dst.which.tolist(), strict=True)]
            srcs, dsts = [src.specs[s] for s, _ in pairs], [dst.specs[d] for _, d in pairs]
            found = self._along[key] = each(srcs, dsts, shape, bits, self.mesh)[at]
        return found

    def parts(self, lay: Lay) -> Array:
        """Into how many parts each of ``lay`` splits a value."""
        found = self._parts.get(lay)
        if found is None:
            parts = np.array([s.shards(self.mesh.shape) for s in lay.specs])
            found = self._parts[lay] = parts[lay.which]
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


@functools.lru_cache(maxsize=1 << 14)
def near(spec: Spec, sizes: tuple[int, ...], axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """``spec`` and every way to split dimensions of ``sizes`` that differs from it in what one axis splits."""
    found = {spec: None}
    for axis in axes:
        rest = tuple(tuple(a for a in d if a != axis) for d in spec.dims)
        found[Spec(rest)] = None
        for d, n in enumerate(sizes):
            split = tuple(a for a in axes if a == axis or a in rest[d])
            if n > 1 and n % mesh.axes_size(split) == 0:
                found[Spec(put(rest, d, split))] = None
    return tuple(s for s in found if all(n % mesh.axes_size(d) == 0 for n, d in zip(sizes, s.dims, strict=True)))
