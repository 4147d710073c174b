"""Inlines `jax.checkpoint` and functions with custom derivatives that hold a loss or a part of one.

A checkpointed loss is computed again in the backward part, so that its logits are not held. In a loop over chunks they
are not held anyway: what is computed twice is then computed once, in the iteration that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules, has_own_rule
from autoshard.passes.losses.region import logits_products


def with_loss_calls_inlined(jaxpr: jx.Jaxpr, rules: Rules, least: float) -> jx.Jaxpr:
    """``jaxpr``, not the bodies in it, with the calls inlined that are of a loss alone, or read or make logits.

    Args:
      least: bytes of the smallest logits.
    """
    sizes = [_elements(e.outvars[0]) for e in logits_products(jaxpr, least)]

    def is_of_loss(eqn: jx.JaxprEqn) -> bool:
        if not jx.calls_one_body(eqn) or eqn.effects or has_own_rule(eqn, rules):
            return False
        bodies = [r.body for r in jx.regions(eqn)]
        if len(bodies) != 1 or bodies[0].constvars:
            return False
        large = bool(sizes) and any(2 * _elements(v) >= min(sizes) for v in (*eqn.invars, *eqn.outvars))
        return large or _is_loss_alone(bodies[0], least)

    return _inlined(jaxpr, is_of_loss) if any(map(is_of_loss, jx.eqns_with_regions(jaxpr))) else jaxpr


def _elements(atom: jx.Atom) -> int:
    return math.prod(jx.aval(atom).shape) if jx.is_shaped(atom) else 0


def _is_loss_alone(body: jx.Jaxpr, least: float) -> bool:
    """Whether all products in ``body`` are of logits or their gradient."""
    sizes = [_elements(e.outvars[0]) for e in logits_products(body, least)]
    products = [e for e in body.eqns if e.primitive is _prims.dot_general_p]
    return bool(sizes) and all(2 * max(map(_elements, (*e.invars, *e.outvars))) >= min(sizes) for e in products)


def _inlined(jaxpr: jx.Jaxpr, chosen: Callable[[jx.JaxprEqn], bool]) -> jx.Jaxpr:
    """``jaxpr`` with the bodies of ``chosen`` equations in their place, without what is computed before already."""
    env: dict[jx.Var, jx.Atom] = {}
    known: dict[Hashable, jx.JaxprEqn] = {}
    eqns: list[jx.JaxprEqn] = []

    def read(atom: jx.Atom) -> jx.Atom:
        return env.get(atom, atom) if isinstance(atom, jx.Var) else atom

    def add(eqn: jx.JaxprEqn, inside: bool) -> None:
        if not env.keys().isdisjoint(a for a in eqn.invars if isinstance(a, jx.Var)):
            eqn = eqn.replace(invars=[read(a) for a in eqn.invars])
        if chosen(eqn):
            body = jx.regions(eqn)[0].body
            env.update(zip(body.invars, eqn.invars, strict=True))
            for e in body.eqns:
                add(e, inside=True)
            env.update((v, read(a)) for v, a in zip(eqn.outvars, body.outvars, strict=True))
            return
        key = _key(eqn)
        same = known.setdefault(key, eqn) if key is not None else eqn
        if inside and same is not eqn:
            env.update(zip(eqn.outvars, same.outvars, strict=True))
        else:
            eqns.append(eqn)

    for eqn in jaxpr.eqns:
        add(eqn, inside=False)
    return jx.with_eqns(jaxpr, eqns, outvars=[read(a) for a in jaxpr.outvars])


def _key(eqn: jx.JaxprEqn) -> Any:
    """Equal for equations that compute the same; None where nothing is known of it."""
    operation = jx.eqn_key(eqn)
    if operation is None or eqn.effects:
        return None
    operands = tuple(a if isinstance(a, jx.Var) else np.asarray(a.val).tobytes() for a in eqn.invars)
    return operation, operands
