"""What kernels for attention read, as they read it best.

Heads of keys and values that are repeated are read once (`repeated_heads`), and the product that makes the output's
cotangent has its weight laid out by head (`weights_by_head`).

After ``recompute``: before it a backward loop reads arrays whose making is in the forward loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.passes.attention_operands.repeated_heads import RepeatedHeads
from autoshard.passes.attention_operands.weights_by_head import product_of_cotangent
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class AttentionOperands(Pass):
    """Gives attentions that run as a kernel their operands as the kernel reads them best."""

    name: ClassVar[str] = "attention_operands"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program, [])
        return program if after is program.jaxpr else program.with_jaxpr(after)

    def change(self, before: Program, after: Program) -> str:
        found: list[str] = []
        _rewritten(before, found)
        once, by_head = found.count(_ONCE), found.count(_BY_HEAD)
        return f"{once} attentions read repeated keys and values once, {by_head} weights laid out by head"


_ONCE, _BY_HEAD = "once", "by head"


def _rewritten(program: Program, found: list[str]) -> jx.Jaxpr:
    """The jaxpr of ``program`` with such operands, at every depth; itself where there are none.

    Args:
      found: `_ONCE` or `_BY_HEAD` is added for each that is changed.
    """
    if not program.mesh.hardware.attention_layouts:
        return program.jaxpr
    repeated, unit = RepeatedHeads(program.jaxpr), program.mesh.hardware.matrix_unit

    def rewritten(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
        made = {v: e for e in jaxpr.eqns for v in e.outvars}
        new: dict[jx.JaxprEqn, list[jx.JaxprEqn]] = {}
        for eqn in jaxpr.eqns:
            noted = repeated.noted(eqn)
            if noted is not eqn:
                found.append(_ONCE)
            else:
                noted = jx.map_bodies(eqn, rewritten)
            if noted is not eqn:
                new[eqn] = [noted]
            laid_out = product_of_cotangent(eqn, made, unit)
            if laid_out is not None and laid_out[0] not in new:
                product, new[product] = laid_out
                found.append(_BY_HEAD)
        return jx.with_eqns(jaxpr, [e for eqn in jaxpr.eqns for e in new.get(eqn, [eqn])]) if new else jaxpr

    return rewritten(program.jaxpr)
