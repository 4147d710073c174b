"""Keeps the carried state of a step (parameters, optimizer state) in the specs of the step's first plan.

A step is planned again for other argument shapes. Its state must then keep its specs, or it would be resharded whenever
the shapes alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard import jaxpr as jx
from autoshard.backend.executable import Executable
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program, pinned
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord
from autoshard.runtime.plan import Plan


@dataclass(frozen=True)
class CarriedSpecs:
    """The specs that a plan gives to the state carried from call to call."""

    mesh: LogicalMesh
    specs: Mapping[tuple[str, tuple[int, ...], str], Spec]
    """By argument path, shape and dtype."""
    stages: str | None = None
    """The mesh axis of the pipeline's stages, if the plan has one."""
    passes: frozenset[str] = frozenset()
    """Those that the plan was made with, as written."""


@dataclass
class FirstPlan:
    """What a step remembers of its first plan; shared by the steps that it makes for the states of NNX modules."""

    plan: Plan | None = None
    """None until there is one."""
    carried: CarriedSpecs | None = None
    """None until a plan has carried state."""

    def record(self, executable: Executable[Plan]) -> None:
        """Remembers the plan of ``executable`` if it is the first, and the specs of its carried state if they are."""
        self.plan = self.plan or executable.plan
        carried = [executable.plan.inputs[i] for i, _ in executable.program.carries]
        if self.carried is None and carried:
            specs = {(p.path, p.shape, p.dtype): p.spec for p in carried}
            pipeline = executable.plan.pipeline
            passes = frozenset(p.written for p in executable.plan.passes)
            self.carried = CarriedSpecs(executable.plan.mesh, specs, pipeline.axis if pipeline else None, passes)

    def forget(self) -> None:
        """As before the first plan."""
        self.plan = self.carried = None


def pin_carried(program: Program, first: CarriedSpecs) -> tuple[Program, frozenset[int]]:
    """``program`` with its carried state pinned to the specs ``first``, and the flat arguments pinned so.

    An argument of another shape or dtype, and one that the user pinned, is left as it is.
    """
    keys = [(leaf.path, leaf.shape, jx.dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
    pins = {i: first.specs[k] for i, k in enumerate(keys) if k in first.specs and program.inputs[i].pin is None}
    pipeline = program.pipeline
    leaves = [pinned(x, pins[i], pipeline) if i in pins else x for i, x in enumerate(program.inputs)]
    return replace(program, inputs=tuple(leaves)), frozenset(pins)


def note_carried(plan: PlanRecord, first: CarriedSpecs, pinned: frozenset[int], conflict: str) -> PlanRecord:
    """``plan`` with a note of what keeps its spec of the first plan, and a diagnostic of what could not.

    Args:
      pinned: flat arguments that `pin_carried` pinned.
      conflict: why no plan with these pins was found; empty where one was.
    """
    inputs = tuple(replace(p, reason="first_plan", sources=()) if i in pinned else p for i, p in enumerate(plan.inputs))
    before = [(p, first.specs.get((p.path, p.shape, p.dtype))) for p in plan.inputs] if conflict else []
    resharded = [p.path for p, spec in before if spec is not None and (first.mesh, spec) != (plan.mesh, p.spec)]
    note = Diagnostic(
        f"{', '.join(resharded)}: another spec than in the first plan of the step, which has no plan here: {conflict}"
    )
    return replace(plan, inputs=inputs, diagnostics=(*plan.diagnostics, note) if resharded else plan.diagnostics)
