"""The reshard graph: which collectives lead from one spec to which others, and their seconds as a function of bytes.

One graph holds the specs of one rank over some mesh axes. It does not depend on shapes: the time of a move is linear in
its bytes, so one graph serves all values. Edges are computed when a search first reaches their source.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from autoshard.ir.spec import Axes, DimAxes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
    collective_rate,
    collective_seconds,
    rings,
)
from autoshard.machine.mesh import LogicalMesh

type MoveKind = CollectiveKind | Literal["slice", "stay", "make-partial"]
FREE_MOVES: Final = ("slice", "stay", "make-partial")
"""Moves that send no bytes."""
PartialAxes = tuple[tuple[str, str], ...]
"""(axis, reduction kind), as in `Spec.partial`."""
State = tuple[DimAxes, PartialAxes]
"""The fields of a `Spec`, partial axes sorted: cheaper to hash and to compare."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a reshard: ``kind`` over ``axes``, with the value's ``spec`` after it.

    ``bytes`` is the payload as `Collective.bytes` defines it; 0 for `FREE_MOVES`.
    """

    kind: MoveKind
    axes: Axes
    bytes: int
    seconds: float
    spec: Spec


class Edge(NamedTuple):
    """A move of a value of any size: it takes ``fixed_seconds + seconds_per_byte * bytes``."""

    kind: MoveKind
    axes: Axes
    fixed_seconds: float
    seconds_per_byte: float
    after: State


class LocalBytes:
    """Bytes per device of one value in each state; None where a dimension does not divide evenly.

    A split that ``start`` or ``goal`` has, or begins with, may be uneven.
    """

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
            if n % parts and all(end[i][: len(axes)] != axes for end in self.ends):
                return None
            elements *= -(-n // parts)
        return -(-elements * self.bits // 8)


class ReshardGraph:
    """The specs of one rank over blocks of mesh axes and the moves between them, computed on demand.

    A block is one axis, or several that only move together, minor-most last; its first axis stands for it in a `State`.
    ``goal_partial``: the partial blocks that make-partial may produce.
    """

    def __init__(self, blocks: Sequence[Axes], rank: int, goal_partial: PartialAxes, mesh: LogicalMesh) -> None:
        self.blocks = {block[0]: block for block in blocks}
        self.axes, self.rank, self.goal_partial = tuple(self.blocks), rank, goal_partial
        self.sizes = {name: math.prod([mesh.shape[a] for a in block]) for name, block in self.blocks.items()}
        self.mesh = mesh
        self._edges: dict[State, tuple[Edge, ...]] = {}
        self._edge_seconds: dict[tuple[str, Axes], tuple[float, float]] = {}
        self._same_parts: dict[tuple[tuple[int, ...], Axes], tuple[tuple[Axes, ...], ...]] = {}
        """Splits with given numbers of parts over given axes."""
        used = [a for a in mesh.axis_names if any(a in block for block in blocks)]
        over = [ring for axes in (*((a,) for a in used), tuple(used)) for ring in rings(axes, mesh)]
        self.max_gather_bandwidth = max((ring.gather for ring in over), default=math.inf)
        self.min_collective_seconds = min((ring.latency for ring in over), default=0.0) + mesh.hardware.overhead

    def edge(self, kind: MoveKind, axes: Axes, after: State) -> Edge:
        """The edge of a move over ``axes`` that leads to ``after``."""
        if kind in FREE_MOVES:
            return Edge(kind, axes, 0.0, 0.0, after)
        if (kind, axes) not in self._edge_seconds:
            self._edge_seconds[kind, axes] = collective_rate(kind, self.whole(axes), self.mesh)
        return Edge(kind, axes, *self._edge_seconds[kind, axes], after)

    def move(self, edge: Edge, before: State, sizes: LocalBytes) -> Move:
        """The move along ``edge`` of the value whose bytes are ``sizes``."""
        dims, partial = edge.after
        spec = Spec(
            tuple(map(self.whole, dims)), tuple(sorted((a, kind) for b, kind in partial for a in self.blocks[b]))
        )
        axes = self.whole(edge.axes)
        if edge.kind in FREE_MOVES:
            return Move(edge.kind, axes, 0, 0.0, spec)
        size = sizes(edge.after if edge.kind == ALL_GATHER else before) or 0
        return Move(edge.kind, axes, size, collective_seconds(edge.kind, axes, size, self.mesh), spec)

    def whole(self, names: Axes) -> Axes:
        """The mesh axes of blocks."""
        return tuple(a for name in names for a in self.blocks[name])

    def edges_from(self, state: State) -> tuple[Edge, ...]:
        """Every move from ``state``."""
        if state not in self._edges:
            found = itertools.chain(
                self._splits(*state), self._gathers(*state), self._reductions(*state), self._permutes(*state)
            )
            self._edges[state] = tuple(found)
        return self._edges[state]

    def _splits(self, dims: DimAxes, partial: PartialAxes) -> Iterator[Edge]:
        taken = {a for d in dims for a in d} | {a for a, _ in partial}
        for axis in self.axes:
            if axis in taken:
                continue
            for dim, axes in enumerate(dims):
                yield self.edge("slice", (axis,), (replace_dim(dims, dim, (*axes, axis)), partial))
            for new in self.goal_partial:
                if new[0] == axis:
                    yield self.edge("make-partial", (axis,), (dims, tuple(sorted((*partial, new)))))

    def _gathers(self, dims: DimAxes, partial: PartialAxes) -> Iterator[Edge]:
        for dim, axes in enumerate(dims):
            for k in range(len(axes)):
                without, moved = replace_dim(dims, dim, axes[:k]), axes[k:]
                yield self.edge(ALL_GATHER, moved, (without, partial))
                for to, to_axes in enumerate(dims):
                    if to != dim:
                        yield self.edge(ALL_TO_ALL, moved, (replace_dim(without, to, to_axes + moved), partial))

    def _reductions(self, dims: DimAxes, partial: PartialAxes) -> Iterator[Edge]:
        for kind in sorted({k for _, k in partial}):
            reducible = [p for p in partial if p[1] == kind]
            for n in range(1, len(reducible) + 1):
                for chosen in itertools.combinations(reducible, n):
                    rest, axes = tuple(p for p in partial if p not in chosen), tuple(a for a, _ in chosen)
                    yield self.edge(ALL_REDUCE, axes, (dims, rest))
                    for dim, order in itertools.product(range(self.rank), itertools.permutations(axes)):
                        yield self.edge(REDUCE_SCATTER, order, (replace_dim(dims, dim, dims[dim] + order), rest))

    def _permutes(self, dims: DimAxes, partial: PartialAxes) -> Iterator[Edge]:
        if not any(dims):
            return
        parts = tuple(math.prod([self.sizes[a] for a in axes]) for axes in dims)
        partial_axes = {a for a, _ in partial}
        free = tuple(a for a in self.axes if a not in partial_axes)
        if (parts, free) not in self._same_parts:
            self._same_parts[parts, free] = tuple(_splits_into(parts, free, self.sizes))
        before = _positions(dims)
        for other in self._same_parts[parts, free]:
            if other != dims:
                after = _positions(other)
                displaced = tuple(sorted(a for a in {*before, *after} if before.get(a) != after.get(a)))
                yield self.edge(COLLECTIVE_PERMUTE, displaced, (other, partial))


def replace_dim(dims: DimAxes, dim: int, axes: Axes) -> DimAxes:
    """``dims`` with dimension ``dim`` split over ``axes``."""
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _splits_into(parts: tuple[int, ...], free: Axes, sizes: Mapping[str, int]) -> Iterator[tuple[Axes, ...]]:
    """Every assignment of axes of ``free`` to dimensions that splits them into ``parts``."""
    if not parts:
        yield ()
        return
    for n in range(len(free) + 1 if parts[0] > 1 else 1):
        for axes in itertools.permutations(free, n):
            if math.prod([sizes[a] for a in axes]) == parts[0]:
                for others in _splits_into(parts[1:], tuple(a for a in free if a not in axes), sizes):
                    yield (axes, *others)


@functools.lru_cache(maxsize=1 << 14)
def _positions(dims: DimAxes) -> Mapping[str, tuple[int, int]]:
    """Axis -> (dimension, position among the axes of that dimension)."""
    return {a: (dim, i) for dim, axes in enumerate(dims) for i, a in enumerate(axes)}
