"""What one place computes of a loop's body: the equations that its results need, evaluated over the context's mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain, Place


def evaluate(
    chain: Chain, place: Place | None, known: Mapping[jx.Var, Any], results: Sequence[jx.Atom], apart: str
) -> list[Any]:
    """The terms of ``results`` that ``place`` computes; None of one to which it contributes nothing.

    Args:
      place: None computes what every stage can.
      known: values of the variables that are not computed here.
      apart: as in `jx.replay`.
    """
    values = dict(known)
    mesh = jax.sharding.get_abstract_mesh()

    def read(atom: jx.Atom) -> Any:
        return atom.val if isinstance(atom, jx.Literal) else values.get(atom)

    for eqn in equations_of(chain, place, values.keys(), results):
        operands = [read(a) for a in eqn.invars]
        if _counted_elsewhere(chain, place, eqn):
            operands = [x if chain.where(a) else None for x, a in zip(operands, eqn.invars, strict=True)]
        if not all(x is None for x in operands) or not eqn.invars:
            pairs = zip(operands, map(jx.aval, eqn.invars), strict=True)
            operands = [jnp.zeros(a.shape, a.dtype) if x is None else x for x, a in pairs]
            if chain.rules.traits(eqn.primitive).stretches and (constraint := chain.constraints.get(eqn.outvars[0])):
                operands = [_stretched(x, jx.aval(eqn.outvars[0]).shape, constraint, apart) for x in operands]
            values.update(zip(eqn.outvars, jx.replay_equation(eqn, operands, mesh, apart), strict=True))
    return [read(a) for a in results]


def _stretched(x: Any, shape: tuple[int, ...], constraint: jx.JaxprEqn, apart: str) -> Any:
    """An operand in the ``shape`` of a result, split as ``constraint`` splits that.

    XLA stretches a value to a shape once. If another operation, which reads it split otherwise, decides how, the result
    here would be split so too, and gathered: behind each operation in a region that is manual over some axes JAX (0.12)
    has a constraint that leaves all open, so that the next one does not reach the operation.
    """
    if jnp.ndim(x) != len(shape) or x.shape == shape:
        return x
    stretched = jnp.broadcast_to(x, shape)
    return jx.replay_equation(constraint, [stretched], jax.sharding.get_abstract_mesh(), apart)[0]


def equations_of(
    chain: Chain, place: Place | None, known: Set[jx.Var], results: Sequence[jx.Atom]
) -> list[jx.JaxprEqn]:
    """The equations of the body that ``place`` runs to compute its terms of ``results`` from what is ``known``."""
    needed = {a for a in results if isinstance(a, jx.Var)}
    found: list[jx.JaxprEqn] = []
    for eqn in reversed(chain.body.eqns):
        wanted = needed.intersection(eqn.outvars) - known
        if wanted and _computes(chain, place, eqn):
            found.append(eqn)
            needed.update(a for a in eqn.invars if isinstance(a, jx.Var))
    return found[::-1]


def _computes(chain: Chain, place: Place | None, eqn: jx.JaxprEqn) -> bool:
    places = chain.places[eqn.outvars[0]]
    return not places or place in places


def _counted_elsewhere(chain: Chain, place: Place | None, eqn: jx.JaxprEqn) -> bool:
    """Whether ``eqn`` adds what any stage can compute to a sum of several places, which another one does once."""
    places = chain.places[eqn.outvars[0]]
    traits = chain.rules.traits(eqn.primitive)
    sums = any(len(s) > 1 for s in traits.linear)
    return sums and len(places) > 1 and place != ("last" if "last" in places else "first")


def stacked_results(chain: Chain, place: Place) -> set[jx.Var]:
    """The values with a row for each layer that something at ``place`` reads whole, as sums without such rows do. Each
    layer adds to the other sums by itself, and leaves by itself what its backward reads."""
    scan, begin = chain.scans[place], chain.groups.carry
    plain = [a for a in chain.sums.values() if not (isinstance(a, jx.Var) and a in chain.per_layer)]
    results = [*plain, *chain.body.outvars[begin:]]
    eqns = equations_of(chain, place, {*scan.outvars}, results)
    return {a for a in (*results, *(a for e in eqns for a in e.invars)) if isinstance(a, jx.Var)}
