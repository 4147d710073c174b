"""Spec tables: the specs that the options of a solver variable give to a value, and what resharding between two such
lists costs, as arrays.

A variable's options are specs over its own dimensions: those of a group, or of one value. A value is bound to a
variable by a `Binding`. Lists of specs are interned, so that each table is computed once for all nodes that ask for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.cost.overlap.node_reshards import slow_placement, takes_slow_link
from autoshard.cost.overlap.rings import gathered_dims, ring_reshards
from autoshard.cost.overlap.seconds_waited import ALL, Hideable
from autoshard.cost.reshard import combined_saving
from autoshard.cost.reshard_moves import replace_dim
from autoshard.cost.reshard_tables import reshard_seconds_pairwise, reshard_seconds_table
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.problem import Array, Indices
from autoshard.search.value_groups import DimMap

Shape = tuple[int, ...]
PartialDims = tuple[tuple[int, str], ...]
"""(dimension of the options, kind of reduction): the value is partial along the axes that shard that dimension."""


class Binding(NamedTuple):
    """The variable that decides a value's spec, and which of its dimensions are the value's."""

    variable: int
    dim_map: DimMap
    """For each dimension of the value, the dimension of the variable's options, or -1 where it is never sharded."""


@dataclass(frozen=True, eq=False)
class OptionSpecs:
    """The spec of one value under each option of a variable."""

    distinct_specs: tuple[Spec, ...]
    index: Indices
    """[options]: which of the distinct specs."""

    @property
    def all_distinct(self) -> bool:
        """Whether no two options give the same spec."""
        return len(self.distinct_specs) == len(self.index)


class SpecTables:
    """The options of a problem's variables, and tables computed from them. Equal option lists and equal spec lists are
    one object."""

    def __init__(self, options: Iterable[Sequence[Spec]], mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self.options: list[Sequence[Spec]] = []
        """Of each variable."""
        self.canonical: list[int] = []
        """For each variable, the first with equal options."""
        self._first: dict[tuple[Spec, ...], int] = {}
        self._interned: dict[tuple[tuple[Spec, ...], bytes], OptionSpecs] = {}
        self._value_specs: dict[tuple[int, DimMap, PartialDims], OptionSpecs] = {}
        self._matrices: dict[tuple[OptionSpecs, OptionSpecs, Shape, int], Array] = {}
        self._pairs: dict[tuple[OptionSpecs, OptionSpecs, Shape, int], Array] = {}
        self._savings: dict[tuple[OptionSpecs, OptionSpecs, int], Array] = {}
        self._hidden: dict[tuple[OptionSpecs, OptionSpecs, tuple[tuple[int, ...] | None, int] | None], Hideable] = {}
        self._shard_counts: dict[OptionSpecs, Array] = {}
        for o in options:
            self.add_variable(o)

    def add_variable(self, options: Sequence[Spec]) -> None:
        """Appends the options of the next variable."""
        self.canonical.append(self._first.setdefault(tuple(options), len(self.options)))
        self.options.append(self.options[self.canonical[-1]] if self.canonical[-1] < len(self.options) else options)

    def intern(self, specs: Iterable[Spec]) -> OptionSpecs:
        """The list ``specs``, one for each option."""
        number: dict[Spec, int] = {}
        index = np.array([number.setdefault(s, len(number)) for s in specs], dtype=np.intp)
        key = tuple(number), index.tobytes()
        found = self._interned.get(key)
        if found is None:
            found = self._interned[key] = OptionSpecs(key[0], index)
        return found

    def value_specs(self, variable: int, dim_map: DimMap, partial: PartialDims = ()) -> OptionSpecs:
        """`value_spec` under each option of ``variable``."""
        key = self.canonical[variable], dim_map, partial
        found = self._value_specs.get(key)
        if found is None:
            specs = [value_spec(o, dim_map, partial) for o in self.options[variable]]
            found = self._value_specs[key] = self.intern(specs)
        return found

    def reshard_matrix(self, src: OptionSpecs, dst: OptionSpecs, shape: Shape, bits: int) -> Array:
        """[options of src, options of dst]: seconds of resharding a value between each two."""
        key = src, dst, shape, bits
        found = self._matrices.get(key)
        if found is None:
            distinct = reshard_seconds_table(src.distinct_specs, dst.distinct_specs, shape, bits, self.mesh)
            one_to_one = src.all_distinct and dst.all_distinct
            found = self._matrices[key] = distinct if one_to_one else distinct[src.index[:, None], dst.index]
        return found

    def reshard_pairs(self, src: OptionSpecs, dst: OptionSpecs, shape: Shape, bits: int) -> Array:
        """[options]: seconds of resharding a value from ``src`` to ``dst`` under one option, the same for both."""
        if src is dst:
            return np.zeros(len(src.index))
        key = src, dst, shape, bits
        found = self._pairs.get(key)
        if found is None:
            pairs: dict[tuple[int, int], int] = {}
            which = [pairs.setdefault(p, len(pairs)) for p in zip(src.index.tolist(), dst.index.tolist(), strict=True)]
            srcs, dsts = [src.distinct_specs[s] for s, _ in pairs], [dst.distinct_specs[d] for _, d in pairs]
            found = self._pairs[key] = reshard_seconds_pairwise(srcs, dsts, shape, bits, self.mesh)[which]
        return found

    def combined_savings(self, src: OptionSpecs, dst: OptionSpecs, count: int) -> Array:
        """[options of src, options of dst]: `combined_saving` between each two."""
        key = src, dst, count
        found = self._savings.get(key)
        if found is None:
            of = {spec: j for j, spec in enumerate(dst.distinct_specs)}
            distinct = np.zeros((len(src.distinct_specs), len(of)))
            for i, spec in enumerate(src.distinct_specs):
                if spec.partial and (j := of.get(spec.reduced())) is not None:
                    distinct[i, j] = combined_saving(spec, spec.reduced(), count, self.mesh)
            found = self._savings[key] = distinct[src.index[:, None], dst.index]
        return found

    def hideable_matrix(self, src: OptionSpecs, dst: OptionSpecs, kind: OpKind, position: int) -> Hideable:
        """[options of src, options of dst]: `hideable` between each two."""
        return self._hideable(src, dst, kind, position, (src.index[:, None], dst.index))

    def hideable_pairs(self, src: OptionSpecs, dst: OptionSpecs, kind: OpKind, position: int) -> Hideable:
        """[options]: `hideable` under one option, the same for both."""
        return self._hideable(src, dst, kind, position, (src.index, dst.index))

    def _hideable(
        self, src: OptionSpecs, dst: OptionSpecs, kind: OpKind, position: int, which: tuple[Indices, Indices]
    ) -> Hideable:
        """`hideable` between distinct specs, of the pairs ``which``."""
        in_rings = position in kind.in_rings
        if not in_rings and position not in kind.on_fast_links:
            return ALL
        ring = (gathered_dims(kind, position), math.prod(kind.shapes[-1])) if in_rings else None
        key = src, dst, ring
        found = self._hidden.get(key)
        if found is None:
            found = self._in_rings(src, dst, *ring) if ring else Hideable(self._shares_of_fast_links(src, dst))
            self._hidden[key] = found
        return Hideable(*(table[which] if isinstance(table, np.ndarray) else table for table in found))

    def _in_rings(self, src: OptionSpecs, dst: OptionSpecs, dims: tuple[int, ...] | None, made: int) -> Hideable:
        """`ring_reshards` between distinct specs."""
        of = {spec: j for j, spec in enumerate(dst.distinct_specs)}
        found = Hideable(*np.zeros((2, len(src.distinct_specs), len(of))))
        for i, spec in enumerate(src.distinct_specs):
            for after, ring in ring_reshards(spec, dims, made, self.mesh).items():
                if (j := of.get(after)) is not None:
                    found.share[i, j], found.outlasts[i, j] = ring
        return found

    def _shares_of_fast_links(self, src: OptionSpecs, dst: OptionSpecs) -> Array:
        """1 between distinct specs whose reshard takes no slow link (`takes_slow_link`), 0 between others."""
        placed = [[slow_placement(spec, self.mesh) for spec in s.distinct_specs] for s in (src, dst)]
        distinct = [{p: n for n, p in enumerate(dict.fromkeys(of))} for of in placed]
        shares = np.array([[float(not takes_slow_link(p, q)) for q in distinct[1]] for p in distinct[0]])
        before, after = ([of[p] for p in ps] for of, ps in zip(distinct, placed, strict=True))
        return shares[np.ix_(before, after)]

    def shard_counts(self, specs: OptionSpecs) -> Array:
        """[options]: into how many parts each spec splits a value."""
        found = self._shard_counts.get(specs)
        if found is None:
            counts = np.array([s.num_shards(self.mesh.shape) for s in specs.distinct_specs])
            found = self._shard_counts[specs] = counts[specs.index]
        return found


def value_spec(option: Spec, dim_map: DimMap, partial: PartialDims = ()) -> Spec:
    """The spec of a value whose variable has ``option``; partial along the axes of the dimensions in ``partial``."""
    dims = option.dims
    axes = tuple(sorted([(a, kind) for d, kind in partial if d not in dim_map for a in dims[d]])) if partial else ()
    return Spec(tuple([dims[d] if d >= 0 else () for d in dim_map]), axes)


@functools.lru_cache(maxsize=4096)
def all_splits(sizes: Shape, axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """Every spec of dimensions of these sizes that divides them evenly: each axis on one dimension or none, in mesh
    order where a dimension has several."""
    found: list[tuple[tuple[Axes, ...], Shape]] = [(((),) * len(sizes), sizes)]
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
def neighbouring_splits(spec: Spec, sizes: Shape, axes: Axes, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """Those of `all_splits` that differ from ``spec`` at most in the dimension that one axis shards."""
    found = {spec: None}
    for axis in axes:
        rest = tuple(tuple(a for a in d if a != axis) for d in spec.dims)
        found[Spec(rest)] = None
        for d, n in enumerate(sizes):
            split = tuple(a for a in axes if a == axis or a in rest[d])
            if n > 1 and n % mesh.axes_size(split) == 0:
                found[Spec(replace_dim(rest, d, split))] = None
    return tuple(s for s in found if all(n % mesh.axes_size(d) == 0 for n, d in zip(sizes, s.dims, strict=True)))
