"""Reshard: the cheapest sequence of collectives that takes a value from one spec to another, and its seconds.

A shortest path (A*) over specs. The moves from a spec:

- **slice**: split a dimension over one more axis along which the value is replicated. Free.
- **make-partial**: from replicated along an axis to partial along it: one device keeps the value, the others hold
  the neutral element of the reduction. Free; only toward a destination that is partial along the axis.
- **all-gather**: remove the minor-most axes of a dimension.
- **all-to-all**: move the minor-most axes of a dimension to the end of another one.
- **all-reduce**: reduce over partial axes of one kind.
- **reduce-scatter**: the same, leaving a dimension split over those axes, minor-most.
- **collective-permute**: any spec with the same number of parts in every dimension (reorders and swaps axes).

Two restrictions keep the graph small. Axes that neither spec uses stay unused, as in XLA's partitioner. (They could
help: where a value is replicated over two devices, an all-reduce over four others sends a sixth less if each replica
reduces half and the halves are all-gathered afterwards. A user who wants that pins the spec between.) And what both
specs have in common, the shared prefix of major axes of a dimension and shared partial axes, is left alone: on equal
links, gathering an axis only to split over it again never pays.

Where the specs differ in more than `MAX_BLOCKS` axes, those that stand next to each other in both move as one block.
Where these are too many, too, the value is all-reduced, all-gathered, and sliced. Both are upper bounds.

On equal links, and up to so many axes, the cost is a directed metric: from ``a`` to ``c`` it never exceeds the sum of
those from ``a`` to ``b`` and from ``b`` to ``c``, for any ``b`` over the axes of ``a`` and ``c``.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping

from autoshard.cost.reshard_moves import (
    FREE_MOVES,
    Edge,
    LocalBytes,
    Move,
    PartialAxes,
    ReshardGraph,
    State,
    replace_dim,
)
from autoshard.errors import SpecError, nearest
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    CollectiveKind,
    collective_seconds,
)
from autoshard.machine.mesh import LogicalMesh

MAX_BLOCKS = 4
"""Most blocks of axes that are searched over: the specs over n axes are more than n!."""
TIE_BREAK_SECONDS = 1e-12
"""Seconds added to each move in the search, so that of equally cheap sequences the shortest wins; twice to a
reduce-scatter, so that an all-reduce wins over a reduce-scatter with an all-gather, as in XLA."""


def reshard_collectives(
    src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh
) -> tuple[Collective, ...]:
    """The cheapest collectives from ``src`` to ``dst``, in order.

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
    """Seconds of `reshard_collectives`: 0 exactly when no collective is needed."""
    if src is dst or src == dst:
        return 0.0
    return _path(src, dst, shape, itemsize_bits, mesh)[0]


def combined_saving(src: Spec, dst: Spec, count: int, mesh: LogicalMesh) -> float:
    """Seconds that the reshard from ``src`` to ``dst`` takes less where its all-reduce is one of ``count`` that XLA
    combines: they share one latency. 0 where it is no single all-reduce."""
    if count == 1 or not src.partial or dst != src.reduced():
        return 0.0
    reduced = {a for a, _ in src.partial}
    axes = tuple(a for a in mesh.axis_names if a in reduced)
    return (1 - 1 / count) * collective_seconds(ALL_REDUCE, axes, 0, mesh)


def reshard_path(
    src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh
) -> tuple[Move, ...]:
    """The cheapest moves from ``src`` to ``dst``, free ones included, each with the spec after it."""
    return () if src == dst else _path(src, dst, shape, itemsize_bits, mesh)[1]


def spec_after_reduction(
    src: Spec, dst: Spec, shape: tuple[int, ...], itemsize_bits: int, mesh: LogicalMesh, *, sliced: bool = False
) -> Spec:
    """The spec of a partial value after the reductions that its path to ``dst`` begins with; never partial.

    Sums may be reduce-scattered; other kinds are all-reduced. Partial axes that the path does not reduce at first count
    as all-reduced. With ``sliced``, it takes the slices among these reductions too: what they leave is less to reduce.
    """
    kinds, found = dict(src.partial), src
    for move in reshard_path(src, dst, shape, itemsize_bits, mesh) if src.partial else ():
        sums = move.kind == REDUCE_SCATTER and all(kinds[a] == "sum" for a in move.axes)
        if not sums and move.kind != ALL_REDUCE and not (sliced and move.kind == "slice"):
            break
        found = move.spec
    return found.reduced()


@functools.lru_cache(maxsize=1 << 17)
def _path(src: Spec, dst: Spec, shape: tuple[int, ...], bits: int, mesh: LogicalMesh) -> tuple[float, tuple[Move, ...]]:
    """Seconds and moves: solves for the axes that the specs do not have in common, and adds the common ones back."""
    sizes = mesh.shape
    for spec in (src, dst):
        _check_spec(spec, shape, sizes)
    trivial_axes = {a for a, n in sizes.items() if n == 1}
    start, goal = _without_axes(src, trivial_axes), _without_axes(dst, trivial_axes)
    common_dims = tuple(_common_prefix(a, b) for a, b in zip(start.dims, goal.dims, strict=True))
    common_partial = tuple(p for p in start.partial if p in goal.partial)
    local = tuple(-(-n // math.prod(sizes[a] for a in axes)) for n, axes in zip(shape, common_dims, strict=True))
    rest_start, rest_goal = (_without_common(spec, common_dims, common_partial) for spec in (start, goal))
    moves = _solve_rest(rest_start, rest_goal, local, bits, mesh)
    whole = tuple(
        Move(
            m.kind,
            m.axes,
            m.bytes,
            m.seconds,
            Spec(
                tuple(prefix + rest for prefix, rest in zip(common_dims, m.spec.dims, strict=True)),
                tuple(sorted(common_partial + m.spec.partial)),
            ),
        )
        for m in moves
    )
    return sum(m.seconds for m in whole), whole


@functools.lru_cache(maxsize=1 << 16)
def _solve_rest(src: Spec, dst: Spec, shape: tuple[int, ...], bits: int, mesh: LogicalMesh) -> tuple[Move, ...]:
    """The cheapest moves between two specs without a common prefix of axes in any dimension."""
    used = {*src.axes, *dst.axes}
    axes = tuple(a for a in mesh.axis_names if a in used)
    blocks = _blocks(src, dst, axes) if len(axes) > MAX_BLOCKS else tuple((a,) for a in axes)
    start, goal = (_state(s, blocks) for s in (src, dst))
    graph = _graph(blocks, src.rank, goal[1], mesh)
    sizes = LocalBytes(start, goal, shape, bits, graph.sizes)
    if not src.partial and all(b[: len(a)] == a for a, b in zip(src.dims, dst.dims, strict=True)):
        return _free_moves(src, dst)
    edge = _single_collective(src, dst)
    if edge is not None:
        kind, moved = edge
        return (graph.move(graph.edge(kind, tuple(a for a in moved if a in graph.blocks), goal), start, sizes),)
    if len(blocks) > MAX_BLOCKS:
        return _gather_and_slice(src, dst, graph, start, sizes)
    return tuple(graph.move(e, before, sizes) for before, e in _shortest(graph, start, goal, sizes))


@functools.lru_cache(maxsize=256)
def _graph(blocks: tuple[Axes, ...], rank: int, goal_partial: PartialAxes, mesh: LogicalMesh) -> ReshardGraph:
    return ReshardGraph(blocks, rank, goal_partial, mesh)


def _state(spec: Spec, blocks: tuple[Axes, ...]) -> State:
    """``spec`` with the first axis of each block in the place of the block."""
    names = {block[0] for block in blocks}
    dims = tuple(tuple(a for a in axes if a in names) for axes in spec.dims)
    return dims, tuple(sorted(p for p in spec.partial if p[0] in names))


def _blocks(src: Spec, dst: Spec, axes: Axes) -> tuple[Axes, ...]:
    """``axes`` in runs that in both specs stand next to each other, in one order, or are partial or unused together."""
    places = [_places(spec) for spec in (src, dst)]

    def follows(a: str, b: str) -> bool:
        return all(_follows(place.get(a), place.get(b)) for place in places)

    found: list[Axes] = []
    rest = list(axes)
    while rest:
        block = [rest.pop(0)]
        while (after := next((b for b in rest if follows(block[-1], b)), None)) is not None:
            block.append(after)
            rest.remove(after)
        while (before := next((b for b in rest if follows(b, block[0])), None)) is not None:
            block.insert(0, before)
            rest.remove(before)
        found.append(tuple(block))
    return tuple(found)


def _places(spec: Spec) -> dict[str, tuple[int, int] | str]:
    """Of each axis: the dimension that it splits and its position there, or the reduction that it is partial of."""
    split = {a: (d, k) for d, axes in enumerate(spec.dims) for k, a in enumerate(axes)}
    return {**split, **dict(spec.partial)}


def _follows(a: tuple[int, int] | str | None, b: tuple[int, int] | str | None) -> bool:
    return b == (a[0], a[1] + 1) if isinstance(a, tuple) else a == b


def _gather_and_slice(src: Spec, dst: Spec, graph: ReshardGraph, start: State, sizes: LocalBytes) -> tuple[Move, ...]:
    """The moves by way of the whole value: all-reduces, all-gathers, and what is free."""
    moves: list[Move] = []
    state = start
    for kind in sorted({kind for _, kind in start[1]}):
        after = state[0], tuple(p for p in state[1] if p[1] != kind)
        axes = tuple(a for a, k in state[1] if k == kind)
        moves.append(graph.move(graph.edge(ALL_REDUCE, axes, after), state, sizes))
        state = after
    for d, axes in enumerate(start[0]):
        if axes:
            after = replace_dim(state[0], d, ()), state[1]
            moves.append(graph.move(graph.edge(ALL_GATHER, axes, after), state, sizes))
            state = after
    return (*moves, *_free_moves(Spec(((),) * src.rank), dst))


def _shortest(graph: ReshardGraph, start: State, goal: State, sizes: LocalBytes) -> list[tuple[State, Edge]]:
    """A* from ``start`` to ``goal``: the edges in order, each with the state that it leaves.

    The heuristic is a lower bound. A device whose part has to grow by ``d`` bytes receives them no faster than the
    fastest ring carries them (a sequence of all-gathers adds up to exactly that), and a state that slices alone do not
    take to the goal needs at least one collective.
    """
    goal_size, goal_partial = sizes(goal) or 0, set(goal[1])

    def bound(state: State, size: int) -> float:
        if goal_partial.issuperset(state[1]) and all(b[: len(a)] == a for a, b in zip(state[0], goal[0], strict=True)):
            return 0.0
        return max(0, goal_size - size) / graph.max_gather_bandwidth + graph.min_collective_seconds

    best: dict[State, float] = {start: 0.0}
    back: dict[State, tuple[State, Edge]] = {}
    done: set[State] = set()
    # Equal costs are ordered by the state itself, so that the path found never depends on hashing.
    queue: list[tuple[float, State]] = [(0.0, start)]
    while queue:
        state = heapq.heappop(queue)[1]
        if state in done:
            continue
        if state == goal:
            break
        done.add(state)
        cost, before = best[state], sizes(state) or 0
        for edge in graph.edges_from(state):
            after = edge.after
            if after in done or (size := sizes(after)) is None:
                continue
            total = (
                cost
                + edge.fixed_seconds
                + edge.seconds_per_byte * (size if edge.kind == ALL_GATHER else before)
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
    """The path where no collective is needed: slices, then make-partial."""
    moves: list[Move] = []
    for dim, axes in enumerate(dst.dims):
        if axes != src.dims[dim]:
            added = axes[len(src.dims[dim]) :]
            src = src.with_dim(dim, axes)
            moves.append(Move("slice", added, 0, 0.0, src))
    if dst.partial:
        moves.append(
            Move("make-partial", tuple(a for a, _ in dst.partial), 0, 0.0, Spec(src.dims, tuple(sorted(dst.partial))))
        )
    return tuple(moves)


def _single_collective(src: Spec, dst: Spec) -> tuple[CollectiveKind, Axes] | None:
    """The single collective from ``src`` to ``dst``, if there is one: no longer path is cheaper."""
    changed = [i for i, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)) if a != b]
    if dst.partial or len(changed) > 2 or len({kind for _, kind in src.partial}) > 1:
        return None
    if src.partial:
        reduced = tuple(a for a, _ in src.partial)
        if not changed:
            return ALL_REDUCE, reduced
        scattered = dst.dims[changed[0]] if len(changed) == 1 and not src.dims[changed[0]] else ()
        return (REDUCE_SCATTER, scattered) if set(scattered) == set(reduced) else None
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
    """The longest common prefix of ``a`` and ``b``."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _without_common(spec: Spec, common_dims: tuple[Axes, ...], common_partial: PartialAxes) -> Spec:
    dims = tuple(axes[len(prefix) :] for axes, prefix in zip(spec.dims, common_dims, strict=True))
    return Spec(dims, tuple(p for p in spec.partial if p not in common_partial))


def _without_axes(spec: Spec, trivial_axes: set[str]) -> Spec:
    """``spec`` without its axes of size 1, which neither split nor make partial."""
    if not trivial_axes:
        return spec
    dims = tuple(tuple(a for a in axes if a not in trivial_axes) for axes in spec.dims)
    return Spec(dims, tuple(p for p in spec.partial if p[0] not in trivial_axes))
