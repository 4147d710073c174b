"""tables: what an equation costs under every option of a problem's variable, all at once.

Most equations are *led*: one whose operands and results include a value that has every factor runs as that value lies.
Any other runs as its own variable says. Either way each option of the variable asks of every value of the equation that
it lies in some way, and what it takes to bring it there, or from there, is a table by that option and the value's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.cost.cost import NodeStrategy, compute_seconds, node_strategy
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import REDUCTION_KINDS, Axes
from autoshard.search.problem import Array
from autoshard.search.spec_tables import OptionSpecs, SpecTables
from autoshard.search.value_groups import DimMap, ValueGroups

End = tuple[int, DimMap] | None
"""A value's variable, and its places there."""


class NodeCosts:
    """What the equations of a program cost whose variables have the options of ``lays``."""

    def __init__(self, groups: ValueGroups, lays: SpecTables) -> None:
        self.groups, self.spec_tables, self.mesh = groups, lays, lays.mesh
        self._ways: dict[tuple[OpKind, tuple[Any, ...]], NodeStrategy] = {}
        self._plain: dict[OpKind, bool] = {}

    def is_elementwise(self, kind: OpKind) -> bool:
        """Whether an equation goes element by element through values of one shape, and numbers."""
        if kind not in self._plain:
            rule, form = kind.rule, self.groups.coverage(kind)
            dims = (*rule.operands, *rule.results)
            large = {(dims[p], n) for p, n in enumerate(kind.shapes) if n or p >= len(rule.operands)}
            split = all(dim or n == 1 for ds, shape in large for dim, n in zip(ds, shape, strict=True))
            whole = "whole" in {rule.kind(f) for f in rule.factors}
            plain = len(large) == 1 and split and bool(form.covering) and not (form.reduces or rule.halos or whole)
            self._plain[kind] = plain and not kind.flops
        return self._plain[kind]

    def follows(self, kind: OpKind, ends: Iterable[End]) -> bool:
        """Whether the equation runs as one of its values lies."""
        form = self.groups.coverage(kind)
        choosing = self.groups.small_program and (form.reduces or len({end[0] for end in ends if end}) > 2)
        return bool(form.covering) and not choosing

    def followed(self, kind: OpKind, ends: Sequence[End]) -> dict[int, tuple[int, DimMap]]:
        """The values as which the equation may be run, by position, one a variable: results first, then the largest."""
        full = [p for p in self.groups.coverage(kind).covering if ends[p]] if self.follows(kind, ends) else []
        found: dict[int, tuple[int, tuple[int, DimMap]]] = {}
        for p in sorted(full, key=lambda p: (p < len(kind.rule.operands), -math.prod(kind.shapes[p]), p)):
            if (end := ends[p]) is not None:
                found.setdefault(end[0], (p, end))
        return dict(found.values())

    def strategy(self, kind: OpKind, chosen: Mapping[str, Axes]) -> NodeStrategy:
        if any(k == "whole" for _, k in kind.rule.kinds):
            chosen = {f: axes for f, axes in chosen.items() if kind.rule.kind(f) != "whole"}
        key = kind, tuple(sorted(chosen.items()))
        if key not in self._ways:
            self._ways[key] = node_strategy(kind, chosen, self.mesh)
        return self._ways[key]

    def strategy_costs(self, kind: OpKind, chosen: Sequence[Mapping[str, Axes]]) -> tuple[Array, list[OptionSpecs]]:
        """Seconds of a node whose factors have each of the axes ``chosen``, and what it asks of its values."""
        ways = [self.strategy(kind, c) for c in chosen]
        asked = [self.spec_tables.intern([w.in_specs[p] for w in ways]) for p in range(len(kind.rule.operands))]
        asked += [self.spec_tables.intern([w.out_specs[p] for w in ways]) for p in range(len(kind.rule.results))]
        return np.array([w.seconds(self.mesh) if w.feasible else math.inf for w in ways]), asked

    def following_costs(self, kind: OpKind, p: int, i: int, at: DimMap) -> tuple[Array, list[OptionSpecs]]:
        """The same for an equation that runs as its value at position ``p`` lies, all options at once: each of its
        values then lies as that does; one by one where neighbours exchange edges."""
        rule = kind.rule
        dims = (*rule.operands, *rule.results)
        place = {dim[0]: d for dim, d in zip(dims[p], at, strict=True) if dim and rule.kind(dim[0]) != "whole"}
        if rule.halos or len(place) < sum(bool(dim) and rule.kind(dim[0]) != "whole" for dim in dims[p]):
            return self.strategy_costs(kind, self._followed_axes(kind, p, i, at))
        where = [tuple([place.get(dim[0], -1) if dim else -1 for dim in ds]) for ds in dims]
        terms = tuple((d, k) for f, k in rule.kinds if k in REDUCTION_KINDS and (d := place.get(f, -1)) >= 0)
        count = len(rule.operands)
        asked = [self.spec_tables.value_specs(i, w, terms if q >= count else ()) for q, w in enumerate(where)]
        local = [b / self.spec_tables.shard_counts(lay) for b, lay in zip(kind.bytes, asked, strict=True)]
        seconds = compute_seconds(
            kind,
            local,
            self.spec_tables.shard_counts(self.spec_tables.value_specs(i, where[p])),
            self.mesh,
            _array_min,
            _array_max,
        )
        return np.broadcast_to(seconds, len(self.spec_tables.options[i])), asked

    def _followed_axes(self, kind: OpKind, p: int, i: int, at: DimMap) -> list[dict[str, Axes]]:
        """The axes of the factors where the equation runs as its value at position ``p`` lies, option by option."""
        dims = (*kind.rule.operands, *kind.rule.results)[p]
        places = [(dim[0], d) for dim, d in zip(dims, at, strict=True) if dim and d >= 0]
        return [{f: o.dims[d] for f, d in places if o.dims[d]} for o in self.spec_tables.options[i]]

    def cost_terms(
        self, kind: OpKind, ends: Sequence[End], i: int, alone: Array, asked: Sequence[OptionSpecs], times: float
    ) -> tuple[Array, dict[int, Array]]:
        """Seconds of a node under each option of ``i``, where it takes ``alone`` and asks this of its values: by that
        option, and, for every other variable of its values, by that option and the other's."""
        operands, lays = len(kind.rule.operands), self.spec_tables
        alone = times * alone
        others: dict[int, Array] = {}
        for p, (end, need) in enumerate(zip(ends, asked, strict=True)):
            shape, bits = kind.shapes[p], kind.bits[p]
            if end is None:  # a scalar, or what no other equation reads: only its terms cost
                if p >= operands and any(s.partial for s in need.distinct_specs):
                    reduced = lays.intern([need.distinct_specs[k].reduced() for k in need.index])
                    alone += times / kind.combined_count * lays.reshard_pairs(need, reduced, shape, bits)
                continue
            there = lays.value_specs(*end)
            if end[0] == i:
                alone += times * lays.reshard_pairs(*((there, need) if p < operands else (need, there)), shape, bits)
            else:
                table = (
                    lays.reshard_matrix(there, need, shape, bits).T
                    if p < operands
                    else lays.reshard_matrix(need, there, shape, bits)
                )
                others[end[0]] = others.get(end[0], 0.0) + times * table
        return alone, others


def _array_min(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.minimum, arrays)


def _array_max(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.maximum, arrays)
