"""What compilers are known to emit in place of what was planned, and how much of it accounts for a difference.

A rewrite trades planned collectives for emitted ones at fixed rates of bytes. Those of the first stage put axes right;
those of the second, which may take up what the first has made, the kinds. How often each was done is what a linear
program finds: that which leaves least open, and of such the one that does least. Bytes are used once. For each set of
axes the rewrites of a stage go one way: the reverse of a rewrite beside it could make collectives out of nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from autoshard.machine.collective import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from autoshard.machine.mesh import LogicalMesh

Axes = tuple[str, ...]
Key = tuple[str, Axes]
"""Kind and axes of collectives."""

REWRITE_PENALTY = 1e-3
"""What trading all bytes of a kind over axes costs beside leaving them open."""

_MIN_SHARE = 1e-6
"""Less than counts of a trade, by its own measure."""

_REDUCE, _GATHER, _SCATTER, _PERMUTE = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, COLLECTIVE_PERMUTE)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What is emitted in place of what is planned: of each, bytes per unit."""

    name: str
    axes: Axes
    emitted: Mapping[Key, float]
    planned: Mapping[Key, float]
    direction: str = ""
    """Those of the same over the same axes that go another way are not done beside it; empty if none is the reverse of
    it."""
    family: str = ""
    """What goes that way: gathers or sums."""


def fit_rewrites(
    planned: Mapping[Key, float],
    emitted: Mapping[Key, float],
    mesh: LogicalMesh,
    seen: Sequence[tuple[Rewrite, float]] = (),
) -> list[tuple[Rewrite, float]]:
    """The trades that account for what differs, each with its units.

    Each kind and axes is measured by the most bytes that it has, and a trade by the least of what it touches, so that
    four bytes weigh beside gigabytes.

    Args:
      planned: bytes of each kind and axes.
      emitted: as ``planned``.
      mesh: says how many devices there are along an axis.
      seen: trades that the collectives themselves show, each with the most units of it.
    """
    axes = sorted({axes for _, axes in (*planned, *emitted)})
    if not axes:
        return []
    stages = [*(t for t, _ in seen), *_axis_rewrites(axes, mesh)], list(_kind_rewrites(axes, mesh))
    size = {key: max(planned.get(key, 0.0), emitted.get(key, 0.0)) for key in (*planned, *emitted)}
    real = {key for key, n in size.items() if n}
    trades = [t for stage in stages for t in stage]
    most = [min((size[k] for k in (*t.planned, *t.emitted) if k in real), default=1.0) for t in trades]
    for trade, units in zip(trades, most, strict=True):
        for key in (*trade.planned, *trade.emitted):
            if key not in real:
                size[key] = max(size.get(key, 0.0), units)
    row = {key: i for i, key in enumerate(size)}
    n, t = len(row), len(trades)
    makes, takes = np.zeros((2, n, t))
    for j, trade in enumerate(trades):
        for side, rates in ((makes, trade.emitted), (takes, trade.planned)):
            for key, rate in rates.items():
                side[row[key], j] = rate * most[j] / size[key]
    given, found = (np.array([side.get(key, 0.0) / size[key] for key in row]) for side in (planned, emitted))
    taken, first = np.zeros((len(stages), n, t)), 0
    for i, stage in enumerate(stages):
        taken[i, :, :first] = (takes - makes)[:, :first]
        taken[i, :, first : first + len(stage)] = takes[:, first : first + len(stage)]
        first += len(stage)
    # Variables: trades; of each kind and axes, what is over and what is under.
    cost = np.concatenate([np.full(t, REWRITE_PENALTY), np.ones(2 * n)])
    used = np.hstack([taken.reshape(-1, t), np.zeros((len(stages) * n, 2 * n))])
    settles = np.hstack([makes - takes, np.eye(n), -np.eye(n)])
    way = [(i, t.axes, t.family, t.direction) for i, stage in enumerate(stages) for t in stage]

    def solved(barred: frozenset[tuple[int, Axes, str, str]]) -> tuple[float, np.ndarray]:
        limits: list[tuple[float, float | None]] = [(0, 0 if w in barred else None) for w in way]
        limits[: len(seen)] = [(0, units / m) for (_, units), m in zip(seen, most, strict=False)]
        limits += [(0, None if key in real else 0) for key in row] * 2
        answer = linprog(cost, used, np.tile(given, len(stages)), settles, found - given, limits)
        if answer.x is None:
            raise RuntimeError(f"what the compiler rewrote could not be told: {answer.message}")
        gone = {w for w, x in zip(way, answer.x, strict=False) if w[-1] and x > _MIN_SHARE}
        for a, b in itertools.combinations(sorted(gone), 2):
            if a[:-1] == b[:-1]:
                return min((solved(barred | {w}) for w in (a, b)), key=lambda found: found[0])
        return answer.fun, answer.x[:t]

    return [(trade, x * m) for trade, x, m in zip(trades, solved(frozenset())[1], most, strict=True) if x > _MIN_SHARE]


def _disjoint_pairs(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Two sets of axes that have none in common, in both orders; then all their axes."""
    for a, b in itertools.permutations(every, 2):
        if not set(a) & set(b):
            yield a, b, tuple(axis for axis in mesh.axis_names if axis in (*a, *b))


def _axis_rewrites(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[Rewrite]:
    """One collective over two sets of axes in place of one over each, or the reverse."""
    for x, y, both in _disjoint_pairs(every, mesh):
        for then in (_REDUCE, _SCATTER):
            planned = {(_SCATTER, x): 1.0, (then, y): 1 / mesh.axes_size(x)}
            name = f"all-reduce + slice in place of reduce-scatter + {then}"
            yield Rewrite(name, both, {(_REDUCE, both): 1.0}, planned, "together", "sums")
        for kind in (_REDUCE, _GATHER, _SCATTER):
            # Gathered over the second last, or scattered over it first: only that one sees all the bytes.
            one, two = {(kind, both): 1.0}, {(kind, x): 1 / mesh.axes_size(y), (kind, y): 1.0}
            if kind == _REDUCE:
                two[kind, x] = 1.0
            if kind != _REDUCE or x < y:
                what = "gathers" if kind == _GATHER else "sums"
                yield Rewrite(f"{kind} in place of one over each", both, one, two, "together", what)
                yield Rewrite(f"{kind} split by axes", both, two, one, "apart", what)
            if kind != _REDUCE:
                turned = {(kind, y): 1 / mesh.axes_size(x), (kind, x): 1.0}
                yield Rewrite(f"{kind} over one axis before the other", both, turned, two)
    for wide, axes in itertools.permutations(every, 2):
        if set(axes) < set(wide):  # Pairs that all lie along fewer axes, as those of the last hops of a chain.
            name = "collective-permute along fewer axes than it is planned over"
            yield Rewrite(name, axes, {(_PERMUTE, axes): 1.0}, {(_PERMUTE, wide): 1.0})


def _kind_rewrites(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[Rewrite]:
    """Collectives of one kind for those of another, over the same axes."""
    for axes in every:
        reduce, scatter, gather, permute = ((kind, axes) for kind in (_REDUCE, _SCATTER, _GATHER, _PERMUTE))
        both = {scatter: 1.0, gather: 1.0}
        yield Rewrite("reduce-scatter + all-gather in place of all-reduce", axes, both, {reduce: 1.0}, "scattered")
        yield Rewrite("all-reduce in place of reduce-scatter + all-gather", axes, {reduce: 1.0}, both, "reduced")
        # XLA for TPU, where parts fill no tiles or a torus of three dimensions is gathered whole.
        yield Rewrite("all-gather as an all-reduce of parts among zeros", axes, {reduce: 1.0}, {gather: 1.0}, "reduced")
        # XLA on CPU never forms a reduce-scatter itself.
        yield Rewrite("all-reduce + slice in place of reduce-scatter", axes, {reduce: 1.0}, {scatter: 1.0}, "reduced")
        # Of n parts, n - 1 travel, or all n where a loop's last does too.
        for kind, sent in itertools.product((gather, scatter), (1 - 1 / mesh.axes_size(axes), 1.0)):
            yield Rewrite(f"{kind[0]} as a ring of collective-permutes", axes, {permute: sent}, {kind: 1.0})
