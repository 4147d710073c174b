"""The planned program that `Step.trace` returns, with the interface of `jax.stages.Traced`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.ir.program import Program


@dataclass(frozen=True)
class Traced(Program):
    """A `Program` that can be lowered. Its pytrees have the structure of the step's arguments and result."""

    lower: Callable[..., jax.stages.Lowered] = dataclasses.field(kw_only=True, compare=False, repr=False)
    """Lowers the step with the planned shardings; takes the options of `jax.stages.Traced.lower`."""

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self.name

    @property
    def args_info(self) -> Any:
        """Shape, dtype and donation of each argument: ``(args, kwargs)`` without static ones."""
        return self.lower().args_info

    @property
    def in_avals(self) -> Any:
        """`jax.ShapeDtypeStruct`s of ``(args, kwargs)`` without static ones."""
        return self.in_tree.unflatten([leaf.true_aval for leaf in self.inputs])

    @property
    def out_info(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the result."""
        return self.out_tree.unflatten([leaf.true_aval for leaf in self.outputs])

    @property
    def out_avals(self) -> Any:
        """The same as `out_info`."""
        return self.out_info

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the flat arguments that are donated."""
        return tuple(i for i, leaf in enumerate(self.inputs) if leaf.donated)

    @property
    def effects(self) -> frozenset[Any]:
        """The JAX effects of the step."""
        return frozenset(self.jaxpr.effects)


def traced(program: Program, lower: Callable[..., jax.stages.Lowered]) -> Traced:
    """``program`` as a `Traced` that ``lower`` lowers. Its jaxpr is without padding, of which derivatives would be NaN:
    `jax.export` takes derivatives of it.
    """
    program = program.with_jaxpr(program.unpadded_jaxpr or program.jaxpr)
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    return Traced(**fields, lower=lower)
