"""Loops accumulate one partial sum per device part, which are all-reduced once after the loop, not in every iteration.

Gradient accumulation computes each micro-batch's gradient as a sum over its batch. With a sharded batch that sum is
partial, and would be all-reduced in every iteration. Here the summed dimension is split into as many parts as there are
devices, and the loop accumulates an array with one sum for each part, in a new leading dimension; these are added after
the loop. Sharded along that dimension, each stays on its device until then.

The same goes for any loop carry that is only added to: the gradient of a weight that every iteration of a recurrence,
or every layer, reads. Results change by rounding only. `autoshard.transforms.per_part_sums` is the rewrite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program
from autoshard.transforms.per_part_sums import with_per_part_sums
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class Accumulate(Pass):
    """Lets loops accumulate partial sums per device part along some mesh axes, and adds them after the loop."""

    name: ClassVar[str] = "accumulate"
    keeps_layers: ClassVar[bool] = True

    axes: str = ""
    """Mesh axes joined by ``+``; "" means all axes of the mesh."""

    def __call__(self, program: Program) -> Program:
        sizes = program.mesh.shape
        names = tuple(self.axes.split("+")) if self.axes else program.mesh.axis_names
        for axis in names:
            if axis not in sizes:
                raise PassError(f"{self}: the mesh {program.mesh} has no axis {axis!r}{nearest(axis, sizes)}")
        parts = math.prod(sizes[a] for a in names)
        after = with_per_part_sums(program.jaxpr, parts, program.rules) if parts > 1 else program.jaxpr
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        if before.jaxpr is after.jaxpr:
            return "no loop carry that is only accumulated"
        return "loops accumulate partial sums per device part, added after the loop"

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """One over the axes that split the batch; without a plan, one for each number of devices that some of the
        mesh's axes have together."""
        if with_per_part_sums(program.jaxpr, 1, program.rules) is program.jaxpr:
            return ()
        axes = program.mesh.nontrivial_axes
        subsets = (
            [tuple(batch_axes)]
            if batch_axes
            else [a for n in range(len(axes), 0, -1) for a in itertools.combinations(axes, n)]
        )
        passes = [Accumulate("+".join(a)) for a in {program.mesh.axes_size(a): a for a in subsets}.values()]
        return tuple(p for p in passes if p(program) is not program)

    def __str__(self) -> str:
        return f"{self.name}:{self.axes}" if self.axes else self.name
