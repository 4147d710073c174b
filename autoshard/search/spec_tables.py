"""lays: how values lie under each of many options, and what it takes to bring them from one to the other, all at once.

Worked out once for all equations that ask the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost.reshard_moves import replace_dim
from autoshard.cost.reshard_tables import reshard_seconds_pairwise, reshard_seconds_table
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.problem import Array, Indices

Sizes = tuple[int, ...]
"""For each dimension of a value, that of its variable's options, or -1."""
PartialDims = tuple[tuple[int, str], ...]
"""Dimensions of the options along whose axes a value is in terms, and of what kind."""


@dataclass(frozen=True, eq=False)
class OptionSpecs:
    """A spec for each of many options."""

    distinct_specs: tuple[Spec, ...]
    """Those that differ."""
    index: Indices
    """For each option, which of them."""

    @property
    def all_distinct(self) -> bool:
        """Whether no two options are alike."""
        return len(self.distinct_specs) == len(self.index)


class SpecTables:
    """How values lie under the options of a problem's variables. Options and lays that are equal are one object."""

    def __init__(self, options: Iterable[Sequence[Spec]], mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self.options: list[Sequence[Spec]] = []
        """Of each variable."""
        self.canonical: list[int] = []
        """Of each variable the first with its options."""
        self._first: dict[tuple[Spec, ...], int] = {}
        self._known: dict[tuple[tuple[Spec, ...], bytes], OptionSpecs] = {}
        self._lays: dict[tuple[int, Sizes, PartialDims], OptionSpecs] = {}
        self._moves: dict[tuple[OptionSpecs, OptionSpecs, Sizes, int], Array] = {}
        self._along: dict[tuple[OptionSpecs, OptionSpecs, Sizes, int], Array] = {}
        self._parts: dict[OptionSpecs, Array] = {}
        for o in options:
            self.add_variable(o)

    def add_variable(self, options: Sequence[Spec]) -> None:
        """The options of the next variable."""
        self.canonical.append(self._first.setdefault(tuple(options), len(self.options)))
        self.options.append(self.options[self.canonical[-1]] if self.canonical[-1] < len(self.options) else options)

    def intern(self, specs: Iterable[Spec]) -> OptionSpecs:
        """A spec for each option."""
        number: dict[Spec, int] = {}
        which = np.array([number.setdefault(s, len(number)) for s in specs], dtype=np.intp)
        key = tuple(number), which.tobytes()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = OptionSpecs(key[0], which)
        return found

    def value_specs(self, i: int, where: Sizes, terms: PartialDims = ()) -> OptionSpecs:
        """How a value with these places lies under each option of variable ``i``; in terms along what splits some."""
        key = self.canonical[i], where, terms
        found = self._lays.get(key)
        if found is None:
            found = self._lays[key] = self.intern([value_spec(o, where, terms) for o in self.options[i]])
        return found

    def reshard_matrix(self, src: OptionSpecs, dst: OptionSpecs, shape: Sizes, bits: int) -> Array:
        """Seconds from each of ``src`` to each of ``dst``."""
        key = src, dst, shape, bits
        found = self._moves.get(key)
        if found is None:
            apart = reshard_seconds_table(src.distinct_specs, dst.distinct_specs, shape, bits, self.mesh)
            found = self._moves[key] = (
                apart if src.all_distinct and dst.all_distinct else apart[src.index[:, None], dst.index]
            )
        return found

    def reshard_pairs(self, src: OptionSpecs, dst: OptionSpecs, shape: Sizes, bits: int) -> Array:
        """Seconds from each of ``src`` to the one of ``dst`` in the same place."""
        if src is dst:
            return np.zeros(len(src.index))
        key = src, dst, shape, bits
        found = self._along.get(key)
        if found is None:
            pairs: dict[tuple[int, int], int] = {}
            at = [pairs.setdefault(p, len(pairs)) for p in zip(src.index.tolist(), dst.index.tolist(), strict=True)]
            srcs, dsts = [src.distinct_specs[s] for s, _ in pairs], [dst.distinct_specs[d] for _, d in pairs]
            found = self._along[key] = reshard_seconds_pairwise(srcs, dsts, shape, bits, self.mesh)[at]
        return found

    def shard_counts(self, lay: OptionSpecs) -> Array:
        """Into how many parts each of ``lay`` splits a value."""
        found = self._parts.get(lay)
        if found is None:
            parts = np.array([s.num_shards(self.mesh.shape) for s in lay.distinct_specs])
            found = self._parts[lay] = parts[lay.index]
        return found


def value_spec(option: Spec, places: Sizes, terms: PartialDims = ()) -> Spec:
    """How a value with these places lies where its group lies so; in terms of a kind along what splits a dimension."""
    dims = option.dims
    partial = tuple(sorted([(a, kind) for d, kind in terms if d not in places for a in dims[d]])) if terms else ()
    return Spec(tuple([dims[p] if p >= 0 else () for p in places]), partial)


@functools.lru_cache(maxsize=4096)
def all_splits(sizes: tuple[int, ...], axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
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
                    (replace_dim(dims, d, (*dims[d], axis)), (*left[:d], m // n, *left[d + 1 :]))
                    for d, m in enumerate(left)
                    if sizes[d] > 1 and m % n == 0
                ),
            )
        ]
    return tuple(Spec(dims) for dims, _ in found)


@functools.lru_cache(maxsize=1 << 14)
def neighbouring_splits(spec: Spec, sizes: tuple[int, ...], axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """``spec`` and every way to split dimensions of ``sizes`` that differs from it in what one axis splits."""
    found = {spec: None}
    for axis in axes:
        rest = tuple(tuple(a for a in d if a != axis) for d in spec.dims)
        found[Spec(rest)] = None
        for d, n in enumerate(sizes):
            split = tuple(a for a in axes if a == axis or a in rest[d])
            if n > 1 and n % mesh.axes_size(split) == 0:
                found[Spec(replace_dim(rest, d, split))] = None
    return tuple(s for s in found if all(n % mesh.axes_size(d) == 0 for n, d in zip(sizes, s.dims, strict=True)))
