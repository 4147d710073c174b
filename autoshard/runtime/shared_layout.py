"""The layout of one step for another: evaluation and decoding with the parameters where training has them.

*As the user asks* (``like=``): what both steps take (`autoshard.plan.shared_arguments`) is pinned to its spec in the
other's plan, so that neither step moves it where they alternate.

*As arguments are placed.* An argument that a result replaces moves once, at the first call, and from then on is as
planned. Any other that is committed to the plan's mesh would move at each call: parameters in evaluation after
training, a batch that a loader has placed. Strategy "auto" pins these to the specs that they have. What the step
computes in another spec is resharded inside it, which takes no longer than to move the argument, and is in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.errors import MeshError, SpecError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program, pinned
from autoshard.ir.spec import Spec, checked_spec
from autoshard.jaxpr import dtype_name
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord
from autoshard.plan.shared_arguments import shared_arguments

SHOWN = 3
"""Most arguments that a diagnostic spells out."""
Placements = tuple[NamedSharding | None, ...]
"""For each flat argument where it is; None if nothing is known of that, or it is not committed to a mesh."""


def pin_shared(program: Program, like: PlanRecord) -> Program:
    """``program`` with every argument that the step of ``like`` has too pinned to its spec there, unless the user
    pinned it.

    Raises:
      MeshError: they are over different meshes.
    """
    mesh = program.mesh if program.pipeline is None else program.pipeline.mesh
    if not _same_axes(mesh, like.mesh):
        raise MeshError(
            f"{program.name} runs over {mesh}, and the plan of {like.name} given as like= is for {like.mesh}: "
            "leave mesh= out to take the same"
        )
    arrays = [(leaf.path, leaf.shape, dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
    pins = {i: place.spec for i, place in shared_arguments(arrays, like.inputs).items()}
    inputs = (
        pinned(x, pins[i], program.pipeline) if x.pin is None and i in pins else x for i, x in enumerate(program.inputs)
    )
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


def placements(leaves: Iterable[Any]) -> Placements:
    """Where flat arguments are, arrays or `jax.ShapeDtypeStruct`s that say where they will be."""
    return tuple(map(_placement, leaves))


def _placement(leaf: Any) -> NamedSharding | None:
    if jx.is_tracer(leaf) or not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    leaf = leaf.stored if isinstance(leaf, jx.PaddedArray) else leaf
    sharding, committed = leaf.sharding, getattr(leaf, "committed", True)
    if not committed or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding


def stay(program: Program) -> frozenset[int]:
    """The flat arguments that are where they are from call to call: those that no computed result replaces."""
    results, arguments = program.jaxpr.outvars, program.jaxpr.invars
    computed = {i for i, o in program.carries if results[o] is not arguments[i]}
    return frozenset(range(len(program.inputs))) - computed


def serves(program: Program, plan: PlanRecord, placed: Placements, made_for: Placements) -> bool:
    """Whether ``plan`` of ``program``, ``made_for`` arguments in these places, is the one for those ``placed``: as it
    takes them where they are, or was made for them."""
    staying = [(i, s) for i in stay(program) if (s := placed[i]) is not None] if any(placed) else []
    return all(made_for[i] == s for i, s in staying) or all(_is_planned(plan, i, s) for i, s in staying)


def _is_planned(plan: PlanRecord, i: int, sharding: NamedSharding) -> bool:
    return sharding.is_equivalent_to(plan.flat_in_shardings[i], len(plan.inputs[i].shape))


def pin_placed(program: Program, placed: Placements) -> Program:
    """``program`` with every argument that stays where it is pinned to the spec that it has there, unless the user
    pinned it, or it is over another mesh than the program's.
    """
    mesh = program.mesh
    if not any(placed) or not mesh.is_available:
        return program
    over, staying, inputs = mesh.concrete(), stay(program), list(program.inputs)
    for i, sharding in enumerate(placed):
        leaf = inputs[i]
        if sharding is not None and i in staying and leaf.pin is None:
            spec = _spec_over(mesh, over, sharding, leaf.aval.shape)
            inputs[i] = leaf if spec is None else replace(leaf, pin=spec, placed=True)
    return replace(program, inputs=tuple(inputs))


def note_moved(plan: PlanRecord, program: Program, placed: Placements, conflict: str) -> PlanRecord:
    """``plan``, made without regard to where arguments are ``placed`` as with that there is none, with a diagnostic of
    what each call has to move.

    Args:
      conflict: why there is none.
    """
    moved = list(_moved(plan, program, placed))
    note = Diagnostic(
        f"{'; '.join(moved)}: moved at each call, since with it as it is placed there is no plan: {conflict}"
    )
    return replace(plan, diagnostics=(*plan.diagnostics, note)) if moved else plan


def _moved(plan: PlanRecord, program: Program, placed: Placements) -> Iterator[str]:
    for i in sorted(stay(program)):
        sharding, place = placed[i], plan.inputs[i]
        if sharding is not None and not _is_planned(plan, i, sharding):
            was, planned = f"{sharding.spec} over {dict(sharding.mesh.shape)}", place.spec.partition_spec()
            yield f"{place.path} is placed as {was}, and planned as {planned}"


def _spec_over(mesh: LogicalMesh, over: Mesh, sharding: NamedSharding, shape: Sequence[int]) -> Spec | None:
    """A sharding as a spec over ``mesh``, whose devices are those of ``over``; None if it is over others."""
    try:
        spec = checked_spec(sharding.spec, shape, mesh.shape, "an argument")
    except SpecError:
        return None
    same = NamedSharding(over, spec.partition_spec(), memory_kind=sharding.memory_kind)
    return spec if same.is_equivalent_to(sharding, len(shape)) else None
