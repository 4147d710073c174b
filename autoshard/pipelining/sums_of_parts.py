"""Sums over micro-batches that are kept in parts, one for each device along some axes, and added up after the loop.

Each stage adds up the parts of its own sums before they go to other stages: a sum is smaller than its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import primitives as prims
from jax.sharding import PartitionSpec

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain

type Additions = Mapping[int, tuple[jx.JaxprEqn, ...]]
"""By carry of the loop: the equations after it that add up the parts of the sum, constraints among them, in order."""


def additions(jaxpr: jx.Jaxpr, chain: Chain) -> Additions:
    """Those of ``jaxpr``, whose chain is ``chain``."""
    readers: dict[Any, list[jx.JaxprEqn | None]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for a in eqn.invars:
            readers[a if isinstance(a, jx.Var) else None].append(eqn)
    for a in jaxpr.outvars:
        readers[a if isinstance(a, jx.Var) else None].append(None)
    found: dict[int, tuple[jx.JaxprEqn, ...]] = {}
    for i, term in chain.sums.items():
        layered = isinstance(term, jx.Var) and term in chain.per_layer
        var, eqns, added = chain.loop.outvars[i], list[jx.JaxprEqn](), False
        while len(readers[var]) == 1 and (eqn := readers[var][0]) is not None:
            adds = eqn.primitive is prims.reduce_sum_p and not added and not (layered and 0 in eqn.params["axes"])
            if not adds and not jx.is_constraint(eqn):
                break
            eqns.append(eqn)
            (var,), added = eqn.outvars, added or adds
        if added:
            found[i] = tuple(eqns)
    return found


def sum_after(chain: Chain, found: Additions, carry: int) -> jx.Var:
    """The sum of a carry of the loop, its parts added up."""
    return found[carry][-1].outvars[0] if carry in found else chain.loop.outvars[carry]


def spec_after(eqns: Sequence[jx.JaxprEqn], spec: PartitionSpec | None) -> PartitionSpec | None:
    """How the plan splits what ``eqns`` make of something split as ``spec``; None where it does not say so."""
    for eqn in eqns:
        if jx.is_constraint(eqn):
            spec = eqn.params["sharding"].spec
        elif spec is not None:
            added = eqn.params["axes"]
            whole = all(spec[d] is None for d in added if d < len(spec))
            spec = PartitionSpec(*(axes for d, axes in enumerate(spec) if d not in added)) if whole else None
    return spec


def added_up(eqns: Sequence[jx.JaxprEqn], x: Any, axis: str) -> Any:
    """``x``, of however many layers, through ``eqns``; ``axis``: of the stages."""
    for eqn in eqns:
        (x,) = jx.replay_equation(eqn, [x], jax.sharding.get_abstract_mesh(), axis)
    return x
