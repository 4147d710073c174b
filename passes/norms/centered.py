"""Arrays from which their mean has been subtracted, and factors that are constant along the dimensions of a sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx

type Squeezed = tuple[jx.Atom, Callable[[Any], Any]]
"""An operand, and what makes of it an array without the dimensions along which it is constant."""


@dataclass(frozen=True)
class Centered:
    """An array minus its mean."""

    operand: jx.Var
    """The array."""
    total: jx.JaxprEqn
    """Its sum, of which the mean is computed."""


class Values:
    """The values of one jaxpr, by the equations that compute them."""

    def __init__(self, jaxpr: jx.Jaxpr) -> None:
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}

    def maker(self, atom: jx.Atom) -> jx.JaxprEqn | None:
        """The equation that computes ``atom``; None of an argument or a literal."""
        return None if isinstance(atom, jx.Literal) else self.made.get(atom)

    def constant_along(self, atom: jx.Atom, axes: Sequence[int], shape: Sequence[int]) -> Squeezed | None:
        """The source of an operand that is constant along ``axes`` of an array of ``shape``, and what makes of it an
        array without these; None where it is not constant."""
        rest, have = [n for d, n in enumerate(shape) if d not in axes], jx.aval(atom).shape
        if not have:
            return atom, lambda x: jnp.broadcast_to(x, rest)
        if len(have) == len(shape) and all(have[d] == 1 for d in axes):
            return atom, lambda x: jnp.broadcast_to(lax.squeeze(x, axes), rest)
        eqn = self.maker(atom)
        if eqn is None or eqn.primitive is not _prims.broadcast_in_dim_p or len(eqn.invars) > 1:
            return None
        (source,), dims = eqn.invars, [int(d) for d in eqn.params["broadcast_dimensions"]]
        sizes = jx.aval(source).shape
        if any(d in axes and n != 1 for d, n in zip(dims, sizes, strict=True)):
            return None
        gone = [i for i, d in enumerate(dims) if d in axes]
        kept = [d - sum(a < d for a in axes) for d in dims if d not in axes]
        return source, lambda x: lax.broadcast_in_dim(lax.squeeze(x, gone), rest, kept)

    def centered(self, atom: jx.Atom, axes: Sequence[int]) -> Centered | None:
        """What ``atom`` is, where it is an array minus its mean over ``axes``; else None."""
        eqn = self.maker(atom)
        if eqn is None or eqn.primitive is not _prims.sub_p:
            return None
        array, mean = eqn.invars
        if isinstance(array, jx.Literal) or not jnp.issubdtype(jx.aval(array).dtype, jnp.floating):
            return None
        shape = jx.aval(array).shape
        total = self._sum_behind(mean, math.prod(shape[d] for d in axes))
        if shape != jx.aval(atom).shape or total is None or total.invars[0] is not array:
            return None
        same = sorted(total.params["axes"]) == sorted(axes) and self._is_along(mean, axes, shape)
        return Centered(array, total) if same else None

    def _sum_behind(self, mean: jx.Atom, count: int) -> jx.JaxprEqn | None:
        """The sum that is divided by ``count``, and has dimensions of size 1 added, to give ``mean``."""
        divided = False
        while (eqn := self.maker(mean)) is not None:
            if eqn.primitive is _prims.reduce_sum_p:
                return eqn if divided else None
            if eqn.primitive is _prims.div_p or eqn.primitive is _prims.mul_p:
                by = eqn.invars[1]
                wanted = count if eqn.primitive is _prims.div_p else 1 / count
                if divided or not isinstance(by, jx.Literal) or not np.isclose(by.val, wanted, rtol=1e-6, atol=0):
                    return None
                divided = True
            elif eqn.primitive is not _prims.broadcast_in_dim_p and eqn.primitive is not _prims.reshape_p:
                return None
            mean = eqn.invars[0]
        return None

    def _is_along(self, mean: jx.Atom, axes: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether ``mean`` has the dimensions of ``shape`` but ``axes``, in order, and is constant along these."""
        have = jx.aval(mean).shape
        return have == tuple(1 if d in axes else n for d, n in enumerate(shape)) and self._keeps_order(mean, shape)

    def _keeps_order(self, mean: jx.Atom, shape: Sequence[int]) -> bool:
        """Whether broadcasts on the way to ``mean`` add dimensions of size 1 only, in the order of the others."""
        while (eqn := self.maker(mean)) is not None and eqn.primitive is not _prims.reduce_sum_p:
            if eqn.primitive is _prims.broadcast_in_dim_p:
                dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
                same = math.prod(jx.aval(eqn.invars[0]).shape) == math.prod(jx.aval(eqn.outvars[0]).shape)
                if dims != sorted(dims) or not same:
                    return False
            mean = eqn.invars[0]
        return True


def spans_rows(axes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a sum over ``axes`` takes in more than the minor dimension, whose elements are read together anyway."""
    return any(d != len(shape) - 1 and shape[d] > 1 for d in axes)
