"""presets: the layouts that people write by hand, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoshard.errors import SpecError
from autoshard.ir.dim_classes import batch_dims
from autoshard.ir.spec import Axes
from autoshard.search.build_problem import StrategyLimits
from autoshard.search.candidates import Choice, Search
from autoshard.search.solved_layouts import solve_layouts

PRESETS = ("auto", "dp", "fsdp", "fsdp_tp", "replicated", "tp", "zero1", "zero2", "zero3")
DESCENT_ROUNDS = 4
"""Most rounds of changing one class at a time for the better."""


def preset_choices(s: Search, strategy: str) -> Iterator[Choice]:
    """The choices that a preset leaves open."""
    axes = s.axes
    none = Choice(((),) * len(s.classes))
    if strategy == "replicated" or not axes:
        yield none
    elif strategy in ("dp", "zero1", "zero2", "zero3", "fsdp"):
        zero = {"dp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}[strategy]
        yield Choice(_batch_split(s, axes, strategy), axes if zero else (), zero)
    elif strategy == "fsdp_tp" and len(axes) == 1:
        yield from preset_choices(s, "fsdp")
    else:
        first = axes[:1] if strategy == "fsdp_tp" else ()
        base = Choice(_batch_split(s, first, strategy), first, 3) if first else none
        limits = StrategyLimits(batch_dims(s.graph), first, axes[len(first) :])
        found = list(solve_layouts(s, limits, first))
        yield from found
        if not found:
            rest = [i for i in range(len(s.classes)) if i not in s.batch_classes]
            yield from _coordinate_descent(s, base, rest, axes[len(first) :])


def _batch_split(s: Search, axes: Axes, strategy: str) -> tuple[Axes, ...]:
    """The batch split over ``axes``: every class named so."""
    split: list[Axes] = [() for _ in s.classes]
    sizes = s.graph.program.mesh
    for i in s.batch_classes:
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


def _coordinate_descent(s: Search, start: Choice, free: Iterable[int], axes: Axes) -> Iterator[Choice]:
    """Changes one class at a time for the better until nothing helps, those that help most alone first; yields what it
    tried."""
    space, best = s.class_options(), s.price(start)

    def tries(i: int, choice: Choice) -> list[Choice]:
        options = [o for o in space[i] if set(o) <= set(axes)]
        return [replace(choice, class_axes=(*choice.class_axes[:i], o, *choice.class_axes[i + 1 :])) for o in options]

    yield start
    alone = {i: min(s.key(s.price(c)) for c in tries(i, start)) for i in free}
    for _ in range(DESCENT_ROUNDS):
        before = best
        for i in sorted(alone, key=lambda i: (alone[i], i)):
            found = tries(i, best.choice)
            yield from found
            best = min([best, *map(s.price, found)], key=s.key)
        if best is before:
            return
