"""presets: the layouts that people write by hand, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoshard.candidates import Choice, Search
from autoshard.errors import SpecError
from autoshard.spec import Axes

PRESETS = ("auto", "dp", "fsdp", "fsdp_tp", "replicated", "tp", "zero1", "zero2", "zero3")
ROUNDS = 4
"""Most rounds of changing one class at a time for the better."""


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


def _improve(s: Search, start: Choice, free: Iterable[int], axes: Axes) -> Iterator[Choice]:
    """Changes one class at a time for the better until nothing helps; yields what it tried."""
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
        if best is before:
            return
