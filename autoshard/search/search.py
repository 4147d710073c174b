"""search: the layout to lower, under a memory budget.

"auto" takes the layout that `solve` finds in the program's `space`, where every group of values has its own spec. Where
that is not proven the best, what the presets would do is tried beside it, and all of what is left open where that is
little. A layout over the budget loses against any that fits. Deterministic: counts bound the work, never clocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.cost.compiler_options import CompilerOptions
from autoshard.errors import ArgumentError, MemoryBudgetError, nearest
from autoshard.ir.graph import Graph
from autoshard.ir.spec import Spec
from autoshard.search.candidates import Candidate, Choice, Search
from autoshard.search.solved_layouts import solve_layouts
from autoshard.search.spec_tables import all_splits
from autoshard.search.strategies import PRESETS, preset_choices
from autoshard.units import size_text

MAX_EXHAUSTIVE = 512
"""Most candidates that are tried one by one."""
MAX_PRESET_WORK = 16_000
"""Most nodes times presets that are tried beside what was solved for: in larger programs none was the better one."""
MAX_ARGUMENT_WORK = 40_000
"""Most nodes times specs of arguments that are tried one by one."""


def search(
    graph: Graph, strategy: str = "auto", budget: float = math.inf, options: CompilerOptions = ()
) -> tuple[Candidate, Search]:
    """The best layout of ``strategy`` whose peak memory is at most ``budget`` bytes per device under compiler
    ``options``.

    Raises:
      MemoryBudgetError: nothing that was tried fits; names the least that would.
      ArgumentError, SpecError: as `explore`.
    """
    found, s = explore(graph, strategy, budget, options)
    if found.memory.peak > budget:
        raise MemoryBudgetError(_over_budget_message(s), min(c.memory.peak for c in s.tried.values()))
    return found, s


def explore(
    graph: Graph, strategy: str = "auto", budget: float = math.inf, options: CompilerOptions = ()
) -> tuple[Candidate, Search]:
    """The best layout of ``strategy``, which may be over the budget where nothing that was tried fits.

    Raises:
      ArgumentError: no such strategy.
      SpecError: a data-parallel preset whose batch does not divide.
    """
    if strategy not in PRESETS:
        raise ArgumentError(f"strategy {strategy!r} is not known{nearest(strategy, PRESETS)}")
    s = Search(graph, budget, options)
    found = s.best(_auto_choices(s) if strategy == "auto" else preset_choices(s, strategy))
    if strategy == "auto" and not s.meets_bound(found):
        found = s.best(_argument_choices(s, found))
    return found, s


def _auto_choices(s: Search) -> Iterator[Choice]:
    proven, found = False, 0
    for choice in solve_layouts(s):
        proven, found = proven or s.meets_bound(s.price(choice)), found + 1
        yield choice
    space = s.class_options()
    subsets = [a for n in range(1, len(s.axes) + 1) for a in itertools.combinations(s.axes, n)]
    zeros = [(0, ()), *((z, a) for z in (2, 3) for a in subsets)]
    if not s.roles.parameters and not s.roles.optimizer:
        zeros = zeros[:1]
    if not proven and math.prod(map(len, space)) * len(zeros) <= MAX_EXHAUSTIVE:
        for split in itertools.product(*space):
            for zero, storage in zeros:
                yield Choice(tuple(split), storage, zero)
        return
    starts = [Choice(((),) * len(s.classes))]
    for axes in subsets:
        split = tuple(axes if i in s.batch_classes and axes in space[i] else () for i in range(len(s.classes)))
        starts += [Choice(split), Choice(split, axes, 2), Choice(split, axes, 3)]
    if len(s.graph.nodes) * len(starts) <= MAX_PRESET_WORK:
        yield from starts
    elif not found:
        yield starts[0]
        yield from starts[-3:]


def _argument_choices(s: Search, best: Candidate) -> Iterator[Choice]:
    """Sets arguments one by one: all combinations where they are few, else those that better ``best`` in turn.

    Classes tie together what one layout may well keep apart (a weight stored otherwise than it is used).
    """
    yield best.choice
    options = {i: argument_options(s, i) for i in _unpinned_arguments(s)}
    if math.prod(map(len, options.values())) <= MAX_EXHAUSTIVE:
        for specs in itertools.product(*options.values()):
            yield Choice(((),) * len(s.classes), argument_specs=tuple(zip(options, specs, strict=True)))
        return
    if len(s.graph.nodes) * sum(map(len, options.values())) > MAX_ARGUMENT_WORK:
        return
    for i, specs in options.items():
        tries = [
            replace(best.choice, argument_specs=(*best.choice.argument_specs, (i, spec)), solved_number=0)
            for spec in specs
        ]
        yield from tries
        best = min([best, *map(s.price, tries)], key=s.key)


def _unpinned_arguments(s: Search) -> list[int]:
    """Flat positions of the arguments that have a dimension to split and no pin, largest first."""
    found = [i for i, v in enumerate(s.graph.inputs) if v not in s.graph.pins and len(argument_options(s, i)) > 1]
    return sorted(found, key=lambda i: (-s.graph.values[s.graph.inputs[i]].bytes, i))


def argument_options(s: Search, i: int) -> Sequence[Spec]:
    """Every spec of argument ``i``: each axis on one dimension or none, in mesh order where several share one."""
    return all_splits(s.graph.values[s.graph.inputs[i]].shape, s.axes, s.graph.program.mesh)


def _over_budget_message(s: Search) -> str:
    smallest = min(s.tried.values(), key=lambda c: c.memory.peak)
    parts = sorted(smallest.memory.items()[:-1], key=lambda p: -p[1])
    v, size = s.memory_model.largest_at_peak(smallest.layout)
    value = s.graph.values[v]
    array = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return (
        f"none of {len(s.tried)} layouts fits {size_text(s.budget, 2)} a device: the least that would is "
        f"{size_text(smallest.memory.peak, 2)}, of which {parts[0][0]} take {size_text(parts[0][1], 2)} and "
        f"{parts[1][0]} {size_text(parts[1][1], 2)}; the largest array, {array}{_value_origin(s.graph, v)}, takes "
        f"{size_text(size, 2)}; raise memory_budget or add devices"
    )


def _value_origin(graph: Graph, v: int) -> str:
    """Where a value comes from: an argument's path, or the line that makes it, of whatever loop it comes out."""
    made = {w: node for node in reversed(graph.nodes) for w in node.results}
    while v in made and made[v].tie and made[v].operands and v not in graph.inputs:
        (v,) = made[v].operands
    if v in graph.inputs:
        return f", {graph.values[v].name}"
    return f" from {made[v].source}" if v in made and made[v].source else ""
