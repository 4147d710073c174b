"""terms: sums that a loop adds up, kept in terms until after it.

An array in terms has a leading dimension with a term for each part that some dimension is dealt in, and stands for
their sum. Equations that sum over a dimension make terms: each deals it, and computes its parts side by side. Linear
equations make terms of terms. A loop that only adds to what it carries, and adds what can be made in terms, carries
terms; so does one within it, or within an equation whose body is run again, or they stack them. An array is made in
terms only where nothing else reads it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.ir.traits import Traits

Positions = tuple[int, ...]
_KEEP_ZERO = (_prims.broadcast_in_dim_p, _prims.convert_element_type_p, _prims.reshape_p)
"""What may stand between a zero and the array that a sum begins with."""


@dataclass(frozen=True)
class _Dealt:
    """The equation makes terms: of each operand, the dimension that is dealt in parts."""

    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class _Passed:
    """The equation makes terms of the terms of these operands."""

    operands: Positions


@dataclass(frozen=True)
class _Within:
    """A result of the equation's body is made in terms there."""

    result: int


How = _Dealt | _Passed | _Within
Tree = list[tuple[jx.JaxprEqn, How]]
"""The equations that a value is made of in terms, from the first on."""


def in_terms(jaxpr: jx.Jaxpr, parts: int, rules: Rules) -> jx.Jaxpr:
    """``jaxpr`` with what its loops add up in ``parts`` terms; itself where they add up nothing that can be. What is
    inside of such a loop and has no part in its sums stays as it is."""
    body = _Body(jaxpr, parts, rules) if any(map(jx.scan_groups, jaxpr.eqns)) else None
    eqns: list[jx.JaxprEqn] = []
    changed = False
    for eqn in jaxpr.eqns:
        if body and (sums := body.sums(eqn)):
            eqns += body.summed(eqn, sums)
            changed = True
            continue
        eqns.append(jx.map_bodies(eqn, lambda b: in_terms(b, parts, rules)))
        changed |= eqns[-1] is not eqn
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


class _Body:
    """One jaxpr, and how its values can be made in terms."""

    def __init__(self, jaxpr: jx.Jaxpr, parts: int, rules: Rules) -> None:
        self.jaxpr, self.parts, self.rules = jaxpr, parts, rules
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.uses = Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, jx.Var))
        self.uses.update(a for a in jaxpr.outvars if isinstance(a, jx.Var))
        self.bodies: dict[jx.JaxprEqn, _Body] = {}

    def inner(self, eqn: jx.JaxprEqn) -> _Body:
        if eqn not in self.bodies:
            self.bodies[eqn] = _Body(jx.regions(eqn)[0].body, self.parts, self.rules)
        return self.bodies[eqn]

    def sums(self, eqn: jx.JaxprEqn) -> list[int]:
        """The carries of a loop that it only adds to, and what it adds can be made in terms."""
        shape = jx.scan_groups(eqn)
        if shape is None or shape.length < 2:
            return []
        return [c for c in range(shape.carry) if self.adds(eqn, c)]

    def adds(self, eqn: jx.JaxprEqn, c: int) -> Tree | None:
        """How the body of a loop makes its carry ``c``, where that is what it was and something in terms."""
        shape, inner = jx.scan_groups(eqn), self.inner(eqn)
        assert shape is not None
        start, end = inner.jaxpr.invars[shape.consts + c], inner.jaxpr.outvars[c]
        tree = inner.tree(end, start)
        now: jx.Atom = start
        for e, _ in tree or []:  # in the order in which they run
            if now in e.invars and self.rules.traits(e.primitive).adds:
                (now,) = e.outvars
        return tree if tree and now is end else None

    def tree(self, atom: jx.Atom, own: jx.Var | None = None) -> Tree | None:
        """How ``atom`` is made in terms, where ``own`` has them; None where it cannot be."""
        if not isinstance(atom, jx.Var) or self.uses[atom] != 1 or not _numbers(atom):
            return None
        if atom is own:
            return []
        eqn = self.made.get(atom)
        if eqn is None:
            return None
        if jx.regions(eqn):
            return self.within(eqn, eqn.outvars.index(atom))
        dims = self.dealt(eqn)
        if dims is not None:
            return [(eqn, _Dealt(dims))]
        for operands in _linear_in(eqn, self.rules.traits(eqn.primitive)):
            found = [self.tree(eqn.invars[i], own) for i in operands]
            if None not in found:
                return [*itertools.chain.from_iterable(t or [] for t in found), (eqn, _Passed(operands))]
        return None

    def within(self, eqn: jx.JaxprEqn, result: int) -> Tree | None:
        """How the equation's body makes its result ``result`` in terms."""
        shape, inner = jx.scan_groups(eqn), self.inner(eqn)
        if shape is not None and result < shape.carry:
            adds = shape.length > 0 and _zero(self.made, eqn.invars[shape.consts + result]) and self.adds(eqn, result)
            return [(eqn, _Within(result))] if adds else None
        known = shape is not None or eqn.primitive is _prims.remat_p
        return [(eqn, _Within(result))] if known and inner.tree(inner.jaxpr.outvars[result]) else None

    def dealt(self, eqn: jx.JaxprEqn) -> tuple[int | None, ...] | None:
        """The first dimension that the equation sums over and that can be dealt, of each operand."""
        shapes = [jx.aval(a).shape for a in eqn.invars]
        for dims in _summed(eqn, self.made):
            if all(d is None or (s[d] and s[d] % self.parts == 0) for s, d in zip(shapes, dims, strict=True)):
                return dims
        return None

    def summed(self, eqn: jx.JaxprEqn, carries: Sequence[int]) -> list[jx.JaxprEqn]:
        """The loop with ``carries`` in terms, and what they add up to."""
        shape, now = jx.scan_groups(eqn), dict[jx.Var, jx.Var]()
        assert shape is not None

        def total(terms: Any, *start: Any) -> Any:
            return sum(start, jax.lax.reduce_sum(terms, (0,)))

        code = self.rebuilt(eqn, carries, now)
        for c in carries:
            start = eqn.invars[shape.consts + c]
            operands = [now[eqn.outvars[c]], *([] if _zero(self.made, start) else [start])]
            code += jx.splice(total, eqn.replace(outvars=[eqn.outvars[c]]), operands)
        return code

    def code(self, tree: Tree, now: dict[jx.Var, jx.Var]) -> list[jx.JaxprEqn]:
        """This jaxpr's equations with those of ``tree`` in terms. ``now`` says where the terms of values are; it is
        given those of the inputs that have them, and gains the others."""
        ways: dict[jx.JaxprEqn, list[How]] = defaultdict(list)
        for eqn, how in tree:
            ways[eqn].append(how)
        eqns: list[jx.JaxprEqn] = []
        for eqn in self.jaxpr.eqns:
            within = [how.result for how in ways[eqn] if isinstance(how, _Within)]
            if within:
                eqns += self.rebuilt(eqn, within, now)
            elif ways[eqn]:
                eqns += self.terms(eqn, ways[eqn][0], now)
            else:
                eqns.append(eqn)
        return eqns

    def terms(self, eqn: jx.JaxprEqn, how: How, now: dict[jx.Var, jx.Var]) -> list[jx.JaxprEqn]:
        """``eqn`` with a term for each part in its result."""
        itself, parts = jx.bind_on_shards(eqn, []), self.parts
        if isinstance(how, _Dealt):
            dims = how.dims
        else:
            assert isinstance(how, _Passed)
            dims = tuple(0 if i in how.operands else None for i in range(len(eqn.invars)))

        def each(*operands: Any) -> Any:
            given = [
                x if d is None or isinstance(how, _Passed) else _parted(x, d, parts)
                for x, d in zip(operands, dims, strict=True)
            ]
            return jax.vmap(itself, in_axes=dims)(*given)

        operands = [now.get(a, a) if isinstance(a, jx.Var) else a for a in eqn.invars]
        now[eqn.outvars[0]] = jx.stacked_var(eqn.outvars[0], parts)
        return jx.splice(each, eqn.replace(outvars=[now[eqn.outvars[0]]]), operands)

    def rebuilt(self, eqn: jx.JaxprEqn, results: Sequence[int], now: dict[jx.Var, jx.Var]) -> list[jx.JaxprEqn]:
        """``eqn``, a loop or a body run again, with some of its results in terms."""
        shape, inner = jx.scan_groups(eqn), self.inner(eqn)
        body, carry = inner.jaxpr, shape.carry if shape else 0
        tree: Tree = []
        for r in results:
            tree += (self.adds(eqn, r) if r < carry else inner.tree(body.outvars[r])) or []
        consts = shape.consts if shape else 0
        begin = {consts + r: jx.stacked_var(body.invars[consts + r], self.parts) for r in results if r < carry}
        inside = {body.invars[i]: v for i, v in begin.items()}
        code = inner.code(tree, inside)
        body = jx.with_eqns(
            body,
            code,
            invars=[begin.get(i, v) for i, v in enumerate(body.invars)],
            outvars=[inside.get(a, a) if isinstance(a, jx.Var) else a for a in body.outvars],
        )
        now |= {eqn.outvars[r]: jx.stacked_var(eqn.outvars[r], self.parts) for r in results}
        if shape is None:
            return [jx.with_bodies(eqn, [body]).replace(outvars=[now.get(v, v) for v in eqn.outvars])]
        zeros = {i: jx.new_var(v) for i, v in begin.items()}
        before = [
            e
            for v in zeros.values()
            for e in jx.splice(lambda v=v: jnp.zeros(jx.aval(v).shape, jx.aval(v).dtype), eqn.replace(outvars=[v]), [])
        ]
        stacked = {r: inner.jaxpr.outvars[r] for r in results if r >= carry}
        ends = {r: jx.stacked_var(inside[v], shape.length) for r, v in stacked.items() if isinstance(v, jx.Var)}
        outvars = [ends[r] if r in ends else now.get(v, v) for r, v in enumerate(eqn.outvars)]
        operands = [zeros.get(i, a) for i, a in enumerate(eqn.invars)]
        loop = jx.rebuild_scan(eqn, body, (shape.consts, shape.carry, shape.xs), operands, outvars)
        turned = [
            e
            for r, v in ends.items()
            for e in jx.splice(lambda x: jnp.moveaxis(x, 1, 0), eqn.replace(outvars=[now[eqn.outvars[r]]]), [v])
        ]
        return [*before, loop, *turned]


def _summed(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> Iterator[tuple[int | None, ...]]:
    """The dimensions that ``eqn`` sums over, each by its place in every operand; outermost first, as batches are."""
    p = eqn.params
    if eqn.primitive is _prims.dot_general_p:
        yield from sorted(zip(*p["dimension_numbers"][0], strict=True), key=sum)
    elif eqn.primitive is _prims.reduce_sum_p:
        yield from ((d,) for d in sorted(p["axes"]))
    elif eqn.primitive is _prims.scatter_add_p and _zero(made, eqn.invars[0]):
        n, rank = p["dimension_numbers"], len(jx.aval(eqn.invars[2]).shape)
        places = [d for d in range(rank) if d not in n.update_window_dims]
        yield from ((None, i, d) for i, d in enumerate(places) if i not in n.scatter_indices_batching_dims)


def _parted(x: Any, d: int, parts: int) -> Any:
    """``x`` with its dimension ``d`` in so many parts, one after the other."""
    return x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :])


def _zero(made: Mapping[jx.Var, jx.JaxprEqn], atom: jx.Atom) -> bool:
    """Whether ``atom`` is known to be zero."""
    while isinstance(atom, jx.Var):
        eqn = made.get(atom)
        if eqn is None or eqn.primitive not in _KEEP_ZERO:
            return False
        atom = eqn.invars[0]
    return not np.any(atom.val)


def _numbers(atom: jx.Var) -> bool:
    return jx.is_array(atom) and jax.dtypes.issubdtype(jx.aval(atom).dtype, np.number)


def _linear_in(eqn: jx.JaxprEqn, traits: Traits) -> tuple[Positions, ...]:
    """Sets of operands in which ``eqn`` is linear, for numbers of these types."""
    inexact = all(jax.dtypes.issubdtype(jx.aval(a).dtype, np.inexact) for a in (*eqn.invars, *eqn.outvars))
    return traits.linear if inexact or not traits.linear_in_inexact else ()
