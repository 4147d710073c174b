"""Rotary positions and the like on whole rows: ``x * [c, c] + swapped(x) * [-s, s]`` in place of its two halves.

``concatenate([a * c - b * s, b * c + a * s])`` of the halves ``a, b`` of a head computes with arrays that are narrower
than the lanes of a tile. XLA for TPU gives them a layout of their own, with the positions minor, in which no lane is
idle, and copies whole queries and keys into it and out of it, in float32 where the halves are float32.

Here the halves change places in one operation (`autoshard.transforms.swapped_halves`), and all else is computed of
whole rows, element by element as in the step as it is written and in the same order, so that results are the same
numbers, up to the sign of a zero in the gradient of a slice; what TPUs make of a row is said there.

The gradient of such a rotation is one too. Both are found as what they compute, not by how they are written: a half of
the result is one half of ``x`` or two, each times factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.transforms.pipeline import Pass
from autoshard.transforms.swapped_halves import BY_PRODUCT, swapped_halves_p

_DEPTH = 8
"""Operations between the halves of an array and those of a result, at most."""


@dataclass(frozen=True)
class Rotary(Pass):
    """Computes what combines the halves of rows on whole rows, where half a row leaves lanes of a tile idle."""

    name: ClassVar[str] = "rotary"

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr, _lanes(program))
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        if before is after:
            return "no rotation of halves is rewritten"
        found = [*_rotations(before.jaxpr, _lanes(before))]
        lines = Counter(jx.source(e) or "unknown line" for e in found)
        where = ", ".join(line + (f", {n} times" if n > 1 else "") for line, n in sorted(lines.items()))
        return f"{len(found)} rotations of halves computed on whole rows ({where})"


def _lanes(program: Program) -> int:
    """Of a tile, where rotations are to be computed on whole rows; else 0: no half is narrower."""
    hardware = program.mesh.hardware
    return hardware.tile[1] if hardware.attention_layouts else 0


def _rewritten(jaxpr: jx.Jaxpr, lanes: int) -> jx.Jaxpr:
    """``jaxpr`` with rotations on whole rows, at every depth; the same object where there are none.

    ``lanes``: of a tile: rows whose halves fill them stay as they are.
    """
    halves, eqns, changed = _Halves(jaxpr), list[jx.JaxprEqn](), False
    for eqn in jaxpr.eqns:
        rotation = halves.rotation(eqn, lanes)
        new = rotation.on_rows(eqn) if rotation else [jx.map_bodies(eqn, lambda body: _rewritten(body, lanes))]
        changed |= new[0] is not eqn
        eqns += new
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def _rotations(jaxpr: jx.Jaxpr, lanes: int) -> Iterator[jx.JaxprEqn]:
    """The equations that `_rewritten` replaces."""
    halves = _Halves(jaxpr)
    for eqn in jaxpr.eqns:
        if halves.rotation(eqn, lanes):
            yield eqn
        for region in jx.regions(eqn):
            yield from _rotations(region.body, lanes)


class _Term(NamedTuple):
    """A half of an array, times factors."""

    half: int
    """0: the first."""
    sign: int
    factors: tuple[jx.Atom, ...]
    """In the order in which they are multiplied."""


class _Sum(NamedTuple):
    """One or two terms of the halves of an array."""

    array: jx.Var
    dtype: Any
    """In which the terms are computed."""
    terms: tuple[_Term, ...]


class _Pair(NamedTuple):
    """What the first and the second half of a result have in one place of their sums."""

    signs: tuple[int, int]
    factors: tuple[tuple[jx.Atom, jx.Atom], ...]


@dataclass(frozen=True)
class _Rotation:
    """A result whose halves are terms of the halves of an array."""

    array: jx.Var
    dtype: Any
    straight: _Pair | None
    """Of each half of the result that half of the array; None where there is no such term."""
    swapped: _Pair
    """Of each half of the result the other half of the array."""

    def on_rows(self, eqn: jx.JaxprEqn) -> list[jx.JaxprEqn]:
        """The equations that compute the result of ``eqn``."""
        pairs = [pair for pair in (self.straight, self.swapped) if pair is not None]
        factors, dtype = [a for pair in pairs for both in pair.factors for a in both], jx.aval(eqn.outvars[0]).dtype

        def rotated(x: Any, *factors: Any) -> Any:
            rest, half = iter(factors), x.shape[-1] // 2
            terms = []
            for pair in pairs:
                (term,) = swapped_halves_p.bind(x) if pair is self.swapped else (x,)
                term, signs = term.astype(self.dtype), pair.signs
                for _ in pair.factors:
                    term, signs = term * _row(next(rest), next(rest), signs, half, x.ndim), (1, 1)
                if signs != (1, 1):
                    one = jnp.ones((), self.dtype)
                    term = term * _row(one, one, signs, half, x.ndim)
                terms.append(term)
            return sum(terms[1:], terms[0]).astype(dtype)

        return jx.splice(rotated, eqn, [self.array, *factors])


def _row(first: Any, second: Any, signs: tuple[int, int], half: int, rank: int) -> Any:
    """The factors of both halves as one of whole rows."""
    both = [lax.neg(f) if sign < 0 else f for f, sign in zip((first, second), signs, strict=True)]
    both = [f.reshape((1,) * rank) if f.ndim == 0 else f for f in both]
    shape = (*jnp.broadcast_shapes(*(f.shape[:-1] for f in both)), half)
    return jnp.concatenate([jnp.broadcast_to(f, shape) for f in both], axis=-1)


class _Halves:
    """What the equations of one jaxpr compute of the halves of rows."""

    def __init__(self, jaxpr: jx.Jaxpr) -> None:
        self._made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._joining = {
            _prims.add_jaxvals_p: self._of_padded,
            _prims.add_p: self._of_padded,
            _prims.concatenate_p: self._of_concatenated,
        }
        self._terms = {
            _prims.add_jaxvals_p: self._of_sum,
            _prims.add_p: self._of_sum,
            _prims.convert_element_type_p: self._of_cast,
            _prims.mul_p: self._of_product,
            _prims.neg_p: self._of_negative,
            _prims.slice_p: self._of_slice,
            _prims.sub_p: self._of_difference,
            lax.split_p: self._of_split,
        }

    def rotation(self, eqn: jx.JaxprEqn, lanes: int) -> _Rotation | None:
        """What ``eqn`` puts together, if these are two halves of the same rows and some change places."""
        joining = self._joining.get(eqn.primitive)
        both = joining(eqn) if joining else []
        if len(both) != 2 or jx.aval(both[0]).shape != jx.aval(both[1]).shape or jx.aval(both[0]).shape[-1] >= lanes:
            return None
        first, second = (self._sum(a, _DEPTH) for a in self._before_casts(both))
        if first is None or second is None or first[:2] != second[:2]:
            return None
        rows = jx.aval(first.array)
        if rows.shape != jx.aval(eqn.outvars[0]).shape or str(rows.dtype) not in BY_PRODUCT:
            return None
        of_first, of_second = ({t.half: t for t in s.terms} for s in (first, second))
        straight, swapped = _pair(of_first.get(0), of_second.get(1)), _pair(of_first.get(1), of_second.get(0))
        count = sum(pair is not None for pair in (straight, swapped))
        if swapped is None or count != len(first.terms) or count != len(second.terms):
            return None
        if straight is None and not swapped.factors and swapped.signs[0] == swapped.signs[1]:
            return None  # halves that change places and no more, as in a roll
        return _Rotation(first.array, first.dtype, straight, swapped)

    def _of_concatenated(self, eqn: jx.JaxprEqn) -> Sequence[jx.Atom]:
        last = len(jx.aval(eqn.outvars[0]).shape) - 1
        return eqn.invars if eqn.params["dimension"] == last else []

    def _of_padded(self, eqn: jx.JaxprEqn) -> Sequence[jx.Atom]:
        """Of a sum of halves beside zeros, as the gradients of slices are, the halves in their order."""
        found = dict(padded for a in eqn.invars if (padded := self._padded(a)) is not None)
        return [found[at] for at in sorted(found)]

    def _padded(self, atom: jx.Atom) -> tuple[int, jx.Atom] | None:
        """Which half of a row is not zero, and what it is; None where no half is zero by itself."""
        eqn = self._maker(atom)
        if eqn is None or eqn.primitive is not _prims.pad_p:
            return None
        half, value = eqn.invars
        if not eqn.params["padding_config"]:
            return None
        *others, (low, high, inner) = eqn.params["padding_config"]
        is_zero = isinstance(value, jx.Literal) and not value.val
        if not is_zero or inner or any(map(any, others)) or sorted((low, high)) != [0, jx.aval(half).shape[-1]]:
            return None
        return int(low > 0), half

    def _before_casts(self, both: Sequence[jx.Atom]) -> Sequence[jx.Atom]:
        """What two halves are cast from at last, where both are: the rows are cast then."""
        casts = [self._maker(a) for a in both]
        before = [e.invars[0] for e in casts if e is not None and e.primitive is _prims.convert_element_type_p]
        return before if len(before) == 2 and jx.aval(before[0]).dtype == jx.aval(before[1]).dtype else both

    def _maker(self, atom: jx.Atom) -> jx.JaxprEqn | None:
        return None if isinstance(atom, jx.Literal) else self._made.get(atom)

    def _sum(self, atom: jx.Atom, depth: int) -> _Sum | None:
        """``atom`` as terms of the halves of an array; None where it is something else, or more operations than
        ``depth`` away from them."""
        eqn = self._maker(atom)
        found = self._terms.get(eqn.primitive) if eqn is not None and depth else None
        return found(eqn, atom, depth - 1) if found and eqn is not None else None

    def _of_negative(self, eqn: jx.JaxprEqn, _: jx.Atom, depth: int) -> _Sum | None:
        return _negated(self._sum(eqn.invars[0], depth))

    def _of_cast(self, eqn: jx.JaxprEqn, _: jx.Atom, depth: int) -> _Sum | None:
        """Of a half in a wider dtype, before it is multiplied."""
        before, after = jx.aval(eqn.invars[0]).dtype, jx.aval(eqn.outvars[0]).dtype
        of = self._sum(eqn.invars[0], depth) if jx.represents(after, before) else None
        return of._replace(dtype=after) if of and len(of.terms) == 1 and not of.terms[0].factors else None

    def _of_product(self, eqn: jx.JaxprEqn, _: jx.Atom, depth: int) -> _Sum | None:
        for half, factor in (eqn.invars, eqn.invars[::-1]):
            of = self._sum(half, depth) if _is_small(factor, jx.aval(eqn.outvars[0]).shape) else None
            if of is not None and len(of.terms) == 1:
                (term,) = of.terms
                return of._replace(terms=(term._replace(factors=(*term.factors, factor)),))
        return None

    def _of_sum(self, eqn: jx.JaxprEqn, _: jx.Atom, depth: int) -> _Sum | None:
        return _added(*(self._sum(a, depth) for a in eqn.invars))

    def _of_difference(self, eqn: jx.JaxprEqn, _: jx.Atom, depth: int) -> _Sum | None:
        left, right = (self._sum(a, depth) for a in eqn.invars)
        return _added(left, _negated(right))

    def _of_split(self, eqn: jx.JaxprEqn, atom: jx.Atom, _: int) -> _Sum | None:
        return self._half(eqn, atom, sum(eqn.params["sizes"][: eqn.outvars.index(atom)]))  # type: ignore[arg-type]

    def _of_slice(self, eqn: jx.JaxprEqn, atom: jx.Atom, _: int) -> _Sum | None:
        strides = eqn.params["strides"] or [1]
        return self._half(eqn, atom, eqn.params["start_indices"][-1]) if set(strides) == {1} else None

    def _half(self, eqn: jx.JaxprEqn, atom: jx.Atom, start: int) -> _Sum | None:
        """The half of the rows of the operand that begins at ``start``, if it is one; of a cast, that of what is
        cast."""
        (array,), (*rest, half) = eqn.invars, jx.aval(atom).shape
        dtype, cast = jx.aval(array).dtype, self._maker(array)
        if not isinstance(array, jx.Var) or jx.aval(array).shape != (*rest, 2 * half) or start not in (0, half):
            return None
        if cast is not None and cast.primitive is _prims.convert_element_type_p:
            (narrow,) = cast.invars
            array = narrow if isinstance(narrow, jx.Var) and jx.represents(dtype, jx.aval(narrow).dtype) else array
        return _Sum(array, dtype, (_Term(int(start > 0), 1, ()),))


def _negated(of: _Sum | None) -> _Sum | None:
    return of and of._replace(terms=tuple(t._replace(sign=-t.sign) for t in of.terms))


def _added(left: _Sum | None, right: _Sum | None) -> _Sum | None:
    """The sum of two terms of different halves of the same array."""
    if left is None or right is None or left[:2] != right[:2] or len(left.terms) + len(right.terms) != 2:
        return None
    terms = left.terms + right.terms
    return left._replace(terms=terms) if terms[0].half != terms[1].half else None


def _pair(first: _Term | None, second: _Term | None) -> _Pair | None:
    """Terms of both halves of a result, with as many factors; None where there are no such two."""
    if first is None or second is None or len(first.factors) != len(second.factors):
        return None
    return _Pair((first.sign, second.sign), tuple(zip(first.factors, second.factors, strict=True)))


def _is_small(factor: jx.Atom, shape: Sequence[int]) -> bool:
    """Whether a factor of an array of ``shape`` has fewer elements, as tables of angles do: it is put together of two
    halves."""
    have = jx.aval(factor).shape
    return not have or (len(have) == len(shape) and any(have[d] < n for d, n in enumerate(shape[:-1])))
