"""Steps on sorted rows as one operation: its factors, of the steps' own rules, and the equation.

Factors of different steps are one where a value connects them. A contracted one may be split where every step that
reads the partial sums makes partial sums of them, up to each result; else it is kept whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule, factor_names
from autoshard.passes.experts.sorted_rows import SortedRows
from autoshard.transforms.composed_rule import InnerDim
from autoshard.transforms.grouped_rows import grouped_rows_p
from autoshard.transforms.sum_of_products import Constant, Step

ROW, GROUP = 0, 1
"""The numbers of two factors; others follow."""


@dataclass
class _Factors:
    """Factors by number; united ones have one root."""

    parent: list[int] = field(default_factory=lambda: [ROW, GROUP])
    whole: set[int] = field(default_factory=set[int])

    def add(self) -> int:
        self.parent.append(len(self.parent))
        return self.parent[-1]

    def root(self, f: int) -> int:
        while self.parent[f] != f:
            f = self.parent[f]
        return f

    def unite(self, a: int, b: int) -> None:
        low, high = sorted((self.root(a), self.root(b)))
        self.parent[high] = low
        if high in self.whole:
            self.whole.add(low)


@dataclass(frozen=True)
class _Part:
    """A step's equation with the factors of its operands and of its result, and those that it contracts."""

    eqn: jx.JaxprEqn
    rule: Rule
    dims: list[list[int]]
    contracted: list[int]


class Region:
    """The operation that makes ``results`` by ``eqns``, of sorted rows that ``sources`` are rows of.

    Args:
      sources: sorted rows that are operands -> the same rows in their own order.
    """

    def __init__(
        self,
        rows: SortedRows,
        eqns: Sequence[jx.JaxprEqn],
        sources: Mapping[jx.Var, jx.Atom],
        results: Sequence[jx.Var],
    ) -> None:
        self.rows, self.eqns, self.sources, self.results = rows, eqns, sources, results
        self.factors = _Factors()
        self.dims: dict[jx.Var, list[int]] = {v: self._new_row(v) for v in sources}
        self.made = {e.outvars[0] for e in eqns}
        others = (a for e in eqns for a in e.invars if isinstance(a, jx.Var) and a not in rows.groups)
        self.others = [a for a in dict.fromkeys(others) if a not in self.made and a not in sources]
        self.dims.update((v, [self.factors.add() for _ in jx.aval(v).shape]) for v in self.others)
        self.parts = [self._part(e) for e in eqns]
        self.summed = {self.factors.root(f) for p in self.parts for f in p.contracted} - {ROW, GROUP}
        self._keep_whole()

    def _new_row(self, v: jx.Var) -> list[int]:
        return [ROW, *(self.factors.add() for _ in jx.aval(v).shape[1:])]

    def _part(self, eqn: jx.JaxprEqn) -> _Part:
        rule, factors = self.rows.rule(eqn), self.factors
        number = {f: factors.add() for f in rule.factors}
        factors.whole.update(number[f] for f, kind in rule.kinds if kind not in ("sum", "parallel"))

        def numbers(dims: Sequence[Sequence[str]]) -> list[int]:
            found = [number[d[0]] if d else factors.add() for d in dims]
            factors.whole.update(f for f, d in zip(found, dims, strict=True) if not d)
            return found

        *ins, out = map(numbers, (*rule.operands, *rule.results))
        if self.rows.traits(eqn).grouped_product:
            numbers_ = eqn.params["ragged_dot_dimension_numbers"]
            groups = [ins[1][d] for d in numbers_.rhs_group_dimensions] or out[:1]
            factors.unite(groups[0], GROUP)
            factors.unite(ins[0][0], ROW)
        for atom, dims in zip(eqn.invars, ins, strict=True):
            for a, b in zip(self.dims.get(atom, ()) if isinstance(atom, jx.Var) else (), dims, strict=False):
                factors.unite(a, b)
        v = eqn.outvars[0]
        if self.rows.is_row(v):
            factors.unite(out[0], ROW)
        self.dims[v] = out
        return _Part(eqn, rule, [*ins, out], [number[f] for f, kind in rule.kinds if kind == "sum"])

    def _keep_whole(self) -> None:
        root, whole = self.factors.root, self.factors.whole
        for dims in self.dims.values():
            found = [root(f) for f in dims]
            whole.update(f for f in found if found.count(f) > 1)
        read = {root(f) for v in (*self.sources, *self.others) for f in self.dims[v]}
        whole.update(root(f) for dims in self.dims.values() for f in dims if root(f) not in read and root(f) > GROUP)
        whole.update([root(f) for f in whole])
        for f in self.summed - whole:
            if not self._carried(f):
                whole.add(f)

    def _carried(self, f: int) -> bool:
        """Whether all that does not have factor ``f`` is partial over it."""
        partial: set[jx.Var] = set()
        for part in self.parts:
            contracts = any(self.factors.root(c) == f for c in part.contracted)
            reads = tuple(i for i, a in enumerate(part.eqn.invars) if isinstance(a, jx.Var) and a in partial)
            if reads:
                passing = dict(part.rule.partial_passthrough).get("sum", ())
                if contracts or reads not in passing:
                    return False
            if contracts or reads:
                partial.add(part.eqn.outvars[0])
        have = {v for v in self.results if f in map(self.factors.root, self.dims[v])}
        return not have & partial and all(v in partial or v in have for v in self.results)

    def equation(self) -> jx.JaxprEqn:
        """The equation of the operation."""
        root, whole = self.factors.root, self.factors.whole
        operands = [*self.sources, *self.others]
        used = [ROW, GROUP, *(root(f) for v in (*operands, *self.results) for f in self.dims[v])]
        order = [f for f in dict.fromkeys(used) if f not in whole]
        name = dict(zip(order, factor_names(len(order)), strict=True))

        def dims(v: jx.Var) -> tuple[tuple[str, ...], ...]:
            return tuple((name[root(f)],) if root(f) in name else () for f in self.dims[v])

        ends = {v: dims(v) for v in (*operands, *self.results)}
        kinds = {name[GROUP]: "local"} | {name[f]: "sum" for f in self.summed if f in name}
        if any(v in self.rows.sums for v in self.results):
            kinds[name[ROW]] = "sum"
        rule = Rule(
            (((name[ROW],),), *(ends[v] for v in operands)),
            tuple(ends[v] for v in self.results),
            tuple(sorted(kinds.items())),
        )
        number = {v: 1 + i for i, v in enumerate(operands)}
        number |= dict.fromkeys(self.rows.groups, len(operands) + 1)
        number |= {e.outvars[0]: len(operands) + 2 + i for i, e in enumerate(self.eqns)}
        steps = tuple(self._step(p, number, name) for p in self.parts)
        groups = next(iter(self.rows.groups.values()))
        params: dict[str, Any] = {
            "steps": steps,
            "rows": len(self.sources),
            "results": tuple(number[v] for v in self.results),
            "rule": rule,
            "groups": groups,
            "flops": sum(s.flops for s in steps),
            "in_blocks": not self.rows.program.mesh.hardware.grouped_products,
            "in_range": self.rows.is_below(self.rows.group_of, groups),
            "after": ((),) * len(self.results),
            "last": 0,
        }
        return self.eqns[-1].replace(
            primitive=grouped_rows_p,
            params=params,
            invars=[self.rows.group_of, *self.sources.values(), *self.others],
            outvars=list(self.results),
        )

    def _step(self, part: _Part, number: Mapping[jx.Var, int], name: Mapping[int, str]) -> Step:
        root, flops = self.factors.root, jx.contraction_flops(part.eqn)
        made = zip(part.dims[-1], jx.aval(part.eqn.outvars[0]).shape, strict=True)
        split = {name[root(f)] for dims in part.dims for f in dims if root(f) in name}
        found = step(
            part.eqn, number, [(name.get(root(f), n),) for f, n in made], self.rows.traits(part.eqn).shape_param
        )
        return found._replace(flops=flops, factors=tuple(sorted(split)) if flops else ())


def step(eqn: jx.JaxprEqn, number: Mapping[jx.Var, int], dims: Sequence[InnerDim], shape_param: str | None) -> Step:
    """``eqn`` as a step, without FLOPs.

    Args:
      number: of the values that it may read.
      dims: of its result.
    """

    def read(atom: jx.Atom) -> int | Constant:
        if isinstance(atom, jx.Literal):
            dtype = jx.aval(atom).dtype
            return Constant(jx.dtype_name(dtype), np.asarray(atom.val, dtype).tobytes())
        return number[atom]

    return Step(
        eqn.primitive,
        tuple(sorted((k, None if k in ("sharding", "out_sharding") else x) for k, x in eqn.params.items())),
        tuple(map(read, eqn.invars)),
        tuple(dims),
        jx.dtype_name(jx.aval(eqn.outvars[0]).dtype),
        shape_param,
    )
