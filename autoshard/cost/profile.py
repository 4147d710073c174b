"""StepProfile: the predicted step as data that can be drawn: what runs when, what is in memory, for which line.

It says of one layout what `Cost` and `Memory` sum up, and adds up to them. Its size is bounded whatever the program:
what has one kind and one spec is one row with a count, and what is too small for a row of its own is added up in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import CollectiveKind

MAX_MOMENTS = 512
MAX_SPANS = 1024
MAX_LINES = 256
MAX_MOVES = 200
MAX_LIVE = 64
MAX_ROWS = 1000
"""Most entries of `StepProfile.moments`, `spans`, `lines`, `moves`, `live` and `values`."""
MAX_NAMES = 4
"""Most names that an entry has of the arrays that it stands for."""

type BufferRole = Literal["residual", "temporary", "copy", "inside"]
"""A value that the forward part saves for the backward part; any other value of the step; a value in another spec than
its own; what an operation stores between its own steps."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is in memory while one node of the step executes, in bytes per device, beside the arguments."""

    seconds: float
    """From the start of the step to when the node begins."""
    residuals: int
    temporaries: int
    """All that is not a residual."""


@dataclass(frozen=True, slots=True)
class Span:
    """What runs for a while. One follows another: of a collective, what a device waits for."""

    seconds: float
    kind: Literal["compute"] | CollectiveKind
    axes: Axes
    """Mesh axes of a collective."""
    op: str
    """The operation that takes the longest in it, or that the collective is for."""
    source: str
    """``file:line`` of that operation, or empty."""
    count: int
    """Operations, or collectives, in it; those in a loop are counted once and take the time of all iterations."""


@dataclass(frozen=True, slots=True)
class LineCost:
    """What one line of the user's code costs; ``source`` is empty for what has none, and for the rest of the lines."""

    source: str
    compute: float
    """Seconds."""
    transfers: float
    """Seconds in collectives."""
    peak_bytes: int
    """Bytes per device, at the peak, of the buffers that the line's operations made."""


@dataclass(frozen=True, slots=True)
class Move:
    """Collectives of one kind: what moves, from which spec to which, for which operation."""

    kind: CollectiveKind
    axes: Axes
    bytes: int
    """Of one execution, as of `Collective`."""
    count: int
    """Executions per call."""
    seconds: float
    """Of all executions."""
    op: str
    """The operation that it is for; empty for a result of the step."""
    phase: str
    source: str
    names: tuple[str, ...]
    """The arguments, at most `MAX_NAMES`, that the moved arrays are, or are parts or casts of; ``new`` before a name:
    what replaces the argument."""
    arrays: int
    """How many arguments these are, with those that ``names`` leaves out."""
    shape: tuple[int, ...]
    before: Spec | None
    """The spec that the value has; None of a halo exchange, and of a collective inside a local form."""
    after: Spec | None
    of_result: bool
    """Whether the operation makes the array as ``before``; else it reads it as ``after``."""


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """Buffers of one type and spec that are live at the peak."""

    role: BufferRole
    op: str
    """The operation that made them, or reads the copies."""
    source: str
    names: tuple[str, ...]
    """As of `Move`."""
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    """Of the values."""
    count: int
    bytes: int
    """Per device, of all of them."""


@dataclass(frozen=True, slots=True)
class ValueRow:
    """Values of one type and spec inside the step."""

    op: str
    """The operation that makes them."""
    phase: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    count: int
    bytes: int
    """Per device, of one of them, whether or not it is ever a buffer."""


@dataclass(frozen=True, slots=True, repr=False)
class StepProfile:
    """One predicted call of a step: time, memory, lines, moves, values."""

    moments: tuple[Moment, ...]
    """In order. Of neighbouring nodes too many to list, that with the most in memory."""
    peak: int
    """Index of the moment of the peak."""
    on_chip: int
    """Bytes of ``live`` that are in on-chip memory, and so not in ``moments``."""
    spans: tuple[Span, ...]
    """In order; their seconds add up to those of the step."""
    lines: tuple[LineCost, ...]
    """The costliest first; they add up to the step."""
    moves: tuple[Move, ...]
    """The costliest first."""
    live: tuple[LiveGroup, ...]
    """The largest first."""
    values: tuple[ValueRow, ...]
    """Those that take most bytes first."""
    values_left_out: int
    """How many values are in no row."""

    @property
    def seconds(self) -> float:
        """Of the step: what its lines add up to."""
        return sum(x.compute + x.transfers for x in self.lines)

    def __repr__(self) -> str:
        return f"<StepProfile of {len(self.moments)} moments, {len(self.spans)} spans, {len(self.lines)} lines>"
