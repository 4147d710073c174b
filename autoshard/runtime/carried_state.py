"""carried: what a step carries from call to call lies as in the step's first plan, lest it be moved with the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard import jaxpr as jx
from autoshard.backend.executable import Executable
from autoshard.ir.program import Program
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord
from autoshard.runtime.plan import Plan


@dataclass(frozen=True)
class CarriedSpecs:
    """How a step's first plan lays out what the step carries from call to call."""

    mesh: LogicalMesh
    specs: Mapping[tuple[str, tuple[int, ...], str], Spec]
    """By argument path, shape and dtype."""


def carried_specs(entry: Executable[Plan]) -> CarriedSpecs:
    """What ``entry``, the first of a step, lays down for those after it."""
    places = [entry.plan.inputs[i] for i, _ in entry.program.carries]
    return CarriedSpecs(entry.plan.mesh, {(p.path, p.shape, p.dtype): p.spec for p in places})


def pin_carried(program: Program, first: CarriedSpecs) -> tuple[Program, frozenset[int]]:
    """``program`` with what the step carries pinned as its first plan lays it out, and which arguments that are."""
    keys = [(leaf.path, leaf.aval.shape, jx.dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
    bound = {i: first.specs[k] for i, k in enumerate(keys) if k in first.specs and program.inputs[i].pin is None}
    leaves = [replace(leaf, pin=bound.get(i, leaf.pin)) for i, leaf in enumerate(program.inputs)]
    return replace(program, inputs=tuple(leaves)), frozenset(bound)


def note_carried(plan: PlanRecord, first: CarriedSpecs, bound: frozenset[int], why: str) -> PlanRecord:
    """``plan``, which says what it has as the step's first plan, and what not and why."""
    inputs = tuple(replace(p, reason="first_plan", sources=()) if i in bound else p for i, p in enumerate(plan.inputs))
    lay = [(p, first.specs.get((p.path, p.shape, p.dtype))) for p in plan.inputs] if why else []
    moved = [p.path for p, spec in lay if spec is not None and (first.mesh, spec) != (plan.mesh, p.spec)]
    said = (
        f"{', '.join(moved)}: laid out otherwise than in the first plan of the step, which does not serve here: {why}"
    )
    return replace(plan, inputs=inputs, diagnostics=(*plan.diagnostics, said) if moved else plan.diagnostics)
