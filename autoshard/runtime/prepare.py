"""Plans a step for the abstract arguments of a call, stage by stage."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard.backend.compilation import stage
from autoshard.backend.executable import Executable
from autoshard.errors import AutoshardError, MemoryBudgetError
from autoshard.ir.program import PipelineRequest, Program, with_pins
from autoshard.ir.trace import trace
from autoshard.jaxpr import dtype_name
from autoshard.jaxpr.arguments import ArgumentAval
from autoshard.machine.mesh_config import mesh_config, resolve_mesh
from autoshard.pipelining.chain import has_scanned_layers
from autoshard.pipelining.layer_casts import cast_before_layers
from autoshard.plan.adopt import adopt
from autoshard.plan.record import PlanRecord
from autoshard.plan.shared_arguments import shared_arguments
from autoshard.runtime.carried_state import CarriedSpecs, note_carried, pin_carried
from autoshard.runtime.choose_mesh import Ground, candidate_meshes, fastest, plan_each
from autoshard.runtime.dump import dump_stages
from autoshard.runtime.fit_memory.on_host import plan_within_memory
from autoshard.runtime.fit_memory.relaxation import relaxation_hint
from autoshard.runtime.options import Options, parts_of, pass_sequences, passes_of
from autoshard.runtime.plan import Plan
from autoshard.runtime.refine import refine
from autoshard.runtime.shared_layout import Placements, note_moved, note_shared, pin_placed, pin_shared
from autoshard.runtime.stages import Planned, plan_program, run_passes
from autoshard.runtime.study import Study
from autoshard.transforms.layer_loops.roll import roll_loops
from autoshard.transforms.pad_state import pad_state, padded_shapes
from autoshard.transforms.pipeline import AppliedPass, Pipeline

GC_FROZEN_BY_PYTHON = 1000
"""Most objects that the interpreter itself freezes; if more are frozen, the program called `gc.freeze`."""
REFINED_SEQUENCES = 3
"""Memory-saving sequences of passes whose layouts `refine` may compile."""

type TraceOn = Callable[[Ground], Program]


@contextlib.contextmanager
def _without_gc() -> Generator[None]:
    """Pauses garbage collection: tracing and planning make millions of objects that stay, and traversing them again and
    again takes a quarter of the time. Afterwards they are moved to the oldest generation at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled and gc.get_freeze_count() <= GC_FROZEN_BY_PYTHON:
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@_without_gc()
def prepare(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    avals: tuple[ArgumentAval, ...],
    options: Options,
    first: CarriedSpecs | None = None,
    placed: Placements = (),
) -> Executable[Plan]:
    """Plans ``jitted`` (a `jax.jit` object) for a call.

    Args:
      args, kwargs: `jax.ShapeDtypeStruct`s, and static arguments as they are.
      avals: shape, dtype and weak type of the flat arguments.
      first: specs of the carried state in the step's first plan. They are kept where possible, so that the state is not
        resharded whenever the shapes of the other arguments change.
      placed: where the flat arguments are. Those that stay there are planned so where possible, so that they are not
        moved at every call.

    Raises:
      AutoshardError, and whatever the function raises while it is traced.
    """
    # Trace, passes, graph, search, plan: for each candidate mesh and sequence of passes; the fastest plan is chosen.
    trace_on = functools.partial(_trace, jitted, args, kwargs, options)
    name, unplaced = getattr(jitted, "__name__", "step"), ""
    placed = placed if options.takes_placed else ()
    try:
        trace_placed = functools.partial(trace_on, placed=placed)
        candidates, pinned, conflict = _plans(trace_placed, options, name, first, placed)
    except AutoshardError as e:
        if not any(placed):
            raise
        (candidates, pinned, conflict), unplaced = _plans(trace_on, options, name, first), str(e)
    planned = fastest(candidates, options.schedule)
    # Lower, compile: of several layouts here if `refine` is to choose; else of the one when the step is first called.
    planned, lowered = _refine(planned, candidates, avals, options) if options.refine else (planned, None)
    record = note_carried(planned.plan, first, pinned, conflict) if first is not None else planned.plan
    record = note_shared(record, options.like()) if options.like is not None else record
    record = note_moved(record, planned.graph.program, placed, unplaced) if unplaced else record
    plan = Plan.of(record, Study(planned.graph, replace(options.request, passes=record.passes)))
    program = planned.graph.program
    unpadded = functools.partial(_plan_unpadded, program, plan, options, avals) if program.unpadded_jaxpr else None
    executable = Executable(program, planned.graph, plan, avals, unpadded, lowered)
    dump_stages(planned.traced, executable)
    return executable


def rewrites(
    jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, plan: PlanRecord
) -> Iterator[AppliedPass]:
    """The program before and after each pass that ``plan``, which `prepare` made for these arguments, was made with."""
    ground = Ground(plan.mesh, plan.pipeline.axis if plan.pipeline else None)
    traced = _trace(jitted, args, kwargs, options, ground)
    return Pipeline(passes_of(plan, traced, options)).rewrites(traced)


def _trace(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    ground: Ground,
    placed: Placements = (),
) -> Program:
    """The function traced over the mesh of ``ground``, with the user's pins, and what stays where it is ``placed``
    pinned there."""
    pins = {"in_shardings": options.in_shardings, "out_shardings": options.out_shardings}
    dynamic = [i for i in range(len(args)) if i not in options.static_nums]
    donated = {*options.donate_names, *(n for n, i in enumerate(dynamic) if i in options.donate_nums)}
    config = mesh_config(options.mesh)
    mesh, pipeline = ground.mesh, None
    if ground.stages is not None:
        pipeline = PipelineRequest(mesh, ground.stages, options.schedule)
        mesh = pipeline.stage_mesh
    with stage("trace", getattr(jitted, "__name__", "step")):
        program = trace(jitted, args, kwargs, mesh, rules=options.rules, donated=donated, pipeline=pipeline, **pins)
    if pipeline is not None:
        if not has_scanned_layers(program.jaxpr, program.rules):
            program = program.with_jaxpr(roll_loops(program.jaxpr))
        program = program.with_jaxpr(cast_before_layers(program.jaxpr, program.rules))
    program = pad_state(program, _stored_shapes(program, options))
    program = with_pins(program, config.specs() if config else {}, "the mesh's pin")
    program = program if options.like is None else pin_shared(program, options.like())
    return pin_placed(program, placed) if any(placed) else program


def _stored_shapes(program: Program, options: Options) -> dict[int, tuple[int, ...]]:
    """The shapes of the flat arguments to store with padding: as a given plan has them, else those that the plan of
    another step shares, else those of state that the mesh does not divide, where the user asks for that."""
    if options.plan is not None:
        same = len(options.plan.inputs) == len(program.inputs)
        return {i: p.stored for i, p in enumerate(options.plan.inputs) if p.stored is not None and same}
    found = padded_shapes(program) if options.pad_state else {}
    if options.like is not None:
        arrays = [(leaf.path, leaf.shape, dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
        shared = shared_arguments(arrays, options.like().inputs)
        found = {i: shape for i, shape in found.items() if i not in shared}
        found |= {i: p.stored for i, p in shared.items() if p.stored is not None and program.inputs[i].pin is None}
    return found


def _plans(
    trace_on: TraceOn, options: Options, name: str, first: CarriedSpecs | None, placed: Placements = ()
) -> tuple[list[Planned], frozenset[int], str]:
    """The plans to choose from: the one that the user gave; else the one with the carried state as in the step's
    ``first`` plan; else the best on each mesh.

    Returns:
      The candidates, the flat arguments that have the specs ``first``, and why none of them could.

    Raises:
      AutoshardError: there is none.
    """
    if options.plan is not None:
        return [_adopt(options.plan, trace_on, options)], frozenset(), ""
    if first is not None and options.request.strategy == "auto":
        return _plan_as_first(first, trace_on, options, name)
    return _plan_candidates(trace_on, options, name, placed), frozenset(), ""


def _plan_candidates(trace_on: TraceOn, options: Options, name: str, placed: Placements = ()) -> list[Planned]:
    """The best plan on the user's mesh, or, where the user leaves it open, on that of what is ``placed`` and stays
    there, else on each candidate mesh.

    Raises:
      AutoshardError: no mesh has a plan.
    """
    config = mesh_config(options.mesh)
    automatic = options.request.strategy == "auto" and not options.refine
    plan_all = functools.partial(
        plan_each, functools.partial(_plan_on, trace_on, options), name=name, leave_out_equal=automatic
    )
    fixed = options.mesh is not None and (config is None or config.axes != "auto")
    like = None if fixed or options.like is None else options.like()
    if fixed or like is not None:
        mesh = resolve_mesh(options.mesh) if like is None else like.mesh
        grounds = [Ground(mesh, axis) for axis in (config.stage_axes(mesh) if config else (None,))]
        if len(grounds) > 1:
            return plan_all(grounds)
        program = trace_on(*grounds)
        try:
            return [plan_within_memory(program, options)]
        except MemoryBudgetError as e:
            hint = relaxation_hint(program, options, e.least)
            raise MemoryBudgetError(f"{e}{hint}", e.least, e.fastest, of_arguments=e.of_arguments) from None
    for over in dict.fromkeys(s.mesh for s in placed if s is not None) if options.mesh is None else ():
        if over.size < jax.device_count():  # not to leave devices idle because an array was made on one
            continue
        program = trace_on(Ground(resolve_mesh(over)))
        if any(leaf.placed for leaf in program.inputs):
            return [plan_within_memory(program, options)]
    pins = options.in_shardings, options.out_shardings
    meshes = config.meshes() if config is not None else candidate_meshes(pins)
    grounds = [Ground(mesh, axis) for mesh in meshes for axis in (config.stage_axes(mesh) if config else (None,))]
    return plan_all(grounds)


def _plan_on(trace_on: TraceOn, options: Options, ground: Ground, to_beat: float) -> Planned:
    return plan_within_memory(trace_on(ground), options, to_beat)


def _plan_as_first(
    first: CarriedSpecs, trace_on: TraceOn, options: Options, name: str
) -> tuple[list[Planned], frozenset[int], str]:
    """The plan in which the carried state has the specs ``first``; if there is none, plans without this demand.

    Returns:
      The candidates, the flat arguments that have the specs ``first``, and why none of them could.
    """
    options = options.as_written(first.passes)
    try:
        program, pinned = pin_carried(trace_on(Ground(first.mesh, first.stages)), first)
        return [plan_within_memory(program, options)], pinned, ""
    except (AutoshardError, ValueError) as e:  # JAX raises ValueError for a spec that names no axis of the mesh
        return _plan_candidates(trace_on, options, name), frozenset(), str(e)


def _adopt(plan: PlanRecord, trace_on: TraceOn, options: Options) -> Planned:
    """The plan that the user gave, checked against the program after the passes that it was made with."""
    config = mesh_config(options.mesh)
    fixed = options.mesh is not None and (config is None or config.axes != "auto")
    traced = trace_on(Ground(resolve_mesh(options.mesh) if fixed else plan.mesh))
    program, request = run_passes(traced, passes_of(plan, traced, options), options.request)
    adopted, graph = adopt(plan, program, request)
    return Planned(traced, graph, adopted)


def _refine(
    planned: Planned, candidates: Sequence[Planned], avals: tuple[ArgumentAval, ...], options: Options
) -> tuple[Planned, jax.stages.Lowered | None]:
    """The best of ``planned`` and other layouts on the meshes of ``candidates``, as the compiler estimates them."""
    in_parts = [
        (c.traced, *run_passes(c.traced, parts_of(c.plan, c.traced, options), options.request), options.as_for(c.plan))
        for c in candidates
    ]
    programs = (
        (traced, *run_passes(program, passes, request))
        for traced, program, request, own in in_parts
        for passes in pass_sequences(program, own, REFINED_SEQUENCES)
    )
    return refine(planned, programs, avals, options.refine, options.cache)


def _plan_unpadded(
    program: Program, plan: PlanRecord, options: Options, avals: tuple[ArgumentAval, ...]
) -> Executable[PlanRecord]:
    """The program without its padding, planned with the argument and result specs of ``plan``."""
    sides = ((program.inputs, plan.inputs), (program.outputs, plan.outputs))
    inputs, outputs = (
        tuple(replace(leaf, pin=place.spec) for leaf, place in zip(leaves, places, strict=True))
        for leaves, places in sides
    )
    assert program.unpadded_jaxpr is not None
    program = replace(program, jaxpr=program.unpadded_jaxpr, unpadded_jaxpr=None, inputs=inputs, outputs=outputs)
    planned = plan_program(program, (), replace(options.request, memory_budget=math.inf))
    return Executable(program, planned.graph, planned.plan, avals)
