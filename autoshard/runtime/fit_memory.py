"""Plans within the memory budget: where memory rules out the fastest layout, with passes that save memory."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.errors import AutoshardError, MemoryBudgetError, SpecError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.pipelining.chain import has_chain
from autoshard.plan.planner import PlanRequest, budget_of
from autoshard.plan.record import PlanRecord
from autoshard.plan.relax import best_relaxation
from autoshard.runtime.options import Options, memory_saving_sequences, passes_of, with_optional_passes
from autoshard.runtime.stages import Planned, plan_program, run_passes
from autoshard.search.search import explore
from autoshard.transforms.pipeline import Pass
from autoshard.units import size_text, time_text

MIN_SAVING = 0.01
"""Least share of the peak memory that dropping a demand must save to be proposed."""
MIN_GAIN = 0.02
"""Least share of the step's time that memory must cost for passes that save some, or micro-batches, to be tried."""
MIN_HELD_GAIN = 0.01
"""Least share of the step's time that holding other values must gain, by the prices of the last plan, to be planned: a
scan may be cut in two for it, which compiles for twice as long."""
MAX_HELD = 3
"""Most choices of held values that are planned, each by the prices of the plan before it."""


def plan_within_memory(traced: Program, options: Options, to_beat: float = math.inf) -> Planned:
    """Plans ``traced`` within the memory budget. Where nothing fits, or memory costs more time than the optimizer's
    state would take to come from the host and go back, that state is kept on the host if the step is faster so.

    Args:
      to_beat: seconds of the best plan so far. A pipeline whose busiest stage alone takes longer is not tried in other
        numbers of micro-batches.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    free_seconds = _seconds_without_budget(traced, options)
    try:
        planned = _plan_on_device(traced, options, to_beat, free_seconds)
    except MemoryBudgetError as e:
        planned, why = None, e
    else:
        may_help = _may_be_faster_offloaded(traced, planned, options, free_seconds)
        if not (may_help and _offload_frees_passes(traced, planned, options)):
            return planned
        why = f"the fastest plan takes {time_text(planned.plan.cost.seconds)}"
    with contextlib.suppress(MemoryBudgetError):
        if options.offload is not None and _offloaded_bytes(traced, options):
            offloading = options.with_offload()
            found = _plan_on_device(traced, offloading, to_beat, _seconds_without_budget(traced, offloading))
            if planned is None or _preference(found.plan) < _preference(planned.plan):
                return _with_note(traced, found, options.offload, why, _host_text(found.plan))
    if planned is None:
        assert isinstance(why, MemoryBudgetError)
        raise why
    return planned


def _seconds_without_budget(traced: Program, options: Options) -> Callable[[], float]:
    """Seconds of the fastest layout, whatever memory it takes: planned once, when they are asked for."""
    request = replace(options.request, memory_budget=math.inf)
    return functools.cache(lambda: plan_program(traced, options.passes, request).plan.cost.seconds)


def _may_be_faster_offloaded(
    traced: Program, planned: Planned, options: Options, free_seconds: Callable[[], float]
) -> bool:
    """Whether memory makes ``planned`` slower by more than the optimizer's state takes over the host's link."""
    bandwidth, short = traced.mesh.hardware.host_bandwidth, _memory_bound(planned.plan)
    changed = [p.written for p in planned.plan.passes] != [str(p) for p in options.passes]
    if not (bandwidth and (short or changed)):
        return False
    transfers = 2 * _offloaded_bytes(traced, options) / traced.mesh.size / bandwidth
    if not 0 < transfers < planned.plan.cost.seconds:
        return False
    return free_seconds() + transfers < planned.plan.cost.seconds


def _offload_frees_passes(traced: Program, planned: Planned, options: Options) -> bool:
    """Whether, with the optimizer's state on the host, a layout faster than that of ``planned`` may fit, or passes that
    save less memory and take less time: the next less saving sequence that fits, with whichever optional pass, says so.
    """
    plan, less = planned.plan, options.with_offload()
    written = {p.written for p in plan.passes}
    sequences = [options.passes, *memory_saving_sequences(traced, options)]
    chosen = max((i for i, passes in enumerate(sequences) if written.issuperset(map(str, passes))), default=0)
    in_parts = options.microbatch is not None and any(p.name == options.microbatch.name for p in plan.passes)
    if in_parts:
        return True
    deciding = {p.name for p in options.memory_saving_passes if p.decides_held}
    if chosen == 0 and deciding & {p.name for p in plan.passes}:  # values are held one by one
        freed = _offloaded_bytes(traced, options) / traced.mesh.size
        transfers = 2 * freed / traced.mesh.hardware.host_bandwidth
        passes = passes_of(plan, traced, options)
        return _held_by_value(traced, passes, plan, freed, options.request)[1] + transfers < plan.cost.seconds
    if _memory_bound(plan) or chosen == 0:
        return True
    less_saving = [less.passes, *memory_saving_sequences(traced, less)][:chosen]
    request = replace(options.request, memory_budget=plan.memory_budget)
    saving = _with_optional(traced, (), options, saving=True, batch_axes=_batch_axes(plan))
    for optional in ((), *saving):
        with contextlib.suppress(MemoryBudgetError):
            for passes in reversed(less_saving):
                if plan_program(traced, (*optional, *passes), request).plan.cost.seconds < plan.cost.seconds:
                    return True
    return False


def _offloaded_bytes(traced: Program, options: Options) -> int:
    """Of all devices together, the bytes that the host may take; 0 where it has no memory of its own."""
    if options.offload is None or traced.pipeline is not None or not traced.mesh.hardware.host_bandwidth:
        return 0
    program, _ = run_passes(traced, (options.offload,), options.request)
    return sum(leaf.bytes for leaf in program.inputs if leaf.offloaded)


def _host_text(plan: PlanRecord) -> str:
    size, seconds = size_text(plan.memory.host, 2), time_text(plan.cost.host)
    return f"; {size} per device are on the host, and take {seconds} a call to come and go"


def _plan_on_device(traced: Program, options: Options, to_beat: float, free_seconds: Callable[[], float]) -> Planned:
    """Plans ``traced`` below the compiler's rematerialization threshold; if nothing fits there, within the budget.

    Below the threshold XLA compiles the plan as it is; above it, XLA recomputes values of its own choice.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    if traced.pipeline is not None:
        options = replace(options, optional_passes=tuple(p for p in options.optional_passes if p.keeps_layers))
    threshold = traced.mesh.hardware.remat_threshold
    if threshold < budget_of(options.request, traced):
        with contextlib.suppress(MemoryBudgetError):
            return _plan_in_parts(
                traced, options, replace(options.request, memory_budget=threshold), to_beat, free_seconds
            )
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
        return _plan_within_budget(traced, options, request)[0]
    if options.microbatches is not None:
        program, asked = run_passes(traced, (options.microbatch,), request)
        try:
            return _plan_within_budget(program, options, asked)[0]._replace(traced=traced)
        except SpecError as e:
            raise SpecError(f"for each of {options.microbatches} micro-batches: {e}") from None
    if traced.pipeline is not None:
        return _plan_staged(traced, options, request, to_beat)
    try:
        whole, is_short = _plan_within_budget(traced, options, request)
        if not is_short or whole.plan.cost.seconds <= (1 + MIN_GAIN) * free_seconds():
            return whole
        fitting, why = [whole], f"the fastest plan takes {time_text(whole.plan.cost.seconds)}"
    except MemoryBudgetError as e:
        fitting, why = list[Planned](), e
    variants = options.microbatch.variants(traced)
    too_slow = False  # in fewer parts the fastest layout does not fit, and in these it is slower than what fits whole

    def in_parts(parts: Pass, *, saving: bool) -> Planned | None:
        """The plan in ``parts``, if one fits: with the passes that save most memory, or with none of them, and then
        only if no faster layout was too large."""
        program, asked = run_passes(traced, (parts,), request)
        *_, passes = options.passes, *(memory_saving_sequences(program, options) if saving else ())
        with contextlib.suppress(MemoryBudgetError):
            planned = plan_program(program, passes, asked)
            if saving or not _memory_bound(planned.plan):
                return planned
            nonlocal too_slow
            too_slow = bool(fitting) and planned.plan.alternatives[0].seconds >= fitting[0].plan.cost.seconds
        return None

    def enough(parts: Pass, *, saving: bool) -> bool:
        try:
            return too_slow or in_parts(parts, saving=saving) is not None
        except SpecError:  # a preset cannot split so small a part
            return True

    def fewest(saving: bool) -> tuple[Pass, ...]:
        n = bisect.bisect_left(variants, True, key=lambda parts: enough(parts, saving=saving))
        return variants[n : n + 1]

    note = functools.partial(_with_note, traced)
    with contextlib.suppress(SpecError):
        for parts in fewest(saving=False):
            if not too_slow and (planned := in_parts(parts, saving=False)) is not None:
                fitting += [note(p, parts, why) for p in (planned, *_with_faster_passes(planned, options, request))]
    with contextlib.suppress(SpecError, MemoryBudgetError):
        for parts in () if isinstance(why, str) else fewest(saving=True):
            program, asked = run_passes(traced, (parts,), request)
            fitting.append(note(_plan_within_budget(program, options, asked)[0], parts, why))
    if not fitting:
        assert isinstance(why, MemoryBudgetError)
        raise why
    return min(fitting, key=lambda p: _preference(p.plan))


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
        return _plan_within_budget(traced, options, request)[0]
    variants, stages = options.microbatch.variants(traced), traced.pipeline.stages
    if not variants:
        return _plan_within_budget(traced, options, request)[0]  # says why there is no chain
    errors: list[MemoryBudgetError | SpecError] = []

    @functools.cache
    def in_parts(n: int) -> Planned | None:
        try:
            program, asked = run_passes(traced, (variants[n],), request)
            return _plan_within_budget(program, options, asked)[0]._replace(traced=traced)
        except (MemoryBudgetError, SpecError) as e:
            errors.append(e)
            return None

    def seconds(n: int) -> float:
        planned = in_parts(n)
        return math.inf if planned is None else planned.plan.cost.seconds

    best = min((2 * stages).bit_length() - 2, len(variants) - 1)  # as many as twice the stages
    start = in_parts(best)
    hopeless = start is not None and start.plan.pipeline is not None and max(start.plan.pipeline.seconds) > to_beat
    for step in () if hopeless else (1, -1):
        while 0 <= best + step < len(variants) and seconds(best + step) <= seconds(best):
            best += step
    planned = in_parts(best)
    if planned is None:
        raise errors[0]
    return planned


def _with_note(
    traced: Program, planned: Planned, added: Pass, why: MemoryBudgetError | str, price: str = ""
) -> Planned:
    """The plan of ``traced`` with the pass ``added``, the reason for it, and what it costs."""
    note = Diagnostic(f"{added} was added: without it, {why}{price}")
    plan = replace(planned.plan, diagnostics=(*planned.plan.diagnostics, note))
    return planned._replace(traced=traced, plan=plan)


def _with_faster_passes(planned: Planned, options: Options, request: PlanRequest) -> Iterator[Planned]:
    """Plans with each optional pass that makes steps faster, such as reductions once after the loop over micro-batches
    along the axes that split the batch in ``planned``."""
    asked = replace(request, passes=planned.plan.passes[:1])
    axes = _batch_axes(planned.plan)
    for passes in _with_optional(planned.traced, options.passes, options, saving=False, batch_axes=axes):
        with contextlib.suppress(MemoryBudgetError):
            yield plan_program(planned.traced, passes, asked)


def _plan_within_budget(traced: Program, options: Options, request: PlanRequest) -> tuple[Planned, bool]:
    """Plans ``traced`` within the budget of ``request``. Where memory rules out the fastest layout and the user named
    no passes, tries passes that save memory too, and returns the fastest plan that fits, and whether memory did so.

    Raises:
      MemoryBudgetError: nothing fits; the message is about the passes with the lowest peak.
    """
    fitting: list[tuple[Planned, tuple[Pass, ...]]] = []
    ran: list[tuple[Pass, ...]] = []
    errors: list[MemoryBudgetError] = []

    def try_passes(passes: tuple[Pass, ...], with_optional: tuple[Pass, ...] | None = None) -> bool:
        """Plans with ``with_optional`` or else ``passes``; whether a plan fits and no faster layout was too large."""
        try:
            planned = plan_program(traced, with_optional or passes, request)
        except MemoryBudgetError as e:
            errors.append(e)
            return False
        plan = planned.plan
        if passes is not options.passes:
            added = ", ".join(str(p) for p in passes if p not in options.passes)
            without = errors[0] if errors else _faster_but_larger(fitting[0][0].plan)
            note = Diagnostic(f"{added} was added: without it, {without}")
            plan = replace(plan, diagnostics=(*plan.diagnostics, note))
        fitting.append((planned._replace(plan=plan), passes))
        ran.append(with_optional or passes)
        return not _memory_bound(plan)

    def try_more(passes: tuple[Pass, ...], with_optional: tuple[Pass, ...]) -> None:
        """What a pipeline keeps for an optional pass may leave too little: tries it with passes that save more."""
        first = tuple(p for p in with_optional if p not in passes)
        sequences = [options.passes, *memory_saving_sequences(traced, options)]
        more = sequences[sequences.index(passes) + 1 :]
        bisect.bisect_left(more, True, key=lambda saving: try_passes(saving, (*first, *saving)))

    def fastest() -> tuple[Planned, tuple[Pass, ...]]:
        return min(fitting, key=lambda f: _preference(f[0].plan))

    def hold_by_value() -> None:
        """From the fastest plan that makes values again, holds other values as its prices and what its layouts leave of
        the memory say, and so on from what that gives while it is faster."""
        deciding = [i for i, passes in enumerate(ran) if any(p.decides_held for p in passes)]
        if not deciding:
            return
        start = min(deciding, key=lambda i: _preference(fitting[i][0].plan))
        best, (_, passes), sequence = fitting[start][0].plan, fitting[start], ran[start]
        tried, taken, budget = {*sequence}, 0.0, budget_of(request, traced)
        for _ in range(MAX_HELD):
            chosen, seconds = _held_by_value(traced, sequence, best, -taken, request)
            while taken and chosen in tried and taken < budget / 4:
                taken += MIN_SAVING * budget
                chosen, seconds = _held_by_value(traced, sequence, best, -taken, request)
            if chosen is None or chosen in tried or seconds > best.cost.seconds * (1 - MIN_HELD_GAIN):
                return
            tried.add(chosen)
            count = len(fitting)
            try_passes(*(tuple(chosen if p.decides_held else p for p in s) for s in (passes, sequence)))
            if len(fitting) == count:
                taken += errors[-1].least - budget
            elif (found := fitting[-1][0].plan).cost.seconds < best.cost.seconds:
                best, taken = found, 0.0
            elif _memory_bound(found):
                taken += found.alternatives[0].peak - budget
            else:
                return

    is_short = not try_passes(options.passes)
    tried = () if fitting else tuple(_with_optional(traced, options.passes, options, saving=None))
    for with_optional in tried:
        is_short = not try_passes(options.passes, with_optional) and is_short
    if is_short:
        sequences = [options.passes, *memory_saving_sequences(traced, options)]
        # The first sequence under which the fastest layout fits saves the least memory, and so adds the least time.
        enough = bisect.bisect_left(sequences, True, lo=1, key=try_passes)
        axes = _batch_axes(fitting[0][0].plan) if fitting else None
        for first, *_ in _with_optional(traced, (), options, saving=True, batch_axes=axes):
            less = sequences[:enough]  # with an optional pass that saves memory, one that saves less may do
            bisect.bisect_left(less, True, key=lambda passes, first=first: try_passes(passes, (first, *passes)))
        if traced.pipeline is None and options.memory_saving_passes:
            hold_by_value()
    if fitting:
        _, passes = fastest()
        axes = () if traced.pipeline is None else _batch_axes(fastest()[0].plan)
        # Of a pipeline also along the first of the axes that split the batch alone, which are the slower ones.
        each = [None] if traced.pipeline is None else [axes[:n] for n in range(len(axes), 0, -1)]
        for batch_axes in each:
            for with_optional in _with_optional(traced, passes, options, saving=False, batch_axes=batch_axes):
                fits = with_optional in tried or try_passes(passes, with_optional)
                if not fits and traced.pipeline is not None:
                    try_more(passes, with_optional)
        return fastest()[0], is_short
    hint = "; or pass passes=['recompute:full']"
    if options.memory_saving_passes:
        hint = f" (with {', '.join(str(p) for p in options.memory_saving_passes if p not in options.passes)})"
    lowest = min(reversed(errors), key=lambda e: e.least)
    raise MemoryBudgetError(f"{lowest}{hint}", lowest.least) from None


def _held_by_value(
    traced: Program, passes: tuple[Pass, ...], plan: PlanRecord, more: float, request: PlanRequest
) -> tuple[Pass | None, float]:
    """What to take in place of the pass among ``passes`` that decides what is held for the backward part, for the step
    to take least time, and the seconds that it then takes; None where none decides that.

    Args:
      plan: made with ``passes``. It has the prices, what is held now, and the layouts that it was chosen from.
      more: bytes per device that may be held beyond the budget of ``request``.
    """
    prices = {r.name: (float(r.bytes), r.seconds) for r in plan.residuals}
    held = {r.name: r.layers - r.again for r in plan.residuals}
    limit = budget_of(request, traced) + more
    layouts = [(plan.cost.seconds, limit - plan.memory.peak)]
    layouts += [(a.seconds, limit - a.peak) for a in plan.alternatives]
    for i, decides in enumerate(passes):
        if decides.decides_held:
            program, _ = run_passes(traced, passes[:i], request)
            return decides.within(program, prices, held, layouts) or (None, math.inf)
    return None, math.inf


def _with_optional(
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


def _batch_axes(plan: PlanRecord) -> tuple[str, ...]:
    """The mesh axes that split the batch, in the order of the mesh."""
    specs = {p.path: p.spec for p in plan.inputs}
    found = {axis for b in plan.batch for axis in specs[b.path].dims[b.dim]}
    return tuple(a for a in plan.mesh.axis_names if a in found)


def _preference(plan: PlanRecord) -> tuple[float, float]:
    """Sort key, best first: a preset splits the batch into as many parts as it can, whatever passes make of it. Then
    the least predicted time."""
    specs = {p.path: p.spec for p in plan.inputs}
    parts = [plan.mesh.axes_size(specs[b.path].dims[b.dim]) for b in plan.batch if plan.strategy != "auto"]
    return -max(parts, default=1), plan.cost.seconds


def relaxation_hint(traced: Program, options: Options, least: float) -> str:
    """The demand to drop so that less than ``least`` bytes per device are needed, as the end of a sentence; empty where
    none helps."""
    *_, passes = options.passes, *memory_saving_sequences(traced, options)

    def peak(relaxed: Program, request: PlanRequest) -> float:
        program, request = run_passes(relaxed, passes, request)
        try:
            graph, budget = build_graph(program), budget_of(request, program)
            return explore(graph, request.strategy, budget, request.compiler_options)[0].memory.peak
        except AutoshardError:  # the strategy does not apply to the relaxed program
            return math.inf

    lowest, demand = best_relaxation(traced, options.request, peak)
    return f"; {demand}, {size_text(lowest, 2)} would do" if lowest < least * (1 - MIN_SAVING) else ""


def _memory_bound(plan: PlanRecord) -> bool:
    """Whether a layout that does not fit in memory is faster, by more than `MIN_GAIN`."""
    fastest, budget = next(iter(plan.alternatives), None), plan.memory_budget
    if fastest is None or budget is None:
        return False
    return fastest.seconds * (1 + MIN_GAIN) < plan.cost.seconds and fastest.peak > budget


def _faster_but_larger(plan: PlanRecord) -> str:
    fastest = plan.alternatives[0]
    return (
        f"the fastest layout that fits takes {time_text(plan.cost.seconds)}; one that takes "
        f"{time_text(fastest.seconds)} needs {size_text(fastest.peak, 2)} per device"
    )
