"""One-hot: sums along a dimension in which each row has one element that is not zero are that element, not a sum.

The gradient of picking one class a row is such an array, and that of a softmax sums it over the classes: where these
are split, one reduction more, and everywhere a pass over all classes. Of an array scattered into zeros the sum is that
of the updates that fell inside; of a label held against all positions it is whether the label is one of them. What is
then negated, converted, or multiplied or divided by the same number all along the row keeps that form.

Numbers are those of the sum, NaN and infinities among them, but for the rounding where one row is picked from twice,
and the sign of zeros.
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
    """Takes such sums from where their elements come from."""

    name: ClassVar[str] = "one_hot"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr)
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        if before is after:
            return "no sum of one-hot rows"
        saved = [sum(e.primitive is _prims.reduce_sum_p for e in jx.walk(p.jaxpr)) for p in (before, after)]
        return f"{saved[0] - saved[1]} sums of one-hot rows fewer"


@dataclass(frozen=True)
class Rows:
    """An array whose sum along ``dim`` is ``fun(*operands)``, that dimension left out."""

    dim: int
    picks: int
    """How many elements of a row, at most, are not zero."""
    operands: tuple[jx.Atom, ...]
    fun: Callable[..., Any]
    condition: bool = False
    """Whether it is a converted condition: XLA multiplies by that by choosing, so that no zero meets an infinity."""


def _rewritten(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` without such sums, at every depth; itself where there are none."""
    reader = _Reader()
    eqns: list[jx.JaxprEqn] = []
    changed = False
    for eqn in jaxpr.eqns:
        new = jx.map_bodies(eqn, _rewritten)
        eqn, changed = new, changed or new is not eqn
        found = reader.sum(eqn)
        eqns += [eqn] if found is None else found
        changed |= found is not None
        reader.read(eqn)
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


class _Reader:
    """What is known of the values of one jaxpr."""

    def __init__(self) -> None:
        self.made: dict[jx.Var, jx.JaxprEqn] = {}
        self.rows: dict[jx.Var, Rows] = {}
        self.readers = {
            _prims.convert_element_type_p: self.follows,
            _prims.div_p: self.scaled,
            _prims.eq_p: self.compared,
            _prims.mul_p: self.scaled,
            _prims.neg_p: self.follows,
            _prims.scatter_add_p: self.scattered,
        }

    def read(self, eqn: jx.JaxprEqn) -> None:
        for v in eqn.outvars:
            self.made[v] = eqn
        read = self.readers.get(eqn.primitive)
        found = read(eqn) if read else None
        if found is not None:
            self.rows[eqn.outvars[0]] = found

    def maker(self, atom: jx.Atom, op: jx.Primitive) -> jx.JaxprEqn | None:
        """The equation that makes ``atom``, if it is of this kind."""
        eqn = None if isinstance(atom, jx.Literal) else self.made.get(atom)
        return eqn if eqn is not None and eqn.primitive is op else None

    def known(self, atom: jx.Atom) -> Rows | None:
        return None if isinstance(atom, jx.Literal) else self.rows.get(atom)

    def sum(self, eqn: jx.JaxprEqn) -> list[jx.JaxprEqn] | None:
        """The equations in the place of a sum along the dimension of one-hot rows; None of anything else."""
        rows = self.known(eqn.invars[0]) if eqn.primitive is _prims.reduce_sum_p else None
        if rows is None or rows.dim not in eqn.params["axes"]:
            return None
        others = [d - (d > rows.dim) for d in eqn.params["axes"] if d != rows.dim]
        return jx.splice(lambda *xs: _summed(rows.fun(*xs), others), eqn, rows.operands)

    def follows(self, eqn: jx.JaxprEqn) -> Rows | None:
        """Each element for itself; zeros stay."""
        rows = self.known(eqn.invars[0])
        if rows is None:
            return None
        before, after = (jx.aval(a).dtype for a in (eqn.invars[0], eqn.outvars[0]))
        rounds = (_is_float(before) and _is_float(after)) or jnp.promote_types(before, after) == after
        if not rounds:
            return None
        fun = lax.neg if eqn.primitive is _prims.neg_p else lambda x: lax.convert_element_type(x, after)
        return replace(rows, fun=lambda *xs: fun(rows.fun(*xs)), condition=before == np.bool_)

    def scaled(self, eqn: jx.JaxprEqn) -> Rows | None:
        """By what is the same all along a row. The other elements are then zero too, or NaN."""
        (left, right), result = eqn.invars, jx.aval(eqn.outvars[0])
        divided = eqn.primitive is _prims.div_p
        for this, other in ((left, right),) if divided else ((left, right), (right, left)):
            rows = self.known(this)
            if rows is None or not _is_float(result.dtype) or rows.picks >= jx.aval(this).shape[rows.dim]:
                continue
            along = self.constant(other, rows.dim, result.shape) if jx.aval(this).shape == result.shape else None
            if along is not None:
                return _times(rows, along, lax.div if divided else lax.mul)
        return None

    def constant(self, atom: jx.Atom, dim: int, shape: Sequence[int]) -> tuple[jx.Atom, Callable[[Any], Any]] | None:
        """What is the same all along ``dim`` of ``shape``, and how to make it an array without that dimension."""
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
        gone = [i for i, d in enumerate(dims) if d == dim]
        made = [n for d, n in enumerate(have) if d != dim]
        to = [d - (d > dim) for d in dims if d != dim]
        return source, lambda x: jnp.broadcast_to(lax.broadcast_in_dim(lax.squeeze(x, gone), made, to), rest)

    def compared(self, eqn: jx.JaxprEqn) -> Rows | None:
        """A label held against every position."""
        shape = jx.aval(eqn.outvars[0]).shape
        for places, label in (eqn.invars, reversed(eqn.invars)):
            for dim, n in enumerate(shape):
                along = self.constant(label, dim, shape) if n > 1 and self.counts(places, dim, n) else None
                if along is not None:
                    return Rows(dim, 1, (along[0],), _within(along[1], n))
        return None

    def counts(self, atom: jx.Atom, dim: int, n: int) -> bool:
        """Whether ``atom`` holds 0, 1, ... n - 1 along ``dim``, whatever the other dimensions."""
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
        return dim in dims and self.counts(spread.invars[0], dims.index(dim), n)

    def scattered(self, eqn: jx.JaxprEqn) -> Rows | None:
        """Updates added to zeros, one or several a row, the other dimensions being those of a batch."""
        into, indices, updates = eqn.invars
        numbers, mode = eqn.params["dimension_numbers"], GatherScatterMode.from_any(eqn.params["mode"])
        rank = len(jx.aval(into).shape)
        signed = jnp.issubdtype(jx.aval(indices).dtype, jnp.signedinteger)
        if not self.zero(into) or not signed or mode not in _DROPS or len(numbers.inserted_window_dims) != 1:
            return None
        (dim,) = numbers.inserted_window_dims
        batch, places = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        if numbers.update_window_dims or numbers.scatter_dims_to_operand_dims != (dim,) or len(batch) != rank - 1:
            return None
        n, shape = jx.aval(into).shape[dim], jx.aval(updates).shape
        rest = [d for d in range(len(shape)) if d not in places]
        order = [sorted(places).index(places[batch.index(d)]) for d in range(rank) if d != dim]

        def fun(at: Any, given: Any) -> Any:
            inside = (at[..., 0] >= 0) & (at[..., 0] < n) if _DROPS[mode] else True
            return lax.transpose(_summed(jnp.where(inside, given, jnp.zeros_like(given)), rest), order)

        return Rows(dim, math.prod(shape[d] for d in rest), (indices, updates), fun)

    def zero(self, atom: jx.Atom) -> bool:
        """Whether all of ``atom`` is zero."""
        eqn = self.maker(atom, _prims.broadcast_in_dim_p)
        return self.zero(eqn.invars[0]) if eqn else isinstance(atom, jx.Literal) and not np.any(atom.val)


_DROPS = {
    GatherScatterMode.FILL_OR_DROP: True,
    GatherScatterMode.CLIP: False,
    GatherScatterMode.PROMISE_IN_BOUNDS: True,  # a promise that is broken: XLA leaves out what breaks it
}
"""Whether what lies out of bounds is left out."""


def _times(rows: Rows, along: tuple[jx.Atom, Callable[[Any], Any]], by: Callable[[Any, Any], Any]) -> Rows:
    other, spread = along

    def fun(x: Any, *xs: Any) -> Any:
        w, picked = spread(x), rows.fun(*xs)
        if rows.condition and by is lax.mul:
            return jnp.where(picked != 0, w, jnp.zeros_like(w))
        return by(picked, w) + by(jnp.zeros_like(picked), w)

    return replace(rows, operands=(other, *rows.operands), fun=fun, condition=False)


def _summed(x: Any, dims: Sequence[int]) -> Any:
    return lax.reduce_sum(x, dims) if dims else x


def _within(spread: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    def fun(label: Any) -> Any:
        at = spread(label)
        return (at >= 0) & (at < n)

    return fun


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
