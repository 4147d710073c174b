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

from autoshard.cost.cost import Way, compute, way
from autoshard.ir.graph import Kind
from autoshard.ir.spec import REDUCED, Axes
from autoshard.search.problem import Array
from autoshard.search.spec_tables import Lay, Lays
from autoshard.search.value_groups import Groups, Places

End = tuple[int, Places] | None
"""A value's variable, and its places there."""


class Tables:
    """What the equations of a program cost whose variables have the options of ``lays``."""

    def __init__(self, groups: Groups, lays: Lays) -> None:
        self.groups, self.lays, self.mesh = groups, lays, lays.mesh
        self._ways: dict[tuple[Kind, tuple[Any, ...]], Way] = {}
        self._plain: dict[Kind, bool] = {}

    def plain(self, kind: Kind) -> bool:
        """Whether an equation goes element by element through values of one shape, and numbers."""
        if kind not in self._plain:
            rule, form = kind.rule, self.groups.form(kind)
            dims = (*rule.operands, *rule.results)
            large = {(dims[p], n) for p, n in enumerate(kind.shapes) if n or p >= len(rule.operands)}
            split = all(dim or n == 1 for ds, shape in large for dim, n in zip(ds, shape, strict=True))
            whole = "whole" in {rule.kind(f) for f in rule.factors}
            plain = len(large) == 1 and split and bool(form.full) and not (form.reduces or rule.halos or whole)
            self._plain[kind] = plain and not kind.flops
        return self._plain[kind]

    def led(self, kind: Kind, ends: Iterable[End]) -> bool:
        """Whether the equation runs as one of its values lies."""
        form = self.groups.form(kind)
        choosing = self.groups.few and (form.reduces or len({end[0] for end in ends if end}) > 2)
        return bool(form.full) and not choosing

    def leaders(self, kind: Kind, ends: Sequence[End]) -> dict[int, tuple[int, Places]]:
        """The values as which the equation may be run, by position, one a variable: results first, then the largest."""
        full = [p for p in self.groups.form(kind).full if ends[p]] if self.led(kind, ends) else []
        found: dict[int, tuple[int, tuple[int, Places]]] = {}
        for p in sorted(full, key=lambda p: (p < len(kind.rule.operands), -math.prod(kind.shapes[p]), p)):
            if (end := ends[p]) is not None:
                found.setdefault(end[0], (p, end))
        return dict(found.values())

    def way(self, kind: Kind, chosen: Mapping[str, Axes]) -> Way:
        if any(k == "whole" for _, k in kind.rule.kinds):
            chosen = {f: axes for f, axes in chosen.items() if kind.rule.kind(f) != "whole"}
        key = kind, tuple(sorted(chosen.items()))
        if key not in self._ways:
            self._ways[key] = way(kind, chosen, self.mesh)
        return self._ways[key]

    def run(self, kind: Kind, chosen: Sequence[Mapping[str, Axes]]) -> tuple[Array, list[Lay]]:
        """Seconds of a node whose factors have each of the axes ``chosen``, and what it asks of its values."""
        ways = [self.way(kind, c) for c in chosen]
        asked = [self.lays.lay([w.needs[p] for w in ways]) for p in range(len(kind.rule.operands))]
        asked += [self.lays.lay([w.gives[p] for w in ways]) for p in range(len(kind.rule.results))]
        return np.array([w.seconds(self.mesh) if w.possible else math.inf for w in ways]), asked

    def led_by(self, kind: Kind, p: int, i: int, at: Places) -> tuple[Array, list[Lay]]:
        """The same for an equation that runs as its value at position ``p`` lies, all options at once: each of its
        values then lies as that does; one by one where neighbours exchange edges."""
        rule = kind.rule
        dims = (*rule.operands, *rule.results)
        place = {dim[0]: d for dim, d in zip(dims[p], at, strict=True) if dim and rule.kind(dim[0]) != "whole"}
        if rule.halos or len(place) < sum(bool(dim) and rule.kind(dim[0]) != "whole" for dim in dims[p]):
            return self.run(kind, self._as(kind, p, i, at))
        where = [tuple([place.get(dim[0], -1) if dim else -1 for dim in ds]) for ds in dims]
        terms = tuple((d, k) for f, k in rule.kinds if k in REDUCED and (d := place.get(f, -1)) >= 0)
        count = len(rule.operands)
        asked = [self.lays.lies(i, w, terms if q >= count else ()) for q, w in enumerate(where)]
        local = [b / self.lays.parts(lay) for b, lay in zip(kind.bytes, asked, strict=True)]
        seconds = compute(kind, local, self.lays.parts(self.lays.lies(i, where[p])), self.mesh, _least, _most)
        return np.broadcast_to(seconds, len(self.lays.options[i])), asked

    def _as(self, kind: Kind, p: int, i: int, at: Places) -> list[dict[str, Axes]]:
        """The axes of the factors where the equation runs as its value at position ``p`` lies, option by option."""
        dims = (*kind.rule.operands, *kind.rule.results)[p]
        places = [(dim[0], d) for dim, d in zip(dims, at, strict=True) if dim and d >= 0]
        return [{f: o.dims[d] for f, d in places if o.dims[d]} for o in self.lays.options[i]]

    def costs(
        self, kind: Kind, ends: Sequence[End], i: int, alone: Array, asked: Sequence[Lay], times: float
    ) -> tuple[Array, dict[int, Array]]:
        """Seconds of a node under each option of ``i``, where it takes ``alone`` and asks this of its values: by that
        option, and, for every other variable of its values, by that option and the other's."""
        operands, lays = len(kind.rule.operands), self.lays
        alone = times * alone
        others: dict[int, Array] = {}
        for p, (end, need) in enumerate(zip(ends, asked, strict=True)):
            shape, bits = kind.shapes[p], kind.bits[p]
            if end is None:  # a scalar, or what no other equation reads: only its terms cost
                if p >= operands and any(s.partial for s in need.specs):
                    reduced = lays.lay([need.specs[k].reduced() for k in need.which])
                    alone += times / kind.together * lays.along(need, reduced, shape, bits)
                continue
            there = lays.lies(*end)
            if end[0] == i:
                alone += times * lays.along(*((there, need) if p < operands else (need, there)), shape, bits)
            else:
                table = lays.moves(there, need, shape, bits).T if p < operands else lays.moves(need, there, shape, bits)
                others[end[0]] = others.get(end[0], 0.0) + times * table
        return alone, others


def _least(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.minimum, arrays)


def _most(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.maximum, arrays)
