"""What is known of the values of a jaxpr without running it: scalar constants, positions (iotas) and masks of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.passes.attention.masks import (
    COMPARISONS,
    Letters,
    Mask,
    Position,
    Segments,
    comparison_band,
    complement,
    conjunction,
)

OuterValues = Mapping[jx.Var, tuple["Facts", "jx.Var | jx.Literal"]]
"""Inputs of a nested jaxpr -> the facts of the jaxpr around it, and the value there."""


class Facts:
    """Constants, positions and masks among the values of one jaxpr."""

    def __init__(self, jaxpr: jx.Jaxpr, rules: Rules, outer: OuterValues | None = None) -> None:
        self.rules = rules
        self.defs = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.consts = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        self.outer = outer or {}

    def in_region(self, eqn: jx.JaxprEqn, region: jx.Region) -> OuterValues:
        """The loop-invariant inputs of one of the bodies of ``eqn``."""
        carried = {start for _, start in region.carries}
        if not region.trip_count_known:  # a `while`, whose condition reads carries too
            return {}
        return {
            region.body.invars[w.inside]: (self, eqn.invars[w.outside])
            for w in region.inputs
            if not w.stacked and w.inside not in carried
        }

    def const(self, atom: jx.Var | jx.Literal) -> float | None:
        """The number that every element of ``atom`` is; None where it is not known to be one."""
        found = self._scalar(atom)
        return None if found is None else float(found)

    def _scalar(self, atom: jx.Var | jx.Literal) -> Any:
        if isinstance(atom, jx.Literal):
            dtype = getattr(jx.aval(atom), "dtype", None)
            real = isinstance(dtype, np.dtype) and np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val)
            return np.asarray(atom.val, dtype) if real else None
        if atom in self.consts:
            value = self.consts[atom]
            known = np.ndim(value) == 0 and not jx.is_tracer(value) and jx.is_array(atom)
            return np.asarray(value) if known and not np.iscomplexobj(value) else None
        if atom in self.outer:
            facts, outside = self.outer[atom]
            return facts._scalar(outside)
        eqn = self.defs.get(atom)
        if eqn is None or len(eqn.outvars) != 1:
            return None
        traits = self.rules.traits(eqn.primitive)
        if traits.keeps_constant and len(eqn.invars) == 1:
            return self._scalar(eqn.invars[0])
        if not traits.folds_scalars or (jx.aval(atom).shape and not traits.casts):
            return None
        operands = [self._scalar(a) for a in eqn.invars]
        if any(x is None for x in operands):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(eqn.primitive.bind(*operands, **eqn.params))

    def source(self, var: jx.Var, letters: Letters) -> tuple[jx.Var, Letters]:
        """The variable that ``var``, with these letters, is a broadcast, transpose or reshape of, and its letters."""
        while True:
            shape = jx.aval(var).shape
            letters = tuple(None if n == 1 else c for c, n in zip(letters, shape, strict=True))
            eqn = self.defs.get(var)
            operand = eqn.invars[0] if eqn is not None and len(eqn.invars) == 1 else None
            if eqn is None or not isinstance(operand, jx.Var):
                return var, letters
            p = eqn.params
            before = jx.aval(operand).shape
            if eqn.primitive is _prims.broadcast_in_dim_p:
                letters = tuple(letters[d] for d in p["broadcast_dimensions"])
            elif eqn.primitive is _prims.transpose_p:
                letters = tuple(letters[p["permutation"].index(d)] for d in range(len(before)))
            elif eqn.primitive is _prims.squeeze_p or (eqn.primitive is _prims.reshape_p and p["dimensions"] is None):
                places = reshape_dims(shape, before)
                if places is None:
                    return var, letters
                letters = tuple(letters[d] if d is not None else None for d in places)
            else:
                return var, letters
            var = operand

    def mask(self, atom: jx.Var | jx.Literal, letters: Letters, kept: bool = True) -> Mask | None:
        """Bands and segments that all keep a score where a boolean array with these letters is ``kept``, and nowhere
        else; None where it is not known to be such a mask."""
        if jx.aval(atom).dtype != np.bool_:
            return None
        constant = self.const(atom)
        if constant is not None:
            return () if bool(constant) == kept else None
        if not isinstance(atom, jx.Var) or len(jx.aval(atom).shape) != len(letters):
            return None
        var, letters = self.source(atom, letters)
        if var in self.outer:
            facts, outside = self.outer[var]
            found = facts.mask(outside, letters, kept)  # segment ids are no variable of this jaxpr
            return None if found is None or any(isinstance(m, Segments) for m in found) else found
        eqn = self.defs.get(var)
        if eqn is None:
            return None
        op = eqn.primitive
        if op is _prims.not_p:
            return self.mask(eqn.invars[0], letters, not kept)
        if op is (_prims.and_p if kept else _prims.or_p):
            x, y = (self.mask(a, letters, kept) for a in eqn.invars)
            return conjunction(x, y)
        if op is _prims.select_n_p and len(eqn.invars) == 3:
            return self._selected(eqn, letters, kept)
        if op in COMPARISONS:
            return self._compared(eqn, letters, kept)
        two = self._two_numbers(eqn.invars[0]) if op is _prims.convert_element_type_p else None
        if two is not None and bool(two[1]) != bool(two[2]):
            return self.mask(two[0], letters, bool(two[2]) == kept)
        return None

    def _selected(self, eqn: jx.JaxprEqn, letters: Letters, kept: bool) -> Mask | None:
        """`mask` of a choice between two boolean arrays, one of which at least is a constant."""
        which, *cases = eqn.invars
        constants = [self.const(a) for a in cases]
        if None not in constants:
            return self.mask(which, letters, bool(constants[1]) == kept) if constants[0] != constants[1] else None
        chosen = next((i for i in (0, 1) if constants[1 - i] == (not kept)), None)
        if chosen is None:
            return None
        return conjunction(self.mask(which, letters, bool(chosen)), self.mask(cases[chosen], letters, kept))

    def _compared(self, eqn: jx.JaxprEqn, letters: Letters, kept: bool) -> Mask | None:
        """`mask` of a comparison: of positions, of segment ids, or of a mask written in numbers with a number."""
        op, (left, right) = eqn.primitive, eqn.invars
        for numbers, other in ((left, right), (right, left)):
            constant, two = self._scalar(other), self._two_numbers(numbers)
            if constant is not None and two is not None:
                which, *values = two
                with jax.ensure_compile_time_eval():
                    sides = [(x, constant) if numbers is left else (constant, x) for x in values]
                    no, yes = (bool(op.bind(*s, **eqn.params)) for s in sides)
                return self.mask(which, letters, yes == kept) if no != yes else None
        if op is (_prims.eq_p if kept else _prims.ne_p):
            return self._segments(left, right, letters)
        x, y = (self.position(a, letters) for a in eqn.invars)
        band = None if x is None or y is None else comparison_band(op, x, y)
        band = band if kept or band is None else complement(band)
        return None if band is None else (band,)

    def _two_numbers(self, atom: jx.Var | jx.Literal) -> tuple[jx.Var | jx.Literal, Any, Any] | None:
        """A boolean array of the shape of ``atom``, and the numbers that are in ``atom`` where it is False and where it
        is True; None where that is not known."""
        eqn = self.defs.get(atom) if isinstance(atom, jx.Var) else None
        if eqn is None or not eqn.invars:
            return None
        which, *cases = eqn.invars
        if eqn.primitive is _prims.select_n_p:
            values = [self._scalar(a) for a in cases]
            known = len(values) == 2 and all(x is not None for x in values)
            return (which, *values) if known and jx.aval(which).shape == jx.aval(atom).shape else None
        if eqn.primitive is not _prims.convert_element_type_p:
            return None
        numbers = (which, np.False_, np.True_) if jx.aval(which).dtype == np.bool_ else self._two_numbers(which)
        if numbers is None:
            return None
        with jax.ensure_compile_time_eval():
            no, yes = (np.asarray(eqn.primitive.bind(np.asarray(x), **eqn.params)) for x in numbers[1:])
        return numbers[0], no, yes

    def _segments(self, left: jx.Var | jx.Literal, right: jx.Var | jx.Literal, letters: Letters) -> Mask | None:
        """The segments that are where two arrays are equal: one array of integers, along two dimensions."""
        x, y = (self._integers(a, letters) for a in (left, right))
        if x is None or y is None or x[2] != y[2] or not self._same(x[0], y[0]):
            return None
        ids = x[0]
        differing = [(a, b) for a, b in zip(x[1], y[1], strict=True) if a != b]
        if len(differing) != 1 or None in differing[0] or jx.dtype_bits(jx.aval(ids).dtype) > 32:
            return None
        if any(c is None and n != 1 for c, n in zip(x[1], jx.aval(ids).shape, strict=True)):
            return None
        ((row, col),) = differing
        assert row is not None
        assert col is not None
        found = Segments(ids, row, col, x[1])
        return (found,) if x[1].count(row) == y[1].count(col) == 1 and row not in y[1] and col not in x[1] else None

    def _same(self, x: jx.Var | jx.Literal, y: jx.Var | jx.Literal, depth: int = 8) -> bool:
        """Whether two values are computed in the same way, in at most ``depth`` equations, from the same variables."""
        if isinstance(x, jx.Literal) and isinstance(y, jx.Literal):
            return jx.aval(x) == jx.aval(y) and np.array_equal(x.val, y.val)
        if isinstance(x, jx.Literal) or isinstance(y, jx.Literal):
            return False
        made, other = self.defs.get(x), self.defs.get(y)
        if x is y or made is None or other is None or not depth or len(made.outvars) + len(other.outvars) > 2:
            return x is y
        equal = made.primitive is other.primitive and len(made.invars) == len(other.invars)
        equal = equal and not jx.regions(made) and not made.effects and made.params.keys() == other.params.keys()
        params = [(made.params[name], other.params[name]) for name in made.params] if equal else []
        equal = equal and all(a is b or (isinstance(a, Hashable) and a == b) for a, b in params)
        return equal and all(self._same(*pair, depth - 1) for pair in zip(made.invars, other.invars, strict=True))

    def _integers(
        self, atom: jx.Var | jx.Literal, letters: Letters
    ) -> tuple[jx.Var, Letters, tuple[np.dtype[Any], ...]] | None:
        """The array of integers that ``atom`` is a broadcast of, its letters, and the casts on the way: none of them
        makes two integers one."""
        casts: list[np.dtype[Any]] = []
        if not isinstance(atom, jx.Var):
            return None
        while _is_integer(jx.aval(atom).dtype):
            if len(jx.aval(atom).shape) != len(letters):
                return None
            atom, letters = self.source(atom, letters)
            eqn = self.defs.get(atom)
            if eqn is None or eqn.primitive is not _prims.convert_element_type_p:
                return atom, letters, tuple(casts)
            (operand,), dtype = eqn.invars, jx.aval(atom).dtype
            before = jx.aval(operand).dtype
            if (
                not isinstance(operand, jx.Var)
                or not _is_integer(before)
                or jx.dtype_bits(before) > jx.dtype_bits(dtype)
            ):
                return atom, letters, tuple(casts)
            casts.append(dtype)
            atom = operand
        return None

    def position(self, atom: jx.Var | jx.Literal, letters: Letters) -> Position | None:
        """An integer array with these letters as a linear function of positions; None where it is not one."""
        dtype = jx.aval(atom).dtype
        if dtype not in (np.int32, np.int64):
            return None
        constant = self.const(atom)
        if constant is not None:
            return {"": int(constant)} if abs(constant) < 2**30 else None
        if not isinstance(atom, jx.Var) or len(jx.aval(atom).shape) != len(letters):
            return None
        var, letters = self.source(atom, letters)
        if var in self.outer:
            facts, outside = self.outer[var]
            return facts.position(outside, letters)
        if var in self.consts:
            return _progression(self.consts[var], letters)
        eqn = self.defs.get(var)
        if eqn is None:
            return None
        op = eqn.primitive
        if op is _prims.iota_p:
            letter = letters[eqn.params["dimension"]]
            return None if letter is None else {letter: 1}
        if op is _prims.convert_element_type_p:
            return self.position(eqn.invars[0], letters)
        if op in (_prims.add_p, _prims.sub_p):
            x, y = (self.position(a, letters) for a in eqn.invars)
            if x is None or y is None:
                return None
            sign = 1 if op is _prims.add_p else -1
            return {c: x.get(c, 0) + sign * y.get(c, 0) for c in {**x, **y}}
        return None


def _progression(value: Any, letters: Letters) -> Position | None:
    """An array that the trace holds as a constant, such as of `jax.numpy.arange`; None where its elements are not each
    one more than the last."""
    if np.ndim(value) != 1 or jx.is_tracer(value) or letters[0] is None:
        return None
    numbers = np.asarray(value)
    first = int(numbers[0]) if numbers.size else 0
    counts = np.array_equal(numbers, np.arange(first, first + numbers.size))
    return {letters[0]: 1, "": first} if counts and abs(first) < 2**30 else None


def _is_integer(dtype: Any) -> bool:
    return dtype == np.bool_ or jax.dtypes.issubdtype(dtype, np.integer)


def reshape_dims(before: Sequence[int], after: Sequence[int]) -> list[int | None] | None:
    """For each dimension of ``after`` the one of ``before`` that it is (None: a new one of size 1); None where a
    reshape between these shapes merges or splits dimensions."""
    places: list[int | None] = []
    d = 0
    for n in after:
        while d < len(before) and before[d] == 1 and n != 1:
            d += 1
        if d < len(before) and before[d] == n:
            places.append(d)
            d += 1
        elif n == 1:
            places.append(None)
        else:
            return None
    return places if all(n == 1 for n in before[d:]) else None
