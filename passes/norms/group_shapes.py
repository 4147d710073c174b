"""Elementwise operations of a group norm in the shape that has no groups.

A group norm reshapes channels to groups, sums over positions and a group's channels, and reshapes back. XLA for GPUs
and TPUs (JAX 0.12) does not fuse through a reshape what it would fuse without: it writes the gradient of an activation
function, where it could compute it in each sweep that reads it. In the shape without groups an array of numbers per
group is repeated over the group's channels, and a sum is one over positions, then one of few numbers over the channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import primitives as _prims
from jax.extend.core.primitives import add_jaxvals_p

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.passes.norms.centered import Values


class _Groups(NamedTuple):
    """A shape, and the dimensions that each of its own is split into."""

    whole: tuple[int, ...]
    split: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def partly(self, axes: Sequence[int]) -> bool:
        """Whether a sum over ``axes`` is over some dimensions of one of ``whole``, and over all of another."""
        some = [[self.split[d] for d in dims if d in axes] for dims in self.dims]
        every = [len(found) == len(dims) for found, dims in zip(some, self.dims, strict=True)]
        sizes = [math.prod(found) for found in some]
        cut = any(n > 1 and not whole for n, whole in zip(sizes, every, strict=True))
        return cut and any(n > 1 and whole for n, whole in zip(sizes, every, strict=True))


def without_groups(jaxpr: jx.Jaxpr, rules: Rules) -> tuple[jx.Jaxpr, list[jx.JaxprEqn]]:
    """``jaxpr`` with sums over groups, and what leads to and from them, in shapes without groups, and the sums that it
    replaces; itself where there are none."""
    groups: dict[tuple[int, ...], _Groups] = {}
    summed = [e for e in jaxpr.eqns if e.primitive is _prims.reduce_sum_p]
    for eqn in jaxpr.eqns:
        found = _groups(eqn)
        if found is not None and any(
            jx.aval(e.invars[0]).shape == found.split and found.partly(e.params["axes"]) for e in summed
        ):
            groups.setdefault(found.split, found)
    if not groups:
        return jaxpr, []
    rewriting = _Rewriting(jaxpr, groups, rules)
    after = rewriting.jaxpr()
    return (after, rewriting.sums) if rewriting.sums else (jaxpr, [])


def _groups(eqn: jx.JaxprEqn) -> _Groups | None:
    """How a reshape splits dimensions; None of any other equation, and of a reshape that merges some."""
    if eqn.primitive is not _prims.reshape_p or eqn.params["dimensions"] is not None or len(eqn.invars) > 1:
        return None
    whole, split = jx.aval(eqn.invars[0]).shape, jx.aval(eqn.outvars[0]).shape
    dims, begin = list[tuple[int, ...]](), 0
    for n in whole:
        end = begin + 1
        while end < len(split) and math.prod(split[begin:end]) < n:
            end += 1
        if end > len(split) or math.prod(split[begin:end]) != n:
            return None
        dims.append((*range(begin, end),))
        begin = end
    return _Groups(whole, split, (*dims,)) if begin == len(split) > len(whole) else None


class _Rewriting:
    """One jaxpr, equation by equation.

    Args:
      groups: by the shape with groups.
    """

    def __init__(self, jaxpr: jx.Jaxpr, groups: dict[tuple[int, ...], _Groups], rules: Rules) -> None:
        self.before, self.groups, self.rules, self.values = jaxpr, groups, rules, Values(jaxpr)
        self.eqns, self.sums = list[jx.JaxprEqn](), list[jx.JaxprEqn]()
        self.whole: dict[jx.Var, jx.Atom] = {}
        """Values with groups, and the same without."""
        self.same: dict[jx.Var, jx.Atom] = {}
        """Values that are no longer computed, and those that they are."""
        self.reshaped, self.repeated = set[jx.Var](), dict[jx.Atom, jx.Atom]()

    def jaxpr(self) -> jx.Jaxpr:
        for eqn in self.before.eqns:
            eqn = eqn.replace(invars=[self._now(a) for a in eqn.invars])
            if not self._rewrite(eqn):
                self._reshape([a for a in eqn.invars if isinstance(a, jx.Var)], eqn)
                self.eqns.append(eqn)
        outvars = [self._now(a) for a in self.before.outvars]
        if self.before.eqns:
            self._reshape([a for a in outvars if isinstance(a, jx.Var)], self.before.eqns[-1])
        return jx.with_eqns(self.before, self.eqns, outvars=outvars)

    def _now(self, atom: jx.Atom) -> jx.Atom:
        return atom if isinstance(atom, jx.Literal) else self.same.get(atom, atom)

    def _reshape(self, read: Sequence[jx.Var], like: jx.JaxprEqn) -> None:
        """Computes those of ``read`` that have been computed without groups only."""
        for v in read:
            if v in self.whole and v not in self.reshaped:
                self.reshaped.add(v)
                shape = jx.aval(v).shape
                self.eqns += jx.splice(
                    lambda x, shape=shape: lax.reshape(x, shape), like.replace(outvars=[v]), [self.whole[v]]
                )

    def _rewrite(self, eqn: jx.JaxprEqn) -> bool:
        """Whether ``eqn`` has been replaced."""
        if len(eqn.outvars) != 1:
            return False
        (result,), op = eqn.outvars, eqn.primitive
        shape = jx.aval(result).shape
        if op is _prims.reshape_p and eqn.params["dimensions"] is None and len(eqn.invars) == 1:
            (operand,) = eqn.invars
            if shape in self.groups and jx.aval(operand).shape == self.groups[shape].whole:
                self.whole[result] = operand
                return True
            if isinstance(operand, jx.Var) and operand in self.whole and shape == jx.aval(self.whole[operand]).shape:
                self.same[result] = self.whole[operand]
                return True
            return False
        if op is _prims.reduce_sum_p and isinstance(eqn.invars[0], jx.Var) and eqn.invars[0] in self.whole:
            self._sum(eqn, eqn.invars[0])
            return True
        adds = op is add_jaxvals_p
        if not (adds or self.rules.traits(op).stretches) or shape not in self.groups:
            return False
        if self.whole.keys().isdisjoint(a for a in eqn.invars if isinstance(a, jx.Var)):
            return False
        groups = self.groups[shape]
        operands = [self._without(a, groups, eqn) for a in eqn.invars]
        made = jx.Var(jx.aval(result).update(shape=groups.whole))
        as_written = eqn.replace(primitive=_prims.add_p, params={}) if adds else eqn
        self.eqns.append(as_written.replace(invars=operands, outvars=[made]))
        self.whole[result] = made
        return True

    def _without(self, atom: jx.Atom, groups: _Groups, like: jx.JaxprEqn) -> jx.Atom:
        """An operand without groups: numbers per group are repeated over its dimensions."""
        if isinstance(atom, jx.Literal) or not jx.aval(atom).shape:
            return atom
        if atom in self.whole:
            return self.whole[atom]
        if atom not in self.repeated:
            source, dims = atom, range(len(groups.split))
            spread = self.values.maker(atom)
            is_spread = spread is not None and spread.primitive is _prims.broadcast_in_dim_p and len(spread.invars) == 1
            if spread is not None and is_spread and spread.invars[0] not in self.whole:
                source, dims = self._now(spread.invars[0]), [int(d) for d in spread.params["broadcast_dimensions"]]
            sizes = dict(zip(dims, jx.aval(source).shape, strict=True))
            varies = [any(sizes.get(d, 1) > 1 for d in of) for of in groups.dims]
            wide = {d: groups.split[d] if more else 1 for of, more in zip(groups.dims, varies, strict=True) for d in of}
            to = [n if more else 1 for n, more in zip(groups.whole, varies, strict=True)]

            def repeated(x: Any) -> Any:
                return lax.reshape(lax.broadcast_in_dim(x, [*wide.values()], dims), to)

            made, (self.repeated[atom],) = jx.emit(repeated, like, source)
            self.eqns += made
        return self.repeated[atom]

    def _sum(self, eqn: jx.JaxprEqn, operand: jx.Var) -> None:
        """A sum over the whole dimensions first, and then over those within."""
        axes, groups = eqn.params["axes"], self.groups[jx.aval(operand).shape]
        first = [d for d, of in enumerate(groups.dims) if all(i in axes for i in of)]
        left = [i for d, of in enumerate(groups.dims) if d not in first for i in of]
        then = [left.index(i) for i in left if i in axes]

        def summed(x: Any) -> Any:
            part = lax.reshape(lax.reduce_sum(x, first), [groups.split[i] for i in left])
            return lax.reduce_sum(part, then) if then else part

        self.eqns += jx.splice(summed, eqn, [self.whole[operand]])
        self.sums.append(eqn)
