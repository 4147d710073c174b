"""What a token makes of the rows of its picks becomes part of the operation that computes these.

Programs add up a token's rows by their weights, and multiply them with the gradient of that sum. Where rows are partial
sums, as of experts that are split in place, one operation leaves only what is made of them to reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import RuleError
from autoshard.ir.program import Program
from autoshard.ir.rule import Dims, Rule, factor_names
from autoshard.ir.rule_registry import fallback_rule, lookup_rule
from autoshard.ir.traits import Traits
from autoshard.passes.experts.region import step
from autoshard.passes.experts.token_products import with_token_products
from autoshard.transforms.grouped_rows import grouped_rows_p, row_factor
from autoshard.transforms.sum_of_products import Step

Names = tuple[str | None, ...]
"""Factors of the dimensions of a value; None of one that is never split."""
PICKS = "picks"
"""The factor of a token's picks, until it has a name."""


@dataclass(frozen=True)
class _Tail:
    """Equations, each of which alone reads what the one before makes, from rows to a value for each token."""

    eqns: tuple[jx.JaxprEqn, ...]
    names: tuple[Names, ...]
    """Of the result of each."""
    read: Mapping[jx.Var, Names]
    """Their other operands."""
    contracted: frozenset[str]
    """Factors to keep whole."""
    picks: int
    """How many rows a token has."""


class Picks:
    """Joins such equations of a jaxpr to its operations on rows."""

    def __init__(self, program: Program, jaxpr: jx.Jaxpr) -> None:
        self.program, self.eqns = program, list(jaxpr.eqns)
        self.returned = {a for a in jaxpr.outvars if isinstance(a, jx.Var)}

    def joined(self) -> list[jx.JaxprEqn]:
        """The equations, those of operations on rows perhaps before some that they read."""
        for eqn in [e for e in self.eqns if e.primitive is grouped_rows_p and not any(e.params["after"])]:
            self.eqns, eqn, picks = with_token_products(self.eqns, eqn, self.returned)
            tails = self._tails(eqn, picks)
            gone = {id(e) for tail in tails.values() for e in tail.eqns}
            if tails:
                picks = next(iter(tails.values())).picks
            if picks > 1:
                joined = _with_tails(self._with_tokens(eqn, picks), tails, picks, self._traits)
                self.eqns = [joined if e is eqn else e for e in self.eqns if id(e) not in gone]
        return self.eqns

    def _with_tokens(self, eqn: jx.JaxprEqn, picks: int) -> jx.JaxprEqn:
        """``eqn`` with tokens as operands, where it has each as often as it has ``picks``, on end."""
        made = {v: e for e in self.eqns for v in e.outvars}

        def source(a: jx.Atom) -> jx.Atom:
            reshape = made.get(a) if isinstance(a, jx.Var) else None
            if reshape is None or reshape.primitive is not _prims.reshape_p:
                return a
            repeat = made.get(reshape.invars[0]) if isinstance(reshape.invars[0], jx.Var) else None
            if repeat is None or repeat.primitive is not _prims.broadcast_in_dim_p:
                return a
            tokens, rows = jx.aval(repeat.invars[0]).shape, jx.aval(a).shape
            places = (0, *range(2, len(rows) + 1))
            if repeat.params["broadcast_dimensions"] != places or tokens != (rows[0] // picks, *rows[1:]):
                return a
            return repeat.invars[0] if jx.aval(repeat.outvars[0]).shape[1] == picks else a

        rows = eqn.params["rows"]
        return eqn.replace(invars=[eqn.invars[0], *map(source, eqn.invars[1 : rows + 1]), *eqn.invars[rows + 1 :]])

    def _tails(self, eqn: jx.JaxprEqn, picks: int) -> dict[jx.Var, _Tail]:
        """By result of ``eqn``, each token of all with as many picks: ``picks`` if that is more than 1."""
        readers: dict[jx.Var, list[jx.JaxprEqn]] = {}
        for e in self.eqns:
            for a in {a for a in e.invars if isinstance(a, jx.Var)}:
                readers.setdefault(a, []).append(e)
        after, todo = set(eqn.outvars), [*eqn.outvars]
        while todo:
            made = {v for e in readers.get(todo.pop(), ()) for v in e.outvars} - after
            after |= made
            todo += made
        rule, found = eqn.params["rule"], dict[jx.Var, _Tail]()
        for v, dims in zip(eqn.outvars, rule.results, strict=True):
            if row_factor(rule) in dims[0] and (
                tail := self._tail(v, tuple(d[0] if d else None for d in dims), readers)
            ):
                fits = picks in (1, tail.picks) and all(
                    tail.picks == other.picks
                    and all(other.read.get(a, names) == names for a, names in tail.read.items())
                    for other in found.values()
                )
                if fits and after.isdisjoint(tail.read):
                    found[v] = tail
        return found

    def _tail(self, v: jx.Var, names: Names, readers: Mapping[jx.Var, Sequence[jx.JaxprEqn]]) -> _Tail | None:
        """What reads the rows ``v``, up to the first equation that makes less than half of them: by tokens first."""
        rows, row = v, names[0]
        eqns, dims = list[jx.JaxprEqn](), list[Names]()
        read, contracted = dict[jx.Var, Names](), set[str]()
        while v not in self.returned and len(reading := readers.get(v, ())) == 1:
            (eqn,) = reading
            if eqn.invars.count(v) > 1 or len(eqn.outvars) != 1 or eqn.effects:
                return None
            shape = jx.aval(eqn.outvars[0]).shape
            if not eqns:
                whole = jx.aval(rows).shape
                if eqn.primitive is not _prims.reshape_p or shape[2:] != whole[1:] or math.prod(shape[:2]) != whole[0]:
                    return None
                names = (row, PICKS, *names[1:])
            elif (found := self._names(eqn, v, names)) is not None:
                names, others, summed = found
                read.update(others)
                contracted |= summed
            else:
                return None
            eqns.append(eqn)
            dims.append(names)
            (v,) = eqn.outvars
            if names[:1] != (row,) or row in contracted:
                return None
            if 2 * math.prod(shape) <= math.prod(jx.aval(rows).shape):
                (_, picks, *_) = jx.aval(eqns[0].outvars[0]).shape
                return _Tail(tuple(eqns), tuple(dims), read, frozenset(contracted), picks)
        return None

    def _names(self, eqn: jx.JaxprEqn, v: jx.Var, names: Names) -> tuple[Names, dict[jx.Var, Names], set[str]] | None:
        """The names of the result of an equation that is linear in ``v``, and of its other operands, and those that it
        contracts; None where it is not, or has other factors."""
        at, rule, traits = eqn.invars.index(v), self._rule(eqn), self._traits(eqn)
        if (at,) not in traits.linear or (at,) not in dict(rule.partial_passthrough).get("sum", ()):
            return None
        inexact = all(jx.aval(a).dtype.kind not in "biu" for a in (v, *eqn.outvars))
        if not inexact or any(len(d) > 1 for dims in (*rule.operands, *rule.results) for d in dims):
            return None
        name = {d[0]: n for d, n in zip(rule.operands[at], names, strict=True) if d}
        kept = {n for d, n in zip(rule.operands[at], names, strict=True) if n and not d}
        kept |= {n for f, n in name.items() if n and rule.kind(f) != "parallel"}
        others = [(a, d) for i, (a, d) in enumerate(zip(eqn.invars, rule.operands, strict=True)) if i != at]
        if any(f not in name for dims in (*(d for _, d in others), rule.results[0]) for d in dims for f in d):
            return None
        for a, _ in others:
            if isinstance(a, jx.Literal):
                if np.ndim(a.val) or not np.isfinite(complex(a.val)) or (eqn.primitive is _prims.div_p and not a.val):
                    return None
            elif 2 * math.prod(jx.aval(a).shape) > math.prod(jx.aval(v).shape):
                return None
        read = {a: tuple(name[d[0]] if d else None for d in dims) for a, dims in others if isinstance(a, jx.Var)}
        return tuple(name[d[0]] if d else None for d in rule.results[0]), read, kept

    def _traits(self, eqn: jx.JaxprEqn) -> Traits:
        return self.program.rules.traits(eqn.primitive)

    def _rule(self, eqn: jx.JaxprEqn) -> Rule:
        try:
            return lookup_rule(eqn, self.program.rules, self.program.mesh) or fallback_rule(eqn)
        except RuleError:  # reported when the graph is built
            return fallback_rule(eqn)


def _with_tails(
    eqn: jx.JaxprEqn, tails: Mapping[jx.Var, _Tail], picks: int, traits: Callable[[jx.JaxprEqn], Traits]
) -> jx.JaxprEqn:
    """The operation that makes what its tails make."""
    params, rule, row = eqn.params, eqn.params["rule"], row_factor(eqn.params["rule"])
    rows = jx.aval(eqn.invars[0]).shape
    of_pick = next(f for f in factor_names(len(rule.factors) + 1) if f not in rule.factors)

    def dims(names: Names) -> Dims:
        return tuple((of_pick if f == PICKS else f,) if f else () for f in names)

    def in_picks(dims: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        return tuple((row, of_pick) if d == (row,) else d for d in dims)

    def of_operand(atom: jx.Atom, dims: Dims) -> Dims:
        return in_picks(dims) if jx.aval(atom).shape[:1] == rows else dims

    read = {a: names for tail in tails.values() for a, names in tail.read.items()}
    count = len(eqn.invars) + len(read)

    def steps_of(v: jx.Var) -> Iterator[Step]:
        number = {a: len(eqn.invars) + i for i, a in enumerate(read)} | {v: count}
        for n, (e, names) in enumerate(zip(tails[v].eqns, tails[v].names, strict=True) if v in tails else ()):
            number[e.outvars[0]] = count + n + 1
            shape = zip(dims(names), jx.aval(e.outvars[0]).shape, strict=True)
            yield step(e, number, [d or (n,) for d, n in shape], traits(e).shape_param)

    whole = dict.fromkeys((of_pick, *(f for tail in tails.values() for f in tail.contracted - {PICKS})), "whole")
    results = [
        dims(tails[v].names[-1]) if v in tails else in_picks(d) for v, d in zip(eqn.outvars, rule.results, strict=True)
    ]
    joined = Rule(
        (*map(of_operand, eqn.invars, rule.operands), *map(dims, read.values())),
        tuple(results),
        tuple(sorted((dict(rule.kinds) | whole).items())),
        sizes=tuple(
            sorted({**dict(rule.sizes), row: jx.aval(eqn.invars[0]).shape[0] // picks, of_pick: picks}.items())
        ),
    )
    steps = tuple(s._replace(dims=in_picks(s.dims)) for s in params["steps"])
    return eqn.replace(
        params={
            **params,
            "rule": joined,
            "steps": steps,
            "after": tuple(tuple(steps_of(v)) for v in eqn.outvars),
            "last": len(read),
        },
        invars=[*eqn.invars, *read],
        outvars=[tails[v].eqns[-1].outvars[0] if v in tails else v for v in eqn.outvars],
    )
