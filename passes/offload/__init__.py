"""Keeps the optimizer's state in the host's memory: it comes in where the update reads it, and goes out again after.

Between steps, and until the update, the state takes no device memory. The update of an array that a loop over layers
reads is itself a loop over the layers (`layers`): XLA copies a layer's state while it updates the layer before, in
place, so that no more than a few layers of it are on the device at a time. Other arrays come in whole, one update after
the other. The step's function stays as it is; only its arguments and results are in another memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.build_graph import build_graph
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.program import Leaf, Program
from autoshard.passes.offload.rewrite import offload_carried
from autoshard.transforms.pipeline import Pass
from autoshard.units import size_text

WHAT = ("optimizer",)
SMALLEST = 1 / 1000
"""Arrays of less than this share of the largest stay on the device: moving them saves nothing."""


@dataclass(frozen=True)
class Offload(Pass):
    """Keeps carried arrays of a training step in the host's memory."""

    name: ClassVar[str] = "offload"
    saves_memory: ClassVar[bool] = True
    moves_state: ClassVar[bool] = True

    what: str = "optimizer"
    """The optimizer's state: what is carried from call to call and is no parameter."""

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """Of ``"optimizer"``.

        Raises:
          PassError: what cannot be offloaded.
        """
        if option not in WHAT:
            near = nearest(option, WHAT) if option else "; did you mean 'offload:optimizer'?"
            raise PassError(f"the pass 'offload' does not know what to offload from {option!r}{near}")
        return cls(option)

    def __call__(self, program: Program) -> Program:
        if program.pipeline is not None:
            raise PassError(
                f"{self}: not with a pipeline yet (pipeline={program.pipeline.axis!r}); leave one of them out"
            )
        pairs = offloadable(program)
        if not pairs:
            return program
        inputs, outputs = list(program.inputs), list(program.outputs)
        for i, o in pairs.items():
            inputs[i], outputs[o] = _on_host(inputs[i]), _on_host(outputs[o])
        jaxpr = offload_carried(program, program.jaxpr, pairs)
        unpadded = program.unpadded_jaxpr and offload_carried(program, program.unpadded_jaxpr, pairs)
        return replace(program, jaxpr=jaxpr, unpadded_jaxpr=unpadded, inputs=tuple(inputs), outputs=tuple(outputs))

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """This pass, where it changes ``program``."""
        return (self,) if offloadable(program) else ()

    def change(self, before: Program, after: Program) -> str:
        if before.jaxpr is after.jaxpr:
            return "the step carries no optimizer state that could be offloaded"
        moved = [b for a, b in zip(before.inputs, after.inputs, strict=True) if b.offloaded and not a.offloaded]
        return f"{len(moved)} arrays of optimizer state, {size_text(sum(x.bytes for x in moved))}, in the host's memory"


def offloadable(program: Program) -> dict[int, int]:
    """The flat arguments of ``program`` that are optimizer state and may be on the host, each with the flat result
    that replaces it: not those of which the user demands where they are."""
    roles = argument_roles(build_graph(program))
    found: dict[int, int] = {}
    for i, o in program.carries:
        ends = program.inputs[i], program.outputs[o]
        free = not any(x.memory_pinned or x.memory_kind is not None for x in ends)
        computed = isinstance(program.jaxpr.outvars[o], jx.Var) and jx.is_array(program.jaxpr.invars[i])
        if i in roles.optimizer and free and computed:
            found[i] = o
    largest = max((program.inputs[i].bytes for i in found), default=0)
    return {i: o for i, o in found.items() if program.inputs[i].bytes >= largest * SMALLEST and program.inputs[i].shape}


def _on_host(leaf: Leaf) -> Leaf:
    return replace(leaf, memory_kind="pinned_host", offloaded=True)
