"""search: which dimension classes are split over which mesh axes, under a memory budget.

A candidate is a *choice*: for each dimension class the axes that split it, and over which axes the state is
stored in parts (ZeRO). Each is propagated through the whole program and priced there, so a candidate's cost
is that of the very layout that would be lowered. When the choices are few all of them are tried;
otherwise the best of every preset's choices is improved one class at a time until no single change helps.
A layout over the budget loses against any that fits. Deterministic: counts bound the work, never clocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.cost import Cost, Costing
from autoshard.dims import DimClass, Roles, classes, roles
from autoshard.errors import ArgumentError, MemoryBudgetError, SpecError, nearest
from autoshard.graph import Graph
from autoshard.memory import Memory, memory
from autoshard.propagate import Layout, propagate
from autoshard.spec import Axes, Spec, replicated
from autoshard.units import size_text

PRESETS = ("auto", "dp", "fsdp", "fsdp_tp", "replicated", "tp", "zero1", "zero2", "zero3")
EXHAUSTIVE = 512
"""Most candidates that are tried one by one."""
CLASSES = 10
"""Classes considered, heaviest first; lighter ones follow by propagation."""
ROUNDS = 4
POLISH = 40_000
"""Most nodes times candidates for which arguments are tried one by one."""


@dataclass(frozen=True)
class Choice:
    """What the search decides. ``split[i]`` are the axes of class i; the state lies in parts over ``storage``."""

    split: tuple[Axes, ...]
    storage: Axes = ()
    zero: int = 0
    """0: state whole on each replica; 1, 2: optimizer state in parts; 3: parameters too."""
    inputs: tuple[tuple[int, Spec], ...] = ()
    """Arguments set one by one, by flat position."""


@dataclass(frozen=True)
class Candidate:
    """A choice with its layout, priced."""

    choice: Choice
    layout: Layout
    cost: Cost
    memory: Memory

    def key(self, budget: float) -> tuple[float, ...]:
        """Sorts the best first: fitting before not, then by seconds, then by memory."""
        over = max(0.0, self.memory.peak - budget)
        return (over, self.cost.seconds, self.memory.peak)


@dataclass
class Search:
    """One program's space, and the candidates priced so far."""

    graph: Graph
    budget: float
    classes: tuple[DimClass, ...] = ()
    costing: Costing = field(init=False)
    tried: dict[Choice, Candidate] = field(default_factory=dict[Choice, Candidate])
    layouts: dict[tuple[Spec, ...], tuple[Cost, Memory]] = field(
        default_factory=dict[tuple[Spec, ...], tuple[Cost, Memory]]
    )

    def __post_init__(self) -> None:
        self.costing = Costing(self.graph)
        self.classes = classes(self.graph)[:CLASSES]
        self.axes = tuple(a for a, n in self.graph.program.mesh.shape.items() if n > 1)
        self.roles: Roles = roles(self.graph)

    def price(self, choice: Choice) -> Candidate:
        """Propagates and prices ``choice``."""
        found = self.tried.get(choice)
        if found is None:
            layout = propagate(self.graph, *self._seeds(choice))
            priced = self.layouts.get(layout.specs)
            if priced is None:
                priced = self.layouts[layout.specs] = (self.costing.cost(layout), memory(self.graph, layout))
            found = self.tried[choice] = Candidate(choice, layout, *priced)
        return found

    def best(self, choices: Iterable[Choice]) -> Candidate:
        """The best of ``choices``; the first of equals."""
        return min(map(self.price, choices), key=lambda c: c.key(self.budget))

    def _seeds(self, choice: Choice) -> tuple[list[dict[int, Spec]], dict[int, Spec]]:
        values, mesh = self.graph.values, self.graph.program.mesh
        first: dict[int, Spec] = {}
        for c, axes in zip(self.classes, choice.split, strict=True):
            for v, d in c.inputs if axes else ():
                spec = first.get(v, replicated(len(values[v].shape)))
                if not set(axes) & set(spec.axes):
                    first[v] = spec.with_dim(d, axes)
        hard = {self.graph.inputs[i]: spec for i, spec in choice.inputs}
        outs = dict(self.graph.program.carries)
        second: dict[int, Spec] = {}
        for i in sorted(self.roles.parameters | self.roles.optimizer):
            v = self.graph.inputs[i]
            spec = first.get(v, replicated(len(values[v].shape)))
            stored = v not in self.graph.pins and choice.zero and (choice.zero == 3 or i in self.roles.optimizer)
            if stored:
                spec = stored_in_parts(spec, values[v].shape, choice.storage, mesh.shape)
                second[v] = second[self.graph.outputs[outs[i]]] = spec
            elif choice.zero and v not in hard:
                hard[v] = hard[self.graph.outputs[outs[i]]] = spec
        hard.pop(0, None)
        second.pop(0, None)
        for i, o in self.graph.program.carries:
            v, out = self.graph.inputs[i], self.graph.outputs[o]
            if v in hard and out not in self.graph.pins and out:
                hard[out] = hard[v]
        return [first, second], {v: s for v, s in hard.items() if v not in self.graph.pins}

    def space(self) -> list[list[Axes]]:
        """For each class, the axes that may split it."""
        options = [p for n in range(len(self.axes) + 1) for p in itertools.combinations(self.axes, n)]
        sizes = self.graph.program.mesh
        return [[o for o in options if c.size % sizes.axes_size(o) == 0] for c in self.classes]


def stored_in_parts(spec: Spec, shape: Sequence[int], axes: Axes, sizes: Mapping[str, int]) -> Spec:
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
        spec = stored_in_parts(spec, shape, (axis,), sizes)
    return spec


def search(graph: Graph, strategy: str = "auto", budget: float = math.inf) -> tuple[Candidate, Search]:
    """The best layout of ``strategy`` whose peak memory is at most ``budget`` bytes per device.

    Raises:
      ArgumentError: no such strategy.
      SpecError: a data-parallel preset whose batch does not divide.
      MemoryBudgetError: nothing that was tried fits; names the least that would.
    """
    if strategy not in PRESETS:
        raise ArgumentError(f"strategy {strategy!r} is not known{nearest(strategy, PRESETS)}")
    s = Search(graph, budget)
    found = s.best(_auto(s) if strategy == "auto" else preset(s, strategy))
    if strategy == "auto":
        found = s.best(_by_input(s, found))
    if found.memory.peak > budget:
        raise MemoryBudgetError(_too_large(s, strategy))
    return found, s


def preset(s: Search, strategy: str) -> Iterator[Choice]:
    """The choices that a preset leaves open."""
    axes = s.axes
    none = Choice(((),) * len(s.classes))
    if strategy == "replicated" or not axes:
        yield none
    elif strategy in ("dp", "zero1", "zero2", "zero3", "fsdp"):
        zero = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}[strategy]
        yield Choice(_batch(s, axes, strategy), axes if zero else (), zero)
    elif strategy == "tp":
        yield from _improve(s, none, [c for c in range(len(s.classes)) if s.classes[c].name != "batch"], axes)
    elif len(axes) == 1:
        yield from preset(s, "fsdp")
    else:
        base = Choice(_batch(s, axes[:1], strategy), axes[:1], 3)
        rest = [c for c in range(len(s.classes)) if not base.split[c]]
        yield from _improve(s, base, rest, axes[1:])


def _batch(s: Search, axes: Axes, strategy: str) -> tuple[Axes, ...]:
    """The batch split over ``axes``: every class named so."""
    split: list[Axes] = [() for _ in s.classes]
    sizes = s.graph.program.mesh
    found = [i for i, c in enumerate(s.classes) if c.name.split("'")[0] == "batch"]
    for i in found:
        c = s.classes[i]
        if c.size % sizes.axes_size(axes):
            v, d = next((v, d) for v, d in c.inputs)
            value = s.graph.values[v]
            parts = sizes.axes_size(axes)
            raise SpecError(
                f"strategy {strategy!r} splits the batch over {'+'.join(axes)} in {parts} parts, but dimension {d} of "
                f"{value.name} has size {value.shape[d]} (and {c.size} is what all that goes with it has in common); "
                f"pad the batch to {-(-value.shape[d] // parts) * parts}, or use strategy 'auto'"
            )
        split[i] = axes
    return tuple(split)


def _auto(s: Search) -> Iterator[Choice]:
    space = s.space()
    subsets = [a for n in range(1, len(s.axes) + 1) for a in itertools.combinations(s.axes, n)]
    zeros = [(0, ()), *((z, a) for z in (2, 3) for a in subsets)]
    if not s.roles.parameters and not s.roles.optimizer:
        zeros = zeros[:1]
    if math.prod(map(len, space)) * len(zeros) <= EXHAUSTIVE:
        for split in itertools.product(*space):
            for zero, storage in zeros:
                yield Choice(tuple(split), storage, zero)
        return
    starts = [Choice(((),) * len(s.classes))]
    batch = [i for i, c in enumerate(s.classes) if c.name.split("'")[0] == "batch"]
    for axes in subsets:
        split = tuple(axes if i in batch and axes in space[i] else () for i in range(len(s.classes)))
        starts += [Choice(split), Choice(split, axes, 2), Choice(split, axes, 3)]
    ranked = sorted(starts, key=lambda c: s.price(c).key(s.budget))
    for start in ranked[:3]:
        yield from _improve(s, start, range(len(s.classes)), s.axes, zeros)


def _by_input(s: Search, best: Candidate) -> Iterator[Choice]:
    """Sets arguments one by one: all combinations where they are few, else those that better ``best`` in turn.

    Classes tie together what one layout may well keep apart (a weight stored otherwise than it is used).
    """
    yield best.choice
    options = {i: _specs(s, i) for i in _free_inputs(s)}
    if math.prod(map(len, options.values())) <= EXHAUSTIVE:
        for specs in itertools.product(*options.values()):
            yield Choice(((),) * len(s.classes), inputs=tuple(zip(options, specs, strict=True)))
        return
    if len(s.graph.nodes) * sum(map(len, options.values())) > POLISH:
        return
    for i, specs in options.items():
        tries = [replace(best.choice, inputs=(*best.choice.inputs, (i, spec))) for spec in specs]
        yield from tries
        best = min([best, *map(s.price, tries)], key=lambda c: c.key(s.budget))


def _free_inputs(s: Search) -> list[int]:
    """Flat positions of the arguments that have a dimension to split and no pin, largest first."""
    found = [i for i, v in enumerate(s.graph.inputs) if v not in s.graph.pins and len(_specs(s, i)) > 1]
    return sorted(found, key=lambda i: (-s.graph.values[s.graph.inputs[i]].bytes, i))


def _specs(s: Search, i: int) -> list[Spec]:
    """Every spec of argument ``i``: each axis on one dimension or none, in mesh order where several share one."""
    shape, sizes = s.graph.values[s.graph.inputs[i]].shape, s.graph.program.mesh
    specs: list[Spec] = []
    for places in itertools.product([None, *range(len(shape))], repeat=len(s.axes)):
        dims = tuple(tuple(a for a, p in zip(s.axes, places, strict=True) if p == d) for d in range(len(shape)))
        if all(n % sizes.axes_size(d) == 0 and (n > 1 or not d) for n, d in zip(shape, dims, strict=True)):
            specs.append(Spec(dims))
    return specs


def _improve(
    s: Search, start: Choice, free: Iterable[int], axes: Axes, zeros: Sequence[tuple[int, Axes]] = ()
) -> Iterator[Choice]:
    """Changes one class, or the storage, at a time for the better until nothing helps; yields what it tried."""
    space, best = s.space(), s.price(start)
    yield start
    for _ in range(ROUNDS):
        before = best
        for i in free:
            options = [o for o in space[i] if set(o) <= set(axes)]
            split = best.choice.split
            tries = [replace(best.choice, split=(*split[:i], o, *split[i + 1 :])) for o in options]
            yield from tries
            best = min([best, *map(s.price, tries)], key=lambda c: c.key(s.budget))
        tries = [replace(best.choice, zero=z, storage=a) for z, a in zeros]
        yield from tries
        best = min([best, *map(s.price, tries)], key=lambda c: c.key(s.budget))
        if best is before:
            return


def _too_large(s: Search, strategy: str) -> str:
    smallest = min(s.tried.values(), key=lambda c: c.memory.peak)
    parts = sorted(smallest.memory.items()[:-1], key=lambda p: -p[1])
    more = "" if strategy == "auto" else f" strategy 'auto' may find a smaller one than {strategy!r};"
    return (
        f"none of {len(s.tried)} layouts fits {size_text(s.budget, 2)} a device: the least that would is "
        f"{size_text(smallest.memory.peak, 2)}, of which {parts[0][0]} take {size_text(parts[0][1], 2)} and "
        f"{parts[1][0]} {size_text(parts[1][1], 2)};{more} raise memory_budget, add devices, or pass "
        "passes=['recompute:full']"
    )
