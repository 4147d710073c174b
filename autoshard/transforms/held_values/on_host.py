"""Residuals that wait in the host's memory: stacks of a forward scan whose slices leave as they are made, and come back
in the iteration of the backward scan that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from autoshard import jaxpr as jx
from autoshard.transforms import remat

SMALL = 1 / 16
"""Of the largest result of an equation: what is no larger stays on the device. XLA for TPU (libtpu 0.0.50.1) waits for
the sums of attention's rows before it computes anything else, and they wait for all that was sent before."""


def send_to_host(jaxpr: jx.Jaxpr, is_sent: Callable[[jx.JaxprEqn], bool]) -> jx.Jaxpr:
    """``jaxpr`` with residuals in the host's memory between its forward and backward scans; the same object where there
    are none.

    Args:
      is_sent: whether what an equation of a forward scan's body makes goes there, if it is stacked for backward scans
        alone.
    """
    eqns = list(jaxpr.eqns)
    on_host: dict[jx.Var, jx.Var] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if remat.is_forward(eqn) and jx.scan_groups(eqn) is not None:
            sent = {v for e in jx.regions(eqn)[0].body.eqns if is_sent(e) for v in _largest(e)}
            sent &= remat.stacked_residuals(jaxpr, eqn) if sent else set()
            eqns[i] = _sending(eqn, sent, on_host) if sent else eqn
    if not on_host:
        return jaxpr
    return jx.with_eqns(jaxpr, [_fetching(e, on_host) if jx.is_backward(e) else e for e in eqns])


def _sending(eqn: jx.JaxprEqn, sent: set[jx.Var], on_host: dict[jx.Var, jx.Var]) -> jx.JaxprEqn:
    """The forward scan that stacks the values ``sent`` on the host; adds to ``on_host`` what their stacks are there."""
    groups, body = jx.scan_groups(eqn), jx.regions(eqn)[0].body
    assert groups is not None
    results, code, copies = list(eqn.outvars), list[jx.JaxprEqn](), dict[jx.Var, jx.Var]()
    for e in body.eqns:
        code.append(e)
        for v in sent.intersection(e.outvars):
            copies[v] = jx.host_var(v)
            code += moved(v, copies[v], e)
    ends = list(body.outvars)
    for k in range(groups.carry, len(ends)):
        if isinstance(end := ends[k], jx.Var) and end in copies:
            ends[k], results[k] = copies[end], on_host.setdefault(results[k], jx.host_var(results[k]))
    body = jx.with_eqns(body, code, outvars=ends)
    return jx.rebuild_scan(eqn, body, (groups.consts, groups.carry, groups.xs), eqn.invars, results)


def _fetching(eqn: jx.JaxprEqn, on_host: dict[jx.Var, jx.Var]) -> jx.JaxprEqn:
    """The backward scan that reads the stacks that are ``on_host`` from there."""
    groups = jx.scan_groups(eqn)
    if groups is None or not any(isinstance(a, jx.Var) and a in on_host for a in eqn.invars):
        return eqn
    body, operands = jx.regions(eqn)[0].body, list(eqn.invars)
    starts, code = list(body.invars), list[jx.JaxprEqn]()
    for k in range(groups.consts + groups.carry, len(operands)):
        if isinstance(a := operands[k], jx.Var) and a in on_host:
            row = jx.host_var(starts[k])
            code += moved(row, starts[k], body.eqns[0])
            operands[k], starts[k] = on_host[a], row
    body = jx.with_eqns(body, [*code, *body.eqns], invars=starts)
    return jx.rebuild_scan(eqn, body, (groups.consts, groups.carry, groups.xs), operands, eqn.outvars)


def _largest(eqn: jx.JaxprEqn) -> list[jx.Var]:
    """The results that are not small beside the largest."""
    sizes = {v: math.prod(jx.aval(v).shape) * jx.dtype_bits(jx.aval(v).dtype) for v in eqn.outvars}
    return [v for v, size in sizes.items() if size > SMALL * max(sizes.values())]


def moved(source: jx.Atom, result: jx.Var, like: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    """The copy of ``source`` in the memory of ``result``."""
    space = jx.aval(result).memory_space
    return jx.splice(lambda x: jax.device_put(x, space), like.replace(outvars=[result]), [source])
