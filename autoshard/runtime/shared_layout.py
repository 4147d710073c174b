"""The layout of one step for another: evaluation and decoding with the parameters where training has them.

What both steps take (`autoshard.plan.shared_arguments`) is pinned to its spec in the other's plan, so that neither step
moves it where they alternate.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import MeshError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.jaxpr import dtype_name
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord
from autoshard.plan.shared_arguments import shared_arguments

SHOWN = 3
"""Most arguments that a diagnostic spells out."""


def pin_shared(program: Program, like: PlanRecord) -> Program:
    """``program`` with every argument that the step of ``like`` has too pinned to its spec there, unless the user
    pinned it.

    Raises:
      MeshError: they are over different meshes.
    """
    if not _same_axes(program.mesh, like.mesh):
        raise MeshError(
            f"{program.name} runs over {program.mesh}, and the plan of {like.name} given as like= is for {like.mesh}: "
            "leave mesh= out to take the same"
        )
    arrays = [(leaf.path, leaf.aval.shape, dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
    pins = {i: place.spec for i, place in shared_arguments(arrays, like.inputs).items()}
    inputs = (replace(x, pin=pins.get(i)) if x.pin is None else x for i, x in enumerate(program.inputs))
    return replace(program, inputs=tuple(inputs))


def note_shared(plan: PlanRecord, like: PlanRecord) -> PlanRecord:
    """``plan`` with a note of what has its spec of ``like``, and a diagnostic of what has another."""
    shared = shared_arguments([(p.path, p.shape, p.dtype) for p in plan.inputs], like.inputs)
    inputs, differ = list(plan.inputs), list[str]()
    for i, place in shared.items():
        ours = plan.inputs[i]
        if ours.spec == place.spec:
            inputs[i] = replace(ours, reason="shared", sources=(f"{place.path} of {like.name}",))
        else:
            differ.append(f"{ours.path} is {ours.spec} here and {place.spec} there")
    notes: list[Diagnostic] = []
    if not shared:
        notes.append(Diagnostic(f"no argument has the path, shape and dtype of one of {like.name}, the plan of like="))
    elif differ:
        rest = [f"{plural(len(differ) - SHOWN, 'more')}"] if len(differ) > SHOWN else []
        notes.append(
            Diagnostic(
                f"pinned otherwise than in {like.name}, the plan of like=, and so moved where the two steps alternate: "
                f"{'; '.join([*differ[:SHOWN], *rest])}"
            )
        )
    return replace(plan, inputs=tuple(inputs), diagnostics=(*plan.diagnostics, *notes))


def _same_axes(a: LogicalMesh, b: LogicalMesh) -> bool:
    return (a.axis_names, a.axis_sizes) == (b.axis_names, b.axis_sizes)
