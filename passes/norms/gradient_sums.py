"""Sums of gradients without the terms whose sum is zero.

The gradient with respect to ``x - mean(x)`` has a term for the variance: a factor that is itself a sum over all
elements, times ``x - mean(x)``. The gradient of the mean is its sum. That of the term is zero, so that the sum of the
others is the same number, and reads nothing of the gradient of the variance. Its rounding is that of the other terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims
from jax.extend.core.primitives import add_jaxvals_p

from autoshard import jaxpr as jx
from autoshard.passes.norms.centered import Squeezed, Values, spans_rows


class _Term(NamedTuple):
    """One of the arrays that a sum consists of, and what multiplies it."""

    array: jx.Atom
    factors: tuple[Squeezed, ...] = ()
    negative: bool = False


def independent_sums(jaxpr: jx.Jaxpr) -> tuple[jx.Jaxpr, list[jx.JaxprEqn]]:
    """``jaxpr`` with sums of the terms that have one, and the sums that it replaces; itself where there are none."""
    values, eqns, found = Values(jaxpr), list[jx.JaxprEqn](), list[jx.JaxprEqn]()
    for eqn in jaxpr.eqns:
        made = _without_zeros(eqn, values) if eqn.primitive is _prims.reduce_sum_p else None
        eqns += [eqn] if made is None else made
        found += [] if made is None else [eqn]
    return (jx.with_eqns(jaxpr, eqns) if found else jaxpr), found


def _without_zeros(eqn: jx.JaxprEqn, values: Values) -> list[jx.JaxprEqn] | None:
    """The equations that sum what is not zero; None where no term of the sum is."""
    (operand,), axes = eqn.invars, eqn.params["axes"]
    shape = jx.aval(operand).shape
    if not spans_rows(axes, shape) or not jnp.issubdtype(jx.aval(operand).dtype, jnp.floating):
        return None
    terms = [*_terms(_Term(operand), values, axes, shape)]
    left = [t for t in terms if values.centered(t.array, axes) is None]
    if len(left) == len(terms):
        return None
    operands = [a for t in left for a in (t.array, *(source for source, _ in t.factors))]

    def summed(*xs: Any) -> Any:
        given, total = iter(xs), jnp.zeros(jx.aval(eqn.outvars[0]).shape, jx.aval(operand).dtype)
        for t in left:
            one = lax.reduce_sum(next(given), axes)
            for _, squeeze in t.factors:
                one = one * squeeze(next(given))
            total = total - one if t.negative else total + one
        return total

    return jx.splice(summed, eqn, operands)


def _terms(term: _Term, values: Values, axes: Sequence[int], shape: Sequence[int]) -> Iterator[_Term]:
    """The arrays of ``shape`` that add up to ``term``, as far as gradients are added and scaled."""
    eqn = values.maker(term.array)
    op = None if eqn is None else eqn.primitive
    if eqn is None or any(jx.aval(v).shape != shape for v in eqn.outvars):
        yield term
    elif op is add_jaxvals_p:
        for a in eqn.invars:
            yield from _terms(term._replace(array=a), values, axes, shape)
    elif op is _prims.neg_p:
        yield from _terms(term._replace(array=eqn.invars[0], negative=not term.negative), values, axes, shape)
    elif op is _prims.mul_p:
        for this, other in (eqn.invars, eqn.invars[::-1]):
            factor = values.constant_along(other, axes, shape)
            if factor is not None and jx.aval(this).shape == shape:
                scaled = term._replace(array=this, factors=(*term.factors, factor))
                yield from _terms(scaled, values, axes, shape)
                return
        yield term
    else:
        yield term
