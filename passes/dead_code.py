"""Dead code elimination: removes equations that no result and no effect of the step depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class DeadCode(Pass):
    """Removes unused equations, at every depth; values, inputs and effects stay as they are."""

    name: ClassVar[str] = "dead_code"

    def __call__(self, program: Program) -> Program:
        return program.with_jaxpr(jx.eliminate_dead_code(program.jaxpr))

    def change(self, before: Program, after: Program) -> str:
        return "equations removed that no result and no effect depends on"
