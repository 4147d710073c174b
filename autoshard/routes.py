"""routes: what it takes to go from each of many specs of a value to each of many others, all at once.

`reshard` finds one path and names its moves; a search needs thousands of prices and no path. The moves are the same,
as arrays: prices relax over all of them together until none falls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.mesh import LogicalMesh
from autoshard.moves import Edge, Graph, State, Terms
from autoshard.problem import Array
from autoshard.spec import Spec


@dataclass(frozen=True, eq=False)
class _Net:
    """Every state of a rank over some axes, and the moves between them, grouped by the state they leave."""

    number: dict[State, int]
    parts: Array
    """[states, dimensions]: into how many parts each splits each dimension."""
    start: np.ndarray
    """[states]: where the moves of each begin; the first of each is to stay."""
    before: np.ndarray
    after: np.ndarray
    fixed: Array
    each: Array
    gathers: np.ndarray
    """Whether a move's bytes are those after it rather than before it."""
    new: np.ndarray
    """[moves, axes]: 1 where a move begins to use an axis, else 0."""


def prices(srcs: Sequence[Spec], dsts: Sequence[Spec], shape: tuple[int, ...], bits: int, mesh: LogicalMesh) -> Array:
    """Seconds from each of ``srcs`` to each of ``dsts``, as `reshard.seconds`. No destination is partial."""
    if set(srcs) == set(dsts) and len(set(srcs)) == 1:
        return np.zeros((len(srcs), len(dsts)))
    large = [d for d, n in enumerate(shape) if n > 1]
    axes = mesh.split_axes
    terms = tuple(sorted({t for s in srcs for t in s.partial if t[0] in axes}))
    known = axes, len(large), terms, mesh
    net = _net(*known)

    def state(s: Spec) -> int:
        dims = tuple(tuple(a for a in s.dims[d] if a in axes) for d in large)
        return net.number[dims, tuple(sorted(t for t in s.partial if t[0] in axes))]

    goals = {g: k for k, g in enumerate(sorted(set(map(state, dsts))))}
    table = _table(known, tuple(shape[d] for d in large), bits, tuple(goals))
    return table[np.ix_([state(s) for s in srcs], [goals[state(d)] for d in dsts])]


@functools.lru_cache(maxsize=512)
def _table(known: Any, shape: tuple[int, ...], bits: int, goals: tuple[int, ...]) -> Array:
    """[states, goals]: seconds from every state to each of ``goals``."""
    axes, net = known[0], _net(*known)
    n = np.asarray(shape, dtype=float)
    size = np.ceil(np.prod(np.ceil(n / net.parts), axis=1) * bits / 8)
    whole = (n % net.parts == 0).all(axis=1)
    cost = net.fixed + net.each * np.where(net.gathers, size[net.after], size[net.before])
    cost[~whole[net.after]] = math.inf
    states = list(net.number)
    idle = np.array([[all(a not in d for d in states[g][0]) for g in goals] for a in axes], dtype=np.float32)
    price = np.where(net.new @ idle > 0, math.inf, cost[:, None])  # an axis that is not wanted stays idle
    best = np.full((len(states), len(goals)), math.inf)
    best[list(goals), range(len(goals))] = 0.0
    while True:
        found = np.minimum.reduceat(price + best[net.after], net.start, axis=0)
        if np.array_equal(found, best):
            return best
        best = np.minimum(found, best)


@functools.lru_cache(maxsize=64)
def _net(axes: tuple[str, ...], rank: int, terms: Terms, mesh: LogicalMesh) -> _Net:
    graph = Graph(axes, rank, (), mesh)
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
        for edge in (stay, *graph.away(state)):
            edges.append((here, edge))
            if edge.after not in number:
                queue.append(edge.after)
    states = list(number)
    before = np.array([b for b, _ in edges])
    return _Net(
        number,
        np.array([[mesh.axes_size(d) for d in dims] for dims, _ in number], dtype=float).reshape(len(number), rank),
        np.flatnonzero(np.diff(before, prepend=-1)),
        before,
        np.array([number[e.after] for _, e in edges]),
        np.array([e.fixed for _, e in edges]),
        np.array([e.each for _, e in edges]),
        np.array([e.kind == "all-gather" for _, e in edges]),
        np.array([[_begins(a, states[b], e) for a in axes] for b, e in edges], dtype=np.float32),
    )


def _begins(axis: str, before: State, edge: Edge) -> bool:
    held = {a for d in before[0] for a in d} | {a for a, _ in before[1]}
    return axis not in held and any(axis in d for d in edge.after[0])


def _subsets(terms: Terms) -> list[Terms]:
    found: list[Terms] = [()]
    for t in terms:
        found += [(*f, t) for f in found if all(t[0] != a for a, _ in f)]
    return found
