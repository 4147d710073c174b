"""The fastest plan within a budget: where memory rules out the fastest layout, with passes that save memory."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from autoshard.errors import MemoryBudgetError, PipelineError, SpecError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.plan.record import PlanRecord
from autoshard.runtime.fit_memory.held_by_value import held_by_value
from autoshard.runtime.fit_memory.preference import (
    MIN_SAVING,
    axes_of_batch,
    faster_but_larger,
    is_memory_bound,
    preference,
)
from autoshard.runtime.fit_memory.time_bounds import TimeBounds
from autoshard.runtime.options import Options, memory_saving_sequences, with_optional_passes
from autoshard.runtime.stages import Planned, plan_program, run_passes
from autoshard.transforms.pipeline import Pass

MIN_HELD_GAIN = 0.01
"""Least share of the fastest plan's seconds that holding other values must gain, by the prices of the last plan, to be
planned, and with an optional pass, to be kept: a scan may be cut in two for it, which compiles for twice as long."""
MAX_HELD = 3
"""Most choices of held values that are planned, each by the prices of the plan before it."""
FILLED = 0.9
"""Share of a TPU's memory that a step may take, as predicted, which holds other values in some layers than in others:
XLA leaves gaps between the stacks of their layers, in three such steps of 8 to 11 % of what it took without."""


def plan_within_budget(
    traced: Program,
    options: Options,
    request: PlanRequest,
    to_beat: float = math.inf,
    bounds: TimeBounds | None = None,
    known: Mapping[tuple[Pass, ...], Planned] = MappingProxyType({}),
) -> tuple[Planned, bool]:
    """Plans ``traced`` within the budget of ``request``. Where memory rules out the fastest layout and the user named
    no passes, tries passes that save memory too, and returns the fastest plan that fits, and whether memory did so.

    Args:
      to_beat: seconds of a step. Once a pipeline fits, optional passes with which none is faster are not pursued.
      bounds: learn what is found here.
      known: plans of ``traced`` within that budget, by their passes.

    Raises:
      MemoryBudgetError: nothing fits; the message is about the passes with the lowest peak.
    """
    plans = _Plans(traced, options, request, to_beat, bounds or TimeBounds(), known)
    is_short = not plans.attempt(options.passes, gives_up=False)
    if plans.errors and plans.errors[0].of_arguments:
        raise plans.errors[0]
    roomy = () if plans.fitting else tuple(with_each_optional(traced, options.passes, options, saving=None))
    for ran in roomy:
        is_short = not plans.attempt(options.passes, ran, gives_up=False) and is_short
    is_short = is_short or not plans.fitting
    if is_short:
        _save_memory(plans)
        plans.search_smallest()
        if traced.pipeline is None and options.memory_saving_passes:
            _hold_by_value(plans)
    if not plans.fitting:
        raise plans.error() from None
    _try_faster(plans, {*roomy})
    found, budget = plans.fastest().planned, budget_of(request, traced)
    if math.isfinite(budget):  # what was planned into less
        found = found._replace(plan=replace(found.plan, memory_budget=budget))
    return found, is_short


class _Fit(NamedTuple):
    """A plan that fits."""

    planned: Planned
    passes: tuple[Pass, ...]
    """Without the optional ones."""
    ran: tuple[Pass, ...]

    @property
    def plan(self) -> PlanRecord:
        return self.planned.plan


class _Unsearched(NamedTuple):
    """Passes after which every layout that the layout problem can express takes more than the budget."""

    least: float
    """Lower bound on the bytes per device of these."""
    passes: tuple[Pass, ...]
    """Without the optional ones."""
    ran: tuple[Pass, ...]


class _Plans:
    """What one program was planned with, within one budget: plans that fit, and errors of those that do not."""

    def __init__(
        self,
        traced: Program,
        options: Options,
        request: PlanRequest,
        to_beat: float,
        bounds: TimeBounds,
        known: Mapping[tuple[Pass, ...], Planned],
    ) -> None:
        self.traced, self.options, self.request = traced, options, request
        self.to_beat, self.bounds, self.known = to_beat, bounds, known
        self.fitting: list[_Fit] = []
        self.errors: list[MemoryBudgetError] = []
        self.errors_within: list[MemoryBudgetError] = []
        """Of what was planned into less than the budget."""
        self.unsearched: list[_Unsearched] = []
        self.tried = set[tuple[Pass, ...]]()
        """Sequences that were planned as they are."""

    def attempt(
        self,
        passes: tuple[Pass, ...],
        ran: tuple[Pass, ...] | None = None,
        within: PlanRequest | None = None,
        *,
        gives_up: bool = True,
    ) -> bool:
        """Plans with ``passes``, or with optional ones among them as ``ran``. Returns whether these save enough: a plan
        fits and no faster layout was too large, or none is faster than what fits without the optional ones.

        Args:
          within: what is planned, with a lower budget: each plan within it tells what to hold next.
          gives_up: as in `plan_program`.
        """
        to_beat = math.inf if ran is None or within is not None else self.goal()
        ran = passes if ran is None else ran
        self.tried.add(ran)
        try:
            planned = self.known.get(ran) if within is None else None
            planned = planned or plan_program(self.traced, ran, within or self.request, to_beat, gives_up=gives_up)
        except MemoryBudgetError as e:
            if e.unsearched:
                self.unsearched.append(_Unsearched(e.least, passes, ran))
                return False
            self.bounds.learn(passes, e)
            if e.none_faster:
                return True
            (self.errors if within is None else self.errors_within).append(e)
            return False
        except (PipelineError, SpecError):
            if ran is passes:
                raise
            return True  # the chain of layers does not survive that pass, or a preset splits nothing of what it makes
        plan, usual = planned.plan, self.options.passes
        self.bounds.learn(passes, plan)
        if passes is not usual:
            added = ", ".join(str(p) for p in passes if p not in usual)
            without = self.errors[0] if self.errors else faster_but_larger(self.fitting[0].plan)
            note = Diagnostic(f"{added} was added: without it, {without}")
            plan = replace(plan, diagnostics=(*plan.diagnostics, note))
        self.fitting.append(_Fit(planned._replace(plan=plan), passes, ran))
        return not is_memory_bound(plan)

    def search_smallest(self) -> None:
        """Where nothing fits, searches after the passes with which less may do than after those that were searched
        for: the error names what the smallest takes, and layouts that no layout problem expresses, such as a preset's,
        may fit."""
        for least, passes, ran in sorted(self.unsearched, key=lambda found: found.least):
            if self.fitting or least >= min(e.least for e in self.errors):
                return
            self.attempt(passes, ran, gives_up=False)

    def fastest(self) -> _Fit:
        return min(self.fitting, key=lambda fit: preference(fit.plan))

    def goal(self) -> float:
        """Seconds that are to be beaten, once something fits."""
        return min(self.to_beat, self.fastest().plan.cost.seconds) if self.fitting else math.inf

    def text(self, passes: tuple[Pass, ...]) -> str:
        """The program after ``passes``, which two of `sequences` can have in common."""
        return str(run_passes(self.traced, passes, self.request)[0].jaxpr)

    def sequences(self) -> list[tuple[Pass, ...]]:
        """The usual passes, and those that save memory, in increasing order of what they save."""
        return [self.options.passes, *memory_saving_sequences(self.traced, self.options)]

    def error(self) -> MemoryBudgetError:
        """Of what needs the least."""
        hint, usual = "; or pass passes=['recompute:full']", self.options.passes
        if saving := self.options.memory_saving_passes:
            hint = f" (with {', '.join(str(p) for p in saving if p not in usual)})"
        lowest = min(reversed(self.errors), key=lambda e: e.least)
        fastest = min((e.fastest for e in self.errors if e.fastest), default=0.0)
        return MemoryBudgetError(f"{lowest}{hint}", lowest.least, fastest)


def _save_memory(plans: _Plans) -> None:
    """Plans with as little of the passes that save memory as it takes, also with optional ones that save some."""
    traced, options, sequences = plans.traced, plans.options, plans.sequences()
    if traced.pipeline is not None and not plans.fitting and sequences[1:]:
        plans.attempt(sequences[-1])  # whether any fits: each is searched for at several budgets
    enough = len(sequences)
    if traced.pipeline is None or plans.fitting:
        # The first sequence under which the fastest layout fits saves the least memory, and so adds the least time.
        enough = bisect.bisect_left(sequences, True, lo=1, key=plans.attempt)
        _save_less(plans, sequences)
    axes = axes_of_batch(plans.fitting[0].plan) if plans.fitting else None
    for first, *_ in with_each_optional(traced, (), options, saving=True, batch_axes=axes):
        less = sequences[:enough]  # with an optional pass that saves memory, one that saves less may do
        if not plans.fitting and less:  # what saves most tells whether any does
            *less, most = less
            plans.attempt(most, (first, *most))
        if plans.fitting:
            bisect.bisect_left(less, True, key=lambda passes, first=first: plans.attempt(passes, (first, *passes)))


def _save_less(plans: _Plans, sequences: Sequence[tuple[Pass, ...]]) -> None:
    """From the fastest plan, for which memory rules out a faster layout, tries what saves less while it is faster: in
    another layout it may fit."""
    while plans.fitting and is_memory_bound((fit := plans.fastest()).plan):
        at, now = sequences.index(fit.passes), plans.text(fit.passes)
        while at > 1 and plans.text(sequences[at - 1]) == now:
            at -= 1
        if at < 2 or sequences[at - 1] in plans.tried:
            return
        plans.attempt(sequences[at - 1])
        if plans.fastest() is fit:
            return


def _hold_by_value(plans: _Plans) -> None:
    """From the fastest plan that makes values again, holds other values as prices say; where that makes no step faster,
    and the plan's layout takes the memory that they may have, from a layout that leaves it. If the fastest plan then
    has no optional pass, also from that plan with one that saves memory, where that gains `MIN_HELD_GAIN`: in what the
    pass saves, values may be held that take longer to make again than the pass takes."""
    deciding = [fit for fit in plans.fitting if any(p.decides_held for p in fit.ran)]
    if not deciding:
        return
    traced, start = plans.traced, min(deciding, key=lambda fit: preference(fit.plan))
    budget = budget_of(plans.request, traced)
    if traced.mesh.platform == "tpu":
        budget = min(budget, FILLED * traced.mesh.hardware.memory)
    within = replace(plans.request, memory_budget=budget)
    count = len(plans.fitting)
    _hold_from(plans, start, within)
    slower = all(fit.plan.cost.seconds >= start.plan.cost.seconds for fit in plans.fitting[count:])
    if slower and start.plan.memory.peak > budget and (planned := _planned_within(plans, start.ran, within)):
        _hold_from(plans, start._replace(planned=planned), within)
    if start.ran != start.passes or plans.fastest().ran != plans.fastest().passes:
        return
    axes, count, most = axes_of_batch(start.plan), len(plans.fitting), plans.goal() * (1 - MIN_HELD_GAIN)
    for ran in with_each_optional(traced, start.passes, plans.options, saving=True, batch_axes=axes):
        known = [fit for fit in deciding if fit.ran[:1] == ran[:1]]
        fit = min(known, key=lambda fit: preference(fit.plan), default=None)
        if fit is None and (planned := _planned_within(plans, ran, within)):
            fit = _Fit(planned, start.passes, ran)
        if fit is not None:
            _hold_from(plans, fit, within)
    plans.fitting[count:] = [fit for fit in plans.fitting[count:] if fit.plan.cost.seconds <= most]


def _planned_within(plans: _Plans, ran: tuple[Pass, ...], within: PlanRequest) -> Planned | None:
    """The plan with these passes that fits ``within``, if one does."""
    with contextlib.suppress(MemoryBudgetError, PipelineError, SpecError):
        return plan_program(plans.traced, ran, within)
    return None


def _hold_from(plans: _Plans, start: _Fit, within: PlanRequest) -> None:
    """From ``start``, holds other values as its prices and what its layouts leave of the memory say, and so on from
    what that gives while it is faster. What the first choice lacks of the memory an optional pass may save."""
    traced, best, ran, budget = plans.traced, start.plan, start.ran, budget_of(within, plans.traced)
    tried, taken, saving = {*ran}, 0.0, [*_optional_saving(plans, start)]
    if ran != start.passes:  # what fits without an optional pass gains nothing from it
        tried.update(p for fit in plans.fitting if fit.ran == fit.passes for p in fit.ran if p.decides_held)
    for _ in range(MAX_HELD):
        chosen, seconds = held_by_value(traced, ran, best, -taken, within)
        while taken and chosen in tried and taken < budget / 4:
            taken += MIN_SAVING * budget
            chosen, seconds = held_by_value(traced, ran, best, -taken, within)
        if chosen is None or chosen in tried or seconds > plans.fastest().plan.cost.seconds * (1 - MIN_HELD_GAIN):
            return
        tried.add(chosen)
        passes, holding = (tuple(chosen if p.decides_held else p for p in s) for s in (start.passes, ran))
        found, least = _attempt_within(plans, passes, holding, within)
        for optional in saving if found is None else ():
            with_optional, _ = _attempt_within(plans, passes, (optional, *holding), within)
            if with_optional is not None and (found is None or with_optional.cost.seconds < found.cost.seconds):
                found, ran = with_optional, (optional, *start.ran)
        saving = []
        if found is None:
            taken += least - budget
        elif found.cost.seconds < best.cost.seconds:
            best, taken = found, 0.0
        elif is_memory_bound(found):
            taken += found.alternatives[0].peak - budget
        else:
            return


def _optional_saving(plans: _Plans, start: _Fit) -> Iterator[Pass]:
    """The variants of optional passes that save memory, where ``start`` has none."""
    if start.ran == start.passes:
        for first, *_ in with_each_optional(plans.traced, (), plans.options, saving=True):
            yield first


def _attempt_within(
    plans: _Plans, passes: tuple[Pass, ...], ran: tuple[Pass, ...], within: PlanRequest
) -> tuple[PlanRecord | None, float]:
    """The plan with these passes within the budget of ``within``, or None and the least that it takes."""
    count = len(plans.fitting)
    plans.attempt(passes, ran, within, gives_up=False)
    if len(plans.fitting) > count:
        return plans.fitting[-1].plan, 0.0
    return None, plans.errors_within[-1].least


def _try_faster(plans: _Plans, tried: Container[tuple[Pass, ...]]) -> None:
    """Plans with each optional pass that makes steps faster, but for those ``tried``."""
    traced, options, (_, passes, _) = plans.traced, plans.options, plans.fastest()
    axes = () if traced.pipeline is None else axes_of_batch(plans.fastest().plan)
    # Of a pipeline also along the first of the axes that split the batch alone, which are the slower ones.
    each = [None] if traced.pipeline is None else [axes[:n] for n in range(len(axes), 0, -1)] or [None]
    for batch_axes in each:
        for ran in with_each_optional(traced, passes, options, saving=False, batch_axes=batch_axes):
            count = len(plans.fitting)
            fits = ran in tried or plans.attempt(passes, ran)
            if fits or traced.pipeline is None:
                continue
            # What is faster and too large is the most that saving memory can gain.
            bound = len(plans.fitting) > count  # it fits, and memory rules out a faster layout
            larger = plans.fitting[-1].plan.alternatives[0].seconds if bound else plans.errors[-1].fastest
            if larger < plans.goal():
                _save_more(plans, passes, ran)


def _save_more(plans: _Plans, passes: tuple[Pass, ...], ran: tuple[Pass, ...]) -> None:
    """What a pipeline keeps for an optional pass may leave too little: plans with it and passes that save more."""
    first, sequences = tuple(p for p in ran if p not in passes), plans.sequences()
    more = sequences[sequences.index(passes) + 1 :]
    bisect.bisect_left(more, True, key=lambda saving: plans.attempt(saving, (*first, *saving)))


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
