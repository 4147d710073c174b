"""Sums of the same products, but for factors that are constant where these are summed, as one sum.

The gradients of a norm's scale and of its variance sum a gradient times normalized values: one over all rows, the other
over a group's channels, with the scale as a factor. What varies along the dimensions that both sum is the same, and one
sum of it gives both.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.passes.norms.centered import Squeezed, Values, spans_rows


class _Product(NamedTuple):
    """What a sum is of."""

    arrays: tuple[jx.Var, ...]
    """The factors that vary along all summed dimensions, in the order in which they are computed."""
    inner: tuple[int, ...]
    """The summed dimensions along which no other factor varies."""

    def summed(self, *arrays: Any) -> Any:
        return lax.reduce_sum(functools.reduce(lax.mul, arrays), self.inner)


def shared_sums(jaxpr: jx.Jaxpr) -> tuple[jx.Jaxpr, list[jx.JaxprEqn]]:
    """``jaxpr`` with one sum for those of the same products, and the sums that it replaces; itself where there are
    none."""
    values = Values(jaxpr)
    order = {v: n for n, v in enumerate([*jaxpr.constvars, *jaxpr.invars, *values.made])}
    sums: dict[_Product, dict[jx.JaxprEqn, list[Squeezed]]] = defaultdict(dict)
    for eqn in jaxpr.eqns:
        if eqn.primitive is _prims.reduce_sum_p and (found := _product(eqn, values, order)) is not None:
            product, factors = found
            sums[product][eqn] = factors
    made: dict[jx.JaxprEqn, list[jx.JaxprEqn]] = {}
    for product, by_eqn in sums.items():
        if len(by_eqn) > 1:
            first, *_ = by_eqn
            made[first], (inner,) = jx.emit(product.summed, first, *product.arrays)
            for eqn, factors in by_eqn.items():
                made.setdefault(eqn, []).extend(_outer(eqn, product, factors, inner))
    if not made:
        return jaxpr, []
    return jx.with_eqns(jaxpr, [new for e in jaxpr.eqns for new in made.get(e, [e])]), [*made]


def _product(eqn: jx.JaxprEqn, values: Values, order: dict[jx.Var, int]) -> tuple[_Product, list[Squeezed]] | None:
    """The product that a sum is of, and its other factors; None where some vary along each summed dimension."""
    (operand,), axes = eqn.invars, tuple(sorted(eqn.params["axes"]))
    shape = jx.aval(operand).shape
    if not jnp.issubdtype(jx.aval(operand).dtype, jnp.floating):
        return None
    factors = [*_factors(operand, values, shape)]
    along = [{d for d in axes if values.constant_along(a, [d], shape) is not None} for a in factors]
    inner = tuple(d for d in axes if all(d in found for found in along if found))
    arrays = [a for a, found in zip(factors, along, strict=True) if not found]
    if not spans_rows(inner, shape) or not all(isinstance(a, jx.Var) for a in arrays) or not arrays:
        return None
    others = [values.constant_along(a, inner, shape) for a, found in zip(factors, along, strict=True) if found]
    product = _Product(tuple(sorted(arrays, key=order.__getitem__)), inner)  # type: ignore[arg-type]
    return product, [found for found in others if found is not None]


def _factors(atom: jx.Atom, values: Values, shape: Sequence[int]) -> Iterator[jx.Atom]:
    """The factors of an array of ``shape``; of an operand that is stretched to it, itself."""
    eqn = values.maker(atom)
    if eqn is not None and eqn.primitive is _prims.mul_p and jx.aval(atom).shape == shape:
        for a in eqn.invars:
            yield from _factors(a, values, shape)
    else:
        yield atom


def _outer(eqn: jx.JaxprEqn, product: _Product, factors: Sequence[Squeezed], inner: jx.Atom) -> list[jx.JaxprEqn]:
    """The equations that compute the result of ``eqn`` from the sum of ``product``."""
    left = [d for d in range(len(jx.aval(eqn.invars[0]).shape)) if d not in product.inner]
    axes = [left.index(d) for d in eqn.params["axes"] if d not in product.inner]

    def summed(x: Any, *sources: Any) -> Any:
        for (_, squeeze), source in zip(factors, sources, strict=True):
            x = x * squeeze(source)
        return lax.reduce_sum(x, axes) if axes else x

    return jx.splice(summed, eqn, [inner, *(source for source, _ in factors)])
