"""The moves between specs: which collective leads from one spec to which others, at what price.

A graph for the specs of one rank over some mesh axes. It knows no shape: a move costs a fixed time
plus a time for each byte, so one graph serves every value, and is filled only where searches go.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
    Ring,
    rings,
    rings_seconds,
)
from autoshard.machine.mesh import LogicalMesh

type MoveKind = CollectiveKind | Literal["slice", "stay", "terms"]
FREE_MOVES: Final = ("slice", "stay", "terms")
"""Moves that send nothing."""
Dims = tuple[Axes, ...]
PartialAxes = tuple[tuple[str, str], ...]
State = tuple[Dims, PartialAxes]
"""A `Spec`'s fields, its terms sorted: cheaper to hash and to compare."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a reshard: ``kind`` over ``axes``, after which the value lies as ``spec`` says.

    ``bytes`` is the payload as `Collective.bytes` defines it; 0 for the free kinds "slice" and "terms".
    """

    kind: MoveKind
    axes: Axes
    bytes: int
    seconds: float
    spec: Spec


class Edge(NamedTuple):
    """A move apart from the value's size: it costs ``fixed + each * bytes`` seconds."""

    kind: MoveKind
    axes: Axes
    fixed_seconds: float
    seconds_per_byte: float
    after: State


class LocalBytes:
    """Bytes per device under each state, for one value; None where a dimension would not divide."""

    def __init__(self, start: State, goal: State, shape: tuple[int, ...], bits: int, sizes: Mapping[str, int]) -> None:
        self.ends = (start[0], goal[0])
        self.shape, self.bits, self.sizes = shape, bits, sizes
        self._bytes: dict[tuple[Axes, ...], int | None] = {}

    def __call__(self, state: State) -> int | None:
        dims = state[0]
        if dims not in self._bytes:
            self._bytes[dims] = self._measure(dims)
        return self._bytes[dims]

    def _measure(self, dims: tuple[Axes, ...]) -> int | None:
        elements = 1
        for i, (n, axes) in enumerate(zip(self.shape, dims, strict=True)):
            parts = math.prod([self.sizes[a] for a in axes])
            # An end of the path may be split unevenly, and then so may what leads to it.
            if n % parts and all(end[i][: len(axes)] != axes for end in self.ends):
                return None
            elements *= -(-n // parts)
        return -(-elements * self.bits // 8)


class ReshardGraph:
    """Every spec of one rank over ``axes``, and the moves between them, found as they are asked for."""

    def __init__(self, axes: Axes, rank: int, terms: PartialAxes, mesh: LogicalMesh) -> None:
        self.axes, self.rank, self.target_partial = axes, rank, terms
        self.sizes = {a: mesh.shape[a] for a in axes}
        self.rings: dict[str, Ring] = dict(zip(axes, rings(axes, mesh), strict=True))
        self.overhead = mesh.hardware.overhead
        self._edges: dict[State, tuple[Edge, ...]] = {}
        self._edge_seconds: dict[tuple[str, Axes], tuple[float, float]] = {}
        self._same_parts: dict[tuple[tuple[int, ...], Axes], tuple[tuple[Axes, ...], ...]] = {}
        self.max_bandwidth = max((bandwidth for _, bandwidth, _ in self.rings.values()), default=math.inf)
        self.min_collective_seconds = (
            min((latency for _, _, latency in self.rings.values()), default=0.0) + self.overhead
        )

    def edge(self, kind: MoveKind, axes: Axes, after: State) -> Edge:
        if kind in FREE_MOVES:
            return Edge(kind, axes, 0.0, 0.0, after)
        if (kind, axes) not in self._edge_seconds:
            over = [self.rings[a] for a in axes]
            fixed = rings_seconds(kind, over, 0.0, self.overhead)
            self._edge_seconds[kind, axes] = fixed, rings_seconds(kind, over, 1.0, self.overhead) - fixed
        return Edge(kind, axes, *self._edge_seconds[kind, axes], after)

    def move(self, edge: Edge, before: State, sizes: LocalBytes) -> Move:
        """``edge`` as taken by a value of known size."""
        if edge.kind in FREE_MOVES:
            return Move(edge.kind, edge.axes, 0, 0.0, Spec(*edge.after))
        size = sizes(edge.after if edge.kind == ALL_GATHER else before) or 0
        paid = rings_seconds(edge.kind, [self.rings[a] for a in edge.axes], size, self.overhead)
        return Move(edge.kind, edge.axes, size, paid, Spec(*edge.after))

    def edges_from(self, state: State) -> tuple[Edge, ...]:
        """Every move away from ``state``."""
        if state not in self._edges:
            found = itertools.chain(
                self._splits(*state), self._gathers(*state), self._reductions(*state), self._permutes(*state)
            )
            self._edges[state] = tuple(found)
        return self._edges[state]

    def _splits(self, dims: Dims, partial: PartialAxes) -> Iterator[Edge]:
        taken = {a for d in dims for a in d} | {a for a, _ in partial}
        for axis in self.axes:
            if axis in taken:
                continue
            for dim, axes in enumerate(dims):
                yield self.edge("slice", (axis,), (replace_dim(dims, dim, (*axes, axis)), partial))
            for term in self.target_partial:
                if term[0] == axis:
                    yield self.edge("terms", (axis,), (dims, tuple(sorted((*partial, term)))))

    def _gathers(self, dims: Dims, partial: PartialAxes) -> Iterator[Edge]:
        for dim, axes in enumerate(dims):
            for k in range(len(axes)):
                without, moved = replace_dim(dims, dim, axes[:k]), axes[k:]
                yield self.edge(ALL_GATHER, moved, (without, partial))
                for to, there in enumerate(dims):
                    if to != dim:
                        yield self.edge(ALL_TO_ALL, moved, (replace_dim(without, to, there + moved), partial))

    def _reductions(self, dims: Dims, partial: PartialAxes) -> Iterator[Edge]:
        for kind in sorted({k for _, k in partial}):
            terms = [t for t in partial if t[1] == kind]
            for n in range(1, len(terms) + 1):
                for chosen in itertools.combinations(terms, n):
                    rest, axes = tuple(t for t in partial if t not in chosen), tuple(a for a, _ in chosen)
                    yield self.edge(ALL_REDUCE, axes, (dims, rest))
                    for dim, order in itertools.product(range(self.rank), itertools.permutations(axes)):
                        yield self.edge(REDUCE_SCATTER, order, (replace_dim(dims, dim, dims[dim] + order), rest))

    def _permutes(self, dims: Dims, partial: PartialAxes) -> Iterator[Edge]:
        if not any(dims):
            return
        parts = tuple(math.prod([self.sizes[a] for a in axes]) for axes in dims)
        terms = {a for a, _ in partial}
        free = tuple(a for a in self.axes if a not in terms)
        if (parts, free) not in self._same_parts:
            self._same_parts[parts, free] = tuple(_splits_into(parts, free, self.sizes))
        here = _positions(dims)
        for other in self._same_parts[parts, free]:
            if other != dims:
                there = _positions(other)
                displaced = tuple(sorted(a for a in {*here, *there} if here.get(a) != there.get(a)))
                yield self.edge(COLLECTIVE_PERMUTE, displaced, (other, partial))


def replace_dim(dims: Dims, dim: int, axes: Axes) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _splits_into(parts: tuple[int, ...], free: Axes, sizes: Mapping[str, int]) -> Iterator[tuple[Axes, ...]]:
    """Every way to split dimensions into ``parts`` over axes of ``free``."""
    if not parts:
        yield ()
        return
    for n in range(len(free) + 1 if parts[0] > 1 else 1):
        for axes in itertools.permutations(free, n):
            if math.prod([sizes[a] for a in axes]) == parts[0]:
                for others in _splits_into(parts[1:], tuple(a for a in free if a not in axes), sizes):
                    yield (axes, *others)


@functools.lru_cache(maxsize=1 << 14)
def _positions(dims: Dims) -> Mapping[str, tuple[int, int]]:
    """Dimension and place there of each axis."""
    return {a: (dim, i) for dim, axes in enumerate(dims) for i, a in enumerate(axes)}
