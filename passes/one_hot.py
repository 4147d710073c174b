"""Replaces the sum of a one-hot row (at most one nonzero element along the summed dimension) by that element.

The gradient of picking one class per row (cross-entropy) is such an array, and the gradient of the softmax sums it over
the classes: another all-reduce where these are sharded, and a pass over all classes anywhere. The sum of an array
scattered into zeros is that of the updates in bounds; the sum of a label compared to all positions is whether the label
is in range. Negation, casts, and products or quotients with what is constant along the row keep that form.

Results are those of the sum, NaN and infinities included, up to rounding where an index repeats in a row, and up to the
sign of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims
from jax.lax import GatherScatterMode

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.transforms.pipeline import Pass


@dataclass(frozen=True)
class OneHot(Pass):
    """Replaces sums along one-hot rows by the elements that are picked."""

    name: ClassVar[str] = "one_hot"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr)
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        if before is after:
            return "no sum of one-hot rows"
        sums = [sum(e.primitive is _prims.reduce_sum_p for e in jx.walk(p.jaxpr)) for p in (before, after)]
        return f"sums of one-hot rows replaced by the picked elements (reduce_sum: {sums[0]} -> {sums[1]})"


@dataclass(frozen=True)
class OneHotRows:
    """An array of rows along ``dim`` whose sum along ``dim`` is ``fun(*operands)``, without that dimension."""

    dim: int
    picks: int
    """The most nonzero elements in a row."""
    operands: tuple[jx.Atom, ...]
    fun: Callable[..., Any]
    is_cast_mask: bool = False
    """Whether it is a boolean cast to numbers: XLA turns a product with it into a select, so that 0 * inf is 0."""


def _rewritten(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` without sums of one-hot rows, at every depth; the same object where there are none."""
    finder = _Finder()
    eqns: list[jx.JaxprEqn] = []
    changed = False
    for eqn in jaxpr.eqns:
        new = jx.map_bodies(eqn, _rewritten)
        eqn, changed = new, changed or new is not eqn
        found = finder.replacement(eqn)
        eqns += [eqn] if found is None else found
        changed |= found is not None
        finder.visit(eqn)
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


class _Finder:
    """Which values of one jaxpr are one-hot rows, found equation by equation."""

    def __init__(self) -> None:
        self.made: dict[jx.Var, jx.JaxprEqn] = {}
        self.rows: dict[jx.Var, OneHotRows] = {}
        self.handlers = {
            _prims.convert_element_type_p: self.elementwise,
            _prims.div_p: self.scaled,
            _prims.eq_p: self.compared,
            _prims.mul_p: self.scaled,
            _prims.neg_p: self.elementwise,
            _prims.scatter_add_p: self.scattered,
        }

    def visit(self, eqn: jx.JaxprEqn) -> None:
        """Notes whether the result of ``eqn`` is one-hot rows."""
        for v in eqn.outvars:
            self.made[v] = eqn
        handler = self.handlers.get(eqn.primitive)
        found = handler(eqn) if handler else None
        if found is not None:
            self.rows[eqn.outvars[0]] = found

    def maker(self, atom: jx.Atom, op: jx.Primitive) -> jx.JaxprEqn | None:
        """The equation that computes ``atom``, if it is of this primitive."""
        eqn = None if isinstance(atom, jx.Literal) else self.made.get(atom)
        return eqn if eqn is not None and eqn.primitive is op else None

    def rows_of(self, atom: jx.Atom) -> OneHotRows | None:
        return None if isinstance(atom, jx.Literal) else self.rows.get(atom)

    def replacement(self, eqn: jx.JaxprEqn) -> list[jx.JaxprEqn] | None:
        """The equations that replace a sum along one-hot rows; None for any other equation."""
        rows = self.rows_of(eqn.invars[0]) if eqn.primitive is _prims.reduce_sum_p else None
        if rows is None or rows.dim not in eqn.params["axes"]:
            return None
        others = [d - (d > rows.dim) for d in eqn.params["axes"] if d != rows.dim]
        return jx.splice(lambda *xs: _sum(rows.fun(*xs), others), eqn, rows.operands)

    def elementwise(self, eqn: jx.JaxprEqn) -> OneHotRows | None:
        """Negation and casts, which keep zeros."""
        rows = self.rows_of(eqn.invars[0])
        if rows is None:
            return None
        before, after = (jx.aval(a).dtype for a in (eqn.invars[0], eqn.outvars[0]))
        rounds = jnp.issubdtype(after, jnp.inexact) and jx.represents(after, np.dtype(bool))  # and so keeps zeros
        if not (rounds or jx.represents(after, before)):
            return None
        fun = lax.neg if eqn.primitive is _prims.neg_p else lambda x: lax.convert_element_type(x, after)
        return replace(rows, fun=lambda *xs: fun(rows.fun(*xs)), is_cast_mask=before == np.bool_)

    def scaled(self, eqn: jx.JaxprEqn) -> OneHotRows | None:
        """Products and quotients with what is constant along a row: its other elements stay zero, or become NaN."""
        (left, right), result = eqn.invars, jx.aval(eqn.outvars[0])
        is_quotient = eqn.primitive is _prims.div_p
        for this, other in ((left, right),) if is_quotient else ((left, right), (right, left)):
            rows = self.rows_of(this)
            if rows is None or not _is_float(result.dtype) or rows.picks >= jx.aval(this).shape[rows.dim]:
                continue
            same_shape = jx.aval(this).shape == result.shape
            constant = self.constant_along(other, rows.dim, result.shape) if same_shape else None
            if constant is not None:
                return _scaled_rows(rows, constant, lax.div if is_quotient else lax.mul)
        return None

    def constant_along(
        self, atom: jx.Atom, dim: int, shape: Sequence[int]
    ) -> tuple[jx.Atom, Callable[[Any], Any]] | None:
        """The source of an operand that is constant along ``dim`` of an array of ``shape``, and the function that
        broadcasts it to ``shape`` without ``dim``; None where it is not constant."""
        rest = [n for d, n in enumerate(shape) if d != dim]
        have = jx.aval(atom).shape
        if not have:
            return atom, lambda x: jnp.broadcast_to(x, rest)
        if have[dim] == 1:
            return atom, lambda x: jnp.broadcast_to(lax.squeeze(x, [dim]), rest)
        eqn = self.maker(atom, _prims.broadcast_in_dim_p)
        if eqn is None:
            return None
        dims, source = eqn.params["broadcast_dimensions"], eqn.invars[0]
        if dim in dims and jx.aval(source).shape[dims.index(dim)] != 1:
            return None
        squeezed = [i for i, d in enumerate(dims) if d == dim]
        before = [n for d, n in enumerate(have) if d != dim]
        to = [d - (d > dim) for d in dims if d != dim]
        return source, lambda x: jnp.broadcast_to(lax.broadcast_in_dim(lax.squeeze(x, squeezed), before, to), rest)

    def compared(self, eqn: jx.JaxprEqn) -> OneHotRows | None:
        """A label compared to every position, as `jax.nn.one_hot` does."""
        shape = jx.aval(eqn.outvars[0]).shape
        for positions, label in (eqn.invars, reversed(eqn.invars)):
            for dim, n in enumerate(shape):
                constant = None
                if n > 1 and self.is_iota(positions, dim, n):
                    constant = self.constant_along(label, dim, shape)
                if constant is not None:
                    return OneHotRows(dim, 1, (constant[0],), _in_range(constant[1], n))
        return None

    def is_iota(self, atom: jx.Atom, dim: int, n: int) -> bool:
        """Whether ``atom`` is 0, 1, ... n - 1 along ``dim``, and constant along the others."""
        aval = jx.aval(atom)
        if not jnp.issubdtype(aval.dtype, jnp.signedinteger) or jnp.iinfo(aval.dtype).max < n or not aval.shape:
            return False
        if aval.shape[dim] != n:
            return False
        spread = self.maker(atom, _prims.broadcast_in_dim_p)
        if spread is None:
            iota = self.maker(atom, _prims.iota_p)
            return iota is not None and iota.params["dimension"] == dim
        dims = spread.params["broadcast_dimensions"]
        return dim in dims and self.is_iota(spread.invars[0], dims.index(dim), n)

    def scattered(self, eqn: jx.JaxprEqn) -> OneHotRows | None:
        """Updates added to zeros along one dimension, all others being batching dimensions."""
        into, indices, updates = eqn.invars
        numbers, mode = eqn.params["dimension_numbers"], GatherScatterMode.from_any(eqn.params["mode"])
        rank = len(jx.aval(into).shape)
        signed = jnp.issubdtype(jx.aval(indices).dtype, jnp.signedinteger)
        if (
            not self.is_zero(into)
            or not signed
            or mode not in _DROPS_OUT_OF_BOUNDS
            or len(numbers.inserted_window_dims) != 1
        ):
            return None
        (dim,) = numbers.inserted_window_dims
        batch, batch_at = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        if numbers.update_window_dims or numbers.scatter_dims_to_operand_dims != (dim,) or len(batch) != rank - 1:
            return None
        n, shape = jx.aval(into).shape[dim], jx.aval(updates).shape
        rest = [d for d in range(len(shape)) if d not in batch_at]
        order = [sorted(batch_at).index(batch_at[batch.index(d)]) for d in range(rank) if d != dim]

        def fun(at: Any, added: Any) -> Any:
            at = at.astype(jnp.promote_types(at.dtype, np.int32))  # a short type may not reach n
            in_bounds = (at[..., 0] >= 0) & (at[..., 0] < n) if _DROPS_OUT_OF_BOUNDS[mode] else True
            return lax.transpose(_sum(jnp.where(in_bounds, added, jnp.zeros_like(added)), rest), order)

        return OneHotRows(dim, math.prod(shape[d] for d in rest), (indices, updates), fun)

    def is_zero(self, atom: jx.Atom) -> bool:
        """Whether all of ``atom`` is rows_of to be zero."""
        eqn = self.maker(atom, _prims.broadcast_in_dim_p)
        return self.is_zero(eqn.invars[0]) if eqn else isinstance(atom, jx.Literal) and not np.any(atom.val)


_DROPS_OUT_OF_BOUNDS = {
    GatherScatterMode.FILL_OR_DROP: True,
    GatherScatterMode.CLIP: False,
    GatherScatterMode.PROMISE_IN_BOUNDS: True,  # should the promise be broken: XLA drops such updates
}
"""Whether updates out of bounds are dropped."""


def _scaled_rows(
    rows: OneHotRows, constant: tuple[jx.Atom, Callable[[Any], Any]], op: Callable[[Any, Any], Any]
) -> OneHotRows:
    """``rows`` multiplied or divided by what is constant along them."""
    other, broadcast = constant

    def fun(x: Any, *xs: Any) -> Any:
        w, picked = broadcast(x), rows.fun(*xs)
        if rows.is_cast_mask and op is lax.mul:
            return jnp.where(picked != 0, w, jnp.zeros_like(w))
        return op(picked, w) + op(jnp.zeros_like(picked), w)  # NaN where the zeros of the row become NaN

    return replace(rows, operands=(other, *rows.operands), fun=fun, is_cast_mask=False)


def _sum(x: Any, dims: Sequence[int]) -> Any:
    return lax.reduce_sum(x, dims) if dims else x


def _in_range(broadcast: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    """Whether a label is one of ``n`` positions, as a function of the label."""

    def fun(label: Any) -> Any:
        at = broadcast(label)
        return (at >= 0) & (at < n)

    return fun


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
