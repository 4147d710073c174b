"""Presets: the strategies that people write by hand ("dp", "fsdp", "tp", ...), as choices to price.

Data-parallel presets are one choice each. "tp" and "fsdp_tp" fix what the batch is sharded over and leave the rest to
the layout problem, within `StrategyLimits`; on a mesh with more axes than that is solved for, to coordinate descent.
What the batch is, `autoshard.ir.batch` defines; arguments that are not carried and have none of it are parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoshard.errors import SpecError
from autoshard.ir.batch import batch_dims
from autoshard.ir.dim_classes import DimClass
from autoshard.ir.graph import Diagnostic, loop_constants
from autoshard.ir.spec import Axes
from autoshard.search.candidates import Choice, Search
from autoshard.search.layout_problem import StrategyLimits
from autoshard.search.solved_layouts import solve_layouts

PRESETS = ("auto", "dp", "fsdp", "fsdp_tp", "replicated", "tp", "zero1", "zero2", "zero3")
ZERO_STAGES = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
"""Presets that split the batch over all axes, and the stage at which they store state sharded."""
DESCENT_ROUNDS = 4


def preset_choices(s: Search, strategy: str) -> Iterator[Choice]:
    """The choices to price for a preset other than "auto".

    Raises:
      SpecError: the axes that shard the batch do not divide it.
    """
    axes = s.axes
    replicated = Choice(((),) * len(s.classes))
    if strategy == "replicated" or not axes:
        yield replicated
    elif strategy in ZERO_STAGES:
        stage = ZERO_STAGES[strategy]
        yield (choice := Choice(_batch_split(s, axes, strategy), axes if stage else (), stage))
        if stage == 3 and loop_constants(s.graph):
            yield replace(choice, before_loops=True)
    elif strategy == "fsdp_tp" and len(axes) == 1:
        yield from preset_choices(s, "fsdp")
    else:
        batch_axes = _batch_axes(s, strategy)
        parameter_axes = axes[len(batch_axes) :]
        start = Choice(_batch_split(s, batch_axes, strategy), batch_axes, 3) if batch_axes else replicated
        frozen = frozenset(s.graph.inputs[i] for i in s.frozen)
        stored = frozen | {s.graph.inputs[i] for i, _ in s.graph.program.carries}
        limits = StrategyLimits(batch_dims(s.graph), batch_axes, parameter_axes, frozen, stored)
        found = list(solve_layouts(s, limits, batch_axes))
        yield from found
        if not found:
            others = [i for i in range(len(s.classes)) if i not in s.batch_classes]
            yield from _coordinate_descent(s, start, others, parameter_axes)


def batch_remarks(s: Search, strategy: str) -> Iterator[Diagnostic]:
    """How the batch is not split as users would expect, of "auto" or by the name of a preset."""
    for i in s.batch_classes if strategy == "auto" and s.axes else ():
        size, parts = s.classes[i].size, s.graph.program.mesh.axes_size(s.axes)
        if size > 1 and not _dividing(size, s.axes, s):
            near = dict.fromkeys((size // parts * parts or parts, -(-size // parts) * parts))
            yield Diagnostic(
                f"{_dimension(s, s.classes[i])}, of the batch, is not split: no axis of the mesh divides {size}; all "
                f"divide {' and '.join(map(str, near))}"
            )
    axes = _batch_axes(s, strategy)
    stage = ZERO_STAGES.get(strategy, 0)
    if axes and not s.batch_classes:
        yield Diagnostic(
            f"strategy {strategy!r}: no dimension of an argument qualifies as the batch, so no work is split over "
            f"{'+'.join(axes)}; it must be one along which most of the forward computation is parallel"
        )
    for i in s.batch_classes if axes else ():
        c = s.classes[i]
        taken = _dividing(c.size, axes, s)
        if taken != axes:
            over = f"over {'+'.join(taken)} only" if taken else "over no axis"
            yield Diagnostic(
                f"strategy {strategy!r}: {_dimension(s, c)} is split {over}, since {c.size} does not divide into "
                f"{s.graph.program.mesh.axes_size(axes)} parts over {'+'.join(axes)}"
            )
    if s.axes and stage in (1, 2) and not s.roles.optimizer:
        yield Diagnostic(f"strategy {strategy!r}: the step carries no optimizer state, so nothing is stored sharded")


def _batch_axes(s: Search, strategy: str) -> Axes:
    """The axes over which a preset splits the batch."""
    if strategy == "fsdp_tp":
        return s.axes[:1]
    return s.axes if strategy in ZERO_STAGES else ()


def _batch_split(s: Search, axes: Axes, strategy: str) -> tuple[Axes, ...]:
    """Class axes with every class of the batch over ``axes``, or over as many parts as some of them divide it into, and
    all else replicated.

    Raises:
      SpecError: no axis divides any class of the batch, and the user's pins leave one of them to the preset.
    """
    class_axes: list[Axes] = [() for _ in s.classes]
    for i in s.batch_classes:
        class_axes[i] = _dividing(s.classes[i].size, axes, s)
    pinned = {a for v in s.graph.inputs if v in s.graph.pins for a in s.graph.pins[v].axes}
    if s.batch_classes and not any(class_axes) and not pinned.issuperset(axes):
        c, parts = s.classes[s.batch_classes[0]], s.graph.program.mesh.axes_size(axes)
        v, d = c.inputs[0]
        size = s.graph.values[v].shape[d]
        raise SpecError(
            f"strategy {strategy!r} splits the batch over {'+'.join(axes)} in {parts} parts, but {_dimension(s, c)} "
            f"has size {size} (greatest common divisor with the dimensions tied to it: {c.size}); "
            f"pad the batch to {-(-size // parts) * parts}, or use strategy 'auto'"
        )
    return tuple(class_axes)


def _dividing(size: int, axes: Axes, s: Search) -> Axes:
    """Those of ``axes`` that together divide ``size`` into the most parts; the first of equals, the fewest."""
    mesh = s.graph.program.mesh
    subsets = (a for n in range(len(axes) + 1) for a in itertools.combinations(axes, n))
    return max((a for a in subsets if size % mesh.axes_size(a) == 0), key=mesh.axes_size)


def _dimension(s: Search, c: DimClass) -> str:
    v, d = c.inputs[0]
    return f"dimension {d} of {s.graph.values[v].name}"


def _coordinate_descent(s: Search, start: Choice, classes: Iterable[int], axes: Axes) -> Iterator[Choice]:
    """Changes the axes of one class at a time for the better, until nothing improves; first those classes that help
    most when changed alone. Yields every choice that it prices."""
    options, best = s.class_options(), s.price(start)

    def variants(i: int, choice: Choice) -> list[Choice]:
        before, after = choice.class_axes[:i], choice.class_axes[i + 1 :]
        return [replace(choice, class_axes=(*before, o, *after)) for o in options[i] if set(o) <= set(axes)]

    yield start
    alone = {i: min(s.key(s.price(c)) for c in variants(i, start)) for i in classes}
    for _ in range(DESCENT_ROUNDS):
        before = best
        for i in sorted(alone, key=lambda i: (alone[i], i)):
            found = variants(i, best.choice)
            yield from found
            best = min([best, *map(s.price, found)], key=s.key)
        if best is before:
            return
