"""The records that a plan is made of: specs of arguments and results, constraints, islands, layouts that lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.cost.profile import StepProfile
from autoshard.ir.program import MemoryKind
from autoshard.ir.spec import Axes, Spec
from autoshard.schedule.schedule import Schedule

PlaceReason = Literal[
    "pinned",
    "replaces",
    "first_plan",
    "shared",
    "placed",
    "loading",
    "returned",
    "solved",
    "chosen",
    "propagated",
    "replicated",
]
"""What decided the spec of an argument or a result: the user; the argument that it replaces; the step's first plan; the
plan of another step, given as ``like=``; where it is already; what loading it takes; the result that may come back as
it, or the argument that it may come back as; the solver; the search; propagation; nothing, so it is whole on every
device.
"""

ConstraintReason = Literal[
    "pinned",
    "product",
    "resharded",
    "operand",
    "before_operand",
    "as_computed",
    "carried",
    "guarded_operand",
    "guarded_result",
]
"""Why an intermediate is constrained: the user pinned it; it is a product's result; it is a result that is resharded;
an operand that is resharded, or the value before that; a result before it is resharded; it enters or leaves a region;
it is an operand or a result of an operation that XLA partitions wrongly by itself."""


@dataclass(frozen=True)
class HeldValue:
    """A value of the forward part that may be held for the backward part, or made again there, in all layers."""

    name: str
    """As `autoshard.jit`'s ``recompute`` takes it."""
    source: str
    """``file:line`` of the user's code."""
    layers: int
    """That compute it."""
    held: int
    """Layers of which the backward part reads it as the forward part made it, from the device's memory."""
    on_host: int
    """Layers of which it is in the host's memory meanwhile."""
    again: int
    """Layers in which the backward part makes it again; in others it needs it neither way."""
    bytes: int
    """Per device, in one layer."""
    seconds: float
    """To make it again in one layer, from what it is computed from."""


@dataclass(frozen=True)
class Place:
    """One flat argument or result and its spec."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    reason: PlaceReason = "replicated"
    sources: tuple[str, ...] = ()
    """The equations, with their source lines, that its splits were propagated from."""
    donated: bool = False
    replaces: str | None = None
    """Of a result: the path of the argument that it replaces at the next call."""
    memory_kind: MemoryKind = None
    """The memory that it is in; None: the device's."""
    offloaded: bool = False
    """Whether the plan put it there, and the step's function has it on the device."""
    stored: tuple[int, ...] | None = None
    """Its shape with the padding that it is stored with, which ``spec`` divides; None where it has none."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is in memory."""
        return self.shape if self.stored is None else self.stored

    @property
    def where(self) -> str:
        """Its spec and, unless that is the device's, its memory: ``[data, _] in pinned_host``."""
        return f"{self.spec} in {self.memory_kind}" if self.memory_kind else str(self.spec)


@dataclass(frozen=True)
class Constraint:
    """A sharding constraint on an intermediate of the lowered step.

    ``value`` is its number in the program's graph. ``node`` is the one equation whose operand or result is constrained,
    or None where the value is constrained for all that read it.
    """

    value: int
    spec: Spec
    op: str
    source: str
    shape: tuple[int, ...]
    reason: ConstraintReason
    node: int | None = None
    resharded_from: Spec | None = None
    """The spec that it has before, where that differs."""
    waypoints: tuple[Spec, ...] = ()
    """Intermediate specs to constrain first, where XLA would otherwise gather the whole value, or all at once."""
    ahead: bool = False
    """Whether the loop that reads it gathers it one iteration earlier (`autoshard.backend.gathers.rows_ahead`)."""

    def gathers(self, sizes: Mapping[str, int]) -> bool:
        """Whether a device has more of the value than before, on a mesh whose axes have these ``sizes``."""
        before = self.resharded_from
        return before is not None and self.spec.num_shards(sizes) < before.num_shards(sizes)

    @property
    def first(self) -> Spec:
        """The first spec that it is constrained to."""
        return (*self.waypoints, self.spec)[0]


@dataclass(frozen=True)
class Island:
    """An equation that runs in its local form: each device computes its part, with explicit collectives."""

    node: int
    axes: Axes
    """Mesh axes that split its local factor."""
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    """Of its results as computed; they may be partial."""
    reduced_specs: tuple[Spec, ...]
    """Of its results after partial values are all-reduced or reduce-scattered."""
    op: str
    source: str


@dataclass(frozen=True)
class DimSplit:
    """A dimension class (`autoshard.ir.dim_classes.DimClass`) and the mesh axes that split it."""

    name: str
    size: int
    axes: Axes


@dataclass(frozen=True)
class BatchDim:
    """A dimension of an argument that belongs to the batch (`autoshard.ir.batch`)."""

    path: str
    dim: int


@dataclass(frozen=True)
class Alternative:
    """A layout that was priced and not chosen."""

    text: str
    seconds: float
    peak: int
    """Bytes per device."""


@dataclass(frozen=True)
class Trial:
    """A layout that was compiled to choose from, and what the compiler reported; bytes are per device."""

    text: str
    predicted: float
    """Seconds of one call."""
    peak: int
    """Predicted bytes."""
    needed_bytes: int = 0
    available_bytes: int = 0
    """What the compiler has available, or the memory budget if that is less."""
    seconds: float | None = None
    """Of one call as the compiler ordered it, with what is computed beside collectives; None where it refused the
    layout."""
    serial: float | None = None
    """The same with no collective beside compute."""
    exact: bool = True
    """False where the trip count of some loop is unknown: it counts as one."""
    refusal: str = ""
    """Why the compiler refused it for another reason than memory."""
    chosen: bool = False

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory that it needs."""
        return not self.refusal and self.needed_bytes <= self.available_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """How the chain of layers of a step runs as a pipeline."""

    axis: str
    """The mesh axis of the stages."""
    stages: int
    microbatches: int
    order: str
    """Name of the schedule; empty of the user's own."""
    schedule: Schedule
    layers: tuple[int, ...]
    """Number of layers of each part of the model, counted from its input; a stage has as many parts as the schedule has
    chunks."""
    stored: bool
    """Whether arguments have a row for each layer, and a stage stores its own; else each layer has arguments of its
    own, which all stages store."""
    bubble: float
    """The share of the step, from 0 to 1, in which a stage is idle, on average."""
    ideal_bubble: float
    """That share as it is published for the schedule: of stages with equal parts, which send in no time."""
    seconds: tuple[float, ...]
    """In which each stage computes its operations, in one call."""
    bytes: tuple[int, ...]
    """Per device of each stage, at the peak."""
    profile: StepProfile | None = field(default=None, compare=False, repr=False)
    """Of one stage's devices if they ran all layers, one micro-batch at a time: what stages share."""
