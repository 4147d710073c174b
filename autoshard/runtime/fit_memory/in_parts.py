"""Plans of a step in micro-batches: where memory is short, and of a pipeline."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.errors import MemoryBudgetError, SpecError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.pipelining.chain import has_chain
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.runtime.fit_memory.preference import MIN_GAIN, axes_of_batch, is_memory_bound, preference
from autoshard.runtime.fit_memory.time_bounds import TimeBounds
from autoshard.runtime.fit_memory.within_budget import plan_within_budget, with_each_optional
from autoshard.runtime.options import Options, memory_saving_sequences
from autoshard.runtime.stages import Planned, least_memory, plan_program, run_passes
from autoshard.schedule.schedule import Schedule
from autoshard.transforms.pipeline import InParts, Pass
from autoshard.units import time_text

MARGIN = 0.05
"""Share of the memory into which XLA for GPUs schedules that a plan without a pipeline leaves: steps compiled for H100s
took up to 0.06 more than predicted, and one that took more than there is waited for collectives that it hides
elsewhere. Pipelines took up to 0.06 less."""
HOPELESS = 1.5
"""A pipeline that takes so many times what is to beat is not tried in other numbers of micro-batches, which shorten its
bubble."""


def plan_on_device(traced: Program, options: Options, to_beat: float, bounds: TimeBounds) -> Planned:
    """Plans ``traced`` below the compiler's rematerialization threshold, without a pipeline by `MARGIN` of it; if
    nothing fits there, within the budget.

    Below the threshold XLA compiles the plan as it is; above it, it recomputes values of its own choice, and waits for
    collectives that it would else run beside compute.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    if traced.pipeline is not None:
        options = replace(options, optional_passes=tuple(p for p in options.optional_passes if p.keeps_layers))
    threshold = traced.mesh.hardware.remat_threshold
    if threshold >= budget_of(options.request, traced):
        return _plan_in_parts(traced, options, options.request, to_beat, bounds)
    below = replace(options.request, memory_budget=threshold)
    try:
        found = _plan_in_parts(traced, options, below, to_beat, bounds)
    except MemoryBudgetError as e:
        if traced.pipeline is not None and e.least > budget_of(options.request, traced):
            raise
        return _plan_in_parts(traced, options, options.request, to_beat, bounds)
    within = replace(below, memory_budget=(1 - MARGIN) * threshold)
    if traced.pipeline is not None or found.plan.memory.peak <= budget_of(within, traced):
        return found
    with contextlib.suppress(MemoryBudgetError):
        *_, smallest = options.passes, *memory_saving_sequences(traced, options)
        plan_program(traced, smallest, within, gives_up=True)  # whether any fits
        return _plan_in_parts(traced, options, within, to_beat, bounds)
    return found


def _plan_in_parts(
    traced: Program, options: Options, request: PlanRequest, to_beat: float, bounds: TimeBounds
) -> Planned:
    """Plans ``traced`` within the budget of ``request``, in as many micro-batches as the user asked for. Where that is
    open and memory makes the step slower, or nothing fits, the fewest with which nothing is recomputed are tried; where
    nothing fits, the fewest with passes that save memory too. The fastest plan is returned.

    Args:
      bounds: learn what is found of the step that is not cut, or cut as the user asked for.

    Raises:
      MicrobatchError: the step is not computable in the number of micro-batches that the user gave.
      SpecError: a preset does not split parts as small.
      MemoryBudgetError: nothing fits.
    """
    if options.microbatch is None:
        return plan_within_budget(traced, options, request, bounds=bounds)[0]
    if options.microbatches is not None:
        program, asked = run_passes(traced, (options.microbatch,), request)
        try:
            return plan_within_budget(program, options, asked, bounds=bounds)[0]._replace(traced=traced)
        except SpecError as e:
            raise SpecError(f"for each of {options.microbatches} micro-batches: {e}") from None
    if traced.pipeline is not None:
        return _plan_staged(traced, options, request, to_beat)
    try:
        whole, is_short = plan_within_budget(traced, options, request, bounds=bounds)
        if not is_short or whole.plan.cost.seconds <= (1 + MIN_GAIN) * bounds.seconds(options.passes):
            return whole
        fitting, why = [whole], f"the fastest plan takes {time_text(whole.plan.cost.seconds)}"
    except MemoryBudgetError as e:
        fitting, why = list[Planned](), e
    variants, parts_of = options.microbatch.variants(traced), _Parts(traced, options, request, fitting)
    note = functools.partial(with_note, traced)
    alone: Sequence[Pass] = ()
    with contextlib.suppress(SpecError):
        alone = parts_of.fewest(variants)
        for parts in () if parts_of.too_slow else alone:
            if (found := parts_of.plan(parts)) is not None:
                fitting += [note(p, parts, why) for p in (found, *_with_faster_passes(found, options, request))]
    with contextlib.suppress(SpecError, MemoryBudgetError):
        fewer = variants[: variants.index(alone[0])] if alone else variants
        for parts in () if isinstance(why, str) else parts_of.fewest_saving(fewer):
            fitting.append(note(parts_of.plan_within_budget(parts), parts, why))
    if not fitting:
        assert isinstance(why, MemoryBudgetError)
        if (cause := options.microbatch.why_none(traced)) is not None:
            raise MemoryBudgetError(f"{why}; {cause}", why.least, why.fastest)
        raise why
    return min(fitting, key=lambda p: preference(p.plan))


class _Parts:
    """What one program was planned with in micro-batches: with the passes that save most memory, or with none."""

    def __init__(self, traced: Program, options: Options, request: PlanRequest, whole: Sequence[Planned]) -> None:
        self.traced, self.options, self.request = traced, options, request
        self.to_beat = min((p.plan.cost.seconds for p in whole), default=math.inf)
        """Seconds of the plan that fits whole."""
        self.too_slow = False
        """In fewer parts the fastest layout does not fit, and in these it is slower than what fits whole."""
        self.planned: dict[tuple[Pass, tuple[Pass, ...]], Planned | None] = {}

    def plan(self, parts: Pass, *, saving: bool = False) -> Planned | None:
        """The plan in ``parts``, if one fits."""
        (program, asked), passes = self._in(parts), self._passes(parts, saving=saving)
        if (parts, passes) not in self.planned:
            self.planned[parts, passes] = None
            to_beat = math.inf if saving else self.to_beat
            try:
                self.planned[parts, passes] = plan_program(program, passes, asked, to_beat, gives_up=True)
            except MemoryBudgetError as e:
                self.too_slow = self.too_slow or e.none_faster
        return self.planned[parts, passes]

    def plan_within_budget(self, parts: Pass) -> Planned:
        """The fastest plan in ``parts`` with passes that save as much memory as it takes."""
        program, asked = self._in(parts)
        known = {passes: found for (p, passes), found in self.planned.items() if p == parts and found is not None}
        return plan_within_budget(program, self.options, asked, known=known)[0]

    def fewest(self, among: Sequence[Pass]) -> Sequence[Pass]:
        """The fewest parts that are enough for the fastest layout to fit, if any are."""
        n = bisect.bisect_left(among, True, key=self._is_enough)
        return among[n : n + 1]

    def fewest_saving(self, among: Sequence[Pass]) -> Sequence[Pass]:
        """The fewest parts in which a plan fits with the passes that save most memory, if one does in any."""
        n = bisect.bisect_left(among, True, key=self._may_fit)
        while n < len(among) and not self._fits(among[n]):  # the bound is near what it takes
            n += 1
        return among[n : n + 1]

    def _in(self, parts: Pass) -> tuple[Program, PlanRequest]:
        return run_passes(self.traced, (parts,), self.request)

    def _passes(self, parts: Pass, *, saving: bool) -> tuple[Pass, ...]:
        *_, passes = self.options.passes, *(memory_saving_sequences(self._in(parts)[0], self.options) if saving else ())
        return passes

    def _is_enough(self, parts: Pass) -> bool:
        """Whether the fastest layout in ``parts`` fits, or makes the step too slow."""
        if self.too_slow:
            return True
        try:
            found = self.plan(parts)
        except SpecError:  # a preset cannot split so small a part
            return True
        if self.too_slow or found is None or not is_memory_bound(found.plan):
            return self.too_slow or found is not None
        self.too_slow = found.plan.alternatives[0].seconds >= self.to_beat
        return self.too_slow

    def _may_fit(self, parts: Pass) -> bool:
        program, asked = self._in(parts)
        return least_memory(program, self._passes(parts, saving=True), asked) <= budget_of(asked, program)

    def _fits(self, parts: Pass) -> bool:
        try:
            return self.plan(parts, saving=True) is not None
        except SpecError:  # a preset cannot split so small a part
            return True


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
    microbatch, given = options.microbatch, traced.pipeline.schedule
    if isinstance(given, Schedule):
        variants: tuple[InParts, ...] = (replace(microbatch, parts=given.microbatches),)
    else:
        variants = microbatch.variants(traced)
    if not variants:
        why = microbatch.why_none(traced)
        if why is not None and not why.own_loop:
            raise why
        return plan_within_budget(traced, options, request)[0]  # says why there is no chain
    planned: dict[int, Planned] = {}
    errors: dict[int, MemoryBudgetError | SpecError] = {}

    def seconds(n: int) -> float:
        """Of the plan in the parts of ``variants[n]``, which is planned once."""
        if n not in planned and n not in errors:
            program, asked = run_passes(traced, (variants[n],), request)
            fastest = min([to_beat, *(p.plan.cost.seconds for p in planned.values())])
            try:
                planned[n] = plan_within_budget(program, options, asked, fastest)[0]._replace(traced=traced)
            except (MemoryBudgetError, SpecError) as e:
                errors[n] = e
        return planned[n].plan.cost.seconds if n in planned else math.inf

    def least(n: int) -> float:
        return getattr(errors[n], "least", math.inf)

    # Twice as many as stages first.
    best = max((n for n, v in enumerate(variants) if v.parts <= 2 * traced.pipeline.stages), default=0)
    while math.isinf(seconds(best)):
        # Twice as many halve what a micro-batch takes, and nothing else.
        never = best - 1 in errors and 2 * least(best) - least(best - 1) > budget_of(options.request, traced)
        never = never or getattr(errors[best], "of_arguments", False)
        if never or best + 1 == len(variants):
            raise min(errors.items(), key=lambda found: least(found[0]))[1]
        best += 1
    pipeline = planned[best].plan.pipeline
    slowest = max(pipeline.seconds) if pipeline is not None else 0.0
    hopeless = slowest > to_beat or seconds(best) > HOPELESS * to_beat
    for step in () if hopeless else (1, -1):
        while 0 <= best + step < len(variants) and seconds(best + step) <= seconds(best):
            best += step
    return planned[best]


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
            yield plan_program(planned.traced, passes, asked, gives_up=True)
