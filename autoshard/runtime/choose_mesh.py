"""Chooses the mesh, and the axis of a pipeline, where the user leaves them open: plans the step on each candidate and
takes the fastest plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.errors import AutoshardError, MicrobatchError, PipelineError, SpecError
from autoshard.ir.graph import Diagnostic
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh
from autoshard.plan.decisions import Alternative
from autoshard.plan.record import PlanRecord
from autoshard.runtime.stages import Planned
from autoshard.schedule.schedule import Schedule
from autoshard.units import time_text


def candidate_meshes(pins: Any) -> list[LogicalMesh]:
    """The candidate meshes where the user gives none: the mesh of the given shardings if they name one, else every
    factoring of the devices into ``data`` and ``model``.

    Args:
      pins: pytree of `PartitionSpec`, `NamedSharding` or None.

    Raises:
      SpecError: the shardings are over different meshes.
    """
    leaves = jax.tree.leaves(pins, is_leaf=lambda x: isinstance(x, NamedSharding))
    named = dict.fromkeys(p.mesh for p in leaves if isinstance(p, NamedSharding))
    if len({tuple(mesh.shape.items()) for mesh in named}) > 1:
        raise SpecError(f"the shardings given are over {' and '.join(str(dict(m.shape)) for m in named)}: choose one")
    if named:
        return [resolve_mesh(next(iter(named)))]
    return MeshConfig(axes="auto").meshes()


PIPELINE_GAIN = 0.04
"""Least share of the predicted time that a pipeline on GPUs must gain to be chosen. Of steps of 7 to 175 billion
parameters compiled for H100s, those without one are read as 0.93 to 1.05 of the predicted time, those with one as 0.93
to 1.12 (benchmarks/results/pipelines.md)."""


@dataclass(frozen=True)
class Ground:
    """What a step is planned on: a mesh, and which of its axes is the stages of a pipeline, if one is."""

    mesh: LogicalMesh
    stages: str | None = None

    def __str__(self) -> str:
        return f"the mesh {self.mesh}" + (f" with a pipeline over {self.stages}" if self.stages else "")


def plan_each(
    plan_on: Callable[[Ground, float], Planned], grounds: Sequence[Ground], name: str, *, leave_out_equal: bool
) -> list[Planned]:
    """The plan on each of ``grounds`` that has one.

    Args:
      plan_on: takes also the seconds of the best plan on those before.
      leave_out_equal: those whose plan is one before by other names (`_is_equal_to`) are not planned.

    Raises:
      AutoshardError: none has. Of the class of the first one's error; that error itself where all are equal.
    """
    planned: list[Planned] = []
    errors: dict[str, Exception] = {}
    for ground in grounds:
        if leave_out_equal and any(_is_equal_to(ground, p) for p in planned):
            continue
        try:
            best = min((comparable_seconds(p.plan, or_pipeline=True) for p in planned), default=math.inf)
            planned.append(plan_on(ground, best))
        except (AutoshardError, ValueError) as e:  # JAX raises ValueError for a spec that names no axis of the mesh
            errors[str(ground)] = e
    no_pipeline = dict.fromkeys(str(e) for e in errors.values() if isinstance(e, PipelineError | MicrobatchError))
    if planned:
        notes = tuple(Diagnostic(f"no pipeline was considered: {why}") for why in no_pipeline)
        return [p._replace(plan=replace(p.plan, diagnostics=(*p.plan.diagnostics, *notes))) for p in planned]
    first = next(iter(errors.values()))
    if len({(type(e), str(e)) for e in errors.values()}) == 1 or not isinstance(first, AutoshardError):
        raise first
    reasons = "; ".join(f"{ground}: {e}" for ground, e in errors.items())
    raise type(first)(f"{name}: none of the candidate meshes has a plan; give one as mesh=. {reasons}")


def fastest(candidates: Sequence[Planned], schedule: str | Schedule | None = None) -> Planned:
    """The plan with the least predicted time, with the others' meshes among its alternatives, and with a note where it
    has no use for the ``schedule`` that the user gave."""
    or_pipeline = any(c.plan.pipeline for c in candidates)
    best = min(candidates, key=lambda c: comparable_seconds(c.plan, or_pipeline=or_pipeline))
    others = [
        Alternative(str(_ground(c.plan)), c.plan.cost.seconds, c.plan.memory.peak) for c in candidates if c is not best
    ]
    plan = replace(best.plan, alternatives=(*best.plan.alternatives, *others))
    staged = [c.plan.cost.seconds for c in candidates if c.plan.pipeline]
    if schedule is not None and plan.pipeline is None:
        why = f"the fastest pipeline takes {time_text(min(staged))}" if staged else "no pipeline was planned"
        note = Diagnostic(
            f"schedule={schedule!r} has no use: {why}, and this step without one {time_text(plan.cost.seconds)}"
        )
        plan = replace(plan, diagnostics=(*plan.diagnostics, note))
    return best._replace(plan=plan)


def comparable_seconds(plan: PlanRecord, *, or_pipeline: bool) -> float:
    """Seconds of a plan among others, with ``or_pipeline`` some of which have a pipeline: without one XLA for TPUs runs
    more collectives beside compute than those of products."""
    hardware = plan.mesh.hardware
    if plan.pipeline is not None or not or_pipeline:
        return plan.cost.seconds
    if hardware.hides_beyond_products:
        return plan.cost.scheduled(hardware.hidden_collectives)
    return (1 - PIPELINE_GAIN) * plan.cost.seconds


def _ground(plan: PlanRecord) -> Ground:
    return Ground(plan.mesh, plan.pipeline.axis if plan.pipeline else None)


def _is_equal_to(ground: Ground, planned: Planned) -> bool:
    """Whether a step is planned on ``ground`` as it was ``planned`` but for the names of axes: its stages lie along
    another axis of the same mesh, with as many devices and the same link, all other axes follow one another as there,
    and nothing in the step names one."""
    mesh, over = planned.plan.mesh, _ground(planned.plan).stages
    if ground.mesh != mesh or ground.stages is None or over is None or planned.graph.pins:
        return False
    spans = {a: [(s.devices, s.stride, s.is_ring) for s in mesh.along(a)] for a in mesh.nontrivial_axes}
    links = {a: (mesh.shape[a], mesh.slowest_link((a,)), spans[a]) for a in mesh.nontrivial_axes}
    one, other = ([link for a, link in links.items() if a != stages] for stages in (ground.stages, over))
    return links[ground.stages] == links[over] and one == other
