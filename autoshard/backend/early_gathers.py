"""Weights of a scan's first product, gathered one turn early.

XLA gathers beside products that do not depend on what is gathered. Of what the first product of a turn reads there is
none, as XLA moves nothing from one turn of a loop to another. So the scan carries these weights gathered, and each turn
gathers those of the next. In the last turn they are gathered in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard import jaxpr as jx

MIN_TURNS = 24
"""Turns of a scan: the gather in vain is one more than they are."""


@dataclass(frozen=True)
class EarlyGather:
    """A value in a scan's body that is made of one slice of what the scan iterates over."""

    aval: Any
    """Of the value."""
    operand: int
    """Of the scan: what is sliced."""
    steps: tuple[jx.JaxprEqn, ...]
    """From the slice to the value, each with one operand."""
    shardings: tuple[NamedSharding, ...]
    """Of the value before it is gathered, and after."""

    def __call__(self, stacked: Any, turn: Any) -> Any:
        """The value as gathered."""
        x = jax.lax.dynamic_index_in_dim(stacked, turn, keepdims=False)
        for eqn in self.steps:
            (x,) = jx.bind_equation(eqn, [x], eqn.params)
        for sharding in self.shardings:
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x


def steps_from_slice(body: jx.Jaxpr, var: jx.Var, first: int) -> tuple[int, tuple[jx.JaxprEqn, ...]] | None:
    """Of which input of a scan's body, not before the number ``first``, ``var`` is made, and how; None where anything
    else enters or there is more to compute than a cast or two."""
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    steps: list[jx.JaxprEqn] = []
    while eqn := made.get(var):
        if len(eqn.invars) != 1 or len(eqn.outvars) != 1 or jx.subjaxprs(eqn) or len(steps) > 3:
            return None
        steps.append(eqn)
        (read,) = eqn.invars
        if not isinstance(read, jx.Var):
            return None
        var = read
    position = next((i for i, v in enumerate(body.invars) if v is var), -1)
    return (position, tuple(reversed(steps))) if position >= first else None


def scan_with_early_gathers(eqn: jx.JaxprEqn, body: jx.Jaxpr, early: Sequence[EarlyGather]) -> Callable[..., list[Any]]:
    """The scan ``eqn`` as a function of its operands; the last inputs of ``body`` are the gathered values."""
    groups, run = jx.scan_groups(eqn), jx.as_fun(body)
    assert groups is not None
    split, turns, reverse = groups.consts + groups.carry, groups.length, groups.reverse

    def scan(*operands: Any) -> list[Any]:
        def gathered(turn: Any) -> list[Any]:
            return [gather(operands[gather.operand], turn) for gather in early]

        def turn(state: tuple[Any, list[Any], list[Any]], xs: list[Any]) -> tuple[Any, list[Any]]:
            number, ready, carry = state
            after = (number + (turns - 1 if reverse else 1)) % turns
            ahead = gathered(after)
            made = run(*operands[: groups.consts], *carry, *xs, *ready)
            return (after, ahead, made[: groups.carry]), made[groups.carry :]

        first = jnp.int32(turns - 1 if reverse else 0)
        start = (first, gathered(first), list(operands[groups.consts : split]))
        (_, _, last), ys = jax.lax.scan(turn, start, list(operands[split:]), length=turns, reverse=reverse)
        return [*last, *ys]

    return scan
