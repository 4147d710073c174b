"""Norms and their gradients, with fewer reads of the activations.

A batch, group or instance norm sums over more elements than a processor holds, and XLA sums what depends on another
sum in a sweep of its own.
Three rewrites make sums depend on each other less:

- the gradient of the mean is the sum of a gradient that depends on the gradient of the variance, times values whose sum
  is zero: those are left out, and one sweep gives both gradients (`gradient_sums`);
- the variance is the mean of squares of differences from the mean: one sweep gives both, of differences from the mean
  of a strip (`variances`);
- groups of channels make a shape of their own, and XLA writes what it would compute where it is read, were it not for
  the reshape: elementwise operations run in the shape without groups (`group_shapes`).

And the gradient of a norm over channels is written once where a depthwise convolution reads it (`written_gradients`).

Results are those of the step as it is written up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.passes.norms.gradient_sums import independent_sums
from autoshard.passes.norms.group_shapes import without_groups
from autoshard.passes.norms.shared_sums import shared_sums
from autoshard.passes.norms.variances import one_sweep_variances
from autoshard.passes.norms.written_gradients import written_gradients
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class Norms(Pass):
    """Rewrites norms so that activations are read and computed fewer times."""

    name: ClassVar[str] = "norms"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr, program.rules, [])
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        if before is after:
            return "no norm is rewritten"
        notes: list[tuple[str, str]] = []
        _rewritten(before.jaxpr, before.rules, notes)
        found: dict[str, Counter[str]] = {}
        for what, where in notes:
            found.setdefault(what, Counter())[where or "unknown line"] += 1
        return "; ".join(f"{lines.total()} {what} ({_lines(lines)})" for what, lines in found.items())


def _lines(lines: Counter[str]) -> str:
    return ", ".join(f"{where}" + (f", {n} times" if n > 1 else "") for where, n in sorted(lines.items()))


def _rewritten(jaxpr: jx.Jaxpr, rules: Rules, notes: list[tuple[str, str]]) -> jx.Jaxpr:
    """``jaxpr`` with its norms rewritten, at every depth; the same object where there are none.

    Args:
      notes: what is rewritten is added here, each with its source line.
    """
    eqns = [jx.map_bodies(e, lambda body: _rewritten(body, rules, notes)) for e in jaxpr.eqns]
    if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jx.with_eqns(jaxpr, eqns)
    jaxpr = _noted("gradients of means no longer wait for those of variances", independent_sums(jaxpr), jaxpr, notes)
    jaxpr = _noted("variances computed in the sweep of the mean", one_sweep_variances(jaxpr), jaxpr, notes)
    jaxpr = _noted("sums over groups taken in the shape without groups", without_groups(jaxpr, rules), jaxpr, notes)
    jaxpr = _noted("sums of the same products taken once", shared_sums(jaxpr), jaxpr, notes)
    return _noted(
        "gradients written once before a depthwise convolution", written_gradients(jaxpr, rules), jaxpr, notes
    )


def _noted(
    what: str,
    made: tuple[jx.Jaxpr, Iterable[jx.JaxprEqn]],
    before: jx.Jaxpr,
    notes: list[tuple[str, str]],
) -> jx.Jaxpr:
    after, eqns = made
    notes += [(what, jx.source(e)) for e in eqns]
    return before if after is before else jx.eliminate_dead_code(after)
