"""shapes: the meshes that so many devices can be seen as, for planning to choose among."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

OUTER_AXIS = "pod"
"""The axis across slices or nodes."""
INNER_AXES = ("data", "model")
"""The axes within one."""


def mesh_shapes(devices: int, groups: int = 1, sides: Sequence[int] | None = None) -> list[dict[str, int]]:
    """Every mesh of one or two axes of more than one device; several groups of devices are an axis of their own.

    Args:
      devices: how many there are in all.
      groups: slices or nodes that they stand in, joined by a slower network.
      sides: of a group's own network; an axis then takes whole sides, so that its ring is one of wires.
    """
    each = devices // groups
    outer = {OUTER_AXIS: groups} if groups > 1 else {}
    if sides is None:
        second = [n for n in range(1, each) if each % n == 0]
    else:
        cores = each // math.prod(sides)
        parts = [n for n in (*sides, cores) if n > 1]
        taken = (c for k in range(len(parts)) for c in itertools.combinations(parts, k))
        second = sorted({math.prod(c) for c in taken})
    first, other = INNER_AXES
    within = [{first: each // n, other: n} if n > 1 else {first: each} for n in second or [1]]
    return [outer | shape for shape in within]
