"""decisions: what a plan holds: where a value lies, what is pinned inside, what runs in its local form, what lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh


@dataclass(frozen=True)
class Place:
    """One flat argument or result and its spec."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    why: str = ""
    donated: bool = False

    def bytes_on(self, mesh: LogicalMesh, bits: int) -> int:
        """Bytes on one device."""
        return -(-math.prod(self.shape) * bits // 8 // self.spec.num_shards(mesh.shape))


@dataclass(frozen=True)
class Constraint:
    """An intermediate that is pinned when the step is lowered.

    ``value`` is its number in the program's graph. ``node`` is the one equation that reads it so, or None when
    the value itself is pinned where it is made.
    """

    value: int
    spec: Spec
    op: str
    source: str
    shape: tuple[int, ...]
    why: str
    node: int | None = None
    waypoints: tuple[Spec, ...] = ()
    """What it is brought to on the way, where XLA cannot go all the way at once."""


@dataclass(frozen=True)
class Island:
    """An equation that runs in its local form: each device computes its part, with explicit collectives."""

    node: int
    axes: tuple[str, ...]
    """Mesh axes that split its local factor."""
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    reduced_specs: tuple[Spec, ...]
    """How its results lie once their terms are put together: as given, or scattered on the way."""
    op: str
    source: str


@dataclass(frozen=True)
class Alternative:
    """A layout that was weighed and lost."""

    text: str
    seconds: float
    peak: int


@dataclass(frozen=True)
class Trial:
    """A layout that was compiled to be chosen from, and what its compiler said; bytes are per device."""

    text: str
    predicted: float
    """Seconds of one call."""
    peak: int
    """Predicted bytes."""
    required: int = 0
    available: int = 0
    """Bytes that there are, by the compiler's account, or what the user allows if that is less."""
    seconds: float | None = None
    """Of one call by the compiler's account, nothing hidden; None where it refused the layout."""
    overlapped: float | None = None
    """The same where all is hidden that can be."""
    exact: bool = True
    """False where some loop's trips are not known: they count as one."""
    reason: str = ""
    """Why it could not be compiled, where that is for another reason than memory."""
    chosen: bool = False

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory that it needs."""
        return not self.reason and self.required <= self.available
