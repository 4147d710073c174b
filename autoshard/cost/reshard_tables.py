"""Reshard tables: seconds from each of many specs of a value to each of many others, computed together.

`autoshard.cost.reshard` finds one path with its moves; the solver's tables need thousands of costs and no path. Same
graph and same costs, as arrays: Bellman-Ford over all states and many destinations at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.cost.reshard_moves import Edge, PartialAxes, ReshardGraph, State
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import ALL_GATHER
from autoshard.machine.mesh import LogicalMesh

Array = npt.NDArray[np.float64]

GOALS_PER_BATCH = 16
"""Destinations that are solved for together: so many that the arrays stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class _StateGraph:
    """Every state of a rank over some axes, and the edges between them, sorted by source state."""

    index: dict[State, int]
    """Number of each state."""
    parts: Array
    """[states, dimensions]: number of parts of each dimension."""
    first_edge: np.ndarray
    """[states]: position of the first edge of each state, which leads to itself and is free."""
    before: np.ndarray
    """[edges]: source state."""
    after: np.ndarray
    """[edges]: destination state."""
    fixed_seconds: Array
    """[edges]"""
    seconds_per_byte: Array
    """[edges]"""
    gathers: np.ndarray
    """[edges]: whether an edge is an all-gather, whose bytes are those of the destination state, not the source's."""
    starts_axis: np.ndarray
    """[edges, axes]: whether the destination splits over an axis that the source does not use."""
    unsplit: np.ndarray
    """[axes, states]: whether a state splits no dimension over an axis."""
    spec_states: dict[tuple[tuple[int, ...], Axes], dict[Spec, int]] = field(
        default_factory=dict[tuple[tuple[int, ...], Axes], dict[Spec, int]]
    )
    """Cache: (dimensions larger than 1, mesh axes in the order of their numbers) -> spec -> state. Meshes that share
    this graph may number axes of the same names differently."""


def reshard_seconds_table(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> Array:
    """[srcs, dsts]: seconds as `reshard_seconds`. No destination may be partial."""
    if len(srcs) == 1 and srcs == dsts:
        return np.zeros((1, 1))
    table, sources, goals = _lookup(srcs, dsts, shape, bits, mesh)
    columns = table.columns(goals)
    return table.seconds[np.array(sources)[:, None], columns]


def reshard_seconds_pairwise(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> Array:
    """[srcs]: seconds from each of ``srcs`` to the one of ``dsts`` at the same position."""
    different = [k for k, (s, d) in enumerate(zip(srcs, dsts, strict=True)) if s != d]
    found = np.zeros(len(srcs))
    if different:
        table, sources, goals = _lookup([srcs[k] for k in different], [dsts[k] for k in different], shape, bits, mesh)
        columns = table.columns(goals)
        found[different] = table.seconds[sources, columns]
    return found


def _lookup(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> tuple[_SecondsTable, list[int], list[int]]:
    """The table of values of this shape, and the states in it of ``srcs`` and of ``dsts``."""
    large = tuple(d for d, n in enumerate(shape) if n > 1)
    index, canonical = _canonical_axes(mesh)
    partial_axes = tuple(sorted({(index[a], kind) for s in srcs for a, kind in s.partial if a in index}))
    key = canonical.axis_names, len(large), partial_axes, canonical
    graph = _state_graph(*key)
    states = graph.spec_states.setdefault((large, tuple(index)), {})

    def state(s: Spec) -> int:
        found = states.get(s)
        if found is None:
            dims = tuple(tuple(index[a] for a in s.dims[d] if a in index) for d in large)
            partial = tuple(sorted((index[a], kind) for a, kind in s.partial if a in index))
            found = states[s] = graph.index[dims, partial]
        return found

    n = np.array([shape[d] for d in large], dtype=float)
    size = np.ceil(np.prod(np.ceil(n / graph.parts), axis=1) * bits / 8)
    divides = (n % graph.parts == 0).all(axis=1)
    return _seconds_table(key, size.tobytes(), divides.tobytes()), [state(s) for s in srcs], [state(d) for d in dsts]


@functools.lru_cache(maxsize=64)
def _canonical_axes(mesh: LogicalMesh) -> tuple[dict[str, str], LogicalMesh]:
    """Mesh axes of more than one device, numbered by size, link and place, and the mesh with these numbers as names.

    Meshes that differ only in names and order of axes share one state graph.
    """
    link = dict(zip(mesh.axis_names, mesh.axis_links, strict=False))
    axes = sorted(mesh.nontrivial_axes, key=lambda a: (mesh.shape[a], link.get(a, ""), mesh.along(a)))
    index = {a: str(k) for k, a in enumerate(axes)}
    sizes, links = tuple(mesh.shape[a] for a in axes), tuple(link[a] for a in axes if link)
    torus = tuple(map(mesh.along, axes)) if mesh.torus else ()
    return index, LogicalMesh(tuple(index.values()), sizes, mesh.hardware, links, torus=torus)


@functools.lru_cache(maxsize=512)
def _seconds_table(key: Any, sizes: bytes, divides: bytes) -> _SecondsTable:
    """The table of values for which these two arrays are equal, so that it serves many shapes.

    Args:
      key: the arguments of `_state_graph`.
      sizes: [states] as bytes: bytes per device in each state.
      divides: [states] as bytes: whether each state splits every dimension evenly.
    """
    return _SecondsTable(_state_graph(*key), np.frombuffer(sizes), np.frombuffer(divides, dtype=bool))


class _SecondsTable:
    """Seconds from every state to the destinations asked for so far, for values of one size."""

    def __init__(self, graph: _StateGraph, size: Array, divides: np.ndarray) -> None:
        seconds = graph.fixed_seconds + graph.seconds_per_byte * np.where(
            graph.gathers, size[graph.after], size[graph.before]
        )
        allowed = divides[graph.after]
        allowed[graph.first_edge] = True  # every state keeps its edge to itself, so that none is without edges
        self.first_edge, self.after = np.cumsum(np.append(0, allowed))[graph.first_edge], graph.after[allowed]
        self.edge_seconds, self.starts_axis = seconds[allowed, None], graph.starts_axis[allowed]
        self.unsplit = graph.unsplit
        self.column: dict[int, int] = {}
        """Goal state -> its column in ``seconds``."""
        self.seconds = np.empty((len(graph.index), 0))
        """[states, goals]"""

    def columns(self, goals: Sequence[int]) -> list[int]:
        """The columns of ``goals``, computed where they are new."""
        new = sorted(set(goals).difference(self.column))
        if new:
            self.column.update(zip(new, range(len(self.column), len(self.column) + len(new)), strict=True))
            parts = [self._to(np.array(new[k : k + GOALS_PER_BATCH])) for k in range(0, len(new), GOALS_PER_BATCH)]
            self.seconds = np.concatenate([self.seconds, *parts], axis=1)
        return [self.column[g] for g in goals]

    def _to(self, goals: np.ndarray) -> Array:
        """[states, goals]: seconds to ``goals``, by Bellman-Ford."""
        forbidden = np.zeros((len(self.after), len(goals)), dtype=bool)
        for starts, unsplit in zip(
            self.starts_axis.T, self.unsplit, strict=True
        ):  # no edge adds an axis that the goal does not use
            forbidden |= starts[:, None] & unsplit[goals]
        edge_seconds = np.where(forbidden, math.inf, self.edge_seconds)
        best, via = np.full((self.seconds.shape[0], len(goals)), math.inf), np.empty_like(edge_seconds)
        best[goals, range(len(goals))] = 0.0
        while True:
            np.take(best, self.after, axis=0, out=via, mode="clip")
            via += edge_seconds
            relaxed = np.minimum.reduceat(via, self.first_edge, axis=0)
            if np.array_equal(relaxed, best):
                return best
            best = np.minimum(relaxed, best)


@functools.lru_cache(maxsize=64)
def _state_graph(axes: tuple[str, ...], rank: int, partial_axes: PartialAxes, mesh: LogicalMesh) -> _StateGraph:
    """All states reachable from the replicated spec, and from it with any of ``partial_axes`` partial."""
    graph = ReshardGraph([(a,) for a in axes], rank, (), mesh)
    start: State = (((),) * rank, ())
    index: dict[State, int] = {}
    queue: list[State] = [start, *((start[0], tuple(sorted(t))) for t in _subsets(partial_axes))]
    edges: list[tuple[int, Edge]] = []
    while queue:
        state = queue.pop()
        if state in index:
            continue
        here = index[state] = len(index)
        stay = Edge("stay", (), 0.0, 0.0, state)
        for edge in (stay, *graph.edges_from(state)):
            edges.append((here, edge))
            if edge.after not in index:
                queue.append(edge.after)
    before, after = np.array([b for b, _ in edges]), np.array([index[e.after] for _, e in edges])
    split = np.array([[any(a in d for d in dims) for a in axes] for dims, _ in index])
    used = split | np.array([[any(a == p for p, _ in partial) for a in axes] for _, partial in index])
    return _StateGraph(
        index,
        np.array([[mesh.axes_size(d) for d in dims] for dims, _ in index], dtype=float).reshape(len(index), rank),
        np.flatnonzero(np.diff(before, prepend=-1)),
        before,
        after,
        np.array([e.fixed_seconds for _, e in edges]),
        np.array([e.seconds_per_byte for _, e in edges]),
        np.array([e.kind == ALL_GATHER for _, e in edges]),
        ~used[before] & split[after],
        ~split.T,
    )


def _subsets(partial_axes: PartialAxes) -> list[PartialAxes]:
    """Every subset in which no axis has two reduction kinds."""
    found: list[PartialAxes] = [()]
    for p in partial_axes:
        found += [(*f, p) for f in found if all(p[0] != a for a, _ in f)]
    return found
