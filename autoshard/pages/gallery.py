"""The pictures of a plan, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoshard.cost.profile import StepProfile
from autoshard.errors import ArgumentError, PlanError, nearest
from autoshard.pages.candidates_drawn import candidates_drawn
from autoshard.pages.memory_over_time import memory_over_time
from autoshard.pages.picture import Picture
from autoshard.pages.pipeline_part import schedule_drawn
from autoshard.pages.raster import png
from autoshard.pages.shards import all_shards
from autoshard.pages.timeline import timeline
from autoshard.plan.decisions import PipelinePlan
from autoshard.plan.record import PlanRecord

_OF_PLANS: Mapping[str, Callable[[PlanRecord], Picture]] = {"arrays": all_shards, "layouts": candidates_drawn}
_OF_STEPS: Mapping[str, Callable[[PlanRecord, StepProfile], Picture]] = {
    "memory": memory_over_time,
    "timeline": timeline,
}
_OF_PIPELINES: Mapping[str, Callable[[PlanRecord, PipelinePlan], Picture]] = {"schedule": schedule_drawn}
PICTURES = tuple(sorted({*_OF_PLANS, *_OF_STEPS, *_OF_PIPELINES}))


def draw(plan: PlanRecord, name: str) -> Picture:
    """The picture ``name`` of ``plan``.

    Raises:
      ArgumentError: there is no such picture.
      PlanError: the plan holds no profile of the step, or is of no pipeline, and this picture is drawn from that.
    """
    if name in _OF_PLANS:
        return _OF_PLANS[name](plan)
    if name in _OF_PIPELINES:
        if plan.pipeline is None:
            raise PlanError(f"the plan of {plan.name} is of no pipeline: its mesh names no axis with pipeline=")
        return _OF_PIPELINES[name](plan, plan.pipeline)
    if name not in _OF_STEPS:
        raise ArgumentError(f"no picture is called {name!r}{nearest(name, PICTURES)}; there are {', '.join(PICTURES)}")
    return _OF_STEPS[name](plan, profile_of(plan))


def as_file(picture: Picture, ending: str) -> bytes:
    """``picture`` as a file whose name has this ending, ``".svg"`` or ``".png"``.

    Raises:
      ArgumentError: it is another ending, or a PNG without matplotlib.
    """
    if ending not in (".svg", ".png"):
        raise ArgumentError(f"a picture is written as .svg or .png, and not as {ending or 'a file without an ending'}")
    return png(picture) if ending == ".png" else picture.svg.encode()


def profile_of(plan: PlanRecord) -> StepProfile:
    """The profile of the step.

    Raises:
      PlanError: the plan holds none.
    """
    if plan.profile is None:
        why = ": plan again" if plan.pipeline is None else ', as of no pipeline: plan.plot("schedule") has its ticks'
        raise PlanError(f"the plan of {plan.name} holds no profile of the step over time{why}")
    return plan.profile
