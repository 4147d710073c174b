"""routes: what it takes to go from each of many specs of a value to each of many others, all at once.

`reshard` finds one path and names its moves; a search needs thousands of prices and no path. The moves are the same,
as arrays: prices relax over all of them together until none falls.
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
"""Destinations priced at a time: so many that what they take stays in the processor's cache."""


@dataclass(frozen=True, eq=False)
class _StateGraph:
    """Every state of a rank over some axes, and the moves between them, grouped by the state they leave."""

    index: dict[State, int]
    parts: Array
    """[states, dimensions]: into how many parts each splits each dimension."""
    first_edge: np.ndarray
    """[states]: where the moves of each begin; the first of each is to stay."""
    before: np.ndarray
    after: np.ndarray
    fixed_seconds: Array
    seconds_per_byte: Array
    gathers: np.ndarray
    """Whether a move's bytes are those after it rather than before it."""
    starts_axis: np.ndarray
    """[moves, axes]: whether a move begins to use an axis."""
    unsplit: np.ndarray
    """[axes, states]: whether a state splits nothing over an axis."""
    spec_states: dict[tuple[tuple[int, ...], Axes], dict[Spec, int]] = field(
        default_factory=dict[tuple[tuple[int, ...], Axes], dict[Spec, int]]
    )
    """The state of each spec that was asked for, by the dimensions that count and the mesh's axes."""


def reshard_seconds_table(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> Array:
    """Seconds from each of ``srcs`` to each of ``dsts``, as `reshard.seconds`. No destination is partial."""
    if len(srcs) == 1 and srcs == dsts:
        return np.zeros((1, 1))
    table, froms, goals = _lookup(srcs, dsts, shape, bits, mesh)
    columns = table.columns(goals)
    return table.seconds[np.array(froms)[:, None], columns]


def reshard_seconds_pairwise(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> Array:
    """Seconds from each of ``srcs`` to the one of ``dsts`` in the same place."""
    apart = [k for k, (s, d) in enumerate(zip(srcs, dsts, strict=True)) if s != d]
    found = np.zeros(len(srcs))
    if apart:
        table, froms, goals = _lookup([srcs[k] for k in apart], [dsts[k] for k in apart], shape, bits, mesh)
        columns = table.columns(goals)
        found[apart] = table.seconds[froms, columns]
    return found


def _lookup(
    srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh
) -> tuple[_SecondsTable, list[int], list[int]]:
    """The table of such values, and its states for ``srcs`` and ``dsts``."""
    large = tuple(d for d, n in enumerate(shape) if n > 1)
    number, alike = _canonical_axes(mesh)
    terms = tuple(sorted({(number[a], kind) for s in srcs for a, kind in s.partial if a in number}))
    known = alike.axis_names, len(large), terms, alike
    net = _state_graph(*known)
    seen = net.spec_states.setdefault((large, mesh.nontrivial_axes), {})

    def state(s: Spec) -> int:
        found = seen.get(s)
        if found is None:
            dims = tuple(tuple(number[a] for a in s.dims[d] if a in number) for d in large)
            partial = tuple(sorted((number[a], kind) for a, kind in s.partial if a in number))
            found = seen[s] = net.index[dims, partial]
        return found

    n = np.array([shape[d] for d in large], dtype=float)
    size = np.ceil(np.prod(np.ceil(n / net.parts), axis=1) * bits / 8)
    whole = (n % net.parts == 0).all(axis=1)
    return _seconds_table(known, size.tobytes(), whole.tobytes()), [state(s) for s in srcs], [state(d) for d in dsts]


@functools.lru_cache(maxsize=64)
def _canonical_axes(mesh: LogicalMesh) -> tuple[dict[str, str], LogicalMesh]:
    """Of each axis of more than one device its number by size and link, and the mesh of axes so named: what is worked
    out for that serves all meshes of such axes, whatever their names and order."""
    link = dict(zip(mesh.axis_names, mesh.axis_links, strict=False))
    axes = sorted(mesh.nontrivial_axes, key=lambda a: (mesh.shape[a], link.get(a, "")))
    number = {a: str(k) for k, a in enumerate(axes)}
    sizes, links = tuple(mesh.shape[a] for a in axes), tuple(link[a] for a in axes if link)
    return number, LogicalMesh(tuple(number.values()), sizes, mesh.hardware, links)


@functools.lru_cache(maxsize=512)
def _seconds_table(known: Any, sizes: bytes, divides: bytes) -> _SecondsTable:
    """``sizes`` and ``divides`` are arrays: the bytes that a device holds in each state, and whether that state splits
    evenly. All else about the value's shape does not count, so one table serves many shapes."""
    return _SecondsTable(_state_graph(*known), np.frombuffer(sizes), np.frombuffer(divides, dtype=bool))


class _SecondsTable:
    """Seconds from every state of a net to those that were asked for, of values of one size."""

    def __init__(self, net: _StateGraph, size: Array, whole: np.ndarray) -> None:
        cost = net.fixed_seconds + net.seconds_per_byte * np.where(net.gathers, size[net.after], size[net.before])
        can = whole[net.after]
        can[net.first_edge] = True  # to stay costs nothing, and where it cannot be had, no move leads there
        self.start, self.after = np.cumsum(np.append(0, can))[net.first_edge], net.after[can]
        self.cost, self.new = cost[can, None], net.starts_axis[can]
        self.idle = net.unsplit
        self.known: dict[int, int] = {}
        """The column of each goal."""
        self.seconds = np.empty((len(net.index), 0))
        """[states, goals]"""

    def columns(self, goals: Sequence[int]) -> list[int]:
        """The columns of ``goals``, which are priced if they were not."""
        new = sorted(set(goals).difference(self.known))
        if new:
            self.known.update(zip(new, range(len(self.known), len(self.known) + len(new)), strict=True))
            parts = [self._to(np.array(new[k : k + GOALS_PER_BATCH])) for k in range(0, len(new), GOALS_PER_BATCH)]
            self.seconds = np.concatenate([self.seconds, *parts], axis=1)
        return [self.known[g] for g in goals]

    def _to(self, goals: np.ndarray) -> Array:
        begins = np.zeros((len(self.after), len(goals)), dtype=bool)
        for new, idle in zip(self.new.T, self.idle, strict=True):  # an axis that is not wanted stays idle
            begins |= new[:, None] & idle[goals]
        price = np.where(begins, math.inf, self.cost)
        now, after_each = np.full((self.seconds.shape[0], len(goals)), math.inf), np.empty_like(price)
        now[goals, range(len(goals))] = 0.0
        while True:
            np.take(now, self.after, axis=0, out=after_each, mode="clip")
            after_each += price
            found = np.minimum.reduceat(after_each, self.start, axis=0)
            if np.array_equal(found, now):
                return now
            now = np.minimum(found, now)


@functools.lru_cache(maxsize=64)
def _state_graph(axes: tuple[str, ...], rank: int, terms: PartialAxes, mesh: LogicalMesh) -> _StateGraph:
    graph = ReshardGraph(axes, rank, (), mesh)
    start: State = (((),) * rank, ())
    number: dict[State, int] = {}
    queue: list[State] = [start, *((start[0], tuple(sorted(t))) for t in _subsets(terms))]
    edges: list[tuple[int, Edge]] = []
    while queue:
        state = queue.pop()
        if state in number:
            continue
        here = number[state] = len(number)
        stay = Edge("stay", (), 0.0, 0.0, state)
        for edge in (stay, *graph.edges_from(state)):
            edges.append((here, edge))
            if edge.after not in number:
                queue.append(edge.after)
    before, after = np.array([b for b, _ in edges]), np.array([number[e.after] for _, e in edges])
    split = np.array([[any(a in d for d in dims) for a in axes] for dims, _ in number])
    held = split | np.array([[any(a == t for t, _ in partial) for a in axes] for _, partial in number])
    return _StateGraph(
        number,
        np.array([[mesh.axes_size(d) for d in dims] for dims, _ in number], dtype=float).reshape(len(number), rank),
        np.flatnonzero(np.diff(before, prepend=-1)),
        before,
        after,
        np.array([e.fixed_seconds for _, e in edges]),
        np.array([e.seconds_per_byte for _, e in edges]),
        np.array([e.kind == ALL_GATHER for _, e in edges]),
        ~held[before] & split[after],
        ~split.T,
    )


def _subsets(terms: PartialAxes) -> list[PartialAxes]:
    found: list[PartialAxes] = [()]
    for t in terms:
        found += [(*f, t) for f in found if all(t[0] != a for a, _ in f)]
    return found
