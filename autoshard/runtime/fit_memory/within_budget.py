"""The fastest plan within a budget: where memory rules out the fastest layout, with passes that save memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from autoshard.errors import MemoryBudgetError, PipelineError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.runtime.fit_memory.held_by_value import held_by_value
from autoshard.runtime.fit_memory.preference import (
    MIN_SAVING,
    axes_of_batch,
    faster_but_larger,
    is_memory_bound,
    preference,
)
from autoshard.runtime.options import Options, memory_saving_sequences, with_optional_passes
from autoshard.runtime.stages import Planned, plan_program
from autoshard.transforms.pipeline import Pass

MIN_HELD_GAIN = 0.01
"""Least share of the step's time that holding other values must gain, by the prices of the last plan, to be planned: a
scan may be cut in two for it, which compiles for twice as long."""
MAX_HELD = 3
"""Most choices of held values that are planned, each by the prices of the plan before it."""
FILLED = 0.9
"""Share of a TPU's memory that a step may take, as predicted, which holds other values in some layers than in others:
XLA leaves gaps between the stacks of their layers, in three such steps of 8 to 11 % of what it took without."""


def plan_within_budget(
    traced: Program, options: Options, request: PlanRequest, to_beat: float = math.inf
) -> tuple[Planned, bool]:
    """Plans ``traced`` within the budget of ``request``. Where memory rules out the fastest layout and the user named
    no passes, tries passes that save memory too, and returns the fastest plan that fits, and whether memory did so.

    Args:
      to_beat: seconds of a step. Once a pipeline fits, optional passes with which none is faster are not pursued.

    Raises:
      MemoryBudgetError: nothing fits; the message is about the passes with the lowest peak.
    """
    fitting: list[tuple[Planned, tuple[Pass, ...]]] = []
    ran: list[tuple[Pass, ...]] = []
    errors: list[MemoryBudgetError] = []
    too_large: list[MemoryBudgetError] = []
    """Of what was planned into less than the budget."""

    def try_passes(
        passes: tuple[Pass, ...], with_optional: tuple[Pass, ...] | None = None, within: PlanRequest = request
    ) -> bool:
        """Plans with ``with_optional`` or else ``passes``; whether a plan fits and no faster layout was too large."""
        try:
            planned = plan_program(
                traced, with_optional or passes, within, math.inf if with_optional is None else goal()
            )
        except MemoryBudgetError as e:
            (errors if within is request else too_large).append(e)
            return False
        except PipelineError:
            if with_optional is None:
                raise
            return True  # the chain of layers does not survive that pass
        plan = planned.plan
        if passes is not options.passes:
            added = ", ".join(str(p) for p in passes if p not in options.passes)
            without = errors[0] if errors else faster_but_larger(fitting[0][0].plan)
            note = Diagnostic(f"{added} was added: without it, {without}")
            plan = replace(plan, diagnostics=(*plan.diagnostics, note))
        fitting.append((planned._replace(plan=plan), passes))
        ran.append(with_optional or passes)
        return not is_memory_bound(plan)

    def try_more(passes: tuple[Pass, ...], with_optional: tuple[Pass, ...]) -> None:
        """What a pipeline keeps for an optional pass may leave too little: tries it with passes that save more."""
        first = tuple(p for p in with_optional if p not in passes)
        sequences = [options.passes, *memory_saving_sequences(traced, options)]
        more = sequences[sequences.index(passes) + 1 :]
        bisect.bisect_left(more, True, key=lambda saving: try_passes(saving, (*first, *saving)))

    def goal() -> float:
        return min(to_beat, fastest()[0].plan.cost.seconds) if fitting else math.inf

    def fastest() -> tuple[Planned, tuple[Pass, ...]]:
        return min(fitting, key=lambda f: preference(f[0].plan))

    def hold_by_value() -> None:
        """From the fastest plan that makes values again, holds other values as its prices and what its layouts leave of
        the memory say, and so on from what that gives while it is faster."""
        deciding = [i for i, passes in enumerate(ran) if any(p.decides_held for p in passes)]
        if not deciding:
            return
        start = min(deciding, key=lambda i: preference(fitting[i][0].plan))
        best, (_, passes), sequence = fitting[start][0].plan, fitting[start], ran[start]
        budget = budget_of(request, traced)
        if traced.mesh.platform == "tpu":
            budget = min(budget, FILLED * traced.mesh.hardware.memory)
        within = replace(request, memory_budget=budget)
        tried, taken = {*sequence}, 0.0
        for _ in range(MAX_HELD):
            chosen, seconds = held_by_value(traced, sequence, best, -taken, within)
            while taken and chosen in tried and taken < budget / 4:
                taken += MIN_SAVING * budget
                chosen, seconds = held_by_value(traced, sequence, best, -taken, within)
            if chosen is None or chosen in tried or seconds > best.cost.seconds * (1 - MIN_HELD_GAIN):
                return
            tried.add(chosen)
            count = len(fitting)
            held = [tuple(chosen if p.decides_held else p for p in s) for s in (passes, sequence)]
            try_passes(held[0], held[1], within)
            if len(fitting) == count:
                taken += too_large[-1].least - budget
            elif (found := fitting[-1][0].plan).cost.seconds < best.cost.seconds:
                best, taken = found, 0.0
            elif is_memory_bound(found):
                taken += found.alternatives[0].peak - budget
            else:
                return

    is_short = not try_passes(options.passes)
    tried = () if fitting else tuple(with_each_optional(traced, options.passes, options, saving=None))
    for with_optional in tried:
        is_short = not try_passes(options.passes, with_optional) and is_short
    if is_short:
        sequences = [options.passes, *memory_saving_sequences(traced, options)]
        if traced.pipeline is not None and not fitting and sequences[1:]:
            try_passes(sequences[-1])  # whether any fits: each is searched for at several budgets
        enough = len(sequences)
        if traced.pipeline is None or fitting:
            # The first sequence under which the fastest layout fits saves the least memory, and so adds the least time.
            enough = bisect.bisect_left(sequences, True, lo=1, key=try_passes)
        axes = axes_of_batch(fitting[0][0].plan) if fitting else None
        for first, *_ in with_each_optional(traced, (), options, saving=True, batch_axes=axes):
            less = sequences[:enough]  # with an optional pass that saves memory, one that saves less may do
            bisect.bisect_left(less, True, key=lambda passes, first=first: try_passes(passes, (first, *passes)))
        if traced.pipeline is None and options.memory_saving_passes:
            hold_by_value()
    if fitting:
        _, passes = fastest()
        axes = () if traced.pipeline is None else axes_of_batch(fastest()[0].plan)
        # Of a pipeline also along the first of the axes that split the batch alone, which are the slower ones.
        each = [None] if traced.pipeline is None else [axes[:n] for n in range(len(axes), 0, -1)] or [None]
        for batch_axes in each:
            for with_optional in with_each_optional(traced, passes, options, saving=False, batch_axes=batch_axes):
                count = len(fitting)
                fits = with_optional in tried or try_passes(passes, with_optional)
                if fits or traced.pipeline is None:
                    continue
                # What is faster and too large is the most that saving memory can gain.
                bound = len(fitting) > count  # it fits, and memory rules out a faster layout
                larger = fitting[-1][0].plan.alternatives[0].seconds if bound else errors[-1].fastest
                if larger < goal():
                    try_more(passes, with_optional)
        (found, _), budget = fastest(), budget_of(request, traced)
        if math.isfinite(budget):  # what was planned into less
            found = found._replace(plan=replace(found.plan, memory_budget=budget))
        return found, is_short
    hint = "; or pass passes=['recompute:full']"
    if options.memory_saving_passes:
        hint = f" (with {', '.join(str(p) for p in options.memory_saving_passes if p not in options.passes)})"
    lowest = min(reversed(errors), key=lambda e: e.least)
    raise MemoryBudgetError(f"{lowest}{hint}", lowest.least) from None


def with_each_optional(
    traced: Program,
    passes: tuple[Pass, ...],
    options: Options,
    *,
    saving: bool | None,
    batch_axes: tuple[str, ...] | None = None,
) -> Iterator[tuple[Pass, ...]]:
    """``passes`` after each variant of each optional pass that saves memory, or of each that does not; None: that makes
    room."""
    chosen = [p for p in options.optional_passes if (p.makes_room if saving is None else p.saves_memory == saving)]
    options = replace(options, optional_passes=tuple(chosen))
    return itertools.islice(with_optional_passes(traced, passes, options, batch_axes), 1, None)
