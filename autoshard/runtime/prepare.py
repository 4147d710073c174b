"""prepare: from the abstract arguments of a call to the step planned for them."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.backend.executable import Executable
from autoshard.errors import AutoshardError, MemoryBudgetError
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program, with_pins
from autoshard.ir.trace import trace
from autoshard.jaxpr.arguments import ArgumentAval
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import mesh_config, resolve_mesh
from autoshard.plan.adopt import adopt
from autoshard.plan.planner import make_plan
from autoshard.plan.record import PlanRecord
from autoshard.runtime.carried_state import CarriedSpecs, note_carried, pin_carried
from autoshard.runtime.choose_mesh import candidate_meshes, cheapest_mesh
from autoshard.runtime.fit_memory import plan_within_memory, relaxation_hint
from autoshard.runtime.options import Options, pass_sequences, rewritten
from autoshard.runtime.plan import Plan
from autoshard.runtime.refine import refine
from autoshard.runtime.study import Study

FROZEN = 1000
"""Most objects that the interpreter itself keeps out of searches for cycles; more were put there by the program."""
LIGHTER = 3
"""Of the sets of passes that hold less, how many are weighed where the compiler chooses."""


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """No search for reference cycles meanwhile: tracing and planning make millions of objects, nearly all of which
    stay, and going through them again and again takes a quarter of the time. Afterwards they are old at once: by
    themselves they would be gone through as the youngest first, then as the next."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and gc.get_freeze_count() <= FROZEN:
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


@_uncollected()
def prepare(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    avals: tuple[ArgumentAval, ...],
    options: Options,
    first: CarriedSpecs | None = None,
) -> Executable[Plan]:
    """Traces and plans ``jitted`` (a `jax.jit` object) for a call.

    Args:
      args, kwargs: `jax.ShapeDtypeStruct`s, and static arguments as they are.
      avals: of the flat arguments.
      first: what the step carries is laid out so where that is possible, lest it be moved whenever the shapes change.

    Raises:
      AutoshardError, and whatever the function raises while it is traced.
    """

    def traced(mesh: LogicalMesh) -> Program:
        pins = options.in_shardings, options.out_shardings
        program = trace(jitted, args, kwargs, mesh, rules=options.rules, in_shardings=pins[0], out_shardings=pins[1])
        config = mesh_config(options.mesh)
        return with_pins(program, config.specs() if config else {}, "the mesh's pin")

    served: list[Program] = []

    def fitting(program: Program) -> tuple[PlanRecord, Graph]:
        made = plan_within_memory(program, options)
        served.append(program)
        return made

    def planned(mesh: LogicalMesh) -> tuple[PlanRecord, Graph]:
        return fitting(traced(mesh))

    def freely() -> tuple[PlanRecord, Graph]:
        config, name = mesh_config(options.mesh), getattr(jitted, "__name__", "step")
        if config is not None and config.axes == "auto":
            return cheapest_mesh(planned, config.meshes(), name)
        if options.mesh is not None:
            program = traced(resolve_mesh(options.mesh))
            try:
                return fitting(program)
            except MemoryBudgetError as e:
                raise MemoryBudgetError(f"{e}{relaxation_hint(program, options, e.least)}", e.least) from None
        return cheapest_mesh(planned, candidate_meshes((options.in_shardings, options.out_shardings)), name)

    bound, why, ready = frozenset[int](), "", None
    if options.plan is not None:
        config = mesh_config(options.mesh)
        chosen = options.mesh is not None and (config is None or config.axes != "auto")
        program = traced(resolve_mesh(options.mesh) if chosen else options.plan.mesh)
        ways = pass_sequences(program, options)
        ran = [p.written for p in options.plan.passes]
        passes = next((way for way in ways if [*map(str, way)] == ran), options.passes)
        program, request = rewritten(program, passes, options)
        plan, graph = adopt(options.plan, program, request)
    elif first is not None and first.specs and options.request.strategy == "auto":
        try:
            program, bound = pin_carried(traced(first.mesh), first)
            plan, graph = fitting(program)
        except (AutoshardError, ValueError) as e:
            bound, why = frozenset[int](), str(e)
            plan, graph = freely()
    else:
        plan, graph = freely()
    if options.refine:
        ways = (
            rewritten(program, way, options) for program in served for way in pass_sequences(program, options, LIGHTER)
        )
        plan, graph, ready = refine((plan, graph), ways, avals, options.refine, options.cache)
    plan = note_carried(plan, first, bound, why) if first is not None else plan
    study = Study(graph, replace(options.request, passes=plan.passes))
    plain = functools.partial(_plain, graph.program, plan, options, avals) if graph.program.unpadded_jaxpr else None
    return Executable(graph.program, graph, Plan.of(plan, study), avals, plain, ready)


def _plain(
    program: Program, plan: PlanRecord, options: Options, avals: tuple[ArgumentAval, ...]
) -> Executable[PlanRecord]:
    """The step as it was before values were made longer, with its arguments and results where ``plan`` has them."""
    ends = ((program.inputs, plan.inputs), (program.outputs, plan.outputs))
    inputs, outputs = (
        tuple(replace(leaf, pin=place.spec) for leaf, place in zip(leaves, places, strict=True))
        for leaves, places in ends
    )
    assert program.unpadded_jaxpr is not None
    program = replace(program, jaxpr=program.unpadded_jaxpr, unpadded_jaxpr=None, inputs=inputs, outputs=outputs)
    plan, graph = make_plan(program, replace(options.request, memory_budget=math.inf))
    return Executable(program, graph, plan, avals)
