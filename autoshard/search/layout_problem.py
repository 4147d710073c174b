"""What an assignment of the layout problem's variables means for the graph: specs of values and strategies of nodes.

And which options the variables have under a preset (`StrategyLimits`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.problem import Array, Budget, Problem
from autoshard.search.spec_tables import Binding, value_spec
from autoshard.search.value_groups import DimMap

FactorAxes = tuple[tuple[str, Axes], ...]
"""Mesh axes of the factors of a node."""


@dataclass(frozen=True)
class LayoutProblem:
    """A problem, and what an assignment of its variables means for the graph."""

    problem: Problem
    bindings: Mapping[int, Binding]
    """Of each value that a variable decides."""
    options: Sequence[Sequence[Spec]]
    """Of each variable; empty for those of nodes."""
    node_options: Mapping[int, tuple[int, Sequence[FactorAxes]]]
    """Of each choosing node: its variable, and the axes of its factors under each option."""
    slack: float
    """Seconds by which an assignment can cost more here than its layout: the most that argument bytes can cost."""

    def factor_axes(self, assignment: Sequence[int]) -> dict[int, FactorAxes]:
        """The axes of the factors of every choosing node."""
        return {n: options[assignment[i]] for n, (i, options) in self.node_options.items()}

    def value_specs(self, assignment: Sequence[int]) -> dict[int, Spec]:
        """The spec of every value that a variable decides."""
        specs = {
            b: value_spec(self.options[b.variable][assignment[b.variable]], b.dim_map)
            for b in set(self.bindings.values())
        }
        return {v: specs[b] for v, b in self.bindings.items()}

    def byte_budget(self, sizes: Mapping[int, float], limit: float, mesh: LogicalMesh) -> Budget:
        """That values of these ``sizes`` (bytes over all devices) take at most ``limit`` bytes per device together."""
        return byte_budget(sizes, limit, self.bindings, self.options, mesh)


def byte_budget(
    sizes: Mapping[int, float],
    limit: float,
    bindings: Mapping[int, Binding],
    options: Sequence[Sequence[Spec]],
    mesh: LogicalMesh,
) -> Budget:
    """Bytes per device of values of these ``sizes``, by the options of their variables; unbound values count whole."""
    total: dict[Binding, float] = defaultdict(float)
    for v, n in sizes.items():
        if v in bindings:
            total[bindings[v]] += n
        else:
            limit -= n
    loads: dict[int, Array] = {}
    for (i, dim_map), n in total.items():
        loads[i] = n / _parts(options[i], dim_map, mesh) + loads.get(i, 0.0)
    return Budget(loads, limit)


def least_sizes(
    sizes: Mapping[int, float],
    bindings: Mapping[int, Binding],
    options: Sequence[Sequence[Spec]],
    mesh: LogicalMesh,
) -> dict[int, float]:
    """Of these ``sizes`` (bytes over all devices), for each value that a variable decides the bytes per device that it
    takes in the options that split it most."""
    most = {b: float(_parts(options[b.variable], b.dim_map, mesh).max(initial=1.0)) for b in set(bindings.values())}
    return {v: n / most[bindings[v]] for v, n in sizes.items() if v in bindings}


def _parts(options: Sequence[Spec], dim_map: DimMap, mesh: LogicalMesh) -> Array:
    """Into how many parts each of ``options`` splits a value of a variable."""
    split = [d for d in dim_map if d >= 0]
    sizes = {axes: mesh.axes_size(axes) for axes in {axes for o in options for axes in o.dims}}
    return np.array([math.prod([sizes[o.dims[d]] for d in split]) for o in options], dtype=float)


@dataclass(frozen=True)
class StrategyLimits:
    """Which mesh axes shard the batch and which the parameters; without batch dimensions, nothing is restricted."""

    batch_dims: frozenset[tuple[int, int]] = frozenset()
    """(value, dimension) pairs that belong to the batch."""
    batch_axes: Axes = ()
    """Axes that shard a batch dimension wherever they divide it, and no other dimension of a value that has one."""
    parameter_axes: Axes = ()
    """Axes that shard no batch dimension, and every parameter that they divide, wherever it is used."""

    frozen: frozenset[int] = frozenset()
    """Arguments that are parameters too, as value numbers, though they are not carried."""
    stored: frozenset[int] = frozenset()
    """Arguments that the batch axes shard too, as value numbers, as far as they divide: with them what has their specs,
    such as the rows of stacked weights that layers read."""

    def allowed(self, options: Iterable[Spec], batch: Collection[int]) -> list[Spec]:
        """Those of ``options`` that are allowed where the dimensions ``batch`` belong to the batch. If none shards it
        over all batch axes, those that shard it over fewer are."""
        found = [s for s in options if not any(a in self.parameter_axes for d in batch for a in s.dims[d])]
        if not batch:
            return found
        other_dims = [[axes for d, axes in enumerate(s.dims) if d not in batch] for s in found]
        found = [
            s
            for s, rest in zip(found, other_dims, strict=True)
            if not any(a in self.batch_axes for axes in rest for a in axes)
        ]
        return [s for s in found if all(any(a in s.dims[d] for d in batch) for a in self.batch_axes)] or found

    def storing(self, options: Sequence[Spec]) -> Sequence[Spec]:
        """Those of ``options`` that shard over all batch axes; all if none do."""
        return [s for s in options if set(self.batch_axes) <= set(s.axes)] or options

    def sharding_parameters[T](self, options: Sequence[T], axes: Callable[[T], Collection[str]]) -> Sequence[T]:
        """Those of ``options`` whose ``axes`` include all parameter axes; all options if none do."""
        return [o for o in options if set(self.parameter_axes) <= set(axes(o))] or options
