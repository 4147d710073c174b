"""What is known of the values of a jaxpr without running it: scalar constants, positions (iotas) and masks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules

Letters = tuple[str | None, ...]
"""A letter for each dimension; None where the value is broadcast along it."""
Position = dict[str, int]
"""An integer linear in positions: the coefficient of each letter's position, and the constant under ``""``."""


@dataclass(frozen=True)
class Band:
    """A mask, True where the position along ``col`` minus that along ``row`` is in [low, high]; None is no limit."""

    row: str
    col: str
    low: int | None
    high: int | None

    def transposed(self) -> Band:
        """The same mask, with ``row`` and ``col`` interchanged."""
        return Band(
            self.col, self.row, None if self.high is None else -self.high, None if self.low is None else -self.low
        )

    def intersection(self, other: Band) -> Band | None:
        """The conjunction of two masks; None where they are of other dimensions."""
        if (self.row, self.col) != (other.row, other.col):
            return None
        lows = [x.low for x in (self, other) if x.low is not None]
        highs = [x.high for x in (self, other) if x.high is not None]
        return Band(self.row, self.col, max(lows, default=None), min(highs, default=None))


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

    def band(self, atom: jx.Var | jx.Literal, letters: Letters) -> Band | None:
        """The band that a boolean array with these letters is True in; None where it is not known to be one."""
        if not isinstance(atom, jx.Var) or len(jx.aval(atom).shape) != len(letters):
            return None
        var, letters = self.source(atom, letters)
        if var in self.outer:
            facts, outside = self.outer[var]
            return facts.band(outside, letters)
        eqn = self.defs.get(var)
        if eqn is None:
            return None
        op = eqn.primitive
        if op in (_prims.ge_p, _prims.gt_p, _prims.le_p, _prims.lt_p):
            x, y = (self.position(a, letters) for a in eqn.invars)
            return None if x is None or y is None else _comparison_band(op, x, y)
        if op is _prims.and_p:
            sides = [self.band(a, letters) for a in eqn.invars]
            ones = [a for a, s in zip(eqn.invars, sides, strict=True) if s is None and self.const(a) == 1]
            known = [s for s in sides if s is not None]
            if len(known) == 2:
                other = known[1] if known[0].row == known[1].row else known[1].transposed()
                return known[0].intersection(other)
            return known[0] if known and ones else None
        if op is _prims.not_p:
            inner = self.band(eqn.invars[0], letters)
            return None if inner is None else complement(inner)
        if (
            op is _prims.select_n_p
            and len(eqn.invars) == 3
            and self.const(eqn.invars[1]) == 0
            and self.const(eqn.invars[2]) == 1
        ):
            return self.band(eqn.invars[0], letters)
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


def complement(band: Band) -> Band | None:
    """The negation of a mask; None where that is no band, as of a band with two limits."""
    if band.low is None and band.high is not None:
        return replace(band, low=band.high + 1, high=None)
    return replace(band, low=None, high=band.low - 1) if band.high is None and band.low is not None else None


def _comparison_band(op: jx.Primitive, x: Position, y: Position) -> Band | None:
    """Where ``x`` compares to ``y`` as ``op`` says; None where they are not positions along one dimension each."""
    left = {c: x.get(c, 0) - y.get(c, 0) for c in {**x, **y}}
    offset = left.pop("", 0)
    found = {c: n for c, n in left.items() if n}
    if sorted(found.values()) != [-1, 1]:
        return None
    (row,), (col,) = ([c for c, n in found.items() if n == sign] for sign in (-1, 1))
    low = {_prims.ge_p: -offset, _prims.gt_p: 1 - offset}.get(op)
    high = {_prims.le_p: -offset, _prims.lt_p: -1 - offset}.get(op)
    return Band(row, col, low, high)


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
