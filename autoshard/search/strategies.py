"""Presets: the strategies that people write by hand ("dp", "fsdp", "tp", ...), as choices to price.

Data-parallel presets are one choice each. "tp" and "fsdp_tp" fix what the batch is sharded over and leave the rest to
the layout problem, within `StrategyLimits`; on a mesh with more axes than that is solved for, to coordinate descent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoshard.errors import SpecError
from autoshard.ir.dim_classes import batch_dims
from autoshard.ir.spec import Axes
from autoshard.search.candidates import Choice, Search
from autoshard.search.solved_layouts import solve_layouts
from autoshard.search.strategy_limits import StrategyLimits

PRESETS = ("auto", "dp", "fsdp", "fsdp_tp", "replicated", "tp", "zero1", "zero2", "zero3")
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
    elif strategy in ("dp", "zero1", "zero2", "zero3", "fsdp"):
        stage = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}[strategy]
        yield Choice(_batch_split(s, axes, strategy), axes if stage else (), stage)
    elif strategy == "fsdp_tp" and len(axes) == 1:
        yield from preset_choices(s, "fsdp")
    else:
        batch_axes = axes[:1] if strategy == "fsdp_tp" else ()
        parameter_axes = axes[len(batch_axes) :]
        start = Choice(_batch_split(s, batch_axes, strategy), batch_axes, 3) if batch_axes else replicated
        limits = StrategyLimits(batch_dims(s.graph), batch_axes, parameter_axes)
        found = list(solve_layouts(s, limits, batch_axes))
        yield from found
        if not found:
            others = [i for i in range(len(s.classes)) if i not in s.batch_classes]
            yield from _coordinate_descent(s, start, others, parameter_axes)


def _batch_split(s: Search, axes: Axes, strategy: str) -> tuple[Axes, ...]:
    """Class axes with every batch class over ``axes``, all else replicated."""
    class_axes: list[Axes] = [() for _ in s.classes]
    parts = s.graph.program.mesh.axes_size(axes)
    for i in s.batch_classes:
        c = s.classes[i]
        if c.size % parts:
            v, d = c.inputs[0]
            value = s.graph.values[v]
            raise SpecError(
                f"strategy {strategy!r} splits the batch over {'+'.join(axes)} in {parts} parts, but dimension {d} of "
                f"{value.name} has size {value.shape[d]} (greatest common divisor with the dimensions tied to it: "
                f"{c.size}); pad the batch to {-(-value.shape[d] // parts) * parts}, or use strategy 'auto'"
            )
        class_axes[i] = axes
    return tuple(class_axes)


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
