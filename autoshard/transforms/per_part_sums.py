"""Loop carries that are only added to become one partial sum per part.

A *per-part* value has a dimension more, with one entry for each part of some dimension that is summed over, and stands
for the sum of its entries. It arises from an equation that sums over a dimension: that is split into parts, and the
parts are computed side by side (`jax.vmap`). An equation that is linear in a per-part value gives a per-part value. A
loop whose carry is only added to, with values that can be per-part, carries a per-part value; so do loops nested in it,
and bodies of `jax.checkpoint`, and scans stack them. A value is made per-part only where nothing else reads it.

The dimension of parts is the first, or the next after those along which scans stack: layers stay first, which a
pipeline splits over its stages.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.ir.traits import UNKNOWN, Traits

Positions = tuple[int, ...]


@dataclass(frozen=True)
class _SplitSum:
    """The equation sums over a dimension, which is split into parts."""

    dims: tuple[int | None, ...]
    """Of each operand, that dimension."""
    axis: int = 0
    """The dimension of parts of the result."""


@dataclass(frozen=True)
class _LinearIn:
    """The equation is linear in these operands together, which are per-part."""

    operands: Positions
    axis: int | None
    """The dimension of parts of the result; None is that of the carry, where only that is read."""


@dataclass(frozen=True)
class _InBody:
    """The equation has a body (a scan or `jax.checkpoint`), of which this result is per-part."""

    result: int
    axis: int
    """The dimension of parts of the result."""


SumRewrite = _SplitSum | _LinearIn | _InBody
Derivation = list[tuple[jx.JaxprEqn, SumRewrite]]
"""The equations that compute a value, in order, and how each is rewritten so that the value is per-part."""


class PerPart(NamedTuple):
    """The per-part value that replaces another one."""

    var: jx.Var
    axis: int
    """Its dimension of parts."""


type PerParts = dict[jx.Var, PerPart]


def with_per_part_sums(jaxpr: jx.Jaxpr, parts: int, rules: Rules) -> jx.Jaxpr:
    """``jaxpr`` with its loops accumulating ``parts`` sums each where they can; the same object where none can.

    Loops inside of a rewritten one that have no part in its sums stay as they are.
    """
    body = _Body(jaxpr, parts, rules) if any(map(jx.scan_groups, jaxpr.eqns)) else None
    eqns: list[jx.JaxprEqn] = []
    changed = False
    for eqn in jaxpr.eqns:
        if body and (carries := body.accumulators(eqn)):
            eqns += body.rewritten_loop(eqn, carries)
            changed = True
            continue
        eqns.append(jx.map_bodies(eqn, lambda b: with_per_part_sums(b, parts, rules)))
        changed |= eqns[-1] is not eqn
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


class _Body:
    """One jaxpr, and how its values can be computed per part."""

    def __init__(self, jaxpr: jx.Jaxpr, parts: int, rules: Rules) -> None:
        self.jaxpr, self.parts, self.rules = jaxpr, parts, rules
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, jx.Var))
        self.uses.update(a for a in jaxpr.outvars if isinstance(a, jx.Var))
        self.bodies: dict[jx.JaxprEqn, _Body] = {}

    def body_of(self, eqn: jx.JaxprEqn) -> _Body:
        """The body of a scan or `jax.checkpoint`."""
        if eqn not in self.bodies:
            self.bodies[eqn] = _Body(jx.regions(eqn)[0].body, self.parts, self.rules)
        return self.bodies[eqn]

    def accumulators(self, eqn: jx.JaxprEqn) -> list[int]:
        """The carries of a loop that are only added to, with values that can be per-part."""
        groups = jx.scan_groups(eqn)
        if groups is None or groups.length < 2:
            return []
        return [c for c in range(groups.carry) if self.accumulation(eqn, c)]

    def accumulation(self, eqn: jx.JaxprEqn, c: int) -> Derivation | None:
        """How the body of a loop computes its carry ``c``, if that is the carry plus per-part values."""
        groups, body = jx.scan_groups(eqn), self.body_of(eqn)
        assert groups is not None
        start, end = body.jaxpr.invars[groups.consts + c], body.jaxpr.outvars[c]
        derivation = body.derivation(end, start)
        total: jx.Atom = start
        for e, _ in derivation or []:  # in the order in which they run
            if total in e.invars and self.rules.traits(e.primitive).adds:
                (total,) = e.outvars
        return derivation if derivation and total is end else None

    def derivation(self, atom: jx.Atom, carry: jx.Var | None = None) -> Derivation | None:
        """How ``atom`` is computed per part, where ``carry`` is per-part; None where it cannot be."""
        if not isinstance(atom, jx.Var) or self.uses[atom] != 1 or not _is_numeric(atom):
            return None
        if atom is carry:
            return []
        eqn = self.made.get(atom)
        if eqn is None:
            return None
        if jx.regions(eqn):
            return self.derivation_in_body(eqn, eqn.outvars.index(atom))
        dims = self.splittable(eqn)
        if dims is not None:
            return [(eqn, _SplitSum(dims))]
        for operands in _linear_in(eqn, self.rules.traits(eqn.primitive)):
            found = [self.derivation(eqn.invars[i], carry) for i in operands]
            if None not in found:
                axis = next((d[-1][1].axis for d in found if d), None)
                if any(len(jx.aval(eqn.invars[i]).shape) != len(jx.aval(atom).shape) for i in operands):
                    axis = 0
                return [*itertools.chain.from_iterable(d or [] for d in found), (eqn, _LinearIn(operands, axis))]
        return None

    def derivation_in_body(self, eqn: jx.JaxprEqn, result: int) -> Derivation | None:
        """How an equation with a body computes its result ``result`` per part; None where it cannot."""
        groups, body = jx.scan_groups(eqn), self.body_of(eqn)
        if groups is not None and result < groups.carry:
            starts_at_zero = groups.length > 0 and self.is_zero(eqn.invars[groups.consts + result])
            inside = self.accumulation(eqn, result) if starts_at_zero else None
        else:
            known = groups is not None or eqn.primitive is _prims.remat_p
            inside = body.derivation(body.jaxpr.outvars[result]) if known else None
        return [(eqn, _InBody(result, _axis_outside(eqn, result, inside)))] if inside else None

    def splittable(self, eqn: jx.JaxprEqn) -> tuple[int | None, ...] | None:
        """The first dimension that the equation sums over and that the number of parts divides, by operand."""
        shapes = [jx.aval(a).shape for a in eqn.invars]
        for dims in self.summed_dims(eqn):
            if all(d is None or (s[d] and s[d] % self.parts == 0) for s, d in zip(shapes, dims, strict=True)):
                return dims
        return None

    def summed_dims(self, eqn: jx.JaxprEqn) -> Iterator[tuple[int | None, ...]]:
        """Of each dimension that ``eqn`` sums over, its index in every operand; outermost first, as batches are."""
        p = eqn.params
        if eqn.primitive is _prims.dot_general_p:
            yield from sorted(zip(*p["dimension_numbers"][0], strict=True), key=sum)
        elif eqn.primitive is _prims.reduce_sum_p:
            yield from ((d,) for d in sorted(p["axes"]))
        elif eqn.primitive is _prims.scatter_add_p and self.is_zero(eqn.invars[0]):
            n, rank = p["dimension_numbers"], len(jx.aval(eqn.invars[2]).shape)
            scatter_dims = [d for d in range(rank) if d not in n.update_window_dims]
            yield from ((None, i, d) for i, d in enumerate(scatter_dims) if i not in n.scatter_indices_batching_dims)

    def is_zero(self, atom: jx.Atom) -> bool:
        """Whether ``atom`` is known to be zero."""
        while isinstance(atom, jx.Var):
            eqn = self.made.get(atom)
            traits = self.rules.traits(eqn.primitive) if eqn is not None else UNKNOWN
            if eqn is None or not (traits.keeps_constant or traits.casts):
                return False
            atom = eqn.invars[0]
        return not np.any(atom.val)

    def rewritten_loop(self, eqn: jx.JaxprEqn, carries: Sequence[int]) -> list[jx.JaxprEqn]:
        """The loop with ``carries`` per part, and the sums of their parts after it."""
        groups, per_part = jx.scan_groups(eqn), dict[jx.Var, PerPart]()
        assert groups is not None

        code = self.rewritten_nest(eqn, carries, per_part)
        for c in carries:
            start, (sums, axis) = eqn.invars[groups.consts + c], per_part[eqn.outvars[c]]

            def total(sums: Any, *start: Any, axis: int = axis) -> Any:
                return sum(start, jax.lax.reduce_sum(sums, (axis,)))

            operands = [sums, *([] if self.is_zero(start) else [start])]
            code += jx.splice(total, eqn.replace(outvars=[eqn.outvars[c]]), operands)
        return code

    def rewritten_eqns(self, derivation: Derivation, per_part: PerParts) -> list[jx.JaxprEqn]:
        """This jaxpr's equations, those of ``derivation`` rewritten.

        Args:
          per_part: variables -> their per-part values; of the jaxpr's inputs to begin with. Others are added.
        """
        rewrites: dict[jx.JaxprEqn, list[SumRewrite]] = defaultdict(list)
        for eqn, rewrite in derivation:
            rewrites[eqn].append(rewrite)
        eqns: list[jx.JaxprEqn] = []
        for eqn in self.jaxpr.eqns:
            results = [rewrite.result for rewrite in rewrites[eqn] if isinstance(rewrite, _InBody)]
            if results:
                eqns += self.rewritten_nest(eqn, results, per_part)
            elif rewrites[eqn]:
                eqns += self.rewritten_eqn(eqn, rewrites[eqn][0], per_part)
            else:
                eqns.append(eqn)
        return eqns

    def rewritten_eqn(self, eqn: jx.JaxprEqn, rewrite: SumRewrite, per_part: PerParts) -> list[jx.JaxprEqn]:
        """``eqn``, which has no body, with a per-part result."""
        itself, parts = jx.bind_on_shards(eqn, []), self.parts
        if isinstance(rewrite, _SplitSum):
            dims, axis = rewrite.dims, rewrite.axis
        else:
            assert isinstance(rewrite, _LinearIn)
            found = {i: per_part[a].axis for i in rewrite.operands if isinstance(a := eqn.invars[i], jx.Var)}
            dims = tuple(map(found.get, range(len(eqn.invars))))
            axis = found[rewrite.operands[0]] if rewrite.axis is None else rewrite.axis

        def of_parts(*operands: Any) -> Any:
            given = [
                x if d is None or isinstance(rewrite, _LinearIn) else _split_into_parts(x, d, parts)
                for x, d in zip(operands, dims, strict=True)
            ]
            return jax.vmap(itself, in_axes=dims, out_axes=axis)(*given)

        operands = [per_part[a].var if isinstance(a, jx.Var) and a in per_part else a for a in eqn.invars]
        result = jx.stacked_var(eqn.outvars[0], parts, axis)
        per_part[eqn.outvars[0]] = PerPart(result, axis)
        return jx.splice(of_parts, eqn.replace(outvars=[result]), operands)

    def rewritten_nest(self, eqn: jx.JaxprEqn, results: Sequence[int], per_part: PerParts) -> list[jx.JaxprEqn]:
        """``eqn``, a scan or `jax.checkpoint`, with these results per part."""
        groups, inner = jx.scan_groups(eqn), self.body_of(eqn)
        body, carry = inner.jaxpr, groups.carry if groups else 0
        derivation: Derivation = []
        for r in results:
            inside = (self.accumulation(eqn, r) if r < carry else inner.derivation(body.outvars[r])) or []
            axis = _axis_outside(eqn, r, inside)
            per_part[eqn.outvars[r]] = PerPart(jx.stacked_var(eqn.outvars[r], self.parts, axis), axis)
            derivation += inside
        consts = groups.consts if groups else 0
        carries = {consts + r: _like(per_part[eqn.outvars[r]]) for r in results if r < carry}
        inside_of = {body.invars[i]: v for i, v in carries.items()}
        code = inner.rewritten_eqns(derivation, inside_of)
        body = jx.with_eqns(
            body,
            code,
            invars=[carries[i].var if i in carries else v for i, v in enumerate(body.invars)],
            outvars=[inside_of[a].var if isinstance(a, jx.Var) and a in inside_of else a for a in body.outvars],
        )
        outvars = [per_part[v].var if v in per_part else v for v in eqn.outvars]
        if groups is None:
            return [jx.with_bodies(eqn, [body]).replace(outvars=outvars)]
        zeros = {i: jx.new_var(v.var) for i, v in carries.items()}
        before = [
            e
            for v in zeros.values()
            for e in jx.splice(lambda v=v: jnp.zeros(jx.aval(v).shape, jx.aval(v).dtype), eqn.replace(outvars=[v]), [])
        ]
        operands = [zeros.get(i, a) for i, a in enumerate(eqn.invars)]
        return [*before, jx.rebuild_scan(eqn, body, (groups.consts, groups.carry, groups.xs), operands, outvars)]


def _axis_outside(eqn: jx.JaxprEqn, result: int, inside: Derivation | None) -> int:
    """The dimension of parts of a result of ``eqn`` that its body computes so: a scan stacks in front of it."""
    groups, axis = jx.scan_groups(eqn), inside[-1][1].axis if inside else 0
    return (axis or 0) + (groups is not None and result >= groups.carry)


def _like(value: PerPart) -> PerPart:
    """Another variable for as many parts."""
    return PerPart(jx.new_var(value.var), value.axis)


def _split_into_parts(x: Any, d: int, parts: int) -> Any:
    """``x`` with dimension ``d`` as two: [parts, size / parts]."""
    return x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :])


def _is_numeric(atom: jx.Var) -> bool:
    """Whether sums of it can be added up later: of numbers, but of floats of 16 bits or more."""
    dtype = jx.aval(atom).dtype if jx.is_array(atom) else None
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.number) and not jx.is_narrow_float(dtype)


def _linear_in(eqn: jx.JaxprEqn, traits: Traits) -> tuple[Positions, ...]:
    """The sets of operands in which ``eqn`` is linear together: integer division and casts to integers are not."""
    inexact = all(jax.dtypes.issubdtype(jx.aval(a).dtype, np.inexact) for a in (*eqn.invars, *eqn.outvars))
    return traits.linear if inexact or not traits.linear_in_inexact else ()
