"""Which values of a jaxpr are rows in the order of one sort, and what they are in the rows' own order.

Rows are sorted by group where an index array ``order`` sorts integers (`jax.numpy.argsort`). From there:

- what is taken at ``order``, or at ``order // k``, *enters*: sorted rows of an array in its own order;
- an equation of sorted rows that treats all rows in the same way is a *step*: a ragged product, or anything row by row;
- what is taken at the inverse of ``order``, put to ``order``, or added up at ``order // k``, *leaves*: rows in their
  own order, or the sums of ``k`` rows each. The gradient of the one is the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives as _prims
from jax.lax import GatherScatterMode

from autoshard import jaxpr as jx
from autoshard.errors import RuleError
from autoshard.ir.program import Program
from autoshard.ir.rule import Rule
from autoshard.ir.rule_registry import fallback_rule, lookup_rule
from autoshard.ir.traits import Traits
from autoshard.passes.experts.positions import Array, positions

MARGIN = 3
"""How far beyond the groups, on both sides, the counting of rows is tried."""


@dataclass(frozen=True)
class Entry:
    """Sorted rows of ``source``, each of whose rows stands for ``repeats`` of them."""

    source: jx.Atom
    repeats: int


@dataclass(frozen=True)
class Exit:
    """An equation that reads sorted rows and gives rows in their own order."""

    rows: jx.Var
    repeats: int
    """How many rows are added up to one; 0 where none are."""
    onto: jx.Atom | None = None
    """What they are added to; None for zeros."""


class SortedRows:
    """What is sorted by the equation number ``at``."""

    def __init__(self, program: Program, jaxpr: jx.Jaxpr, at: int) -> None:
        self.program, self.jaxpr = program, jaxpr
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        eqn = jaxpr.eqns[at]
        group_of = eqn.invars[0]
        assert isinstance(group_of, jx.Var)
        self.group_of, (keys, self.order) = group_of, eqn.outvars
        (self.count,) = jx.aval(self.order).shape
        self._range = np.arange(self.count)
        self.inverse: set[jx.Var] = set()
        self.groups: dict[jx.Var, int] = {}
        """Variables that are the sizes of the groups -> how many groups there are."""
        self.entries: dict[jx.Var, Entry] = {keys: Entry(group_of, 1)}
        self.steps: dict[jx.Var, int] = {}
        """Sorted rows, and sums over each group's rows, that steps make -> the number of the equation."""
        self.sums: set[jx.Var] = set()
        self.exits: dict[int, Exit] = {}
        for n, e in enumerate(jaxpr.eqns):
            if n != at and len(e.outvars) <= 2 and not e.effects:
                self._visit(n, e)

    def is_row(self, atom: jx.Atom) -> bool:
        """Whether ``atom`` is sorted rows."""
        return isinstance(atom, jx.Var) and (atom in self.entries or (atom in self.steps and atom not in self.sums))

    def rule(self, eqn: jx.JaxprEqn) -> Rule:
        """The rule of ``eqn``, which keeps it whole where it has none."""
        try:
            return lookup_rule(eqn, self.program.rules, self.program.mesh) or fallback_rule(eqn)
        except RuleError:  # reported when the graph is built
            return fallback_rule(eqn)

    def traits(self, eqn: jx.JaxprEqn) -> Traits:
        return self.program.rules.traits(eqn.primitive)

    def _visit(self, n: int, eqn: jx.JaxprEqn) -> None:
        op = eqn.primitive
        if op is _prims.sort_p:
            is_inverse = len(eqn.invars) == 2 and eqn.params["num_keys"] == 1 and self._index(eqn.invars[0], 1)
            if is_inverse and self._is_range(eqn.invars[1]):
                self.inverse.add(eqn.outvars[1])
        elif op is _prims.gather_p:
            self._visit_gather(n, eqn)
        elif op in (_prims.scatter_p, _prims.scatter_add_p):
            self._visit_scatter(n, eqn)
        elif self.traits(eqn).grouped_product:
            self._visit_product(n, eqn)
        elif any(map(self.is_row, eqn.invars)):
            self._visit_rows(n, eqn)

    def _index(self, atom: jx.Atom, repeats: int, *, inverse: bool = False) -> bool:
        """Whether ``atom`` is ``order // repeats``, or the inverse of the order."""
        if math.prod(jx.aval(atom).shape) != self.count:
            return False
        bases = self.inverse if inverse else {self.order}
        found = (positions(atom, self.made, {base: self._range}) for base in bases)
        return any(p is not None and np.array_equal(p.reshape(-1), self._range // repeats) for p in found)

    def _is_range(self, atom: jx.Atom) -> bool:
        p = positions(atom, self.made, {})
        return p is not None and np.array_equal(p.reshape(-1), self._range)

    def _is_number(self, atom: jx.Atom, number: int) -> bool:
        """Whether ``atom`` is ``number`` everywhere."""
        if isinstance(atom, jx.Literal):
            return bool(np.all(atom.val == number))
        eqn = self.made.get(atom)
        if eqn is None or not (self.traits(eqn).keeps_constant or self.traits(eqn).casts):
            return False
        return self._is_number(eqn.invars[0], number)

    def _repeats(self, rows: int) -> int:
        """How many sorted rows there are for each of ``rows``; 0 where that is no whole number."""
        return self.count // rows if rows and self.count % rows == 0 else 0

    def _visit_gather(self, n: int, eqn: jx.JaxprEqn) -> None:
        source, index = eqn.invars
        numbers, shape = eqn.params["dimension_numbers"], jx.aval(source).shape
        whole_rows = (
            numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
            and numbers.offset_dims == tuple(range(1, len(shape)))
            and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
            and jx.aval(index).shape == (self.count, 1)
        )
        if whole_rows and self.is_row(source):
            if self._index(index, 1, inverse=True):
                assert isinstance(source, jx.Var)
                self.exits[n] = Exit(source, 0)
        elif whole_rows and (repeats := self._repeats(shape[0])) and self._index(index, repeats):
            self.entries[eqn.outvars[0]] = Entry(source, repeats)

    def _visit_scatter(self, n: int, eqn: jx.JaxprEqn) -> None:
        onto, index, updates = eqn.invars
        numbers, shape = eqn.params["dimension_numbers"], jx.aval(onto).shape
        adds, (out,) = eqn.primitive is _prims.scatter_add_p, eqn.outvars
        whole_rows = (
            numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
            and numbers.update_window_dims == tuple(range(1, len(shape)))
            and jx.aval(updates).shape == (self.count, *shape[1:])
            and jx.aval(index).shape == (self.count, 1)
        )
        if not whole_rows:
            return
        zeros = self._is_number(onto, 0)
        repeats = self._repeats(shape[0])
        if self.is_row(updates):
            assert isinstance(updates, jx.Var)
            if adds and repeats and self._index(index, repeats):
                self.exits[n] = Exit(updates, repeats, None if zeros else onto)
            elif not adds and repeats == 1 and self._index(index, 1):
                self.exits[n] = Exit(updates, 0)
        elif repeats == 1 and self._index(index, 1) and not adds and self._is_range(updates):
            self.inverse.add(out)
        elif repeats == 1 and zeros and self._index(index, 1, inverse=True):
            self.entries[out] = Entry(updates, 1)
        elif adds and zeros and self._is_number(updates, 1) and self._counts(index, shape[0], eqn.params["mode"]):
            self.groups[out] = shape[0]

    def _counts(self, index: jx.Atom, groups: int, mode: Any) -> bool:
        """Whether ``index`` is the group of each row, so that ones added there are the sizes of the groups.

        Rows of groups out of bounds must count as they are sorted: below zero with the first, beyond the last nowhere.
        """
        drops = GatherScatterMode.from_any(mode) == GatherScatterMode.FILL_OR_DROP
        in_range = self.is_below(self.group_of, groups)
        margin = 0 if in_range else MARGIN
        tried = np.arange(-margin, groups + margin)
        bases = [self.group_of, *(v for v, e in self.entries.items() if e.source is self.group_of)]
        for base in bases:
            found: list[Array] = []
            for start in range(0, len(tried), self.count):
                part = np.resize(tried[start : start + self.count], self.count)
                p = positions(index, self.made, {base: part})
                if p is None:
                    break
                found.append(p.reshape(-1)[: len(tried) - start])
            else:
                at = np.concatenate(found)
                beyond = tried >= groups
                return bool(
                    np.array_equal(at[~beyond], np.maximum(tried[~beyond], 0))
                    and (in_range or (drops and np.all(at[beyond] >= groups)))
                )
        return False

    def is_below(self, atom: jx.Atom, groups: int) -> bool:
        """Whether integers are known to be from 0 up to ``groups``: they say which of so many elements are largest."""
        eqn = self.made.get(atom) if isinstance(atom, jx.Var) else None
        if eqn is None:
            return False
        traits = self.traits(eqn)
        if traits.keeps_constant or (traits.casts and groups <= np.iinfo(jx.aval(atom).dtype).max):
            return self.is_below(eqn.invars[0], groups)
        if eqn.primitive is _prims.top_k_p and atom is eqn.outvars[1]:
            return jx.aval(eqn.invars[0]).shape[eqn.params["axis"]] <= groups
        return eqn.primitive is _prims.argmax_p and jx.aval(eqn.invars[0]).shape[eqn.params["axes"][0]] <= groups

    def _visit_product(self, n: int, eqn: jx.JaxprEqn) -> None:
        lhs, rhs, sizes = eqn.invars
        numbers: lax.RaggedDotDimensionNumbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, others), (batch, _) = numbers.dot_dimension_numbers
        if sizes not in self.groups or batch or tuple(numbers.lhs_ragged_dimensions) != (0,) or not self.is_row(lhs):
            return
        if 0 not in contracted:
            if not self.is_row(rhs):
                self.steps[eqn.outvars[0]] = n
        elif tuple(contracted) == (0,) == tuple(others) and self.is_row(rhs):
            self.steps[eqn.outvars[0]] = n
            self.sums.add(eqn.outvars[0])

    def _visit_rows(self, n: int, eqn: jx.JaxprEqn) -> None:
        """A step, where each row of the result is computed of the rows of the operands with its number."""
        if len(eqn.outvars) != 1 or jx.regions(eqn) or jx.contraction_flops(eqn) or jx.eqn_key(eqn) is None:
            return
        if not all(map(jx.is_array, (*eqn.invars, *eqn.outvars))):
            return
        rule, (out,) = self.rule(eqn), eqn.outvars
        shape = jx.aval(out).shape
        if not self.traits(eqn).any_size and not all(_broadcasts(jx.aval(a).shape, shape) for a in eqn.invars):
            return
        dims = [d for d in rule.results[0][:1] if len(d) == 1]
        if not dims or rule.kind(dims[0][0]) != "parallel" or any(len(d) > 1 for d in _all_dims(rule)):
            return
        row = dims[0]
        constants: list[tuple[jx.Var, int]] = []
        for atom, of in zip(eqn.invars, rule.operands, strict=True):
            if self.is_row(atom):
                if of[0] != row or row in of[1:]:
                    return
            elif isinstance(atom, jx.Literal):
                if np.ndim(atom.val):
                    return
            elif row in of:
                maker = self.made.get(atom)
                spread = maker is not None and maker.primitive is _prims.broadcast_in_dim_p
                if not (spread and maker and isinstance(maker.invars[0], jx.Literal) and of[0] == row):
                    return
                constants.append((atom, self.jaxpr.eqns.index(maker)))
        if row in rule.results[0][1:]:
            return
        self.steps.update(constants)
        self.steps[out] = n


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return not shape or (len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True)))


def _all_dims(rule: Rule) -> Iterator[Sequence[str]]:
    return (d for dims in (*rule.operands, *rule.results) for d in dims)


def sorts(jaxpr: jx.Jaxpr) -> Iterator[int]:
    """The numbers of equations that sort rows of integers and say in which order."""
    made: Mapping[jx.Var, jx.JaxprEqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
    for n, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is not _prims.sort_p or len(eqn.invars) != 2 or eqn.params["num_keys"] != 1:
            continue
        keys, index = map(jx.aval, eqn.invars)
        if len(keys.shape) == 1 and np.issubdtype(keys.dtype, np.integer) and not isinstance(eqn.invars[0], jx.Literal):
            p = positions(eqn.invars[1], made, {})
            if eqn.params["is_stable"] and p is not None and np.array_equal(p, np.arange(index.shape[0])):
                yield n
