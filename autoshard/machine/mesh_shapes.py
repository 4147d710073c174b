"""Candidate mesh shapes: the factorings of a device count into named axes, among which planning chooses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

OUTER_AXIS = "pod"
"""Name of the axis across slices or nodes."""
INNER_AXES = ("data", "model")
"""Names of the axes within a slice or node."""


def mesh_shapes(devices: int, groups: int = 1, chip_grid: Sequence[int] | None = None) -> list[dict[str, int]]:
    """Every mesh with one or two axes within a group of devices, and an outer axis across groups if there are several.

    Args:
      devices: number of devices in all groups.
      groups: number of slices or nodes, joined by a slower network.
      chip_grid: shape of a group's own network, if it has one; an axis then covers whole grid dimensions, so that its
        ring runs along physical links.
    """
    each = devices // groups
    outer = {OUTER_AXIS: groups} if groups > 1 else {}
    if chip_grid is None:
        small = [n for n in range(1, math.isqrt(each) + 1) if each % n == 0]
        second = sorted({*small, *(each // n for n in small)} - {each})
    else:
        devices_per_chip = each // math.prod(chip_grid)
        sides = [n for n in (*chip_grid, devices_per_chip) if n > 1]
        subsets = (c for k in range(len(sides)) for c in itertools.combinations(sides, k))
        second = sorted({math.prod(c) for c in subsets})
    first, other = INNER_AXES
    within = [{first: each // n, other: n} if n > 1 else {first: each} for n in second or [1]]
    return [outer | shape for shape in within]
