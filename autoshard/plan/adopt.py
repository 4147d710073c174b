"""adopt: a plan made earlier, held against the step that is to run by it.

It must be of the same program, and must not overrule what the user gives beside it: a pin, or a memory budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoshard.cost.compiler_options import should_disable_all_gather_fusion, user_options, conflicting_options, effective_options
from autoshard.errors import MemoryBudgetError, PlanError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program, aval_text
from autoshard.ir.spec import Spec
from autoshard.jaxpr import dtype_name
from autoshard.plan.planner import PlanRequest, budget_of, fingerprint
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text


def adopt(plan: PlanRecord, program: Program, request: PlanRequest) -> tuple[PlanRecord, Graph]:
    """``plan`` for ``program``, with the structures of its arguments and the compiler options given beside it.

    Raises:
      PlanError: it was made for another program, or for other shapes, donations, passes or another mesh; or it lays
        a value out otherwise than the user pinned it. Names the first difference.
      MemoryBudgetError: it takes more than the budget that was given.
      RuleError, SpecError: as `flatten.flatten`.
    """
    _check_arguments(plan, program)
    graph = build_graph(program, strict=request.strict)
    _check_program(plan, graph, request)
    for what, lies, wanted in _overruled(plan, graph):
        raise PlanError(
            f"{what} is pinned to {wanted}, and the plan lays it out as {lies}: a pin is never overruled; plan anew "
            "with it, or leave it out"
        )
    if request.memory_budget is not None and plan.memory.peak > request.memory_budget:
        raise MemoryBudgetError(
            f"the plan takes {size_text(plan.memory.peak, 2)} a device at its peak, and the memory budget is "
            f"{size_text(request.memory_budget, 2)}: plan anew under it, or raise it",
            plan.memory.peak,
        )
    said = user_options(plan.compiler_options)
    ours = len(said) < len(plan.compiler_options)
    given = (*said, *request.compiler_options)
    if ours and (other := conflicting_options(given)):
        raise PlanError(
            f"the plan's memory is foreseen with compiler options that are given otherwise: {other}; leave them out, "
            "or plan anew"
        )
    peak = math.inf if ours else plan.memory.peak  # where it has ours, it needs them
    options = effective_options(should_disable_all_gather_fusion(graph, peak, budget_of(request, program), given), given)
    return replace(plan, in_tree=program.in_tree, out_tree=program.out_tree, compiler_options=options), graph


def _check_arguments(plan: PlanRecord, program: Program) -> None:
    if (plan.mesh.axis_names, plan.mesh.axis_sizes) != (program.mesh.axis_names, program.mesh.axis_sizes):
        raise PlanError(f"the plan is for the mesh {plan.mesh}, the step runs on {program.mesh}: plan anew for it")
    if len(plan.inputs) != len(program.inputs):
        raise PlanError(
            f"the plan is for {len(plan.inputs)} argument arrays, the step has {len(program.inputs)}: "
            "it was made for another step"
        )
    for place, leaf in zip(plan.inputs, program.inputs, strict=True):
        if place.shape != leaf.aval.shape or place.dtype != dtype_name(leaf.aval.dtype) or place.path != leaf.path:
            raise PlanError(
                f"the plan is for {place.path}: {place.dtype}{list(place.shape)}, the step is called with {leaf.path}: "
                f"{leaf.aval.dtype}{list(leaf.aval.shape)}; plan anew for these shapes"
            )
    then, now = (_roots(p.path for p in side if p.donated) for side in (plan.inputs, program.inputs))
    if [p.donated for p in plan.inputs] != [leaf.donated for leaf in program.inputs]:
        raise PlanError(
            f"the plan was made with {then} donated, the step donates {now}: donate the same "
            "(donate_argnums, donate_argnames), or plan anew"
        )


def passes_of(passes: Iterable[str]) -> tuple[str, ...]:
    """Of passes and what they did, the passes."""
    return tuple(text.split(": ", 1)[0] for text in passes)


def _check_program(plan: PlanRecord, graph: Graph, request: PlanRequest) -> None:
    program, now = graph.program, fingerprint(graph)
    if now == plan.fingerprint:
        return
    ran = [list(passes_of(texts)) for texts in (plan.passes, request.passes)]
    if ran[0] != ran[1]:
        raise PlanError(
            f"the plan was made with passes={ran[0]}, and {program.name} runs with passes={ran[1]}: give the same, or "
            "plan anew"
        )
    for o, (place, leaf) in enumerate(zip(plan.outputs, program.outputs, strict=False)):
        if (place.path, place.shape, place.dtype) != (leaf.path, leaf.aval.shape, dtype_name(leaf.aval.dtype)):
            raise PlanError(
                f"the plan is for another program than {program.name}: its result {o} is {place.path}: "
                f"{place.dtype}{list(place.shape)}, the step's {leaf.path}: {aval_text(leaf.aval)}; plan anew"
            )
    raise PlanError(
        f"the plan is for another program than {program.name}: the arguments agree, the operations do not "
        f"(fingerprint {plan.fingerprint}, now {now}); plan anew"
    )


def _overruled(plan: PlanRecord, graph: Graph) -> Iterator[tuple[str, Spec, Spec]]:
    """What is pinned, the plan's spec of it and the pin, where these two differ."""
    program, sizes = graph.program, graph.program.mesh.shape

    def differ(a: Spec, b: Spec, free: frozenset[int] = frozenset()) -> bool:
        """Whether they split some dimension differently; those in ``free`` may be split in any way."""
        sides = ([tuple(x for x in axes if sizes[x] > 1) for axes in spec.dims] for spec in (a, b))
        return any(x != y for d, (x, y) in enumerate(zip(*sides, strict=True)) if d not in free)

    for places, leaves in ((plan.inputs, program.inputs), (plan.outputs, program.outputs)):
        for place, leaf in zip(places, leaves, strict=True):
            if leaf.pin is not None and differ(place.spec, leaf.pin):
                yield leaf.path, place.spec, leaf.pin
    pinned = {p.value: p for p in plan.intermediates if p.node is None}
    results = {v for v, leaf in zip(graph.outputs, program.outputs, strict=True) if leaf.pin == graph.pins.get(v)}
    for value in sorted(graph.pins.keys() & pinned.keys() - results):
        pin, want = pinned[value], graph.pins[value]
        if differ(pin.spec, want, graph.unconstrained_dims.get(value, frozenset())):
            yield f"{pin.op} at {pin.source}", pin.spec, want


def _roots(paths: Iterable[str]) -> str:
    """The arguments that ``paths`` lie in, by name."""
    return ", ".join(dict.fromkeys(re.split(r"[\[.]", path, maxsplit=1)[0] for path in paths)) or "nothing"
