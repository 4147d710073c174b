"""Masks that JAX broadcasts before a loop over layers, as it does with what no iteration changes, broadcast in it.

In the loop they would be read whole, of all heads; so attentions read them as the program made them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx


def broadcast_in_loops(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` with its scans, at every depth, broadcasting masks that are the same in each iteration; itself where
    there are none."""
    made: dict[jx.Var, jx.JaxprEqn] = {}
    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        after = jx.map_bodies(_with_broadcasts(eqn, made), broadcast_in_loops)
        eqns.append(after)
        if eqn.primitive is _prims.broadcast_in_dim_p and _is_widened_mask(eqn):
            made[eqn.outvars[0]] = eqn
    return jaxpr if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)) else jx.with_eqns(jaxpr, eqns)


def _is_widened_mask(eqn: jx.JaxprEqn) -> bool:
    (operand, *sizes), result = eqn.invars, jx.aval(eqn.outvars[0])
    if sizes or not isinstance(operand, jx.Var) or result.dtype != np.bool_:
        return False
    return 0 < jx.aval(operand).size < result.size


def _with_broadcasts(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> jx.JaxprEqn:
    """The scan ``eqn`` with the operands of those of its constants that ``made`` has; any other as it is."""
    groups = jx.scan_groups(eqn)
    if groups is None:
        return eqn
    body, operands = eqn.params["jaxpr"], [*eqn.invars]
    inputs, begins = [*body.invars], list[jx.JaxprEqn]()
    for n in range(groups.consts):
        constant = operands[n]
        while isinstance(constant, jx.Var) and (broadcast := made.get(constant)) is not None:
            constant = broadcast.invars[0]
            assert isinstance(constant, jx.Var)
            narrow = jx.new_var(constant)
            begins.insert(0, broadcast.replace(invars=[narrow], outvars=[inputs[n]]))
            operands[n], inputs[n] = constant, narrow
    if not begins:
        return eqn
    return jx.with_bodies(eqn, [body.replace(invars=inputs, eqns=[*begins, *body.eqns])]).replace(invars=operands)
