"""Checks a plan that was made earlier against the step that is to run by it.

It must be of the same program, and agree with the pins and the memory budget that the user gives now.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.cost.compiler_options import (
    NO_ALL_GATHER_FUSION,
    conflicting_options,
    effective_options,
    other_options,
    pipeline_options,
    should_disable_all_gather_fusion,
    user_options,
)
from autoshard.errors import MemoryBudgetError, PlanError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Leaf, Program, aval_text
from autoshard.ir.spec import Spec
from autoshard.jaxpr import dtype_name
from autoshard.jaxpr.paths import argument_name
from autoshard.plan.decisions import Place
from autoshard.plan.planner import PlanRequest, budget_of, fingerprint
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text


def adopt(plan: PlanRecord, program: Program, request: PlanRequest) -> tuple[PlanRecord, Graph]:
    """``plan`` for ``program``, with the pytree structures of its arguments and the compiler options of ``request``.

    Raises:
      PlanError: it was made for another program, or for other shapes, donations, passes or another mesh; one of its
        specs conflicts with a pin; or it has compiler options that are neither harmless nor in ``request``. Names the
        first difference.
      MemoryBudgetError: it needs more than the budget of ``request``.
      RuleError, SpecError: as `build_graph`.
    """
    _check_arguments(plan, program)
    graph = build_graph(program, strict=request.strict)
    _check_program(plan, graph, request)
    for place, leaf in (
        *zip(plan.inputs, program.inputs, strict=True),
        *zip(plan.outputs, program.outputs, strict=True),
    ):
        if leaf.memory_pinned and leaf.memory_kind != place.memory_kind:
            raise PlanError(
                f"{leaf.path} is pinned to {leaf.memory_kind or 'device'} memory, and the plan has it in "
                f"{place.memory_kind or 'device'} memory: a pin is never overridden; plan again with it, or drop it"
            )
    for what, spec, pin in _pin_conflicts(plan, graph):
        raise PlanError(
            f"{what} is pinned to {pin}, and its spec in the plan is {spec}: a pin is never overridden; plan again "
            "with it, or drop it"
        )
    if request.memory_budget is not None and plan.memory.peak > request.memory_budget:
        raise MemoryBudgetError(
            f"the plan needs {size_text(plan.memory.peak, 2)} per device at its peak, and the memory budget is "
            f"{size_text(request.memory_budget, 2)}: plan again under it, or raise it",
            plan.memory.peak,
        )
    if other := other_options(plan.compiler_options, request.compiler_options):
        raise PlanError(
            "the plan sets compiler options that may do more than change how the step is compiled: "
            f"{reprlib.repr(other)}; if that is what you want, give them yourself (compiler_options=), else plan again"
        )
    planned = user_options(plan.compiler_options, plan.mesh)
    has_own = NO_ALL_GATHER_FUSION.items() <= dict(plan.compiler_options).items()
    given = (*planned, *request.compiler_options)
    if has_own and (other := conflicting_options(given)):
        raise PlanError(
            f"the plan's memory is predicted with compiler options that these override: {other}; drop them, or plan "
            "again"
        )
    peak = math.inf if has_own else plan.memory.peak  # a plan that disables the fusion needs that again
    disable = should_disable_all_gather_fusion(graph, peak, budget_of(request, program), given)
    options = effective_options(graph, plan.memory.peak, plan.cost.collectives, disable, given, plan.memory.host)
    if plan.pipeline is not None:
        options = pipeline_options(options, plan.mesh)
    return replace(plan, in_tree=program.in_tree, out_tree=program.out_tree, compiler_options=options), graph


def _check_arguments(plan: PlanRecord, program: Program) -> None:
    if (plan.mesh.axis_names, plan.mesh.axis_sizes) != (program.mesh.axis_names, program.mesh.axis_sizes):
        raise PlanError(f"the plan is for the mesh {plan.mesh}, the step runs on {program.mesh}: plan again for it")
    if len(plan.inputs) != len(program.inputs):
        raise PlanError(
            f"the plan is for {len(plan.inputs)} argument arrays, the step has {len(program.inputs)}: "
            "it was made for another step"
        )
    for place, leaf in zip(plan.inputs, program.inputs, strict=True):
        if place.shape != leaf.shape or place.dtype != dtype_name(leaf.aval.dtype) or place.path != leaf.path:
            raise PlanError(
                f"the plan is for {place.path}: {place.dtype}{list(place.shape)}, the step is called with {leaf.path}: "
                f"{leaf.aval.dtype}{list(leaf.shape)}; plan again for these shapes"
            )
    then, now = map(_donated_names, (plan.inputs, program.inputs))
    if [p.donated for p in plan.inputs] != [leaf.donated for leaf in program.inputs]:
        raise PlanError(
            f"the plan was made with {then} donated, the step donates {now}: donate the same "
            "(donate_argnums, donate_argnames), or plan again"
        )


def _check_program(plan: PlanRecord, graph: Graph, request: PlanRequest) -> None:
    program, now = graph.program, fingerprint(graph)
    if now == plan.fingerprint:
        return
    ran = [[p.written for p in passes] for passes in (plan.passes, request.passes)]
    if ran[0] != ran[1]:
        raise PlanError(
            f"the plan was made with passes={ran[0]}, and {program.name} runs with passes={ran[1]}: give the same, or "
            "plan again"
        )
    for o, (place, leaf) in enumerate(zip(plan.outputs, program.outputs, strict=False)):
        if (place.path, place.shape, place.dtype) != (leaf.path, leaf.shape, dtype_name(leaf.aval.dtype)):
            raise PlanError(
                f"the plan is for another program than {program.name}: its result {o} is {place.path}: "
                f"{place.dtype}{list(place.shape)}, the step's {leaf.path}: {aval_text(leaf.aval)}; plan again"
            )
    raise PlanError(
        f"the plan is for another program than {program.name}: the arguments agree, the operations do not "
        f"(fingerprint {plan.fingerprint}, now {now}); plan again"
    )


def _pin_conflicts(plan: PlanRecord, graph: Graph) -> Iterator[tuple[str, Spec, Spec]]:
    """Each pinned value whose spec in the plan differs: its name, the plan's spec and the pin."""
    program, sizes = graph.program, graph.program.mesh.shape

    def differ(a: Spec, b: Spec, free: frozenset[int] = frozenset()) -> bool:
        """Whether they split a dimension differently; those in ``free`` are not compared."""
        sides = ([tuple(x for x in axes if sizes[x] > 1) for axes in spec.dims] for spec in (a, b))
        return any(x != y for d, (x, y) in enumerate(zip(*sides, strict=True)) if d not in free)

    for places, leaves in ((plan.inputs, program.inputs), (plan.outputs, program.outputs)):
        for place, leaf in zip(places, leaves, strict=True):
            if leaf.pin is not None and differ(place.spec, leaf.pin):
                yield leaf.path, place.spec, leaf.pin
    constraints = {c.value: c for c in plan.intermediates if c.node is None}
    results = {v for v, leaf in zip(graph.outputs, program.outputs, strict=True) if leaf.pin == graph.pins.get(v)}
    for value in sorted(graph.pins.keys() & constraints.keys() - results):
        found, pin = constraints[value], graph.pins[value]
        if differ(found.spec, pin, graph.unconstrained_dims.get(value, frozenset())):
            yield f"{found.op} at {found.source}", found.spec, pin


def _donated_names(arrays: Sequence[Place] | Sequence[Leaf]) -> str:
    """The names of the arguments with a donated array."""
    return ", ".join(dict.fromkeys(argument_name(x.path) for x in arrays if x.donated)) or "nothing"
