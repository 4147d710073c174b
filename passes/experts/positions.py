"""What integers that index rows are, computed while a program is read.

A program says with indices which row goes where: the order that sorts the rows, its inverse, ``order // k`` where each
token has ``k`` rows, with negative ones wrapped and others clamped. However that is spelled, it is a function of the
order alone, and is evaluated for the order 0, 1, 2, ...
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx

Array = np.ndarray[Any, Any]


def positions(atom: jx.Atom, made: Mapping[jx.Var, jx.JaxprEqn], known: Mapping[jx.Var, Array]) -> Array | None:
    """The value of ``atom``, where the variables in ``known`` have these values; None where it depends on others.

    Args:
      made: the equation that makes each variable.
    """
    return _value(atom, made, dict(known))


def _value(atom: jx.Atom, made: Mapping[jx.Var, jx.JaxprEqn], found: dict[jx.Var, Array]) -> Array | None:
    """The same; what it needs of others is added to ``found``."""
    if isinstance(atom, jx.Literal):
        return np.asarray(atom.val, jx.aval(atom).dtype)
    if atom in found:
        return found[atom]
    eqn = made.get(atom)
    evaluate = eqn and _EVALUATED.get(eqn.primitive)
    if not eqn or not evaluate:
        return None
    operands: list[Array] = []
    for a in eqn.invars:
        x = _value(a, made, found)
        if x is None:
            return None
        operands.append(x)
    found[atom] = np.asarray(evaluate(eqn.params, *operands)).astype(jx.aval(atom).dtype)
    return found[atom]


def constants(jaxpr: jx.Jaxpr) -> dict[jx.Var, jx.JaxprEqn]:
    """What is made of literals alone: numbers everywhere, and positions."""
    made: dict[jx.Var, jx.JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive in _EVALUATED and all(isinstance(a, jx.Literal) or a in made for a in eqn.invars):
            made[eqn.outvars[0]] = eqn
    return made


def with_constants(region: jx.Region, eqn: jx.JaxprEqn, outside: Mapping[jx.Var, jx.JaxprEqn]) -> jx.Jaxpr:
    """The body of ``region``, a part of ``eqn``, which makes the constants itself that it reads from ``outside``."""
    body, carried = region.body, {start for _, start in region.carries}
    copies: dict[jx.Var, jx.JaxprEqn] = {}
    same: dict[jx.Atom, jx.Var] = {}

    def copy(outer: jx.Atom) -> jx.Atom:
        if isinstance(outer, jx.Literal):
            return outer
        if outer not in copies:
            copies[outer] = jx.clone_eqn(outside[outer], [copy(a) for a in outside[outer].invars])
        return copies[outer].outvars[0]

    for wire in region.inputs:
        outer, var = eqn.invars[wire.outside], body.invars[wire.inside]
        if wire.stacked or wire.inside in carried or isinstance(outer, jx.Literal) or outer not in outside:
            continue
        copy(outer)
        same[var] = copies[outer].outvars[0]
    if not same:
        return body
    eqns = [e.replace(invars=[same.get(a, a) if isinstance(a, jx.Var) else a for a in e.invars]) for e in body.eqns]
    outvars = [same.get(a, a) if isinstance(a, jx.Var) else a for a in body.outvars]
    return jx.with_eqns(body, [*copies.values(), *eqns], outvars=outvars)


def without_repeats(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` in which integers and booleans that are computed twice of the same operands are computed once."""
    same: dict[jx.Atom, jx.Atom] = {}
    found: dict[Any, jx.JaxprEqn] = {}
    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if any(isinstance(a, jx.Var) and a in same for a in eqn.invars):
            eqn = eqn.replace(invars=[same.get(a, a) if isinstance(a, jx.Var) else a for a in eqn.invars])
        key = jx.eqn_key(eqn) if _makes_integers(eqn) else None
        if key is not None:
            atoms = [(np.asarray(a.val).tobytes() if isinstance(a, jx.Literal) else a) for a in eqn.invars]
            first = found.setdefault((key, *atoms), eqn)
            if first is not eqn:
                same.update(zip(eqn.outvars, first.outvars, strict=True))
                continue
        eqns.append(eqn)
    if not same:
        return jaxpr
    return jx.with_eqns(jaxpr, eqns, outvars=[same.get(a, a) if isinstance(a, jx.Var) else a for a in jaxpr.outvars])


def _makes_integers(eqn: jx.JaxprEqn) -> bool:
    arrays = all(map(jx.is_array, (*eqn.invars, *eqn.outvars)))
    return arrays and not (eqn.effects or jx.regions(eqn)) and all(jx.aval(v).dtype.kind in "iub" for v in eqn.outvars)


def _elementwise(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *xs: fun(*xs)


def _quotient(x: Array, y: Array) -> Array:
    """Rounded towards zero."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.maximum(np.abs(y), 1))


def _broadcast_in_dim(params: Mapping[str, Any], x: Array) -> Array:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        spread[d] = n
    return np.broadcast_to(x.reshape(spread), shape)


def _iota(params: Mapping[str, Any]) -> Array:
    shape, d = params["shape"], params["dimension"]
    return np.broadcast_to(np.arange(shape[d]).reshape([-1 if e == d else 1 for e in range(len(shape))]), shape)


_EVALUATED: Mapping[Primitive, Callable[..., Any]] = {
    _prims.add_p: _elementwise(operator.add),
    _prims.and_p: _elementwise(operator.and_),
    _prims.broadcast_in_dim_p: _broadcast_in_dim,
    _prims.clamp_p: _elementwise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    _prims.convert_element_type_p: _elementwise(lambda x: x),
    _prims.div_p: _elementwise(_quotient),
    _prims.eq_p: _elementwise(operator.eq),
    _prims.ge_p: _elementwise(operator.ge),
    _prims.gt_p: _elementwise(operator.gt),
    _prims.iota_p: _iota,
    _prims.le_p: _elementwise(operator.le),
    _prims.lt_p: _elementwise(operator.lt),
    _prims.max_p: _elementwise(np.maximum),
    _prims.min_p: _elementwise(np.minimum),
    _prims.mul_p: _elementwise(operator.mul),
    _prims.ne_p: _elementwise(operator.ne),
    _prims.or_p: _elementwise(operator.or_),
    _prims.rem_p: _elementwise(lambda x, y: np.fmod(x, np.where(y == 0, 1, y))),
    _prims.reshape_p: lambda params, x: x.reshape(params["new_sizes"]),
    _prims.select_n_p: _elementwise(lambda which, *cases: np.choose(which.astype(int), cases)),
    _prims.sign_p: _elementwise(np.sign),
    _prims.squeeze_p: lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    _prims.sub_p: _elementwise(operator.sub),
}
"""By primitive: the result, given its parameters and operands. Divisors of zero do not count: none is selected."""
