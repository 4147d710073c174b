"""Masks that JAX makes before a loop over layers, as it does with what no iteration changes, made in it.

In the loop they would be read whole, of all heads; so attentions read them as the program made them before they were
broadcast. For a kernel that takes segment ids, masks of segments are made from these where they are read, in loops and
under `jax.checkpoint`.
"""

from __future__ import annotations

import functools
import operator
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.passes.attention.facts import Facts
from autoshard.passes.attention.masks import Mask, Segments


def masks_in_loops(jaxpr: jx.Jaxpr, segments: Rules | None) -> jx.Jaxpr:
    """``jaxpr`` with its scans, at every depth, broadcasting masks that are the same in each iteration; itself where
    there are none.

    Args:
      segments: the rules, where masks of segments are made in loops and under `jax.checkpoint` too; else None.
    """
    facts = None if segments is None else Facts(jaxpr, segments)
    broadcasts: dict[jx.Var, jx.JaxprEqn] = {}

    def source(mask: jx.Var, is_scan: bool) -> _Source | None:
        if facts is not None and (found := _segments_source(facts, mask)):
            return found
        return _broadcast_source(broadcasts[mask]) if is_scan and mask in broadcasts else None

    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns.append(jx.map_bodies(_with_masks(eqn, source), lambda body: masks_in_loops(body, segments)))
        if eqn.primitive is _prims.broadcast_in_dim_p and _is_widened_mask(eqn):
            broadcasts[eqn.outvars[0]] = eqn
    return jaxpr if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)) else jx.with_eqns(jaxpr, eqns)


@dataclass(frozen=True)
class _Source:
    """What a mask is made of."""

    operand: jx.Var
    eqns: Callable[[jx.Var, jx.Var], list[jx.JaxprEqn]]
    """(operand, mask) -> the equations that make the mask of the operand."""


def _is_widened_mask(eqn: jx.JaxprEqn) -> bool:
    (operand, *sizes), result = eqn.invars, jx.aval(eqn.outvars[0])
    if sizes or not isinstance(operand, jx.Var) or result.dtype != np.bool_:
        return False
    return 0 < jx.aval(operand).size < result.size


def _broadcast_source(eqn: jx.JaxprEqn) -> _Source:
    (operand,) = eqn.invars
    assert isinstance(operand, jx.Var)
    return _Source(operand, lambda narrow, mask: [eqn.replace(invars=[narrow], outvars=[mask])])


def _segments_source(facts: Facts, mask: jx.Var) -> _Source | None:
    """The segment ids that ``mask`` is made of; None where it is another mask."""
    eqn, shape = facts.defs.get(mask), jx.aval(mask).shape
    if eqn is None or jx.aval(mask).dtype != np.bool_ or len(shape) > len(string.ascii_letters):
        return None
    for kept in (True, False):
        found = facts.mask(mask, tuple(string.ascii_letters[: len(shape)]), kept) or ()
        ids = {m.ids for m in found if isinstance(m, Segments)}
        if len(ids) == 1:
            return _Source(ids.pop(), functools.partial(_eqns_of_mask, found, kept, eqn))
    return None


def _eqns_of_mask(masks: Mask, kept: bool, eqn: jx.JaxprEqn, ids: jx.Var, mask: jx.Var) -> list[jx.JaxprEqn]:
    """The equations that make of ``ids`` the ``mask`` that ``eqn`` is of others."""
    make = functools.partial(_mask_of_ids, masks, kept, jx.aval(mask).shape)
    return jx.splice(make, eqn.replace(outvars=[mask]), [ids])


def _mask_of_ids(masks: Mask, kept: bool, shape: tuple[int, ...], ids: Any) -> Any:
    """Booleans of this shape, whose dimensions are the letters of the alphabet, that are ``kept`` where all ``masks``
    are True."""
    letters = string.ascii_letters[: len(shape)]
    used = {c for m in masks for c in (m.row, m.col, *(m.letters if isinstance(m, Segments) else ()))}
    narrow = [n if c in used else 1 for c, n in zip(letters, shape, strict=True)]
    limits: list[Any] = []
    for m in masks:
        if isinstance(m, Segments):
            dims = [[letters.index(c) for c in x.letters if c is not None] for x in (m, m.transposed())]
            own = lax.squeeze(ids, [d for d, c in enumerate(m.letters) if c is None])
            sides = [
                lax.broadcast_in_dim(jnp.transpose(own, np.argsort(at).tolist()), narrow, sorted(at)) for at in dims
            ]
            limits.append(operator.eq(*sides))
        else:
            row, col = (lax.broadcasted_iota("int32", narrow, letters.index(c)) for c in (m.row, m.col))
            limits += [col - row >= m.low] if m.low is not None else []
            limits += [col - row <= m.high] if m.high is not None else []
    found = functools.reduce(operator.and_, limits)
    return lax.broadcast_in_dim(found if kept else ~found, shape, range(len(shape)))


def _with_masks(eqn: jx.JaxprEqn, source: Callable[[jx.Var, bool], _Source | None]) -> jx.JaxprEqn:
    """A scan, or what is under `jax.checkpoint`, given the ``source`` of its constant masks; any other as it is."""
    groups = jx.scan_groups(eqn)
    if groups is None and eqn.primitive is not _prims.remat_p:
        return eqn
    body, operands = eqn.params["jaxpr"], [*eqn.invars]
    inputs, begins = [*body.invars], list[jx.JaxprEqn]()
    for n in range(len(operands) if groups is None else groups.consts):
        constant = operands[n]
        while isinstance(constant, jx.Var) and (made := source(constant, groups is not None)) is not None:
            constant = made.operand
            narrow = jx.new_var(constant)
            begins[:0] = made.eqns(narrow, inputs[n])
            operands[n], inputs[n] = constant, narrow
    if not begins:
        return eqn
    return jx.with_bodies(eqn, [body.replace(invars=inputs, eqns=[*begins, *body.eqns])]).replace(invars=operands)
