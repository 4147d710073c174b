"""traced: a planned program as `Step.trace` gives it, with what `jax.stages.Traced` offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.ir.program import Program


@dataclass(frozen=True)
class Traced(Program):
    """A `Program` that can be lowered. The trees that it gives have the shape of the step's arguments and result."""

    lower: Callable[[], jax.stages.Lowered] = dataclasses.field(kw_only=True, compare=False, repr=False)
    """The step lowered as planned; ``.compile()`` makes the executable."""

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self.name

    @property
    def args_info(self) -> Any:
        """Shape, dtype and donation of each argument: ``(args, kwargs)``, static ones left out."""
        return self.lower().args_info

    @property
    def in_avals(self) -> Any:
        """`jax.ShapeDtypeStruct`s of ``(args, kwargs)``, static arguments left out."""
        return self.in_tree.unflatten([leaf.aval for leaf in self.inputs])

    @property
    def out_info(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the result."""
        return self.out_tree.unflatten([leaf.aval for leaf in self.outputs])

    @property
    def out_avals(self) -> Any:
        """As `out_info`."""
        return self.out_info

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The flat arguments that are donated."""
        return tuple(i for i, leaf in enumerate(self.inputs) if leaf.donated)

    @property
    def effects(self) -> frozenset[Any]:
        """What the step does beside its result."""
        return frozenset(self.jaxpr.effects)


def traced(program: Program, lower: Callable[[], jax.stages.Lowered]) -> Traced:
    """``program``, to be lowered by ``lower``."""
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    return Traced(**fields, lower=lower)
