"""Accumulate: what a loop only adds up is reduced once, after it.

A step that adds up gradients over micro-batches makes each as a sum over the batch. Split over devices, the batch
leaves that sum partial, and it would be put together in every turn. Here the dimension summed over is dealt in as many
parts as devices, and the loop adds up an array with a term for each part, in a new leading dimension; its terms are
added after the loop. Split as the batch is, they stay where they are made until then.

The same goes for whatever a loop carries round and only adds to: the gradient of a weight that every turn of a
recurrence reads, or every layer. Numbers change by how sums are rounded, no more. How is in `autoshard.passes.accumulate.per_part_sums`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program
from autoshard.passes.accumulate.per_part_sums import in_terms
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class Accumulate(Pass):
    """Keeps what loops add up in terms, one for each part along some mesh axes, and adds the terms after the loop."""

    name: ClassVar[str] = "accumulate"

    axes: str = ""
    """Mesh axes with ``+`` between them; none: all of the mesh."""

    def __call__(self, program: Program) -> Program:
        sizes = program.mesh.shape
        names = tuple(self.axes.split("+")) if self.axes else program.mesh.axis_names
        for axis in names:
            if axis not in sizes:
                raise PassError(f"{self}: the mesh {program.mesh} has no axis {axis!r}{nearest(axis, sizes)}")
        parts = math.prod(sizes[a] for a in names)
        after = in_terms(program.jaxpr, parts, program.rules) if parts > 1 else program.jaxpr
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        return "sums of loops kept in terms" if before.jaxpr is not after.jaxpr else "no loop only adds up"

    def variants(self, program: Program) -> tuple[Pass, ...]:
        """One for each number of parts that some of the mesh's axes make."""
        if in_terms(program.jaxpr, 1, program.rules) is program.jaxpr:
            return ()
        axes = program.mesh.nontrivial_axes
        some = [a for n in range(len(axes), 0, -1) for a in itertools.combinations(axes, n)]
        forms = [Accumulate("+".join(a)) for a in {program.mesh.axes_size(a): a for a in some}.values()]
        return tuple(f for f in forms if f(program) is not program)

    def __str__(self) -> str:
        return f"{self.name}:{self.axes}" if self.axes else self.name
