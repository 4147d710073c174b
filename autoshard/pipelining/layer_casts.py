"""Weights of layers cast once, before the loops that read them.

A layer casts its weights (to bfloat16, say) for its products, and its forward leaves the cast ones for its backward:
of a pipeline, in every slot for a micro-batch. Cast before the loops they are there once for all micro-batches, and
what is gathered of them has the fewer bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.pipelining.chain import layer_scans, scan_groups


def cast_before_layers(jaxpr: jx.Jaxpr, rules: Rules) -> jx.Jaxpr:
    """``jaxpr`` with the weights of scanned layers cast before the scans, also in its loops over micro-batches; weights
    are what no scan makes."""
    layers = layer_scans(jaxpr, rules)
    outer = [e for e in jaxpr.eqns if jx.scan_groups(e) and e not in layers]
    loops = {e: jx.map_bodies(e, lambda body: _cast_before(body, rules)) for e in outer}
    return _cast_before(jx.with_eqns(jaxpr, [loops.get(e, e) for e in jaxpr.eqns]), rules)


def _cast_before(jaxpr: jx.Jaxpr, rules: Rules) -> jx.Jaxpr:
    scans = layer_scans(jaxpr, rules)
    if not scans:
        return jaxpr
    made = {v for e in jaxpr.eqns if jx.scan_groups(e) for v in e.outvars}
    eqns: list[jx.JaxprEqn] = []
    replaced: dict[jx.Var, jx.Atom] = {}
    casts: dict[tuple[jx.Var, str], jx.Atom] = {}
    for eqn in jaxpr.eqns:
        operands = [replaced.get(a, a) if isinstance(a, jx.Var) else a for a in eqn.invars]
        new = eqn.replace(invars=operands)
        if eqn in scans:
            for x, dtype in _casts(new).values():
                if x not in made and (x, dtype) not in casts:
                    added, (casts[x, dtype],) = jx.emit(lambda x, d=dtype: lax.convert_element_type(x, d), eqn, x)
                    eqns += added
            new, stacked = _without_casts(new, casts)
            replaced |= stacked
        eqns.append(new)
        if not made.isdisjoint(a for a in operands if isinstance(a, jx.Var)):
            made.update(new.outvars)
    outvars = [replaced.get(a, a) if isinstance(a, jx.Var) else a for a in jaxpr.outvars]
    return jx.normalize(jx.with_eqns(jaxpr, eqns, outvars=outvars)) if casts else jaxpr


def _casts(scan: jx.JaxprEqn) -> dict[jx.JaxprEqn, tuple[jx.Var, str]]:
    """The equations of the body of ``scan`` that cast what it reads for each layer to fewer digits: of which stacked
    array, and the dtype."""
    groups, body = scan_groups(scan), jx.regions(scan)[0].body
    begin = groups.consts + groups.carry
    rows = dict(zip(body.invars[begin:], scan.invars[begin:], strict=True))
    found: dict[jx.JaxprEqn, tuple[jx.Var, str]] = {}
    for e in body.eqns:
        operand = e.invars[0] if e.primitive is prims.convert_element_type_p else None
        x = rows.get(operand) if isinstance(operand, jx.Var) else None
        if isinstance(x, jx.Var) and _fewer_digits(jx.aval(x).dtype, jx.aval(e.outvars[0]).dtype):
            found[e] = x, str(jx.aval(e.outvars[0]).dtype)
    return found


def _fewer_digits(source: np.dtype, result: np.dtype) -> bool:
    floats = all(jax.dtypes.issubdtype(d, np.floating) for d in (source, result))
    return floats and jx.dtype_bits(result) < jx.dtype_bits(source)


def _without_casts(
    scan: jx.JaxprEqn, casts: Mapping[tuple[jx.Var, str], jx.Atom]
) -> tuple[jx.JaxprEqn, dict[jx.Var, jx.Atom]]:
    """``scan`` with ``casts`` among its operands, and what stands for those of its results that were such casts."""
    groups, body = scan_groups(scan), jx.regions(scan)[0].body
    done = {e: casts[key] for e, key in _casts(scan).items() if key in casts}
    begin, carry = groups.consts + groups.carry, groups.carry
    stands = {e.outvars[0]: stack for e, stack in done.items()}
    ends = list(zip(scan.outvars[carry:], body.outvars[carry:], strict=True))
    results = {v: stands[a] for v, a in ends if isinstance(a, jx.Var) and a in stands}
    ends = [(v, a) for v, a in ends if v not in results]
    rest = [e for e in body.eqns if e not in done]
    read = {a for e in rest for a in e.invars if isinstance(a, jx.Var)} | {a for a in body.outvars if jx.is_array(a)}
    rows = [(v, a) for v, a in zip(body.invars[begin:], scan.invars[begin:], strict=True) if v in read]
    rows += stands.items()
    inner = jx.with_eqns(
        body,
        rest,
        invars=[*body.invars[:begin], *(v for v, _ in rows)],
        outvars=[*body.outvars[:carry], *(a for _, a in ends)],
    )
    sizes = groups.consts, carry, len(rows)
    operands = [*scan.invars[:begin], *(a for _, a in rows)]
    return jx.rebuild_scan(scan, inner, sizes, operands, [*scan.outvars[:carry], *(v for v, _ in ends)]), results
