"""candidates: layouts of one program, each with its cost and memory.

A candidate stands for a *choice*: for each dimension class the axes that split it, and over which axes the state is
stored in parts (ZeRO). It is propagated through the whole program and priced there, so its cost is that of the very
layout that would be lowered.
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
from autoshard.ir.dim_classes import ArgumentRoles, DimClass, argument_roles, dim_classes
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout, propagate
from autoshard.ir.spec import Axes, Spec, replicated
from autoshard.search.value_groups import ValueGroups

BOUND_TOLERANCE = 2e-6
"""A cost that is above its bound by no more than this fraction is at it."""
MAX_CLASSES = 10
"""Classes considered, heaviest first; lighter ones follow by propagation."""


@dataclass(frozen=True)
class Choice:
    """What the search decides. ``split[i]`` are the axes of class i; the state lies in parts over ``storage``."""

    class_axes: tuple[Axes, ...]
    storage_axes: Axes = ()
    zero_stage: int = 0
    """0: state whole on each replica; 1, 2: optimizer state in parts; 3: parameters too."""
    argument_specs: tuple[tuple[int, Spec], ...] = ()
    """Arguments set one by one, by flat position."""
    solved_number: int = 0
    """Not 0: the layout is this one of those that were solved for; ``split`` says what it amounts to."""


@dataclass(frozen=True)
class Candidate:
    """A choice with its layout, priced."""

    choice: Choice
    layout: Layout
    cost: Cost
    memory: Memory
    all_gather_fusion_disabled: bool = False
    """Whether it asks the compiler to keep gathers out of convolutions (`autoshard.cost.compiler_options`)."""

    def key(self, budget: float) -> tuple[float, ...]:
        """Sorts the best first: fitting before not, then by seconds, then by memory."""
        over = max(0.0, self.memory.peak - budget)
        return (over, self.cost.seconds, self.memory.peak)


@dataclass
class Search:
    """One program's space, and the candidates priced so far."""

    graph: Graph
    budget: float
    options: CompilerOptions = ()
    """What the user tells the compiler."""
    classes: tuple[DimClass, ...] = ()
    cost_model: CostModel = field(init=False)
    memory_model: MemoryModel = field(init=False)
    bound: float = 0.0
    """Seconds that no layout of the space can go below, as the solver proved."""
    tried: dict[Choice, Candidate] = field(default_factory=dict[Choice, Candidate])
    priced_layouts: dict[Any, tuple[Cost, Memory, bool]] = field(default_factory=dict[Any, tuple[Cost, Memory, bool]])
    """Of layouts, by their specs and ways."""

    def __post_init__(self) -> None:
        self.cost_model = CostModel(self.graph)
        self.memory_model = MemoryModel(self.graph, self.cost_model)
        self.classes = dim_classes(self.graph)[:MAX_CLASSES]
        self.axes = self.graph.program.mesh.nontrivial_axes
        self.roles: ArgumentRoles = argument_roles(self.graph)

    @functools.cached_property
    def groups(self) -> ValueGroups:
        """The graph's."""
        return ValueGroups(self.graph)

    @property
    def batch_classes(self) -> list[int]:
        """The classes that the batch is of."""
        return [i for i, c in enumerate(self.classes) if c.is_batch]

    def price(self, choice: Choice) -> Candidate:
        """Propagates and prices ``choice``."""
        found = self.tried.get(choice)
        return found if found is not None else self.price_layout(choice, propagate(self.graph, *self._seeds(choice)))

    def price_layout(self, choice: Choice, layout: Layout) -> Candidate:
        """Prices ``layout``, which stands for ``choice``."""
        key = layout.specs, tuple(layout.strategies.items())
        priced = self.priced_layouts.get(key)
        if priced is None:
            memory = self.memory_model.memory(layout)
            apart = should_disable_all_gather_fusion(self.graph, memory.peak, self.budget, self.options)
            memory = self.memory_model.memory(layout, all_gather_fusion_disabled=True) if apart else memory
            priced = self.priced_layouts[key] = (self.cost_model.cost(layout), memory, apart)
        found = self.tried[choice] = Candidate(choice, layout, *priced)
        return found

    def meets_bound(self, found: Candidate) -> bool:
        """Whether no layout of the space is better."""
        return found.memory.peak <= self.budget and found.cost.seconds <= self.bound * (1 + BOUND_TOLERANCE)

    def best(self, choices: Iterable[Choice]) -> Candidate:
        """The best of ``choices``; the first of equals."""
        return min(map(self.price, choices), key=self.key)

    def key(self, found: Candidate) -> tuple[float, ...]:
        """Sorts the best first."""
        return found.key(self.budget)

    def _seeds(self, choice: Choice) -> tuple[list[dict[int, Spec]], dict[int, Spec]]:
        values, mesh = self.graph.values, self.graph.program.mesh
        first: dict[int, Spec] = {}
        for c, axes in zip(self.classes, choice.class_axes, strict=True):
            for v, d in c.inputs if axes else ():
                spec = first.get(v, replicated(len(values[v].shape)))
                if not set(axes) & set(spec.axes):
                    first[v] = spec.with_dim(d, axes)
        hard = {self.graph.inputs[i]: spec for i, spec in choice.argument_specs}
        outs = dict(self.graph.program.carries)
        second: dict[int, Spec] = {}
        for i in sorted(self.roles.parameters | self.roles.optimizer):
            v = self.graph.inputs[i]
            spec = first.get(v, replicated(len(values[v].shape)))
            stored = (
                v not in self.graph.pins and choice.zero_stage and (choice.zero_stage == 3 or i in self.roles.optimizer)
            )
            if stored:
                spec = zero_sharded(spec, values[v].shape, choice.storage_axes, mesh.shape)
                second[v] = second[self.graph.outputs[outs[i]]] = spec
            elif choice.zero_stage and v not in hard:
                hard[v] = hard[self.graph.outputs[outs[i]]] = spec
        hard.pop(0, None)
        second.pop(0, None)
        for i, o in self.graph.program.carries:
            v, out = self.graph.inputs[i], self.graph.outputs[o]
            if v in hard and out not in self.graph.pins and out:
                hard[out] = hard[v]
        return [first, second], {v: s for v, s in hard.items() if v not in self.graph.pins}

    def class_options(self) -> list[list[Axes]]:
        """For each class, the axes that may split it."""
        options = [p for n in range(len(self.axes) + 1) for p in itertools.combinations(self.axes, n)]
        sizes = self.graph.program.mesh
        return [[o for o in options if c.size % sizes.axes_size(o) == 0] for c in self.classes]


def zero_sharded(spec: Spec, shape: Sequence[int], axes: Axes, sizes: Mapping[str, int]) -> Spec:
    """``spec`` split further over ``axes``: all on one dimension if one divides, else each where it can.

    The locally largest dimension that fits is taken, so that a transfer is one collective.
    """
    axes = tuple(a for a in axes if a not in spec.axes)
    if not axes:
        return spec
    local = [n // math.prod(sizes[a] for a in d) for n, d in zip(shape, spec.dims, strict=True)]
    parts = math.prod(sizes[a] for a in axes)
    fits = [d for d, n in enumerate(local) if n % parts == 0 and n > 1]
    if fits:
        d = max(fits, key=lambda d: (local[d], d))
        return spec.with_dim(d, spec.dims[d] + axes)
    for axis in axes if len(axes) > 1 else ():
        spec = zero_sharded(spec, shape, (axis,), sizes)
    return spec
