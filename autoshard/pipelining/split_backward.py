"""The backward of a layer in two: the gradient of its input, which the layer before waits for; and of its weights.

What makes the gradient of the input is one part; the equations that only the rest needs are the other, and what they
read of the first is kept in between (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard import jaxpr as jx


@dataclass(frozen=True)
class SplitBackward:
    """A layer's backward as two jaxprs."""

    of_input: jx.Jaxpr
    """Takes what the backward takes: constants, carry, xs. Returns the carry, then ``kept``."""
    of_weights: jx.Jaxpr
    """Takes constants, xs and ``kept``. Returns the rest of what the backward returns."""
    kept: tuple[jx.Var, ...]


def split_backward(backward: jx.JaxprEqn) -> SplitBackward:
    """The two parts of the body of ``backward``, a scan over layers."""
    body, groups = jx.regions(backward)[0].body, jx.scan_groups(backward)
    assert groups is not None
    ends, rest = body.outvars[: groups.carry], body.outvars[groups.carry :]
    first = _needed(body, ends)
    second = _needed(body, rest) - first
    carry = body.invars[groups.consts : groups.consts + groups.carry]
    made = {*carry, *(v for e in first for v in e.outvars)}
    read = [*(a for e in body.eqns if e in second for a in e.invars), *rest]
    kept = tuple(dict.fromkeys(a for a in read if isinstance(a, jx.Var) and a in made))
    others = [v for v in body.invars if v not in carry]
    return SplitBackward(
        jx.with_eqns(body, [e for e in body.eqns if e in first], outvars=[*ends, *kept]),
        jx.with_eqns(body, [e for e in body.eqns if e in second], invars=[*others, *kept], outvars=rest),
        kept,
    )


def _needed(body: jx.Jaxpr, results: Iterable[jx.Atom]) -> set[jx.JaxprEqn]:
    """The equations that ``results`` are computed by."""
    wanted, found = {a for a in results if isinstance(a, jx.Var)}, set[jx.JaxprEqn]()
    for eqn in reversed(body.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.add(eqn)
            wanted.update(a for a in eqn.invars if isinstance(a, jx.Var))
    return found
