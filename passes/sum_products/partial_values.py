"""Which values of a jaxpr can stay partial sums, and which equations to join so that less is reduced.

A product leaves a partial sum where its contracted dimension is split. An equation *carries* it if it is linear in it:
its traits say so, and its rule that a partial sum of that dtype passes through exactly. A value can stay partial where
every equation that reads it carries it. Such values are passed on together with all others that the same equations
carry: that replaces their reductions by those of what these equations compute, and is done where these are fewer bytes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import RuleError
from autoshard.ir.rule import Rule
from autoshard.ir.rule_registry import Rules, fallback_rule, lookup_rule
from autoshard.ir.traits import Traits
from autoshard.machine.mesh import LogicalMesh

MAX_PRODUCTS = 32
"""In one operation: its strategies, one for every contracted dimension, are each as long as its operands are many."""
LATER_FLOPS = 1 / 4
"""Most FLOPs of a product that a partial sum is carried through, as a share of those that the partial sum took: all
devices that hold a part of the sum compute it."""
LATER_BYTES = 1 / 2
"""Most bytes to reduce after such products, as a share of those before."""
MIN_BITS = 32
"""Fewest bits of a partial sum that is more than added, moved or cast: scaled or multiplied, each is rounded again."""

Positions = tuple[int, ...]


@dataclass(frozen=True)
class LinearRules:
    """Through which operations partial sums are carried."""

    table: Rules
    mesh: LogicalMesh
    through_products: bool
    _rules: dict[Any, Rule] = field(default_factory=dict[Any, Rule])
    _carried: dict[Any, tuple[jx.JaxprEqn, bool]] = field(default_factory=dict[Any, tuple[jx.JaxprEqn, bool]])
    """`_carries_any_number` by the ids of an equation's parameters and abstract values, which equal layers share."""

    def traits(self, eqn: jx.JaxprEqn) -> Traits:
        return self.table.traits(eqn.primitive)

    def rule(self, eqn: jx.JaxprEqn) -> Rule:
        """The rule of ``eqn``, which keeps it whole where it has none."""
        key = jx.eqn_key(eqn)
        found = self._rules.get(key)
        if found is None:
            try:
                found = lookup_rule(eqn, self.table, self.mesh) or fallback_rule(eqn)
            except RuleError:  # reported when the graph is built
                found = fallback_rule(eqn)
            self._rules[key] = found
        return found

    def is_product(self, eqn: jx.JaxprEqn) -> bool:
        """Whether ``eqn`` is a product that may leave a partial sum."""
        return (
            eqn.primitive is _prims.dot_general_p
            and bool(eqn.params["dimension_numbers"][0][0])
            and _is_plain(eqn)
            and any(kind == "sum" for _, kind in self.rule(eqn).kinds)
        )

    def carries(self, eqn: jx.JaxprEqn, operands: Positions) -> bool:
        """Whether ``eqn`` makes a partial sum of partial sums as these operands."""
        if operands not in self.traits(eqn).linear:
            return False
        numbers = [a.val for i, a in enumerate(eqn.invars) if isinstance(a, jx.Literal) and i not in operands]
        if not all(np.ndim(x) == 0 and np.isfinite(complex(x)) for x in numbers):
            return False
        if eqn.primitive is _prims.div_p and not (numbers and all(numbers)):
            return False
        key = eqn.primitive, id(eqn.params), operands, *[id(jx.aval(a)) for a in (*eqn.invars, *eqn.outvars)]
        found = self._carried.get(key)
        if found is None:  # the equation is kept, so that no other object gets these ids
            found = self._carried[key] = eqn, self._carries_any_number(eqn, operands)
        return found[1]

    def _carries_any_number(self, eqn: jx.JaxprEqn, operands: Positions) -> bool:
        """`carries`, whatever the literals among its operands are."""
        if not _is_plain(eqn):
            return False
        traits, bits = self.traits(eqn), jx.dtype_bits(jx.aval(eqn.outvars[0]).dtype)
        if bits < MIN_BITS and not (traits.adds or traits.moves_data or traits.fused_into_consumer):
            return False
        return operands in dict(self.rule(eqn).partial_passthrough).get("sum", ())


def _is_plain(eqn: jx.JaxprEqn) -> bool:
    """Whether ``eqn`` can be a step of an operation: arrays with elements, and numbers, to one array of numbers."""
    if len(eqn.outvars) != 1 or eqn.effects or jx.eqn_key(eqn) is None or jx.regions(eqn):
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    if not all(map(jx.is_array, atoms)) or any(isinstance(a, jx.Literal) and np.ndim(a.val) for a in atoms):
        return False
    numeric = jax.dtypes.issubdtype(jx.aval(eqn.outvars[0]).dtype, np.number)
    return numeric and all(math.prod(jx.aval(a).shape) for a in atoms)


class PartialValues:
    """The values of a jaxpr that products leave partial, and how far they can be carried. Equations are numbers."""

    def __init__(self, jaxpr: jx.Jaxpr, rules: LinearRules) -> None:
        self.jaxpr, self.rules = jaxpr, rules
        self.made = {v: n for n, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.readers: dict[jx.Var, list[int]] = defaultdict(list)
        for n, e in enumerate(jaxpr.eqns):
            for a in {a for a in e.invars if isinstance(a, jx.Var)}:
                self.readers[a].append(n)
        self.returned = {a for a in jaxpr.outvars if isinstance(a, jx.Var)}
        self.products = {n for n, e in enumerate(jaxpr.eqns) if rules.is_product(e)}
        self.partial: dict[jx.Var, float] = {}
        """Values that products leave partial, with the FLOPs of these."""
        self.carried: dict[int, Positions] = {}
        """Equations that carry partial sums, and the operands that are."""
        if self.products:
            self._find()

    def _find(self) -> None:
        """Supposes that every equation carries all that it reads, and takes back what turns out not to be so."""
        self._carry(lambda v: True)
        passed: set[jx.Var] | None = None
        while passed is None or any(not self._is_passed(v) for v in passed):
            passed = {v for v in (passed or self.partial) if self._is_passed(v)}
            self._carry(passed.__contains__)

    def _carry(self, passed: Callable[[jx.Var], bool]) -> None:
        self.partial, self.carried = {}, {}
        todo = sorted(self.products)  # a heap: equations are visited after all that they read
        seen = set(todo)
        while todo:
            n = heapq.heappop(todo)
            e = self.jaxpr.eqns[n]
            read = {i: a for i, a in enumerate(e.invars) if isinstance(a, jx.Var) and a in self.partial and passed(a)}
            flops = sum(self.partial[v] for v in {*read.values()})
            if read and self._carries(n, tuple(read), flops):
                self.carried[n] = tuple(read)
            if n in self.products or n in self.carried:
                own = jx.contraction_flops(e) if n in self.products else 0.0
                self.partial[e.outvars[0]] = own + (flops if n in self.carried else 0.0)
                for m in self.readers[e.outvars[0]]:
                    if m not in seen:
                        seen.add(m)
                        heapq.heappush(todo, m)

    def _carries(self, n: int, operands: Positions, flops: float) -> bool:
        eqn = self.jaxpr.eqns[n]
        if eqn.primitive is _prims.dot_general_p:
            small = jx.contraction_flops(eqn) <= LATER_FLOPS * flops
            return self.rules.through_products and small and self.rules.carries(eqn, operands)
        return self.rules.carries(eqn, operands)

    def _is_passed(self, v: jx.Var) -> bool:
        """Whether every equation that reads ``v`` carries it."""
        eqns = self.jaxpr.eqns
        return (
            v not in self.returned
            and bool(self.readers[v])
            and all(
                n in self.carried and all(i in self.carried[n] for i, a in enumerate(eqns[n].invars) if a is v)
                for n in self.readers[v]
            )
        )

    def regions(self) -> list[list[list[int]]]:
        """Equations to join into one operation each: sets of them, of which each leaves less to reduce if those before
        it are joined too."""
        bundles = self._bundles()
        bundle_of = {n: b for b, eqns in enumerate(bundles) for n in eqns}
        joined, accepted, found = _DisjointSets(), set[int](), list[list[int]]()
        for b in range(len(bundles)):
            needed, todo = {b}, [b]
            while todo:
                made = {self.made[a] for n in bundles[todo.pop()] for a in self._partial_operands(n)}
                new = {bundle_of[n] for n in made if n in bundle_of} - accepted - needed
                needed |= new
                todo += new
            eqns = sorted(n for c in needed for n in bundles[c])
            makers = [self.made[a] for n in eqns for a in self._partial_operands(n)]
            roots = {joined.root(n) for n in (*eqns, *makers)}
            count = sum(n in self.products for r in roots for n in joined.members(r))
            if count <= MAX_PRODUCTS and self._saves(eqns):
                accepted |= needed
                found.append([*eqns, *makers])
                for n in found[-1]:
                    joined.unite(eqns[0], n)
        regions: dict[int, list[list[int]]] = defaultdict(list)
        for eqns in found:
            regions[joined.root(eqns[0])].append(eqns)
        return list(regions.values())

    def _bundles(self) -> list[list[int]]:
        """Equations to carry partial sums through together: all readers of a value carry it or none, and so for all
        values that one of them reads."""
        together = _DisjointSets()
        for n in self.carried:
            for a in self._partial_operands(n):
                for m in self.readers[a]:
                    together.unite(n, m)
        return sorted(sorted(s) for s in together.sets())

    def _partial_operands(self, n: int) -> list[jx.Var]:
        return [a for i in self.carried[n] if isinstance(a := self.jaxpr.eqns[n].invars[i], jx.Var)]

    def _saves(self, eqns: Collection[int]) -> bool:
        """Whether what these equations compute is fewer bytes than what they carry."""
        read = {a for n in eqns for a in self._partial_operands(n)}
        made = {self.jaxpr.eqns[n].outvars[0] for n in eqns}
        before, after = (sum(jx.aval_bytes(jx.aval(v)) for v in vs) for vs in (read - made, made - read))
        later = any(n in self.products for n in eqns)
        return after <= LATER_BYTES * before if later else after < before

    def is_read_outside(self, v: jx.Var, eqns: Collection[int]) -> bool:
        return v in self.returned or any(n not in eqns for n in self.readers[v])

    def is_out_of_order(self, eqns: Collection[int], joined: Mapping[int, Collection[int]]) -> bool:
        """Whether one operation for ``eqns`` would read what is computed of its results, or have an effect wait for
        another that comes after it.

        Args:
          joined: by equation, those that it is one operation with.
        """
        end = max(eqns)
        read = (m for n in eqns for v in self.jaxpr.eqns[n].outvars for m in self.readers[v] if m not in eqns)
        if any(self.jaxpr.eqns[n].effects for n in range(min(read, default=end), end)):
            return True
        for others in sorted({id(o): o for o in joined.values()}.values(), key=min):
            end = max(end, *others) if min(others) < end else end
        seen, todo = set(eqns), [*eqns]
        while todo:
            n = todo.pop()
            readers = {m for v in self.jaxpr.eqns[n].outvars for m in self.readers[v] if m <= end}
            if n not in eqns and not readers.isdisjoint(eqns):
                return True
            new = {k for m in readers for k in joined.get(m, (m,))} - seen
            seen |= new
            todo += new
        return False


class _DisjointSets:
    """Sets of numbers that grow together."""

    def __init__(self) -> None:
        self._set: dict[int, list[int]] = {}

    def root(self, n: int) -> int:
        return self._set.setdefault(n, [n])[0]

    def members(self, n: int) -> list[int]:
        return self._set.setdefault(n, [n])

    def unite(self, m: int, n: int) -> None:
        a, b = self.members(m), self.members(n)
        if a is not b:
            small, large = sorted((a, b), key=len)
            large += small
            self._set.update(dict.fromkeys(small, large))

    def sets(self) -> list[list[int]]:
        return list({id(s): s for s in self._set.values()}.values())


def grouped_additions(values: PartialValues) -> PartialValues:
    """The same program with the partial sums among the terms of each sum added first, at most `MAX_PRODUCTS` to one
    another; the same object where they are so already."""
    jaxpr, rules = values.jaxpr, values.rules
    if len(values.partial) < 2:
        return values
    additions = {n for n, e in enumerate(jaxpr.eqns) if rules.traits(e).adds and _is_elementwise(e)}
    uses = jx.use_counts(jaxpr)
    inner = {
        n
        for n in additions
        if uses[v := jaxpr.eqns[n].outvars[0]] == 1 and v not in values.returned and values.readers[v][0] in additions
    }
    instead: dict[int, list[jx.JaxprEqn]] = {}
    gone = set[int]()
    for n in sorted(additions - inner):
        eqn, terms, chain = jaxpr.eqns[n], list[jx.Atom](), list[int]()
        waiting = [*reversed(eqn.invars)]
        while waiting:
            atom = waiting.pop()
            m = values.made.get(atom) if isinstance(atom, jx.Var) else None
            if m in inner:
                chain.append(m)
                waiting += reversed(jaxpr.eqns[m].invars)
            else:
                terms.append(atom)
        partial = [a for a in terms if isinstance(a, jx.Var) and a in values.partial and uses[a] == 1]
        rest = [a for a in terms if a not in partial]
        if len(partial) < 2 or (not rest and len(partial) <= MAX_PRODUCTS):
            continue
        groups = [list(group) for group in itertools.batched(partial, MAX_PRODUCTS)]
        new: list[jx.JaxprEqn] = []

        def add(a: jx.Atom, b: jx.Atom, like: jx.JaxprEqn = eqn, new: list[jx.JaxprEqn] = new) -> jx.Atom:
            total = jx.new_var(like.outvars[0])
            new.append(like.replace(invars=[a, b], outvars=[total]))
            return total

        functools.reduce(add, [*(functools.reduce(add, g) for g in groups), *rest])
        new[-1] = new[-1].replace(outvars=eqn.outvars)
        instead[n] = new
        gone.update(chain)
    if not instead:
        return values
    eqns = [new for n, eqn in enumerate(jaxpr.eqns) if n not in gone for new in instead.get(n, (eqn,))]
    return PartialValues(jx.with_eqns(jaxpr, eqns), rules)


def _is_elementwise(eqn: jx.JaxprEqn) -> bool:
    """Whether an addition is of arrays of one shape, which is not that of a scalar."""
    shape = jx.aval(eqn.outvars[0]).shape
    return bool(shape) and all(jx.aval(a).shape == shape for a in eqn.invars)
