"""The arguments of `jit` in one form, and the sequences of passes that planning may choose from."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh_config import MeshLike
from autoshard.plan.planner import PlanRequest
from autoshard.plan.record import PlanRecord
from autoshard.schedule.schedule import Schedule
from autoshard.transforms.pipeline import InParts, Pass


@dataclass(frozen=True)
class Options:
    """The arguments of `jit`, validated and normalized."""

    mesh: MeshLike
    plan: PlanRecord | None
    """The plan to run by, where the user gave one as the strategy."""
    like: Callable[[], PlanRecord] | None
    """Gives the plan whose specs the arguments that are its step's too are to have."""
    request: PlanRequest
    """Strategy, memory budget, strictness and compiler options."""
    rules: Rules
    """The step's own rules, then those registered, then those that ship."""

    passes: tuple[Pass, ...]
    """The passes that run unless memory rules out the fastest layout."""
    memory_saving_passes: tuple[Pass, ...]
    """The passes tried in their place then; those that ``passes`` lacks are tried in each of their variants. Empty
    where the user named the passes."""
    optional_passes: tuple[Pass, ...]
    """Passes of which each variant is tried, in the place of the pass of its name or before all others, and kept if it
    makes the step faster. Empty where the user named the passes."""

    microbatch: InParts | None
    """The pass that computes the step in micro-batches, before all others: where the user gave their number, with it;
    else with the number open, tried where memory is short. None: the batch is computed whole."""

    offload: tuple[Pass, ...]
    """The passes of which each keeps more of the carried state on the host than the one before, tried after all others
    where memory is short; empty where the user asked for one, or named the passes."""

    in_shardings: Any
    out_shardings: Any
    static_nums: tuple[int, ...]
    """Positions of the static arguments; ``static_names`` has the same arguments' names. So for donation."""
    static_names: tuple[str, ...]
    donate_nums: tuple[int, ...]
    donate_names: tuple[str, ...]

    microbatches: int | None = None
    """The number of micro-batches; None leaves it to the planner."""
    schedule: str | Schedule | None = None
    """Of a pipeline; None leaves it to the planner."""
    pad_state: bool = False
    """Whether state that the mesh does not divide is stored with padding."""
    refine: int = 0
    """Layouts compiled to choose from; 0 chooses by predicted time."""
    cache: str | os.PathLike[str] | None = None
    """Folder of cached compilations for ``refine``; None as in `compile_cache.cache_folder`."""

    @property
    def takes_placed(self) -> bool:
        """Whether plans depend on where arguments are: those of a preset, and one that is given, do not."""
        return self.plan is None and self.request.strategy == "auto"

    def offloading(self, offload: Pass) -> Options:
        """These options, with what ``offload`` keeps on the host there in any case."""
        saving = (*self.memory_saving_passes, offload) if self.memory_saving_passes else ()
        return replace(self, passes=(*self.passes, offload), memory_saving_passes=saving, offload=())

    def as_written(self, passes: Container[str]) -> Options:
        """These options, with what one of ``passes`` keeps on the host there in any case."""
        chosen = next((p for p in self.offload if str(p) in passes), None)
        return self.offloading(chosen) if chosen else self

    def as_for(self, plan: PlanRecord) -> Options:
        """These options, with what ``plan`` has on the host by the planner's choice there in any case."""
        return self.as_written({p.written for p in plan.passes})

    def without_first(self) -> Options:
        """The options for the same function with its first argument bound."""

        def shifted(nums: Sequence[int]) -> tuple[int, ...]:
            return tuple(n - 1 for n in nums if n > 0)

        return replace(self, static_nums=shifted(self.static_nums), donate_nums=shifted(self.donate_nums))


def pass_sequences(program: Program, options: Options, max_saving: int | None = None) -> Iterator[tuple[Pass, ...]]:
    """Every candidate sequence of passes: ``options.passes`` and the memory-saving ones, each with optional passes too.

    Args:
      max_saving: the most memory-saving sequences to take, 2 or more, evenly spaced; None takes all.
    """
    saving = list(memory_saving_sequences(program, options))
    if max_saving is not None and len(saving) > max_saving:
        saving = [saving[i * (len(saving) - 1) // (max_saving - 1)] for i in range(max_saving)]
    for passes in (options.passes, *saving):
        yield from with_optional_passes(program, passes, options)


def passes_of(plan: PlanRecord, program: Program, options: Options) -> tuple[Pass, ...]:
    """The sequence of passes that ``plan`` was made with; ``options.passes`` where these options name none such."""
    options, first = options.as_for(plan), parts_of(plan, program, options)
    ran = [p.written for p in plan.passes[len(first) :]]
    given = (*options.optional_passes, *options.memory_saving_passes, *options.passes)
    known = {str(p): p for p in given}
    by_name = {p.name: p for p in given}
    if ran == [*map(str, options.passes)] or not all(
        text in known or text.partition(":")[0] in by_name for text in ran
    ):
        return *first, *options.passes
    found: list[Pass] = []
    for text in ran:
        name, colon, option = text.partition(":")
        found.append(known[text] if text in known else by_name[name].from_option(option if colon else None))
    return *first, *found


def parts_of(plan: PlanRecord, program: Program, options: Options) -> tuple[Pass, ...]:
    """The pass by which ``plan`` computes ``program`` in micro-batches, if it does."""
    if options.microbatch is None or options.microbatches is not None:
        return () if options.microbatch is None else (options.microbatch,)
    names = [p.written.partition(":") for p in plan.passes[:1]]
    return tuple(options.microbatch.from_option(option) for name, _, option in names if name == options.microbatch.name)


def with_optional_passes(
    program: Program, passes: tuple[Pass, ...], options: Options, batch_axes: Sequence[str] | None = None
) -> Iterator[tuple[Pass, ...]]:
    """``passes``, then ``passes`` with each variant of each optional pass, in the place of the pass of its name or
    before all others; ``batch_axes`` as in `Pass.variants`."""
    yield passes
    for optional in options.optional_passes:
        for variant in optional.variants(program, batch_axes):
            replaced = tuple(variant if p.name == variant.name else p for p in passes)
            yield (variant, *passes) if replaced == passes else replaced


def memory_saving_sequences(program: Program, options: Options) -> Iterator[tuple[Pass, ...]]:
    """The sequences that save memory, in increasing order of what they save.

    ``options.memory_saving_passes`` with each variant of each pass in it that ``options.passes`` has not.
    """
    passes = options.memory_saving_passes
    for i, added in enumerate(passes):
        if added not in options.passes:
            for variant in added.variants(program):
                yield *passes[:i], variant, *passes[i + 1 :]
