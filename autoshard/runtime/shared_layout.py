"""The layout of one step for another: evaluation and decoding with the parameters where training has them.

An argument of the one step is found in the other by the names of its keys, shape by shape: ``params`` of a predict
function is ``state.params`` of the training step. What is found is pinned to its spec there, so that neither step moves
it when they alternate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import MeshError
from autoshard.ir.graph import Diagnostic
from autoshard.ir.program import Program
from autoshard.jaxpr import dtype_name
from autoshard.jaxpr.paths import path_names
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Place
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord

Names = tuple[str, ...]
Array = tuple[tuple[int, ...], str]
"""Shape and dtype."""
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


def shared_arguments(arrays: Sequence[tuple[str, tuple[int, ...], str]], places: Sequence[Place]) -> dict[int, Place]:
    """Which of ``places`` each array is, by its position; those that are none are left out.

    All arrays of one argument are looked for in one subtree of the places: the one that has the most of them under the
    same keys, with the same shape and dtype. Of equals the one at the argument's own place, then one whose last key is
    the argument's name, then the one with the fewest keys, then the first. An argument that is one array is found by
    its name only; of one key that is a number, nothing.

    Args:
      arrays: path, shape and dtype of each flat argument.
    """
    by_rest, full = _index(places)
    arguments: dict[str, list[tuple[int, Names, Array]]] = defaultdict(list)
    for i, (path, shape, dtype) in enumerate(arrays):
        name, *keys = path_names(path)
        arguments[name].append((i, tuple(keys), (shape, dtype)))
    found: dict[int, Place] = {}
    for name, leaves in arguments.items():
        roots = Counter[Names]()
        named: set[Names] = set()
        for _, keys, array in leaves:
            roots.update(r for r in by_rest.get((keys, array), ()) if keys or r[-1] == name)
            if not all(map(str.isdecimal, keys)):
                named.update(by_rest.get((keys, array), ()))
        certain = {r: n for r, n in roots.items() if n > 1 or r in named or r[-1] == name}
        if not certain:
            continue
        root = max(certain, key=lambda r: (certain[r], r == (name,), r[-1] == name, -len(r)))
        for i, keys, array in leaves:
            place = full.get((*root, *keys))
            if place is not None and (place.shape, place.dtype) == array:
                found[i] = place
    return found


def _index(places: Sequence[Place]) -> tuple[Mapping[tuple[Names, Array], list[Names]], Mapping[Names, Place]]:
    """The roots of all subtrees that have an array under some keys, and the places by all names of their path."""
    by_rest: dict[tuple[Names, Array], list[Names]] = defaultdict(list)
    full: dict[Names, Place] = {}
    for place in places:
        names = path_names(place.path)
        full.setdefault(names, place)
        for n in range(1, len(names) + 1):
            by_rest[names[n:], (place.shape, place.dtype)].append(names[:n])
    return by_rest, full


def _same_axes(a: LogicalMesh, b: LogicalMesh) -> bool:
    return (a.axis_names, a.axis_sizes) == (b.axis_names, b.axis_sizes)
