"""A mean and the variance about it from one sweep.

With any number s, the sum of the squares of x - mean(x) over n elements is that of x - s, less the square of the sum of
x - s over n. In floating point the difference loses as many digits as the square of mean(x) - s has more than the
variance. s is the mean of a strip, the first rows of one dimension, at least a `_PARTS`-th of the elements: be these
what they may, the variance is then at least the square of mean(x) - s over `_PARTS` or so, and an error is at most that
many times the rounding of a sum. Where a strip is like the rest, nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.passes.norms.centered import Centered, Values, spans_rows

_PARTS = 64
_LEAST = 8
"""Elements along the dimension of a strip: of fewer, to read the strip too is not much less than a second sweep."""


def one_sweep_variances(jaxpr: jx.Jaxpr) -> tuple[jx.Jaxpr, list[jx.JaxprEqn]]:
    """``jaxpr`` with variances computed beside the mean, and the sums of squares that these replace; itself where there
    are none."""
    values = Values(jaxpr)
    squares: dict[jx.JaxprEqn, tuple[jx.JaxprEqn, Centered]] = {}  # by the sum for the mean
    for eqn in jaxpr.eqns:
        about = _about_mean(eqn, values)
        if about is not None and about.total not in squares:
            squares[about.total] = eqn, about
    made: dict[jx.JaxprEqn, list[jx.JaxprEqn]] = {}
    for total, (eqn, about) in squares.items():
        strip = _strip(about.operand, total.params["axes"], values)
        if strip is not None:
            made[total] = _both(total, eqn, about.operand, strip)
            made[eqn] = []
    if not made:
        return jaxpr, []
    eqns = [new for e in jaxpr.eqns for new in made.get(e, [e])]
    return jx.with_eqns(jaxpr, eqns), [e for e, new in made.items() if not new]


def _about_mean(eqn: jx.JaxprEqn, values: Values) -> Centered | None:
    """What ``eqn`` sums the squares of, if that is an array minus its mean over the same dimensions."""
    if eqn.primitive is not _prims.reduce_sum_p or not spans_rows(eqn.params["axes"], jx.aval(eqn.invars[0]).shape):
        return None
    square = values.maker(eqn.invars[0])
    if square is None:
        return None
    is_product = square.primitive is _prims.mul_p and square.invars[0] is square.invars[1]
    is_power = square.primitive is _prims.integer_pow_p and square.params["y"] == 2
    if not (is_product or is_power or square.primitive is _prims.square_p):
        return None
    wide = jnp.finfo(dtype).bits >= 32 if jnp.issubdtype(dtype := jx.aval(eqn.invars[0]).dtype, jnp.floating) else False
    return values.centered(square.invars[0], eqn.params["axes"]) if wide else None


class _Strip:
    """The first rows of an array along one dimension, from what the array is cast and reshaped from."""

    def __init__(self, source: jx.Var, dim: int, rows: int, steps: Sequence[jx.JaxprEqn], dims: Sequence[int]) -> None:
        self.source, self.dim, self.rows, self.steps, self.dims = source, dim, rows, steps, dims

    def __call__(self, source: Any) -> Any:
        x = lax.slice_in_dim(source, 0, self.rows, axis=self.dim)
        for eqn, dim in zip(self.steps, self.dims, strict=True):
            if eqn.primitive is _prims.reshape_p:
                shape = jx.aval(eqn.outvars[0]).shape
                x = lax.reshape(x, (*shape[:dim], self.rows, *shape[dim + 1 :]))
            else:
                x = lax.convert_element_type(x, eqn.params["new_dtype"])
        return x


def _strip(array: jx.Var, axes: Sequence[int], values: Values) -> _Strip | None:
    """A strip along the first of ``axes`` that is not the major dimension, nor made by a reshape of ``array``; None
    where there is none long enough."""
    shape = jx.aval(array).shape
    for axis in sorted(axes):
        if axis == 0 or shape[axis] < _LEAST:
            continue
        source, dim, steps, dims = array, axis, list[jx.JaxprEqn](), list[int]()
        while (eqn := values.maker(source)) is not None:
            before, after = (jx.aval(a).shape for a in (eqn.invars[0], source)) if eqn.invars else ((), ())
            if eqn.primitive is _prims.reshape_p and eqn.params["dimensions"] is None and len(eqn.invars) == 1:
                major = math.prod(after[:dim])
                at = [d for d, n in enumerate(before) if n == after[dim] and math.prod(before[:d]) == major]
                if not at:
                    break
            elif eqn.primitive is _prims.convert_element_type_p:
                at = [dim]
            else:
                break
            steps.insert(0, eqn)
            dims.insert(0, dim)
            dim, (source, *_) = at[-1], eqn.invars
            assert isinstance(source, jx.Var)
        return _Strip(source, dim, -(-shape[axis] // _PARTS), steps, dims)
    return None


def _both(total: jx.JaxprEqn, squares: jx.JaxprEqn, array: jx.Var, strip: _Strip) -> list[jx.JaxprEqn]:
    """The equations that compute the results of ``total``, the sum of ``array``, and of ``squares``, that of the
    squares of the differences from its mean."""
    axes, shape = tuple(total.params["axes"]), jx.aval(array).shape
    count = math.prod(shape[d] for d in axes)

    def sums(x: Any, source: Any) -> tuple[Any, Any]:
        rows = strip(source)
        kept = [1 if d in axes else n for d, n in enumerate(shape)]
        near = lax.reduce_sum(rows, axes) / math.prod(rows.shape[d] for d in axes)
        away = x - near.reshape(kept)
        first, second = lax.reduce_sum(away, axes), lax.reduce_sum(away * away, axes)
        return first + near * count, jnp.maximum(second - first * first / count, 0)

    both = total.replace(outvars=[*total.outvars, *squares.outvars])
    return jx.splice(sums, both, [array, strip.source])
