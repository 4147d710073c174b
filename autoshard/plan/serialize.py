"""A plan as JSON values, and back, strictly: nothing in it is executed, and every entry is checked."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import jax
import pydantic

from autoshard.cost.profile import StepProfile
from autoshard.errors import MeshError, PlanError, ScheduleError
from autoshard.ir.program import TreeDef
from autoshard.ir.spec import REDUCTION_KINDS, Spec
from autoshard.jaxpr import dtype_from_name
from autoshard.machine.gpu_cluster import GpuCluster
from autoshard.machine.mesh import Hardware, LogicalMesh
from autoshard.machine.torus import Span
from autoshard.machine.tpu_slice import TpuSlice
from autoshard.plan.decisions import PipelinePlan, Place
from autoshard.plan.record import PlanRecord
from autoshard.plan.treedef import leaf_paths, treedef_from_json, treedef_to_json
from autoshard.strict_files import cut, shortened

VERSION = 16
_TREES = ("in_tree", "out_tree")


def plan_to_json(plan: PlanRecord) -> dict[str, Any]:
    """``plan`` as JSON values."""
    names = _field_names() - set(_TREES)
    plain = {f.name: _plain(getattr(plan, f.name)) for f in dataclasses.fields(PlanRecord) if f.name in names}
    trees = {name: None if (tree := getattr(plan, name)) is None else [treedef_to_json(tree)] for name in _TREES}
    return {"autoshard_plan": VERSION, **plain, **trees}


def _field_names() -> set[str]:
    return {f.name for f in dataclasses.fields(PlanRecord)}


def plan_from_json(stored: Any) -> PlanRecord:
    """The plan that `plan_to_json` was given.

    Raises:
      PlanError: not a plan, another version, a field that is missing, unknown or of the wrong type, or a spec that
        does not fit its value or the mesh.
    """
    if not isinstance(stored, dict) or "autoshard_plan" not in stored:
        raise PlanError("this is not a plan: it has no 'autoshard_plan' entry")
    if stored["autoshard_plan"] != VERSION:
        raise PlanError(
            f"plan of version {shortened(stored['autoshard_plan'])}; this autoshard reads {VERSION}: plan again"
        )
    names = _field_names()
    missing = sorted(names - set(stored))
    if missing:
        raise PlanError(f"the plan lacks {', '.join(map(repr, missing))}")
    parts: dict[str, Any] = {}
    for name in names - set(_TREES):
        try:
            parts[name] = _adapter(name).validate_json(json.dumps(stored[name]), strict=True)
        except pydantic.ValidationError as e:
            first = e.errors()[0]
            raise PlanError(cut(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}", 400)) from None
        except (MeshError, RecursionError, TypeError, ValueError) as e:
            raise PlanError(f"{name}: {e}") from None
    mesh: _MeshRecord = parts["mesh"]
    try:
        parts["mesh"] = LogicalMesh(
            mesh.axis_names, mesh.axis_sizes, mesh.hardware, mesh.axis_links, target=mesh.target, torus=mesh.torus
        )
    except MeshError as e:
        raise PlanError(f"mesh: {e}") from None
    for name, places in zip(_TREES, (parts["inputs"], parts["outputs"]), strict=True):
        parts[name] = _tree(stored[name], places, name)
    plan = PlanRecord(**parts)
    unknown = _difference(json.loads(json.dumps(plan_to_json(plan))), stored, "plan")
    if unknown:
        raise PlanError(f"{cut(unknown, 200)}: not an entry that this version writes")
    _check(plan)
    return plan


@dataclass(frozen=True)
class _MeshRecord:
    """A `LogicalMesh` as stored: without devices."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_links: tuple[str, ...]
    torus: tuple[tuple[Span, ...], ...]
    hardware: Hardware
    target: TpuSlice | GpuCluster | None


@functools.cache
def _adapter(name: str) -> pydantic.TypeAdapter[Any]:
    """Parses one field of a plan; its types are plain data all the way down."""
    return pydantic.TypeAdapter(_MeshRecord if name == "mesh" else get_type_hints(PlanRecord)[name])


def _tree(stored: Any, places: Sequence[Place], what: str) -> TreeDef | None:
    """The structure with these leaves: `plan_to_json` wraps it in a list, since a structure may be None itself."""
    if stored is None:
        return None
    if not isinstance(stored, list) or len(stored) != 1:
        raise PlanError(f"{what}: expected a list of one structure")
    try:
        tree = treedef_from_json(stored[0])
    except (PlanError, RecursionError) as e:
        raise PlanError(f"{what}: {e}") from None
    if tree.num_leaves != len(places):
        raise PlanError(f"{what}: it has {tree.num_leaves} leaves for {len(places)} values")
    top = tree.children() if what == "in_tree" else []
    if what == "in_tree" and [t.node_data() and t.node_data()[0] for t in (tree, *top)] != [tuple, tuple, dict]:
        raise PlanError(f"{what}: expected positional arguments and keywords")
    for path, place in zip(leaf_paths(tree), places, strict=True):
        name = jax.tree_util.keystr(path[2:] if what == "in_tree" else path)
        if not place.path.endswith(name):
            raise PlanError(f"{what}: the path {name} does not match the value {place.path}")
    return tree


def _check_pipeline(pipeline: PipelinePlan, mesh: LogicalMesh) -> None:
    """Raises `PlanError` for a schedule that is wrong, or one that does not fit the mesh or the numbers beside it."""
    schedule, p = pipeline.schedule, pipeline
    try:
        schedule.check()
    except ScheduleError as e:
        raise PlanError(f"pipeline: schedule: {e}") from None
    facts = (mesh.shape.get(p.axis), p.microbatches, len(p.layers), len(p.seconds), len(p.bytes))
    parts = schedule.stages * schedule.chunks
    if facts != (p.stages, schedule.microbatches, parts, p.stages, p.stages) or schedule.stages != p.stages:
        raise PlanError(
            f"pipeline: {p.stages} stages along {p.axis!r} and {p.microbatches} micro-batches, with layers "
            f"{list(p.layers)}, do not fit the mesh {mesh} and {schedule!r}"
        )
    if min(p.layers) < 1:
        raise PlanError("pipeline: a part of the model has no layer")
    if p.profile is not None:
        _check_profile(p.profile, p.profile.seconds)


def _check_profile(profile: StepProfile, total: float) -> None:
    """Raises `PlanError` for what no step can take or hold, and where the peak is at no moment."""
    parts = (profile.moments, profile.spans, profile.lines, profile.moves, profile.live, profile.values)
    names = ("seconds", "compute", "transfers", "residuals", "temporaries", "bytes", "peak_bytes", "count")
    found = [getattr(x, name) for part in parts for x in part for name in names if hasattr(x, name)]
    wrong = [x for x in (total, profile.on_chip, profile.values_left_out, *found) if not 0 <= x < math.inf]
    if wrong:
        raise PlanError(f"profile: {wrong[0]} is no time, size or count")
    if not 0 <= profile.peak < len(profile.moments):
        raise PlanError(f"profile: the peak is moment {profile.peak}, and there are {len(profile.moments)}")


def _check(plan: PlanRecord) -> None:
    """Raises `PlanError` for a spec that does not fit its value or the mesh, and for what is no dtype or argument."""
    mesh = plan.mesh
    if not (mesh.hardware.links and mesh.hardware.flops):
        raise PlanError(f"mesh: the hardware {mesh.hardware.name} has no links or no peak FLOP/s")
    if plan.pipeline is not None:
        _check_pipeline(plan.pipeline, mesh)
    if plan.profile is not None:
        _check_profile(plan.profile, plan.cost.seconds)
    for what, spec, shape in _specs(plan):
        missing = sorted(set(spec.axes) - set(mesh.axis_names))
        if missing:
            raise PlanError(f"{what}: spec {spec} names mesh axis {missing[0]!r}, and the mesh is {mesh}")
        twice = [a for a in mesh.axis_names if spec.axes.count(a) > 1]
        if twice:
            raise PlanError(f"{what}: spec {spec} uses mesh axis {twice[0]!r} twice")
        unknown = sorted({kind for _, kind in spec.partial} - set(REDUCTION_KINDS))
        if unknown:
            raise PlanError(f"{what}: spec {spec}: {unknown[0]!r} is no reduction of partial values")
        if shape is not None and spec.rank != len(shape):
            raise PlanError(f"{what}: spec {spec} has {spec.rank} entries, the shape is {list(shape)}")
    for place in (*plan.inputs, *plan.outputs):
        stored = place.stored_shape
        if len(stored) != len(place.shape) or any(m > n for m, n in zip(place.shape, stored, strict=True)):
            raise PlanError(f"{place.path}: {list(place.shape)} is no part of {list(stored)}, which it is stored as")
        for d, (size, axes) in enumerate(zip(stored, place.spec.dims, strict=True)):
            if size % (parts := mesh.axes_size(axes)):
                raise PlanError(
                    f"{place.path}: dimension {d} of shape {list(stored)} has size {size}, which does not divide "
                    f"into {parts} parts over {'+'.join(axes)}"
                )
        try:
            dtype_from_name(place.dtype)
        except (TypeError, ValueError):
            raise PlanError(f"{place.path}: {place.dtype!r} is not a dtype") from None
    paths = {place.path: len(place.shape) for place in plan.inputs}
    for b in plan.batch:
        if not 0 <= b.dim < paths.get(b.path, 0):
            raise PlanError(f"batch: no argument {b.path} has a dimension {b.dim}")
    for place in plan.outputs:
        if place.replaces is not None and place.replaces not in paths:
            raise PlanError(f"{place.path} replaces {place.replaces}, which is not an argument")


def _specs(plan: PlanRecord) -> Iterator[tuple[str, Spec, tuple[int, ...] | None]]:
    """Every spec in ``plan``, after the name of its value and before the shape where that is known."""
    for place in (*plan.inputs, *plan.outputs):
        yield place.path, place.spec, place.shape
    for c in plan.intermediates:
        for spec in (c.spec, *c.waypoints, *([] if c.resharded_from is None else [c.resharded_from])):
            yield f"{c.op} at {c.source}", spec, c.shape
    for island in plan.islands:
        for spec in (*island.in_specs, *island.out_specs, *island.reduced_specs, Spec((island.axes,))):
            yield f"{island.op} at {island.source}", spec, None
    for split in plan.dim_splits:
        yield f"the dimension {split.name}", Spec((split.axes,)), None
    for collective in plan.cost.collectives:
        yield f"the {collective.kind} at {collective.source}", Spec((collective.axes or (),)), None
    yield "the sharding of stored state", Spec((plan.storage_axes,)), None
    if (profile := plan.work) is None:
        return
    for span in profile.spans:
        yield f"profile: the {span.kind} for {span.op}", Spec((span.axes,)), None
    for move in profile.moves:
        yield f"profile: the {move.kind} for {move.op}", Spec((move.axes,)), None
        for spec in (s for s in (move.before, move.after) if s is not None):
            yield f"profile: the {move.kind} for {move.op}", spec, move.shape
    for row in (*profile.live, *profile.values):
        yield f"profile: {row.op} at {row.source}", row.spec, row.shape


def _difference(a: Any, b: Any, at: str) -> str:
    """Where two JSON values first differ, or the empty string."""
    if isinstance(a, dict) and isinstance(b, dict):
        for k in sorted({*a, *b}, key=str):
            if k not in a or k not in b:
                return f"{at}.{k}"
            if found := _difference(a[k], b[k], f"{at}.{k}"):
                return found
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (_difference(x, y, f"{at}[{i}]") for i, (x, y) in pairs)), "")
    return "" if a == b else at


def _plain(x: Any) -> Any:
    if isinstance(x, LogicalMesh):
        return _plain(_MeshRecord(x.axis_names, x.axis_sizes, x.axis_links, x.torus, x.hardware, x.target))
    if dataclasses.is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return [_plain(v) for v in x]
    return x
