"""Keeps carried state in the host's memory: the optimizer's comes in where the update reads it, and goes out again
after; parameters of layers come in where a loop over layers reads them, too.

Between steps, and until it is read, the state takes no device memory. The update of an array that a loop over layers
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
from autoshard.passes.offload.parameters import read_by_layer
from autoshard.passes.offload.rewrite import offload_carried
from autoshard.transforms.pipeline import Pass
from autoshard.units import size_text

WHAT = ("optimizer", "state")
SMALLEST = 1 / 1000
"""Arrays of less than this share of the largest stay on the device: moving them saves nothing."""


@dataclass(frozen=True)
class Offload(Pass):
    """Keeps carried arrays of a training step in the host's memory."""

    name: ClassVar[str] = "offload"
    saves_memory: ClassVar[bool] = True
    moves_state: ClassVar[bool] = True

    what: str = "optimizer"
    """``"optimizer"``: what is carried from call to call and is no parameter. ``"state"``: parameters too that, but for
    their update, loops over layers alone read."""

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """Of ``"optimizer"`` or ``"state"``.

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
        pairs, parameters = self.offloadable(program)
        if not pairs:
            return program
        inputs, outputs = list(program.inputs), list(program.outputs)
        for i, o in pairs.items():
            inputs[i], outputs[o] = _on_host(inputs[i]), _on_host(outputs[o])
        jaxpr = offload_carried(program, program.jaxpr, pairs, parameters)
        unpadded = program.unpadded_jaxpr and offload_carried(program, program.unpadded_jaxpr, pairs, parameters)
        return replace(program, jaxpr=jaxpr, unpadded_jaxpr=unpadded, inputs=tuple(inputs), outputs=tuple(outputs))

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """This pass, where it changes ``program``."""
        return (self,) if self.offloadable(program)[0] else ()

    def change(self, before: Program, after: Program) -> str:
        if before.jaxpr is after.jaxpr:
            return f"the step carries no {self._text} that could be offloaded"
        moved = [b for a, b in zip(before.inputs, after.inputs, strict=True) if b.offloaded and not a.offloaded]
        return f"{len(moved)} arrays of {self._text}, {size_text(sum(x.bytes for x in moved))}, in the host's memory"

    @property
    def _text(self) -> str:
        return "optimizer state" if self.what == "optimizer" else "optimizer state and parameters"

    def offloadable(self, program: Program) -> tuple[dict[int, int], frozenset[int]]:
        """The flat arguments of ``program`` that go to the host, each with the flat result that replaces it, and which
        of them are parameters: not those of which the user demands where they are."""
        roles, invars = argument_roles(build_graph(program)), program.jaxpr.invars
        free: dict[int, int] = {}
        for i, o in program.carries:
            ends = program.inputs[i], program.outputs[o]
            open_ = not any(x.memory_pinned or x.memory_kind is not None for x in ends)
            computed = isinstance(program.jaxpr.outvars[o], jx.Var) and jx.is_array(invars[i])
            if open_ and computed and program.inputs[i].shape:
                free[i] = o
        parameters = frozenset(free).intersection(roles.parameters if self.what == "state" else ())
        by_layer = read_by_layer(program.jaxpr, [invars[i] for i in parameters]) if parameters else set[jx.Var]()
        parameters = frozenset(i for i in parameters if invars[i] in by_layer)
        found = {i: o for i, o in free.items() if i in roles.optimizer or i in parameters}
        largest = max((program.inputs[i].bytes for i in found), default=0)
        found = {i: o for i, o in found.items() if program.inputs[i].bytes >= largest * SMALLEST}
        return found, parameters.intersection(found)


def _on_host(leaf: Leaf) -> Leaf:
    return replace(leaf, memory_kind="pinned_host", offloaded=True)
