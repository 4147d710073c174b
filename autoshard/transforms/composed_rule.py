"""The rule of several equations that run as one operation, composed of their own rules.

Values that the equations pass to one another are not operands or results of the whole, so no spec of theirs is asked
for: every device computes its part of each, and where a contracted factor is split, a partial sum of it. What an
equation makes of a partial sum its rule says (`Rule.partial_passthrough`); only results of the whole are reduced.

Factors of different equations are one where a value connects them. Partial sums that are added must be partial over the
same mesh axes: the factors that they were contracted over become one, of the greatest common divisor of their sizes. A
factor that would leave a result neither split nor partial is kept whole; but nothing is composed where that is one
that a product alone could split without leaving a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard import jaxpr as jx
from autoshard.ir.rule import Dims, Rule, factor_names

InnerDim = tuple[str | int, ...]
"""Factors of a dimension of a value inside; a number is the size of one that no operand has and that is never split."""


@dataclass(frozen=True)
class Part:
    """One equation of the whole."""

    eqn: jx.JaxprEqn
    rule: Rule
    partial: tuple[int, ...] = ()
    """The operands that other parts compute, as partial sums."""


@dataclass(frozen=True)
class ComposedRule:
    """The rule of the whole, and the factors of what is inside."""

    rule: Rule
    dims: tuple[tuple[InnerDim, ...], ...]
    """Of each part's result."""
    factors: tuple[tuple[str, ...], ...]
    """Of each part: those of its operands and its result, sorted."""


def compose(parts: Sequence[Part], results: Collection[jx.Var]) -> ComposedRule | None:
    """The rule of ``parts``, each with one result, as one operation; None where no partial sum stays partial, or where
    a product could be split in fewer ways than alone.

    Its operands are those of the parts, one after the other, that are neither literals nor results of other parts; its
    results are ``results``, in the order in which they are computed.
    """
    return _Composition(parts, results).composed()


@dataclass
class _Factors:
    """Factors of all parts by number; united ones have one root, and a split one has two pieces in its place."""

    sizes: list[int] = field(default_factory=list[int])
    kinds: list[str] = field(default_factory=list[str])
    """``parallel``, ``sum`` or ``whole``."""
    parent: dict[int, int] = field(default_factory=dict[int, int])
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def add(self, size: int, kind: str) -> int:
        self.sizes.append(size)
        self.kinds.append(kind if kind in ("parallel", "sum") else "whole")
        return len(self.sizes) - 1

    def leaves(self, factors: Iterable[int]) -> list[int]:
        """What ``factors`` consist of now, major to minor, without factors of size 1."""
        found: list[int] = []
        todo = [*factors][::-1]
        while todo:
            f = todo.pop()
            while f in self.parent:
                f = self.parent[f]
            if f in self.pieces:
                todo += self.pieces[f][::-1]
            elif self.sizes[f] != 1:
                found.append(f)
        return found

    def unite(self, left: Iterable[int], right: Iterable[int]) -> bool:
        """Makes two dimensions of equal size the same factors; False where these do not divide one another."""
        a, b = self.leaves(left), self.leaves(right)
        while a and b:
            x, y = a[0], b[0]
            m, n = self.sizes[x], self.sizes[y]
            if x == y:
                a, b = a[1:], b[1:]
            elif m == n:
                self.merge(x, y)
            elif m > n and m % n == 0:
                self.split(x, n)
            elif n > m and n % m == 0:
                self.split(y, m)
            else:
                return False
            a, b = self.leaves(a), self.leaves(b)
        return not a and not b

    def merge(self, x: int, y: int) -> None:
        kinds = {self.kinds[x], self.kinds[y]}
        self.parent[y] = x
        self.kinds[x] = next(k for k in ("whole", "sum", "parallel") if k in kinds)

    def split(self, x: int, major: int) -> tuple[int, int]:
        """Replaces ``x`` by a factor of size ``major`` and the rest."""
        self.pieces[x] = self.add(major, self.kinds[x]), self.add(self.sizes[x] // major, self.kinds[x])
        return self.pieces[x]

    def unite_parts(self, x: int, y: int) -> None:
        """Lets two contracted factors be split together, as far as their sizes have a common divisor."""
        common = math.gcd(self.sizes[x], self.sizes[y])
        if common == 1:
            self.keep_whole(x, y)
            return
        majors: list[int] = []
        for f in (x, y):
            major, rest = (f, None) if self.sizes[f] == common else self.split(f, common)
            majors.append(major)
            if rest is not None:
                self.keep_whole(rest)
        self.merge(majors[0], majors[1])

    def keep_whole(self, *factors: int) -> None:
        for f in factors:
            self.kinds[f] = "whole"


class _Composition:
    """Unites the factors of parts, then keeps factors whole until every partial sum can be carried to the results."""

    def __init__(self, parts: Sequence[Part], results: Collection[jx.Var]) -> None:
        self.parts, self.factors = parts, _Factors()
        self.results = [v for p in parts for v in p.eqn.outvars if v in results]
        self.dims: dict[jx.Var, list[list[int]]] = {}
        """Of each value inside, the factors of its dimensions."""
        self.operands: list[list[list[int]]] = []
        self.reads: list[list[list[list[int]]]] = []
        """Of each part, of each operand, the factors of its dimensions."""
        self.summed: list[list[int]] = []
        """Of each part, the factors that it contracts."""
        self.free: list[int] = []
        """The other factors that split products."""
        self.fits = all(self._add(p) for p in parts)

    def _add(self, part: Part) -> bool:
        """Adds the factors of ``part``; False where its dimensions cannot be made those of what it reads."""
        eqn, rule = part.eqn, part.rule
        shapes = [jx.aval(a).shape for a in (*eqn.invars, *eqn.outvars)]
        sizes = rule.factor_sizes(shapes)
        number = {f: self.factors.add(sizes[f], rule.kind(f)) for f in rule.factors}

        def numbers(dims: Dims, shape: Sequence[int]) -> list[list[int]]:
            named = zip(dims, shape, strict=True)
            return [[number[f] for f in d] if d else [self.factors.add(n, "whole")] for d, n in named]

        *ins, out = (numbers(d, s) for d, s in zip((*rule.operands, *rule.results), shapes, strict=True))
        self.reads.append(ins)
        for i, (atom, dims) in enumerate(zip(eqn.invars, ins, strict=True)):
            if i in part.partial:
                assert isinstance(atom, jx.Var)
                if not all(self.factors.unite(a, b) for a, b in zip(self.dims[atom], dims, strict=True)):
                    return False
            elif isinstance(atom, jx.Var):
                self.operands.append(dims)
        self.dims[eqn.outvars[0]] = out
        made = {f for d in rule.results[0] for f in d}
        self.summed.append([number[f] for f in rule.factors if rule.kind(f) == "sum" and f not in made])
        if len(rule.operands) > 1 and self.summed[-1]:
            self.free += [number[f] for f in rule.factors if rule.kind(f) == "parallel"]
        return True

    def composed(self) -> ComposedRule | None:
        if not self.fits:
            return None
        while self._keep_whole_what_cannot_be_split():
            pass
        read = {f for dims in self.operands for d in dims for f in self.factors.leaves(d)}
        kinds = self.factors.kinds
        if not any(kinds[f] == "sum" for f in read) or any(kinds[f] == "whole" for f in self.factors.leaves(self.free)):
            return None
        sides = [
            [[self.factors.leaves(d) for d in dims] for dims in side]
            for side in (self.operands, [self.dims[v] for v in self.results])
        ]
        order = list(dict.fromkeys(f for side in sides for dims in side for d in dims for f in d if f in read))
        name = dict(zip(order, factor_names(len(order)), strict=True))
        operands, results = (
            tuple(tuple(tuple(name[f] for f in d) if read.issuperset(d) else () for d in dims) for dims in side)
            for side in sides
        )
        compound = {f for dims in (*operands, *results) for d in dims if len(d) > 1 for f in d}
        rule = Rule(
            operands,
            results,
            tuple(sorted((n, k) for f, n in name.items() if (k := kinds[f]) != "parallel")),
            sizes=tuple(sorted((n, self.factors.sizes[f]) for f, n in name.items() if n in compound)),
        )
        return ComposedRule(
            rule,
            tuple(tuple(self._inner_dim(d, name) for d in self.dims[p.eqn.outvars[0]]) for p in self.parts),
            tuple(
                tuple(sorted({name[f] for dims in (*ins, out) for f in self._leaves(dims) if f in name}))
                for ins, out in ((r, self.dims[p.eqn.outvars[0]]) for r, p in zip(self.reads, self.parts, strict=True))
            ),
        )

    def _inner_dim(self, dim: Iterable[int], name: Mapping[int, str]) -> InnerDim:
        return tuple(name.get(f, self.factors.sizes[f]) for f in self.factors.leaves(dim))

    def _leaves(self, dims: Iterable[Iterable[int]]) -> list[int]:
        return [f for d in dims for f in self.factors.leaves(d)]

    def _keep_whole_what_cannot_be_split(self) -> bool:
        """Keeps some factors whole, or unites some; False where nothing is left to do."""
        factors, before = self.factors, (len(self.factors.sizes), len(self.factors.parent), [*self.factors.kinds])
        kinds = factors.kinds
        read = set(self._leaves(d for dims in self.operands for d in dims))
        for dims in (*self.operands, *self.dims.values()):
            found = self._leaves(dims)
            factors.keep_whole(*(f for f in found if f not in read or found.count(f) > 1))
        for d in (d for v in self.results for d in self.dims[v] if not read.issuperset(factors.leaves(d))):
            factors.keep_whole(*factors.leaves(d))
        partial: dict[jx.Var, list[int]] = {}
        """Of each value inside, the factors over which it is partial where they are split."""
        for part, summed in zip(self.parts, self.summed, strict=True):
            first, *others = [partial[part.eqn.invars[i]] for i in part.partial] or [[]]  # type: ignore[index]
            for other in others:
                rest = [[f for f in a if f not in b] for a, b in ((first, other), (other, first))]
                for x, y in zip(*rest, strict=False):
                    factors.unite_parts(x, y)
                shared = min(map(len, rest))
                factors.keep_whole(*rest[0][shared:], *rest[1][shared:])
            out = part.eqn.outvars[0]
            dims = set(self._leaves(self.dims[out]))
            left = [f for f in dict.fromkeys((*factors.leaves(first), *factors.leaves(summed))) if kinds[f] != "whole"]
            factors.keep_whole(*(f for f in left if f in dims))
            partial[out] = [f for f in left if kinds[f] == "sum"]
        for v in self.results:
            known = {*self._leaves(self.dims[v]), *factors.leaves(partial[v])}
            factors.keep_whole(*(f for f in read if kinds[f] == "sum" and f not in known))
        return before != (len(factors.sizes), len(factors.parent), factors.kinds)
