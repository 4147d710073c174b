"""Plans of a step in micro-batches: where memory is short, and of a pipeline."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.errors import MemoryBudgetError, SpecError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.pipelining.chain import has_chain
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.runtime.fit_memory.preference import MIN_GAIN, axes_of_batch, is_memory_bound, preference
from autoshard.runtime.fit_memory.within_budget import plan_within_budget, with_each_optional
from autoshard.runtime.options import Options, memory_saving_sequences
from autoshard.runtime.stages import Planned, plan_program, run_passes
from autoshard.transforms.pipeline import Pass
from autoshard.units import time_text

MARGIN = 0.05
"""Share of the memory into which XLA for GPUs schedules that a plan without a pipeline leaves: steps compiled for H100s
took up to 0.06 more than predicted, and one that took more than there is waited for collectives that it hides
elsewhere. Pipelines took up to 0.06 less."""
HOPELESS = 1.5
"""A pipeline that takes so many times what is to beat is not tried in other numbers of micro-batches, which shorten its
bubble."""


def plan_on_device(traced: Program, options: Options, to_beat: float, free_seconds: Callable[[], float]) -> Planned:
    """Plans ``traced`` below the compiler's rematerialization threshold; if nothing fits there, within the budget.

    Below the threshold XLA compiles the plan as it is; above it, it recomputes values of its own choice, and waits for
    collectives that it would else run beside compute.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    if traced.pipeline is not None:
        options = replace(options, optional_passes=tuple(p for p in options.optional_passes if p.keeps_layers))
    margin = MARGIN if traced.pipeline is None else 0.0
    threshold = (1 - margin) * traced.mesh.hardware.remat_threshold
    if threshold < budget_of(options.request, traced):
        below = replace(options.request, memory_budget=threshold)
        try:
            return _plan_in_parts(traced, options, below, to_beat, free_seconds)
        except MemoryBudgetError as e:
            if traced.pipeline is not None and e.least > budget_of(options.request, traced):
                raise
    return _plan_in_parts(traced, options, options.request, to_beat, free_seconds)


def _plan_in_parts(
    traced: Program, options: Options, request: PlanRequest, to_beat: float, free_seconds: Callable[[], float]
) -> Planned:
    """Plans ``traced`` within the budget of ``request``, in as many micro-batches as the user asked for. Where that is
    open and memory makes the step slower, or nothing fits, the fewest with which nothing is recomputed are tried; where
    nothing fits, the fewest with passes that save memory too. The fastest plan is returned.

    Raises:
      MicrobatchError: the step is not computable in the number of micro-batches that the user gave.
      SpecError: a preset does not split parts as small.
      MemoryBudgetError: nothing fits.
    """
    if options.microbatch is None:
        return plan_within_budget(traced, options, request)[0]
    if options.microbatches is not None:
        program, asked = run_passes(traced, (options.microbatch,), request)
        try:
            return plan_within_budget(program, options, asked)[0]._replace(traced=traced)
        except SpecError as e:
            raise SpecError(f"for each of {options.microbatches} micro-batches: {e}") from None
    if traced.pipeline is not None:
        return _plan_staged(traced, options, request, to_beat)
    try:
        whole, is_short = plan_within_budget(traced, options, request)
        if not is_short or whole.plan.cost.seconds <= (1 + MIN_GAIN) * free_seconds():
            return whole
        fitting, why = [whole], f"the fastest plan takes {time_text(whole.plan.cost.seconds)}"
    except MemoryBudgetError as e:
        fitting, why = list[Planned](), e
    variants = options.microbatch.variants(traced)
    too_slow = False  # in fewer parts the fastest layout does not fit, and in these it is slower than what fits whole

    @functools.cache
    def in_parts(parts: Pass, *, saving: bool) -> Planned | None:
        """The plan in ``parts``, if one fits: with the passes that save most memory, or with none of them, and then
        only if no faster layout was too large."""
        program, asked = run_passes(traced, (parts,), request)
        *_, passes = options.passes, *(memory_saving_sequences(program, options) if saving else ())
        with contextlib.suppress(MemoryBudgetError):
            planned = plan_program(program, passes, asked)
            if saving or not is_memory_bound(planned.plan):
                return planned
            nonlocal too_slow
            too_slow = bool(fitting) and planned.plan.alternatives[0].seconds >= fitting[0].plan.cost.seconds
        return None

    def enough(parts: Pass, *, saving: bool) -> bool:
        try:
            return too_slow or in_parts(parts, saving=saving) is not None
        except SpecError:  # a preset cannot split so small a part
            return True

    def fewest(among: Sequence[Pass], *, saving: bool) -> Sequence[Pass]:
        n = bisect.bisect_left(among, True, key=lambda parts: enough(parts, saving=saving))
        return among[n : n + 1]

    note = functools.partial(with_note, traced)
    alone: Sequence[Pass] = ()
    with contextlib.suppress(SpecError):
        alone = fewest(variants, saving=False)
        for parts in alone:
            if not too_slow and (planned := in_parts(parts, saving=False)) is not None:
                fitting += [note(p, parts, why) for p in (planned, *_with_faster_passes(planned, options, request))]
    with contextlib.suppress(SpecError, MemoryBudgetError):
        fewer = variants[: variants.index(alone[0])] if alone else variants
        for parts in () if isinstance(why, str) else fewest(fewer, saving=True):
            program, asked = run_passes(traced, (parts,), request)
            fitting.append(note(plan_within_budget(program, options, asked)[0], parts, why))
    if not fitting:
        assert isinstance(why, MemoryBudgetError)
        raise why
    return min(fitting, key=lambda p: preference(p.plan))


def _plan_staged(traced: Program, options: Options, request: PlanRequest, to_beat: float) -> Planned:
    """The pipeline with the number of micro-batches with which it is fastest: that of the loop over micro-batches that
    the step has, or else, of numbers doubled again and again, the best next to which both neighbours are slower.

    Raises:
      PipelineError: no pipeline runs the step.
      MemoryBudgetError, SpecError: with no number of micro-batches it fits, or a preset splits them.
    """
    assert options.microbatch is not None
    assert traced.pipeline is not None
    if has_chain(traced.jaxpr, traced.rules):
        return plan_within_budget(traced, options, request)[0]
    variants, stages = options.microbatch.variants(traced), traced.pipeline.stages
    if not variants:
        return plan_within_budget(traced, options, request)[0]  # says why there is no chain
    errors: list[MemoryBudgetError | SpecError] = []
    found: list[float] = []

    @functools.cache
    def in_parts(n: int) -> Planned | None:
        try:
            program, asked = run_passes(traced, (variants[n],), request)
            planned = plan_within_budget(program, options, asked, min([to_beat, *found]))[0]
        except (MemoryBudgetError, SpecError) as e:
            errors.append(e)
            return None
        found.append(planned.plan.cost.seconds)
        return planned._replace(traced=traced)

    def seconds(n: int) -> float:
        planned = in_parts(n)
        return math.inf if planned is None else planned.plan.cost.seconds

    best, least = min((2 * stages).bit_length() - 2, len(variants) - 1), list[float]()  # as many as twice the stages
    while in_parts(best) is None:
        least.append(getattr(errors[-1], "least", math.inf))
        # Twice as many halve what a micro-batch takes, and nothing else.
        never = len(least) > 1 and 2 * least[-1] - least[-2] > budget_of(options.request, traced)
        if never or best + 1 == len(variants):
            raise errors[least.index(min(least))]
        best += 1
    start = in_parts(best)
    hopeless = False
    if start is not None and start.plan.pipeline is not None:
        hopeless = max(start.plan.pipeline.seconds) > to_beat or start.plan.cost.seconds > HOPELESS * to_beat
    for step in () if hopeless else (1, -1):
        while 0 <= best + step < len(variants) and seconds(best + step) <= seconds(best):
            best += step
    planned = in_parts(best)
    assert planned is not None
    return planned


def with_note(traced: Program, planned: Planned, added: Pass, why: MemoryBudgetError | str, price: str = "") -> Planned:
    """The plan of ``traced`` with the pass ``added``, the reason for it, and what it costs."""
    note = Diagnostic(f"{added} was added: without it, {why}{price}")
    plan = replace(planned.plan, diagnostics=(*planned.plan.diagnostics, note))
    return planned._replace(traced=traced, plan=plan)


def _with_faster_passes(planned: Planned, options: Options, request: PlanRequest) -> Iterator[Planned]:
    """Plans with each optional pass that makes steps faster, such as reductions once after the loop over micro-batches
    along the axes that split the batch in ``planned``."""
    asked = replace(request, passes=planned.plan.passes[:1])
    axes = axes_of_batch(planned.plan)
    for passes in with_each_optional(planned.traced, options.passes, options, saving=False, batch_axes=axes):
        with contextlib.suppress(MemoryBudgetError):
            yield plan_program(planned.traced, passes, asked)
