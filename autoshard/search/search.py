"""The search: which layout of a graph to lower, under a strategy and a memory budget.

"auto" solves the layout problem (`autoshard.search.solved_layouts`), in which every group of values has its own spec.
Unless a layout found meets the proven bound, it also prices what the presets would do, all choices of dimension classes
where they are few, and changes of single arguments' specs. What comes and goes between calls then decides the specs of
such arguments and results (`autoshard.search.call_ends`). A layout over the budget loses to any within it.
Deterministic: work is limited by counts, never by clocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.cost.compiler_options import CompilerOptions
from autoshard.cost.reshard import MAX_BLOCKS
from autoshard.errors import ArgumentError, MemoryBudgetError, nearest
from autoshard.ir.graph import Graph
from autoshard.ir.spec import Spec
from autoshard.search.call_ends import EQUALLY_FAST, revise_ends
from autoshard.search.candidates import Candidate, Choice, Search
from autoshard.search.solved_layouts import solve_layouts
from autoshard.search.spec_tables import all_splits
from autoshard.search.strategies import PRESETS, preset_choices
from autoshard.units import size_text

MAX_EXHAUSTIVE = 512
"""Most choices that are enumerated."""
MAX_EXHAUSTIVE_WORK = 100_000
"""Nodes times choices above which they are not enumerated, however few: some seconds."""
MAX_PRESET_WORK = 16_000
"""Nodes times presets above which presets are not priced beside solved layouts: in no larger program was one better."""
MAX_ARGUMENT_WORK = 40_000
"""Nodes times specs of arguments above which arguments are not varied one by one."""
EQUALLY_LARGE = 1e-2
"""Share of the predicted peak memory within which layouts count as equally large."""


def search(
    graph: Graph,
    strategy: str = "auto",
    budget: float = math.inf,
    options: CompilerOptions = (),
    *,
    to_beat: float = math.inf,
    gives_up: bool = False,
) -> tuple[Candidate, Search]:
    """The cheapest layout found for ``strategy`` with predicted peak memory of at most ``budget`` bytes per device, and
    all that was priced.

    Args:
      options: compiler options that the user gave.
      to_beat: seconds. The search ends where it is proven that no layout that the layout problem can express takes
        less.
      gives_up: whether to end at once where it is proven that no layout that the layout problem can express fits: the
        error then names what each needs at least, and not how fast one would be.

    Raises:
      MemoryBudgetError: no layout that was priced fits; names the smallest.
      ArgumentError, SpecError: as `explore`.
    """
    found, s = explore(graph, strategy, budget, options, to_beat=to_beat, gives_up=gives_up)
    if found.memory.peak > budget:
        raise MemoryBudgetError(_over_budget_message(s), _least(s), min(c.cost.seconds for c in s.tried.values()))
    return found, s


def explore(
    graph: Graph,
    strategy: str = "auto",
    budget: float = math.inf,
    options: CompilerOptions = (),
    *,
    to_beat: float = math.inf,
    gives_up: bool = False,
) -> tuple[Candidate, Search]:
    """As `search`, but if nothing fits, the layout that exceeds the budget least instead of an error.

    Raises:
      MemoryBudgetError: it gives up; or none takes less than ``to_beat``, and none that was priced until then fits.
      ArgumentError: no such strategy.
      SpecError: a preset's axes do not divide the batch.
    """
    if strategy not in PRESETS:
        raise ArgumentError(f"strategy {strategy!r} is not known{nearest(strategy, PRESETS)}")
    s = Search(graph, budget, options)
    if gives_up and strategy == "auto" and s.least_peak > budget:
        raise MemoryBudgetError(
            f"each layout of {graph.program.name} needs more than the memory budget of {size_text(budget, 2)} per "
            f"device: {size_text(s.least_peak, 2)} or more",
            s.least_peak,
            unsearched=True,
        )
    found = s.best(_auto_choices(s, to_beat) if strategy == "auto" else preset_choices(s, strategy))
    if strategy == "auto" and not s.meets_bound(found) and s.bound < to_beat:
        found = s.best(_argument_choices(s, found))
    return revise_ends(s, _plainest(s, found)) if strategy == "auto" else found, s


def _plainest(s: Search, best: Candidate) -> Candidate:
    """Of the layouts that are as fast as ``best`` to `EQUALLY_FAST`, as large to `EQUALLY_LARGE`, and transfer for no
    longer, the one with the fewest collectives."""
    seconds, peak = best.cost.seconds * (1 + EQUALLY_FAST), best.memory.peak * (1 + EQUALLY_LARGE)
    equal = [c for c in s.tried.values() if c.cost.seconds <= seconds and c.cost.transfers <= best.cost.transfers]
    fitting = [c for c in equal if c.memory.peak <= min(peak, max(s.budget, best.memory.peak))]
    return min(fitting, key=lambda c: (sum(x.count for x in c.cost.collectives), s.key(c)))


def _auto_choices(s: Search, to_beat: float) -> Iterator[Choice]:
    """Solved layouts; then all choices of class axes and ZeRO stages if these are few and no solved layout meets the
    bound, else the data-parallel ones among them; of these the one that splits most where no solved layout can fit."""
    proven, solved = False, 0
    for choice in solve_layouts(s):
        proven, solved = proven or s.meets_bound(s.price(choice)), solved + 1
        yield choice
        if s.bound >= to_beat:
            if all(c.memory.peak > s.budget for c in s.tried.values()):
                raise MemoryBudgetError(_over_budget_message(s), _least(s), s.bound, none_faster=True)
            return
    options = s.class_options()
    subsets = [a for n in range(1, len(s.axes) + 1) for a in itertools.combinations(s.axes, n)]
    stages = [(0, ()), *((stage, axes) for stage in (2, 3) for axes in subsets)]
    if not s.roles.parameters and not s.roles.optimizer:
        stages = stages[:1]
    if not proven and _can_enumerate(s, math.prod(map(len, options)) * len(stages)):
        for class_axes in itertools.product(*options):
            for stage, storage_axes in stages:
                yield Choice(tuple(class_axes), storage_axes, stage)
        return
    presets = [Choice(((),) * len(s.classes))]
    for axes in subsets:
        batch = tuple(axes if i in s.batch_classes and axes in options[i] else () for i in range(len(s.classes)))
        presets += [Choice(batch), Choice(batch, axes, 2), Choice(batch, axes, 3)]
    if len(s.graph.nodes) * len(presets) <= MAX_PRESET_WORK:
        yield from presets[-1:] if math.isfinite(s.budget) and s.least_peak > s.budget else presets
    elif not solved:
        yield presets[0]
        yield from presets[-3:]


def _can_enumerate(s: Search, choices: int) -> bool:
    return choices <= MAX_EXHAUSTIVE and choices * len(s.graph.nodes) <= MAX_EXHAUSTIVE_WORK


def _argument_choices(s: Search, best: Candidate) -> Iterator[Choice]:
    """Decides specs of arguments one by one: all combinations if these are few, else changes that improve ``best``.

    Dimension classes tie together what a good layout can keep apart, such as how a weight is stored and used. Not over
    more axes than reshards are searched over: each of many more specs has reshards of its own.
    """
    yield best.choice
    if len(s.axes) > MAX_BLOCKS:
        return
    options = {i: argument_options(s, i) for i in _unpinned_arguments(s)}
    if _can_enumerate(s, math.prod(map(len, options.values()))):
        for specs in itertools.product(*options.values()):
            yield Choice(((),) * len(s.classes), argument_specs=tuple(zip(options, specs, strict=True)))
        return
    if len(s.graph.nodes) * sum(map(len, options.values())) > MAX_ARGUMENT_WORK:
        return
    for i, specs in options.items():
        decided = best.choice.argument_specs
        variants = [replace(best.choice, argument_specs=(*decided, (i, spec)), solved_number=0) for spec in specs]
        yield from variants
        best = min([best, *map(s.price, variants)], key=s.key)


def _unpinned_arguments(s: Search) -> list[int]:
    """Flat positions of the arguments that have no pin and more than one possible spec, largest first."""
    found = [i for i, v in enumerate(s.graph.inputs) if v not in s.graph.pins and len(argument_options(s, i)) > 1]
    return sorted(found, key=lambda i: (-s.graph.values[s.graph.inputs[i]].bytes, i))


def argument_options(s: Search, i: int) -> Sequence[Spec]:
    """Every spec that divides the argument at flat position ``i``."""
    return all_splits(s.graph.values[s.graph.inputs[i]].shape, s.axes, s.graph.program.mesh)


def _least(s: Search) -> float:
    return min(c.memory.peak for c in s.tried.values())


def _over_budget_message(s: Search) -> str:
    smallest = min(s.tried.values(), key=lambda c: c.memory.peak)
    parts = sorted([p for p in smallest.memory.items() if p[0] not in ("peak", "host")], key=lambda p: -p[1])
    v, size = s.memory_model.largest_at_peak(smallest.layout)
    value = s.graph.values[v]
    array = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return (
        f"none of {len(s.tried)} layouts fits the memory budget of {size_text(s.budget, 2)} per device: the smallest "
        f"needs {size_text(smallest.memory.peak, 2)}, of which {parts[0][0]} take {size_text(parts[0][1], 2)} and "
        f"{parts[1][0]} {size_text(parts[1][1], 2)}; the largest array at its peak, "
        f"{array}{_value_origin(s.graph, v)}, takes {size_text(size, 2)}; raise memory_budget or add devices"
    )


def _value_origin(graph: Graph, v: int) -> str:
    """Where a value comes from, for a message: an argument's path, or the source line that computes it, traced back
    through the borders of loops, never to a later node: what a loop carries from a literal may come round to itself."""
    producer = {w: n for n, node in reversed(list(enumerate(graph.nodes))) for w in node.results}
    at = len(graph.nodes)
    while v not in graph.inputs and producer.get(v, at) < at and graph.nodes[producer[v]].tie:
        at = producer[v]
        if graph.nodes[at].operands:
            (v,) = graph.nodes[at].operands
    if v in graph.inputs:
        return f", {graph.values[v].name}"
    source = graph.nodes[producer[v]].source if v in producer else ""
    return f" from {source}" if source else ""
