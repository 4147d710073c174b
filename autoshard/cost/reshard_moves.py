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
from typing import NamedTuple

from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import Ring, rings, rings_seconds
from autoshard.machine.mesh import LogicalMesh

FREE = ("slice", "terms")
Dims = tuple[Axes, ...]
Terms = tuple[tuple[str, str], ...]
State = tuple[Dims, Terms]
"""A `Spec`'s fields, its terms sorted: cheaper to hash and to compare."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a reshard: ``kind`` over ``axes``, after which the value lies as ``spec`` says.

    ``bytes`` is the payload as `Collective.bytes` defines it; 0 for the free kinds "slice" and "terms".
    """

    kind: str
    axes: Axes
    bytes: int
    seconds: float
    spec: Spec


class Edge(NamedTuple):
    """A move apart from the value's size: it costs ``fixed + each * bytes`` seconds."""

    kind: str
    axes: Axes
    fixed: float
    each: float
    after: State


class Sizes:
    """Bytes per device under each state, for one value; None where a dimension would not divide."""

    def __init__(self, start: State, goal: State, shape: tuple[int, ...], bits: int, sizes: Mapping[str, int]) -> None:
        self.ends = (start[0], goal[0])
        self.shape, self.bits, self.sizes = shape, bits, sizes
        self.known: dict[tuple[Axes, ...], int | None] = {}

    def __call__(self, state: State) -> int | None:
        dims = state[0]
        if dims not in self.known:
            self.known[dims] = self._measure(dims)
        return self.known[dims]

    def _measure(self, dims: tuple[Axes, ...]) -> int | None:
        elements = 1
        for i, (n, axes) in enumerate(zip(self.shape, dims, strict=True)):
            parts = math.prod([self.sizes[a] for a in axes])
            # An end of the path may be split unevenly, and then so may what leads to it.
            if n % parts and all(end[i][: len(axes)] != axes for end in self.ends):
                return None
            elements *= -(-n // parts)
        return -(-elements * self.bits // 8)


class Graph:
    """Every spec of one rank over ``axes``, and the moves between them, found as they are asked for."""

    def __init__(self, axes: Axes, rank: int, terms: Terms, mesh: LogicalMesh) -> None:
        self.axes, self.rank, self.terms = axes, rank, terms
        self.sizes = {a: mesh.shape[a] for a in axes}
        self.rings: dict[str, Ring] = dict(zip(axes, rings(axes, mesh), strict=True))
        self.overhead = mesh.hardware.overhead
        self.edges: dict[State, tuple[Edge, ...]] = {}
        self.prices: dict[tuple[str, Axes], tuple[float, float]] = {}
        self.alike: dict[tuple[tuple[int, ...], Axes], tuple[tuple[Axes, ...], ...]] = {}
        self.fastest = max((bandwidth for _, bandwidth, _ in self.rings.values()), default=math.inf)
        self.quickest = min((latency for _, _, latency in self.rings.values()), default=0.0) + self.overhead

    def edge(self, kind: str, axes: Axes, after: State) -> Edge:
        if kind in FREE:
            return Edge(kind, axes, 0.0, 0.0, after)
        if (kind, axes) not in self.prices:
            over = [self.rings[a] for a in axes]
            fixed = rings_seconds(kind, over, 0.0, self.overhead)
            self.prices[kind, axes] = fixed, rings_seconds(kind, over, 1.0, self.overhead) - fixed
        return Edge(kind, axes, *self.prices[kind, axes], after)

    def move(self, edge: Edge, before: State, sizes: Sizes) -> Move:
        """``edge`` as taken by a value of known size."""
        if edge.kind in FREE:
            return Move(edge.kind, edge.axes, 0, 0.0, Spec(*edge.after))
        size = sizes(edge.after if edge.kind == "all-gather" else before) or 0
        paid = rings_seconds(edge.kind, [self.rings[a] for a in edge.axes], size, self.overhead)
        return Move(edge.kind, edge.axes, size, paid, Spec(*edge.after))

    def away(self, state: State) -> tuple[Edge, ...]:
        """Every move away from ``state``."""
        if state not in self.edges:
            found = itertools.chain(
                self._splits(*state), self._gathers(*state), self._reductions(*state), self._permutes(*state)
            )
            self.edges[state] = tuple(found)
        return self.edges[state]

    def _splits(self, dims: Dims, partial: Terms) -> Iterator[Edge]:
        taken = {a for d in dims for a in d} | {a for a, _ in partial}
        for axis in self.axes:
            if axis in taken:
                continue
            for dim, axes in enumerate(dims):
                yield self.edge("slice", (axis,), (put(dims, dim, (*axes, axis)), partial))
            for term in self.terms:
                if term[0] == axis:
                    yield self.edge("terms", (axis,), (dims, tuple(sorted((*partial, term)))))

    def _gathers(self, dims: Dims, partial: Terms) -> Iterator[Edge]:
        for dim, axes in enumerate(dims):
            for k in range(len(axes)):
                without, moved = put(dims, dim, axes[:k]), axes[k:]
                yield self.edge("all-gather", moved, (without, partial))
                for to, there in enumerate(dims):
                    if to != dim:
                        yield self.edge("all-to-all", moved, (put(without, to, there + moved), partial))

    def _reductions(self, dims: Dims, partial: Terms) -> Iterator[Edge]:
        for kind in sorted({k for _, k in partial}):
            terms = [t for t in partial if t[1] == kind]
            for n in range(1, len(terms) + 1):
                for chosen in itertools.combinations(terms, n):
                    rest, axes = tuple(t for t in partial if t not in chosen), tuple(a for a, _ in chosen)
                    yield self.edge("all-reduce", axes, (dims, rest))
                    for dim, order in itertools.product(range(self.rank), itertools.permutations(axes)):
                        yield self.edge("reduce-scatter", order, (put(dims, dim, dims[dim] + order), rest))

    def _permutes(self, dims: Dims, partial: Terms) -> Iterator[Edge]:
        if not any(dims):
            return
        parts = tuple(math.prod([self.sizes[a] for a in axes]) for axes in dims)
        terms = {a for a, _ in partial}
        free = tuple(a for a in self.axes if a not in terms)
        if (parts, free) not in self.alike:
            self.alike[parts, free] = tuple(_layouts(parts, free, self.sizes))
        here = _where(dims)
        for other in self.alike[parts, free]:
            if other != dims:
                there = _where(other)
                displaced = tuple(sorted(a for a in {*here, *there} if here.get(a) != there.get(a)))
                yield self.edge("collective-permute", displaced, (other, partial))


def put(dims: Dims, dim: int, axes: Axes) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _layouts(parts: tuple[int, ...], free: Axes, sizes: Mapping[str, int]) -> Iterator[tuple[Axes, ...]]:
    """Every way to split dimensions into ``parts`` over axes of ``free``."""
    if not parts:
        yield ()
        return
    for n in range(len(free) + 1 if parts[0] > 1 else 1):
        for axes in itertools.permutations(free, n):
            if math.prod([sizes[a] for a in axes]) == parts[0]:
                for others in _layouts(parts[1:], tuple(a for a in free if a not in axes), sizes):
                    yield (axes, *others)


@functools.lru_cache(maxsize=1 << 14)
def _where(dims: Dims) -> Mapping[str, tuple[int, int]]:
    """Dimension and place there of each axis."""
    return {a: (dim, i) for dim, axes in enumerate(dims) for i, a in enumerate(axes)}
