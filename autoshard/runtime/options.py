"""Options: the arguments of `jit` in one form, and the sequences of passes that they let a plan choose from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh_config import MeshLike
from autoshard.plan.planner import PlanRequest
from autoshard.plan.record import PlanRecord
from autoshard.transforms.pipeline import Pass, Pipeline


@dataclass(frozen=True)
class Options:
    """The arguments of `jit`, checked and in one form."""

    mesh: MeshLike
    plan: PlanRecord | None
    request: PlanRequest
    passes: tuple[Pass, ...]
    memory_saving_passes: tuple[Pass, ...]
    """Passes to weigh in place of them where memory stands in the way, what is new among them in all its forms, from
    what holds most to what holds least; none where the user chose the passes."""
    optional_passes: tuple[Pass, ...]
    """Passes whose every form is weighed against going without."""
    rules: Rules
    in_shardings: Any
    out_shardings: Any
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]
    donate_nums: tuple[int, ...]
    donate_names: tuple[str, ...]
    refine: int = 0
    """Layouts that are compiled to choose from; none where predictions choose."""
    cache: str | os.PathLike[str] | None = None
    """The folder where the compiler's answers are kept."""

    def without_first(self) -> Options:
        """For the same function with its first argument bound."""

        def shifted(nums: Sequence[int]) -> tuple[int, ...]:
            return tuple(n - 1 for n in nums if n > 0)

        return replace(self, static_nums=shifted(self.static_nums), donate_nums=shifted(self.donate_nums))


def rewritten(program: Program, passes: tuple[Pass, ...], options: Options) -> tuple[Program, PlanRequest]:
    program, reports = Pipeline(passes).run(program)
    return program, replace(options.request, passes=reports)


def with_optional_passes(program: Program, passes: tuple[Pass, ...], options: Options) -> Iterator[tuple[Pass, ...]]:
    """``passes``, and ``passes`` after each form of those that are weighed."""
    yield passes
    for weighed in options.optional_passes:
        for form in weighed.variants(program):
            yield form, *passes


def pass_sequences(program: Program, options: Options, most: int | None = None) -> Iterator[tuple[Pass, ...]]:
    """Passes that may serve: those chosen and those that hold less, each after every form of what is weighed.

    Of those that hold less all, or ``most``, 2 or more, evenly from what holds most to what holds least.
    """
    lighter = list(memory_saving_sequences(program, options))
    if most is not None and len(lighter) > most:
        lighter = [lighter[i * (len(lighter) - 1) // (most - 1)] for i in range(most)]
    for passes in (options.passes, *lighter):
        yield from with_optional_passes(program, passes, options)


def memory_saving_sequences(program: Program, options: Options) -> Iterator[tuple[Pass, ...]]:
    """What holds less than the passes that were chosen, from most to least."""
    for i, lighter in enumerate(options.memory_saving_passes):
        if lighter not in options.passes:
            for form in lighter.variants(program):
                yield *options.memory_saving_passes[:i], form, *options.memory_saving_passes[i + 1 :]
