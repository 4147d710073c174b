"""Candidates: layouts of one program with predicted cost and memory, and the search state that prices them.

A candidate stands for a `Choice`: mesh axes for each dimension class, and axes over which carried state is stored
sharded (ZeRO). It is propagated through the whole graph and priced there, so that its cost is that of the layout that
would be lowered.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.cost.compiler_options import CompilerOptions, should_disable_all_gather_fusion
from autoshard.cost.cost import Cost, CostModel
from autoshard.cost.memory import Memory, MemoryModel
from autoshard.ir.batch import classes_with_batch, frozen_arguments
from autoshard.ir.dim_classes import ArgumentRoles, DimClass, argument_roles
from autoshard.ir.graph import Graph, loop_constants
from autoshard.ir.propagate import Layout, propagate
from autoshard.ir.spec import Axes, Spec, replicated
from autoshard.search.build_problem import MAX_AXES, value_options
from autoshard.search.layout_problem import least_sizes
from autoshard.search.value_groups import ValueGroups

BOUND_TOLERANCE = 2e-6
"""A predicted cost meets the bound if it exceeds it by at most this fraction."""
MAX_CLASSES = 10
"""Dimension classes that a choice decides, heaviest first, beside those of the batch; the dimensions of others are
sharded by propagation only."""


@dataclass(frozen=True)
class Choice:
    """What one candidate decides; all else follows by propagation."""

    class_axes: tuple[Axes, ...]
    """For each dimension class, the axes that shard it."""
    storage_axes: Axes = ()
    """Axes that shard carried state in storage, beyond how it is used."""
    zero_stage: int = 0
    """0: state stored as it is used; 1, 2: optimizer state over ``storage_axes``; 3: parameters too."""
    before_loops: bool = False
    """Whether what every iteration of a loop reads alike is gathered before the loop, in place of in each iteration."""
    argument_specs: tuple[tuple[int, Spec], ...] = ()
    """(flat position, spec) of arguments that are decided one by one."""
    solved_number: int = 0
    """Nonzero: the solver's n-th layout of this program; the other fields only describe it."""


@dataclass(frozen=True)
class Candidate:
    """A choice, its layout, and what that is predicted to cost."""

    choice: Choice
    layout: Layout
    cost: Cost
    memory: Memory
    all_gather_fusion_disabled: bool = False
    """Whether the compiler is asked not to fuse all-gathers into convolutions (`autoshard.cost.compiler_options`)."""

    def key(self, budget: float) -> tuple[float, ...]:
        """Sort key, the best first: bytes over the budget, then seconds, then peak memory."""
        over = max(0.0, self.memory.peak - budget)
        return (over, self.cost.seconds, self.memory.peak)


@dataclass
class Search:
    """The state of a search: one graph with its models, and every candidate priced so far."""

    graph: Graph
    budget: float
    """Bytes per device."""
    options: CompilerOptions = ()
    """Compiler options that the user gave."""
    cost_model: CostModel = field(init=False)
    memory_model: MemoryModel = field(init=False)
    bound: float = 0.0
    """Lower bound on the predicted seconds of every layout that the layout problem of this graph can express within the
    budget; 0 if nothing was proven."""
    tried: dict[Choice, Candidate] = field(default_factory=dict[Choice, Candidate])
    priced_layouts: dict[Any, tuple[Cost, Memory, bool]] = field(default_factory=dict[Any, tuple[Cost, Memory, bool]])
    """By specs of the values and strategies of the nodes: different choices can have one layout."""

    def __post_init__(self) -> None:
        self.cost_model = CostModel(self.graph)
        self.graph = self.cost_model.graph
        self.memory_model = MemoryModel(self.graph, self.cost_model)
        self.axes = self.graph.program.mesh.nontrivial_axes

    @functools.cached_property
    def roles(self) -> ArgumentRoles:
        """Of the graph's arguments."""
        return argument_roles(self.graph)

    @functools.cached_property
    def _every_class(self) -> Sequence[DimClass]:
        return classes_with_batch(self.graph)

    @functools.cached_property
    def classes(self) -> tuple[DimClass, ...]:
        """The dimension classes that a choice decides."""
        return tuple(c for k, c in enumerate(self._every_class) if k < MAX_CLASSES or c.is_batch)

    @functools.cached_property
    def frozen(self) -> frozenset[int]:
        """Flat positions of arguments that are parameters too, though they are not carried."""
        return frozen_arguments(self.graph, self._every_class)

    @functools.cached_property
    def least_peak(self) -> float:
        """Lower bound on the peak bytes per device of every layout that the layout problem of this graph can express,
        whatever the budget; 0 on more axes than it is solved over."""
        if not 0 < len(self.axes) <= MAX_AXES:
            return 0.0
        device_bytes = {v: float(value.device_bytes) for v, value in enumerate(self.graph.values)}
        sizes = least_sizes(device_bytes, *value_options(self.graph, self.groups), self.graph.program.mesh)
        return self.memory_model.least_peak(sizes)[1]

    @functools.cached_property
    def groups(self) -> ValueGroups:
        """The value groups of the graph, on any mesh."""
        return ValueGroups(self.graph)

    @property
    def batch_classes(self) -> list[int]:
        """Indices of the dimension classes that are batch dimensions."""
        return [i for i, c in enumerate(self.classes) if c.is_batch]

    def price(self, choice: Choice) -> Candidate:
        """The candidate of ``choice``, propagated and priced if it was not before."""
        found = self.tried.get(choice)
        return found if found is not None else self.price_layout(choice, self._propagated(choice))

    def _propagated(self, choice: Choice) -> Layout:
        """The layout of ``choice``."""
        (by_class, stored), given = self._seeds(choice)
        if choice.before_loops:
            used = propagate(self.graph, [by_class], given)
            given |= {v: used.specs[v] for v in loop_constants(self.graph) if v not in self.graph.pins}
        return propagate(self.graph, [by_class, stored], given)

    def price_layout(self, choice: Choice, layout: Layout) -> Candidate:
        """The candidate of ``choice`` with ``layout``, as one that was tried."""
        found = self.tried[choice] = self.candidate(choice, layout)
        return found

    def candidate(self, choice: Choice, layout: Layout) -> Candidate:
        """``choice`` with ``layout``, priced."""
        key = layout.specs, tuple(layout.strategies.items())
        priced = self.priced_layouts.get(key)
        if priced is None:
            memory = self.memory_model.memory(layout)
            disable = should_disable_all_gather_fusion(self.graph, memory.peak, self.budget, self.options)
            memory = self.memory_model.memory(layout, all_gather_fusion_disabled=True) if disable else memory
            priced = self.priced_layouts[key] = (self.cost_model.cost(layout), memory, disable)
        return Candidate(choice, layout, *priced)

    def meets_bound(self, found: Candidate) -> bool:
        """Whether ``found`` is within the budget and its cost equals the bound, up to `BOUND_TOLERANCE`."""
        return found.memory.peak <= self.budget and found.cost.seconds <= self.bound * (1 + BOUND_TOLERANCE)

    def best(self, choices: Iterable[Choice]) -> Candidate:
        """The candidate of least `key` among ``choices``; of equal ones the first."""
        return min(map(self.price, choices), key=self.key)

    def key(self, found: Candidate) -> tuple[float, ...]:
        """`Candidate.key` under this search's budget."""
        return found.key(self.budget)

    def _seeds(self, choice: Choice) -> tuple[list[dict[int, Spec]], dict[int, Spec]]:
        """What `propagate` starts from: levels of seeds (class axes, then stored state), and specs that are given."""
        values, mesh = self.graph.values, self.graph.program.mesh
        by_class: dict[int, Spec] = {}
        for c, axes in zip(self.classes, choice.class_axes, strict=True):
            for v, d in (*c.inputs, *c.starts) if axes else ():
                spec = by_class.get(v, replicated(len(values[v].shape)))
                if not set(axes) & set(spec.axes):
                    by_class[v] = spec.with_dim(d, axes)
        given = {self.graph.inputs[i]: spec for i, spec in choice.argument_specs}
        outs = dict(self.graph.program.carries)
        stored: dict[int, Spec] = {}
        for i in sorted(self.roles.parameters | self.roles.optimizer | self.frozen):
            v, out = self.graph.inputs[i], self.graph.outputs[outs[i]] if i in outs else 0
            spec = by_class.get(v, replicated(len(values[v].shape)))
            covered = choice.zero_stage == 3 or i in self.roles.optimizer
            if choice.zero_stage and covered and v not in self.graph.pins:
                spec = zero_sharded(spec, values[v].shape, choice.storage_axes, mesh.shape)
                stored[v] = stored[out] = spec
            elif choice.zero_stage and v not in given:
                given[v] = given[out] = spec
        given.pop(0, None)
        stored.pop(0, None)
        for i, o in self.graph.program.carries:
            v, out = self.graph.inputs[i], self.graph.outputs[o]
            if v in given and out not in self.graph.pins and out:
                given[out] = given[v]
        return [by_class, stored], {v: s for v, s in given.items() if v not in self.graph.pins}

    def class_options(self) -> list[list[Axes]]:
        """For each class, the sets of axes that divide its size."""
        subsets = [p for n in range(len(self.axes) + 1) for p in itertools.combinations(self.axes, n)]
        mesh = self.graph.program.mesh
        return [[axes for axes in subsets if c.size % mesh.axes_size(axes) == 0] for c in self.classes]


def zero_sharded(spec: Spec, shape: Sequence[int], axes: Axes, sizes: Mapping[str, int]) -> Spec:
    """``spec`` sharded further over ``axes``, as ZeRO stores state: all axes on one dimension if they divide any, else
    one after the other where they can.

    Of several dimensions, the one with the largest local size, so that gathering it is one collective.
    """
    axes = tuple(a for a in axes if a not in spec.axes)
    if not axes:
        return spec
    local = [n // math.prod(sizes[a] for a in d) for n, d in zip(shape, spec.dims, strict=True)]
    parts = math.prod(sizes[a] for a in axes)
    divisible = [d for d, n in enumerate(local) if n % parts == 0 and n > 1]
    if divisible:
        d = max(divisible, key=lambda d: (local[d], d))
        return spec.with_dim(d, spec.dims[d] + axes)
    for axis in axes if len(axes) > 1 else ():
        spec = zero_sharded(spec, shape, (axis,), sizes)
    return spec
