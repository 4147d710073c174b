"""The cheapest sequence of collectives that brings a value from one spec to another.

A shortest path (A*) over specs. The moves, on a value with local size ``b`` bytes:

- **slice**: split a dimension over an axis along which the value is replicated. Free.
- **terms**: replicated along an axis -> partial along it (one device keeps the value, the others hold
  the kind's neutral element). Free; only toward a destination that asks for it.
- **all-gather**: drop the minor-most axes of a dimension.
- **all-to-all**: move the minor-most axes of a dimension to the end of another.
- **all-reduce**: combine the terms along partial axes of one kind.
- **reduce-scatter**: the same, leaving a dimension split over those axes, minor-most.
- **collective-permute**: any spec with as many parts in every dimension (reorders and swaps axes).

Two things keep the graph small. Axes that neither spec uses stay idle, as XLA's partitioner leaves
them. (They could help: where a value is replicated over two devices, an all-reduce over four others
moves a sixth less when each replica reduces half and the halves are gathered after. A plan that wants
that pins the spec between.) And what both specs agree on in front, a dimension's common major axes and
common partial axes, is set aside: on equal links, gathering it only to split it again never pays.

On equal links the cost is a directed metric: that from ``a`` to ``c`` never exceeds that from ``a`` to
``b`` plus that from ``b`` to ``c``, for any ``b`` over the axes of ``a`` and ``c``.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping

from autoshard.cost.reshard_moves import FREE_MOVES, Edge, LocalBytes, Move, PartialAxes, ReshardGraph, State
from autoshard.errors import SpecError, nearest
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    CollectiveKind,
)
from autoshard.machine.mesh import LogicalMesh

TIE_BREAK_SECONDS = 1e-12
"""Seconds added to each move while searching, so that of equally cheap sequences the shortest wins; a reduce-scatter
has twice that, so that what is scattered only to be gathered is reduced instead, as XLA does."""


def reshard_collectives(
    src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh
) -> tuple[Collective, ...]:
    """The collectives that bring a value from ``src`` to ``dst`` at the least cost, in order.

    Args:
      shape: the value's global shape.
      itemsize_bits: bits per element (4 for int4).

    Raises:
      SpecError: a spec's rank is not the shape's, or it names an axis that the mesh lacks.
    """
    moves = reshard_path(src, dst, shape, itemsize_bits, mesh)
    order = {axis: i for i, axis in enumerate(mesh.axis_names)}
    return tuple(
        Collective(m.kind, tuple(sorted(m.axes, key=order.__getitem__)), m.bytes)
        for m in moves
        if m.kind not in FREE_MOVES
    )


def reshard_seconds(src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh) -> float:
    """Seconds that `steps` takes on ``mesh``: 0 exactly when no collective is needed."""
    if src is dst or src == dst:
        return 0.0
    return _path(src, dst, shape, itemsize_bits, mesh)[0]


def reshard_path(
    src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh
) -> tuple[Move, ...]:
    """Every move from ``src`` to ``dst``, the free ones too, with the spec after each."""
    return () if src == dst else _path(src, dst, shape, itemsize_bits, mesh)[1]


def spec_after_reduction(src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh) -> Spec:
    """How a value lies once its terms are put together, where that is the first thing on its way to ``dst``: sums are
    scattered along dimensions, as far as the way has it so."""
    kinds, found = dict(src.partial), src
    for move in reshard_path(src, dst, shape, itemsize_bits, mesh) if src.partial else ():
        sums = move.kind == REDUCE_SCATTER and all(kinds[a] == "sum" for a in move.axes)
        if not sums and move.kind != ALL_REDUCE:
            break
        found = move.spec
    return found.reduced()


@functools.lru_cache(maxsize=1 << 17)
def _path(src: Spec, dst: Spec, shape: tuple[int, ...], bits: int, mesh: LogicalMesh) -> tuple[float, tuple[Move, ...]]:
    """Sets aside what both specs agree on, solves the rest, and puts it back."""
    sizes = mesh.shape
    for spec in (src, dst):
        _check_spec(spec, shape, sizes)
    lone = {a for a, n in sizes.items() if n == 1}
    start, goal = _without_axes(src, lone), _without_axes(dst, lone)
    kept = tuple(_common_prefix(a, b) for a, b in zip(start.dims, goal.dims, strict=True))
    held = tuple(t for t in start.partial if t in goal.partial)
    local = tuple(-(-n // math.prod(sizes[a] for a in axes)) for n, axes in zip(shape, kept, strict=True))
    moves = _solve_rest(_without_common(start, kept, held), _without_common(goal, kept, held), local, bits, mesh)
    whole = tuple(
        Move(
            m.kind,
            m.axes,
            m.bytes,
            m.seconds,
            Spec(
                tuple(front + back for front, back in zip(kept, m.spec.dims, strict=True)),
                tuple(sorted(held + m.spec.partial)),
            ),
        )
        for m in moves
    )
    return sum(m.seconds for m in whole), whole


@functools.lru_cache(maxsize=1 << 16)
def _solve_rest(src: Spec, dst: Spec, shape: tuple[int, ...], bits: int, mesh: LogicalMesh) -> tuple[Move, ...]:
    """The cheapest moves between two specs that have nothing in common in front."""
    used = {*src.axes, *dst.axes}
    graph = _graph(tuple(a for a in mesh.axis_names if a in used), src.rank, dst.partial, mesh)
    start, goal = ((s.dims, tuple(sorted(s.partial))) for s in (src, dst))
    sizes = LocalBytes(start, goal, shape, bits, graph.sizes)
    if not src.partial and all(b[: len(a)] == a for a, b in zip(src.dims, dst.dims, strict=True)):
        return _free_moves(src, dst)
    edge = _single_collective(src, dst)
    if edge is None:
        return tuple(graph.move(e, before, sizes) for before, e in _shortest(graph, start, goal, sizes))
    return (graph.move(graph.edge(*edge, goal), start, sizes),)


@functools.lru_cache(maxsize=256)
def _graph(axes: Axes, rank: int, terms: PartialAxes, mesh: LogicalMesh) -> ReshardGraph:
    return ReshardGraph(axes, rank, terms, mesh)


def _shortest(graph: ReshardGraph, start: State, goal: State, sizes: LocalBytes) -> list[tuple[State, Edge]]:
    """A* from ``start`` until ``goal`` is settled: the edges in order, each with the state it leaves.

    The bound on what is still to pay: a device that must come to hold ``d`` bytes more receives them no
    faster than the fastest link carries them (gathers telescope to exactly that), and whatever is not
    yet right takes one collective at least, unless slices mend it.
    """
    wanted, wishes = sizes(goal) or 0, set(goal[1])

    def bound(state: State, held: int) -> float:
        if wishes.issuperset(state[1]) and all(b[: len(a)] == a for a, b in zip(state[0], goal[0], strict=True)):
            return 0.0
        return max(0, wanted - held) / graph.max_bandwidth + graph.min_collective_seconds

    best: dict[State, float] = {start: 0.0}
    back: dict[State, tuple[State, Edge]] = {}
    done: set[State] = set()
    # The state itself orders equal costs, so that the path found never depends on hashing.
    queue: list[tuple[float, State]] = [(0.0, start)]
    while queue:
        state = heapq.heappop(queue)[1]
        if state in done:
            continue
        if state == goal:
            break
        done.add(state)
        cost, held = best[state], sizes(state) or 0
        for edge in graph.edges_from(state):
            after = edge.after
            if after in done or (size := sizes(after)) is None:
                continue
            total = (
                cost
                + edge.fixed_seconds
                + edge.seconds_per_byte * (size if edge.kind == ALL_GATHER else held)
                + TIE_BREAK_SECONDS
            )
            total += TIE_BREAK_SECONDS if edge.kind == REDUCE_SCATTER else 0.0
            if total < best.get(after, math.inf):
                best[after] = total
                back[after] = (state, edge)
                heapq.heappush(queue, (total + bound(after, size), after))
    found: list[tuple[State, Edge]] = []
    while goal != start:
        found.append(back[goal])
        goal = back[goal][0]
    return found[::-1]


def _free_moves(src: Spec, dst: Spec) -> tuple[Move, ...]:
    """Slices, then terms: the path from a value that is replicated along all that is asked for."""
    moves: list[Move] = []
    for dim, axes in enumerate(dst.dims):
        if axes != src.dims[dim]:
            added = axes[len(src.dims[dim]) :]
            src = src.with_dim(dim, axes)
            moves.append(Move("slice", added, 0, 0.0, src))
    if dst.partial:
        moves.append(
            Move("terms", tuple(a for a, _ in dst.partial), 0, 0.0, Spec(src.dims, tuple(sorted(dst.partial))))
        )
    return tuple(moves)


def _single_collective(src: Spec, dst: Spec) -> tuple[CollectiveKind, Axes] | None:
    """The one collective that leads from ``src`` to ``dst``, which no longer path can beat."""
    changed = [i for i, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)) if a != b]
    if dst.partial or len(changed) > 2 or len({kind for _, kind in src.partial}) > 1:
        return None
    if src.partial:
        gone = tuple(a for a, _ in src.partial)
        if not changed:
            return ALL_REDUCE, gone
        grown = dst.dims[changed[0]] if len(changed) == 1 and not src.dims[changed[0]] else ()
        return (REDUCE_SCATTER, grown) if set(grown) == set(gone) else None
    if len(changed) == 1:
        return None if dst.dims[changed[0]] else (ALL_GATHER, src.dims[changed[0]])
    i, j = changed if src.dims[changed[0]] else changed[::-1]
    moved = src.dims[i] == dst.dims[j] and not dst.dims[i] and not src.dims[j]
    return (ALL_TO_ALL, src.dims[i]) if moved else None


def _check_spec(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    if spec.rank != len(shape):
        raise SpecError(f"spec {spec} has {spec.rank} dimensions and the value has {len(shape)}: {shape}")
    for axis in spec.axes:
        if axis not in sizes:
            raise SpecError(
                f"spec {spec} names mesh axis {axis!r}, and the mesh has {dict(sizes)}{nearest(axis, sizes)}"
            )
    if len(set(spec.axes)) != len(spec.axes):
        raise SpecError(f"spec {spec} uses a mesh axis twice")


def _common_prefix(a: Axes, b: Axes) -> Axes:
    """The axes that ``a`` and ``b`` both begin with."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _without_common(spec: Spec, kept: tuple[Axes, ...], held: PartialAxes) -> Spec:
    dims = tuple(axes[len(front) :] for axes, front in zip(spec.dims, kept, strict=True))
    return Spec(dims, tuple(t for t in spec.partial if t not in held))


def _without_axes(spec: Spec, lone: set[str]) -> Spec:
    """``spec`` with its axes of one device dropped: they neither split nor hold terms."""
    if not lone:
        return spec
    dims = tuple(tuple(a for a in axes if a not in lone) for axes in spec.dims)
    return Spec(dims, tuple(t for t in spec.partial if t[0] not in lone))
