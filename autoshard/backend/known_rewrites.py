"""Known compiler rewrites of collectives, and a linear program that says how far they explain what was emitted.

A rewrite replaces planned collectives by emitted ones, at fixed bytes per unit. Let p_k and e_k be the planned and
emitted bytes of kind and axes k, and x_r the units of rewrite r, which consumes P_kr and produces E_kr bytes of k a
unit:

    minimize    REWRITE_PENALTY * sum_r x_r + sum_k (u_k + v_k)
    subject to  sum_r (E_kr - P_kr) x_r + u_k - v_k = e_k - p_k     for each k: u, v are what stays unexplained
                what the rewrites up to a stage consume of k is at most p_k and what earlier stages produced of it
                x, u, v >= 0

Rewrites of the first stage change axes, those of the second, which may consume what the first produced, kinds. A
rewrite and its reverse in the same stage, over the same axes, could produce collectives from nothing: where a
solution has both, each is excluded in turn (branch and bound) and the cheaper solution kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from autoshard.ir.spec import Axes
from autoshard.machine.collective import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from autoshard.machine.mesh import LogicalMesh

KindAxes = tuple[str, Axes]
"""Kind and axes of collectives."""

REWRITE_PENALTY = 1e-3
"""Cost of rewriting all bytes of a kind and axes, where leaving them unexplained costs 1."""

_MIN_SHARE = 1e-6
"""Rewrites of less than this share of their bytes are numerical noise."""

_REDUCE, _GATHER, _SCATTER, _PERMUTE = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, COLLECTIVE_PERMUTE)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Collectives emitted in place of planned ones: bytes of each per unit."""

    name: str
    axes: Axes
    emitted: Mapping[KindAxes, float]
    planned: Mapping[KindAxes, float]
    direction: str = ""
    """Rewrites of one family and the same axes that have different directions exclude each other; empty for one whose
    reverse is no rewrite."""
    family: str = ""
    """"gathers" or "reductions": what `direction` is about; empty where it is about kinds."""


def fit_rewrites(
    planned: Mapping[KindAxes, float],
    emitted: Mapping[KindAxes, float],
    mesh: LogicalMesh,
    observed: Sequence[tuple[Rewrite, float]] = (),
) -> list[tuple[Rewrite, float]]:
    """The rewrites that explain the difference best, each with its units.

    The linear program is scaled: bytes of a kind and axes by the larger of planned and emitted, units of a rewrite by
    the least of what it touches. So four bytes weigh as much as gigabytes.

    Args:
      planned: bytes of each kind and axes.
      emitted: as ``planned``.
      mesh: gives the number of devices along each axis.
      observed: rewrites that can be seen in the collectives themselves, each with the most units of it.
    """
    axes = sorted({axes for _, axes in (*planned, *emitted)})
    if not axes:
        return []
    stages = [*(r for r, _ in observed), *_axis_rewrites(axes, mesh)], list(_kind_rewrites(axes, mesh))
    size = {key: max(planned.get(key, 0.0), emitted.get(key, 0.0)) for key in (*planned, *emitted)}
    present = {key for key, n in size.items() if n}
    rewrites = [r for stage in stages for r in stage]
    unit = [min((size[k] for k in (*r.planned, *r.emitted) if k in present), default=1.0) for r in rewrites]
    for rewrite, units in zip(rewrites, unit, strict=True):
        for key in (*rewrite.planned, *rewrite.emitted):
            if key not in present:
                size[key] = max(size.get(key, 0.0), units)
    row = {key: i for i, key in enumerate(size)}
    n, r = len(row), len(rewrites)
    produced, consumed = np.zeros((2, n, r))
    for j, rewrite in enumerate(rewrites):
        for side, rates in ((produced, rewrite.emitted), (consumed, rewrite.planned)):
            for key, rate in rates.items():
                side[row[key], j] = rate * unit[j] / size[key]
    before, after = (np.array([side.get(key, 0.0) / size[key] for key in row]) for side in (planned, emitted))
    used_by_stage, first = np.zeros((len(stages), n, r)), 0
    for i, stage in enumerate(stages):
        used_by_stage[i, :, :first] = (consumed - produced)[:, :first]
        used_by_stage[i, :, first : first + len(stage)] = consumed[:, first : first + len(stage)]
        first += len(stage)
    # Variables: the units of each rewrite; of each kind and axes, the unexplained bytes above and below.
    cost = np.concatenate([np.full(r, REWRITE_PENALTY), np.ones(2 * n)])
    usage = np.hstack([used_by_stage.reshape(-1, r), np.zeros((len(stages) * n, 2 * n))])
    balance = np.hstack([produced - consumed, np.eye(n), -np.eye(n)])
    directions = [(i, r.axes, r.family, r.direction) for i, stage in enumerate(stages) for r in stage]

    def solve(excluded: frozenset[tuple[int, Axes, str, str]]) -> tuple[float, np.ndarray]:
        limits: list[tuple[float, float | None]] = [(0, 0 if d in excluded else None) for d in directions]
        limits[: len(observed)] = [(0, units / u) for (_, units), u in zip(observed, unit, strict=False)]
        limits += [(0, None if key in present else 0) for key in row] * 2
        solution = linprog(cost, usage, np.tile(before, len(stages)), balance, after - before, limits)
        if solution.x is None:
            raise RuntimeError(f"the linear program of compiler rewrites has no solution: {solution.message}")
        taken = {d for d, x in zip(directions, solution.x, strict=False) if d[-1] and x > _MIN_SHARE}
        for a, b in itertools.combinations(sorted(taken), 2):
            if a[:-1] == b[:-1]:
                return min((solve(excluded | {d}) for d in (a, b)), key=lambda found: found[0])
        return solution.fun, solution.x[:r]

    shares = solve(frozenset())[1]
    return [(rewrite, x * u) for rewrite, x, u in zip(rewrites, shares, unit, strict=True) if x > _MIN_SHARE]


def _disjoint_pairs(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Pairs of disjoint sets of axes, in both orders, each with their union in mesh order."""
    for a, b in itertools.permutations(every, 2):
        if not set(a) & set(b):
            yield a, b, tuple(axis for axis in mesh.axis_names if axis in (*a, *b))


def _axis_rewrites(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[Rewrite]:
    """One collective over two sets of axes in place of one over each, the reverse, or the two in the other order."""
    for x, y, both in _disjoint_pairs(every, mesh):
        for then in (_REDUCE, _SCATTER):
            planned = {(_SCATTER, x): 1.0, (then, y): 1 / mesh.axes_size(x)}
            name = f"all-reduce + slice in place of reduce-scatter + {then}"
            yield Rewrite(name, both, {(_REDUCE, both): 1.0}, planned, "merge", "reductions")
        for kind in (_REDUCE, _GATHER, _SCATTER):
            # The gather over y comes last, the scatter over y first: only that one has the payload of the merged one.
            one, two = {(kind, both): 1.0}, {(kind, x): 1 / mesh.axes_size(y), (kind, y): 1.0}
            if kind == _REDUCE:
                two[kind, x] = 1.0
            if kind != _REDUCE or x < y:
                family = "gathers" if kind == _GATHER else "reductions"
                yield Rewrite(f"{kind} over all axes in place of one per axis", both, one, two, "merge", family)
                yield Rewrite(f"{kind} split into one per axis", both, two, one, "decompose", family)
            if kind != _REDUCE:
                swapped = {(kind, y): 1 / mesh.axes_size(x), (kind, x): 1.0}
                yield Rewrite(f"{kind} over the axes in the other order", both, swapped, two)
                if kind == _SCATTER:  # shards then come in another order, and are sent to where they belong
                    moved = {**swapped, (_PERMUTE, both): 1 / mesh.axes_size(both)}
                    yield Rewrite(f"{kind} over the axes in the other order, and shards put in place", both, moved, two)
    for wide, axes in itertools.permutations(every, 2):
        if set(axes) < set(wide):  # all source-target pairs differ in fewer axes, as in the last hops of a chain
            name = "collective-permute over fewer axes than planned"
            yield Rewrite(name, axes, {(_PERMUTE, axes): 1.0}, {(_PERMUTE, wide): 1.0})


def _kind_rewrites(every: Sequence[Axes], mesh: LogicalMesh) -> Iterator[Rewrite]:
    """Collectives of one kind in place of another, over the same axes."""
    for axes in every:
        reduce, scatter, gather, permute = ((kind, axes) for kind in (_REDUCE, _SCATTER, _GATHER, _PERMUTE))
        both = {scatter: 1.0, gather: 1.0}
        yield Rewrite("reduce-scatter + all-gather in place of all-reduce", axes, both, {reduce: 1.0}, "scatter")
        yield Rewrite("all-reduce in place of reduce-scatter + all-gather", axes, {reduce: 1.0}, both, "reduce")
        # XLA for TPU, where shards are smaller than a tile or a gather spans a whole torus of three dimensions.
        yield Rewrite("all-gather as an all-reduce of zero-padded shards", axes, {reduce: 1.0}, {gather: 1.0}, "reduce")
        # XLA for CPU never forms a reduce-scatter itself, and that for TPU none over a whole slice.
        yield Rewrite("all-reduce + slice in place of reduce-scatter", axes, {reduce: 1.0}, {scatter: 1.0}, "reduce")
        # Of n shards, n - 1 are sent, or all n where the loop's last iteration sends too.
        for kind, sent in itertools.product((gather, scatter), (1 - 1 / mesh.axes_size(axes), 1.0)):
            yield Rewrite(f"{kind[0]} as a ring of collective-permutes", axes, {permute: sent}, {kind: 1.0})
