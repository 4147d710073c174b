"""What of the reshards of a node's operands and results can be hidden, and how long a device waits for each.

What moves over links of the slowest kind has no time beside products where weights and gradients need these links
(`OpKind.on_fast_links`). Rings of one product share the time that it takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autoshard.cost.overlap.products import product_seconds
from autoshard.cost.overlap.rings import gathered_dims, ring_reshards
from autoshard.cost.overlap.seconds_waited import ALL, NOTHING, Hideable, seconds_waited
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh

NOWHERE, PARTIAL = -1, -2
"""In the place of a dimension (`slow_placement`): an axis shards none and sums over it are not partial, or are."""


class Resharded(NamedTuple):
    """One operand or result of a node."""

    position: int
    before: Spec
    after: Spec
    seconds: float


def seconds_waited_by(kind: OpKind, moved: Sequence[Resharded], mesh: LogicalMesh) -> list[float]:
    """`seconds_waited` of each of what a node reshards: all of its rings together run beside it once."""
    waited = [
        float(seconds_waited(m.seconds, kind, m.position, mesh, hideable(kind, m.position, m.before, m.after, mesh)))
        for m in moved
    ]
    hidden = [m.seconds - w if m.position in kind.in_rings else 0.0 for m, w in zip(moved, waited, strict=True)]
    excess = sum(hidden) - product_seconds(kind, mesh) if any(hidden) else 0.0
    return [w + excess * h / sum(hidden) for w, h in zip(waited, hidden, strict=True)] if excess > 0 else waited


def hideable(kind: OpKind, position: int, before: Spec, after: Spec, mesh: LogicalMesh) -> Hideable:
    """What of the seconds of a reshard of the operand or result at this position can be hidden: what runs in a ring, or
    all of it, but over slow links where only others count."""
    if position in kind.in_rings:
        rings = ring_reshards(before, gathered_dims(kind, position), math.prod(kind.shapes[-1]), mesh)
        return rings.get(after, NOTHING)
    slow = position in kind.on_fast_links and takes_slow_link(slow_placement(before, mesh), slow_placement(after, mesh))
    return NOTHING if slow else ALL


def takes_slow_link(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshard moves data over links of the slowest kind, by the `slow_placement` before and after it."""
    return any(b not in (NOWHERE, a) for b, a in zip(before, after, strict=True))


@functools.lru_cache(maxsize=1 << 14)
def slow_placement(spec: Spec, mesh: LogicalMesh) -> tuple[int, ...]:
    """For each of `LogicalMesh.slow_axes`, the dimension that it shards, `PARTIAL`, or `NOWHERE`."""
    where = {a: d for d, axes in enumerate(spec.dims) for a in axes} | {a: PARTIAL for a, _ in spec.partial}
    return tuple([where.get(a, NOWHERE) for a in mesh.slow_axes])
