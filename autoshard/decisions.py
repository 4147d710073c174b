"""decisions: what a plan holds: where a value lies, what is pinned inside, what runs in its local form, what lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.mesh import LogicalMesh
from autoshard.spec import Spec


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
        return -(-math.prod(self.shape) * bits // 8 // self.spec.shards(mesh.shape))


@dataclass(frozen=True)
class Pin:
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
    via: tuple[Spec, ...] = ()
    """What it is brought to on the way, where XLA cannot go all the way at once."""


@dataclass(frozen=True)
class Island:
    """An equation that runs in its local form: each device computes its part, with explicit collectives."""

    node: int
    axes: tuple[str, ...]
    """Mesh axes that split its local factor."""
    needs: tuple[Spec, ...]
    gives: tuple[Spec, ...]
    leaves: tuple[Spec, ...]
    """How its results lie once their terms are put together: as given, or scattered on the way."""
    op: str
    source: str


@dataclass(frozen=True)
class Alternative:
    """A layout that was weighed and lost."""

    text: str
    seconds: float
    peak: int
