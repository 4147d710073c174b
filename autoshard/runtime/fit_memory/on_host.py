"""Plans within the memory budget, with carried state on the host where that is faster, or nothing else fits."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from autoshard.errors import MemoryBudgetError
from autoshard.ir.program import Program
from autoshard.plan.record import PlanRecord
from autoshard.runtime.fit_memory.held_by_value import held_by_value
from autoshard.runtime.fit_memory.in_parts import plan_on_device, with_note
from autoshard.runtime.fit_memory.preference import MIN_GAIN, axes_of_batch, is_memory_bound, preference
from autoshard.runtime.fit_memory.time_bounds import TimeBounds
from autoshard.runtime.fit_memory.within_budget import with_each_optional
from autoshard.runtime.options import Options, memory_saving_sequences, passes_of
from autoshard.runtime.stages import Planned, keeping_programs, plan_program, run_passes
from autoshard.transforms.pipeline import Pass
from autoshard.units import size_text, time_text


@keeping_programs()
def plan_within_memory(traced: Program, options: Options, to_beat: float = math.inf) -> Planned:
    """Plans ``traced`` within the memory budget. Where nothing fits, or memory costs more time than the optimizer's
    state would take to come from the host and go back, that state is kept on the host if the step is faster so; where
    nothing fits then either, parameters of layers too.

    Args:
      to_beat: seconds of the best plan so far. A pipeline whose busiest stage alone takes longer is not tried in other
        numbers of micro-batches.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    bounds = TimeBounds()
    try:
        planned = plan_on_device(traced, options, to_beat, bounds)
    except MemoryBudgetError as e:
        planned, why = None, e
    else:
        may_help = _may_be_faster_offloaded(traced, planned, options, bounds)
        if not (may_help and _offload_frees_passes(traced, planned, options, bounds)):
            return planned
        why = f"the fastest plan takes {time_text(planned.plan.cost.seconds)}"
    for offload in options.offload if planned is None else options.offload[:1]:
        with contextlib.suppress(MemoryBudgetError):
            if _offloaded_bytes(traced, options, offload):
                found = plan_on_device(traced, options.offloading(offload), to_beat, TimeBounds())
                if planned is None or preference(found.plan) < preference(planned.plan):
                    return with_note(traced, found, offload, why, _host_text(found.plan))
    if planned is None:
        assert isinstance(why, MemoryBudgetError)
        raise why
    return planned


def _may_be_faster_offloaded(traced: Program, planned: Planned, options: Options, bounds: TimeBounds) -> bool:
    """Whether memory makes ``planned`` slower by more than the optimizer's state takes over the host's link."""
    changed = [p.written for p in planned.plan.passes] != [str(p) for p in options.passes]
    if not (is_memory_bound(planned.plan) or changed):
        return False
    transfers = _transfer_seconds(traced, options)
    return transfers > 0 and bounds.seconds(options.passes) + transfers < planned.plan.cost.seconds


def _offload_frees_passes(traced: Program, planned: Planned, options: Options, bounds: TimeBounds) -> bool:
    """Whether, with the optimizer's state on the host, a layout faster than that of ``planned`` may fit, or passes that
    save less memory and take less time: the next less saving sequence that fits, with whichever optional pass, says so.
    Where residuals are on the host already, it has to promise `MIN_GAIN`.
    """
    plan, less = planned.plan, options.offloading(options.offload[0])
    written = {p.written for p in plan.passes}
    sequences = [options.passes, *memory_saving_sequences(traced, options)]
    chosen = max((i for i, passes in enumerate(sequences) if written.issuperset(map(str, passes))), default=0)
    in_parts = options.microbatch is not None and any(p.name == options.microbatch.name for p in plan.passes)
    if in_parts:
        return True
    deciding = {p.name for p in options.memory_saving_passes if p.decides_held}
    transfers = _transfer_seconds(traced, options)
    if chosen == 0 and deciding & {p.name for p in plan.passes}:  # values are held one by one
        freed = _offloaded_bytes(traced, options, options.offload[0]) / traced.mesh.size
        passes = passes_of(plan, traced, options)
        promised = held_by_value(traced, passes, plan, freed, options.request)[1] + transfers
        least = MIN_GAIN if any(r.on_host for r in plan.residuals) else 0.0
        return promised < (1 - least) * plan.cost.seconds
    if chosen == 0:
        return True

    if is_memory_bound(plan) and plan.alternatives[0].seconds + transfers < plan.cost.seconds:
        return True
    less_saving = [less.passes, *memory_saving_sequences(traced, less)]
    in_time = [n for n in range(chosen) if bounds.estimate(sequences, n) + transfers < plan.cost.seconds]
    request = replace(options.request, memory_budget=plan.memory_budget)
    saving = with_each_optional(traced, (), options, saving=True, batch_axes=axes_of_batch(plan))
    for optional in ((), *saving):
        for n in reversed(range(chosen) if optional else in_time):
            try:
                found = plan_program(traced, (*optional, *less_saving[n]), request, plan.cost.seconds, gives_up=True)
            except MemoryBudgetError as e:
                if e.none_faster:
                    continue
                break
            if found.plan.cost.seconds < plan.cost.seconds:
                return True
    return False


def _transfer_seconds(traced: Program, options: Options) -> float:
    """Seconds in which the optimizer's state comes from the host and goes back; 0 where it has no memory of its own."""
    offloaded = _offloaded_bytes(traced, options, options.offload[0]) if options.offload else 0
    return 2 * offloaded / traced.mesh.size / traced.mesh.hardware.host_bandwidth if offloaded else 0.0


def _offloaded_bytes(traced: Program, options: Options, offload: Pass) -> int:
    """Of all devices together, the bytes that the host takes by ``offload``; 0 where it has no memory of its own."""
    if traced.pipeline is not None or not traced.mesh.hardware.host_bandwidth:
        return 0
    program, _ = run_passes(traced, (offload,), options.request)
    return sum(leaf.bytes for leaf in program.inputs if leaf.offloaded)


def _host_text(plan: PlanRecord) -> str:
    size, seconds = size_text(plan.memory.host, 2), time_text(plan.cost.host)
    return f"; {size} per device are on the host, and take {seconds} a call to come and go"
