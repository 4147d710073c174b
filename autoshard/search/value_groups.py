"""groups: values of a graph that lie alike, and groups that are alike.

Two values lie alike when an equation passes one on as the other with its dimensions kept (elementwise, views,
converts, loop carries), and both have the same part in the step: parameters (and what is made of one alone), the
forward pass, the backward pass, the rest. What the user pinned stays by itself. In a large program, groups that do the
same in the same surroundings, as those of a model's layers, have one color, in turns of two: a chain of products is
best split by columns and by rows in turn.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import BACKWARD, FORWARD, Graph, Node, OpKind
from autoshard.ir.spec import REDUCTION_KINDS

Numbers = npt.NDArray[np.int64]
DimMap = tuple[int, ...]
"""For each dimension of a value, the dimension of its group, or -1."""
SharedDims = dict[int, dict[int, list[tuple[int, int]]]]
PARAMETER = "parameter"
COLOR_REFINEMENTS = 2
"""How far from a group its surroundings reach, in equations."""
SMALL_PROGRAM = 64
"""Most equations of a program in which every one of them, and every value, is decided for itself."""
MAX_CODE = 1 << 62
"""Numbers that there are."""
MAX_UNFOLDED_GROUPS = 300
"""Groups above which those that are alike are given one color."""


@dataclass(frozen=True)
class FactorCoverage:
    """Which values of a kind of node have what factors."""

    factors: tuple[str, ...]
    """Those of more than one element."""
    covering: tuple[int, ...]
    """Positions of the values that have every factor; none where a choice is to be made."""
    exactly_covering: tuple[int, ...]
    """Those of them that have nothing but factors."""
    reduces: bool
    """Whether it puts terms together."""


def factor_coverage(kind: OpKind) -> FactorCoverage:
    rule, sizes = kind.rule, dict(kind.factor_sizes)
    factors = tuple(f for f in rule.factors if sizes[f] > 1)
    dims = (*rule.operands, *rule.results)
    if rule.local is not None or any(len(d) > 1 for ds in dims for d in ds):
        return FactorCoverage(factors, (), (), False)
    have = [{f for d in ds for f in d} for ds in dims]
    full = tuple(p for p, fs in enumerate(have) if fs.issuperset(factors))
    exact = tuple(p for p in full if kind.tie or all(d or n == 1 for d, n in zip(dims[p], kind.shapes[p], strict=True)))
    reduces = any(kind.rule.kind(f) in REDUCTION_KINDS for f in factors)
    return FactorCoverage(factors, full if factors else (), exact if factors else (), reduces)


def _shared_dims(kind: OpKind, form: FactorCoverage) -> SharedDims:
    """For each position whose value may lie as others do, and each of these before it: which dimensions are one."""
    dims = (*kind.rule.operands, *kind.rule.results)
    there = {
        p: {dim[0]: d for d, dim in enumerate(dims[p]) if dim and dim[0] in form.factors} for p in form.exactly_covering
    }
    found: SharedDims = {
        p: {q: [(there[q][f], d) for f, d in there[p].items()] for q in form.exactly_covering if q < p}
        for p in form.exactly_covering
    }
    return found if len(found) > 1 else {}


class ValueGroups:
    """The groups of one graph. A group goes by the number of one of its values, its root.

    In a program of few equations, only what goes round lies alike: every other value is a group of its own.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.small_program = graph, len(graph.nodes) <= SMALL_PROGRAM
        self._coverage: dict[OpKind, FactorCoverage] = {}
        self._sets = _DisjointSets(graph)
        self.non_scalar = [False, *(math.prod(v.shape) > 1 for v in graph.values[1:])]
        self.phases = self._value_phases()
        links = {kind: _shared_dims(kind, self.coverage(kind)) for kind in {n.kind for n in graph.nodes}}
        weights = {kind: -max(kind.bytes) for kind, found in links.items() if found}
        tied = [n for n in graph.nodes if links[n.kind] and (n.tie or not self.small_program)]
        for node in sorted(tied, key=lambda n: weights[n.kind]):
            self._unite_equally_sharded(node, links[node.kind])
        self.members = self._members()
        """Root and places of every value that has more than one element."""
        self.color = self._colors()
        """For each root a number; groups that are alike have the same."""

    def rank(self, root: int) -> int:
        """How many dimensions a group has."""
        return len(self._sets.dims[root])

    def coverage(self, kind: OpKind) -> FactorCoverage:
        found = self._coverage.get(kind)
        if found is None:
            found = self._coverage[kind] = factor_coverage(kind)
        return found

    def _value_phases(self) -> list[str]:
        """For each value `PARAMETER`, or the phase of the equation that makes it."""
        graph, inputs = self.graph, self.graph.inputs
        state = argument_roles(graph)
        parameters = {inputs[i] for i in state.parameters}
        parameters |= {graph.outputs[o] for i, o in graph.program.carries if i in state.parameters}
        labels = [""] * len(graph.values)
        for i, v in enumerate(inputs):
            labels[v] = FORWARD if i in state.batch else ""
        for v in parameters:
            labels[v] = PARAMETER
        for node in graph.nodes:
            large = [v for v in node.operands if self.non_scalar[v]]
            alone = bool(large) and all(labels[v] == PARAMETER for v in large) and self.coverage(node.kind).covering
            for v in node.results:
                if not labels[v]:
                    labels[v] = PARAMETER if alone else node.phase if node.phase in (FORWARD, BACKWARD) else ""
        return labels

    def _unite_equally_sharded(self, node: Node, links: SharedDims) -> None:
        """Groups the values of ``node`` that lie alike."""
        pins, values, labels = self.graph.pins, node.values, self.phases
        first: dict[str, int] = {}
        for p, before in links.items():
            v = values[p]
            if v and v not in pins:
                other = first.setdefault(labels[v], p)
                if other != p:
                    self._sets.unite(values[other], v, before[other])

    def _members(self) -> dict[int, tuple[int, DimMap]]:
        """Root and places of every value that has more than one element and that an equation reads or makes."""
        graph, sets = self.graph, self._sets
        used = sorted({v for n in graph.nodes for v in n.values if self.non_scalar[v]})
        roots, place = _all_roots(sets.value).tolist(), np.full(len(sets.atom), -1)
        for atoms in sets.dims.values():
            place[atoms] = range(len(atoms))
        split = np.array([n > 1 for v in graph.values for n in v.shape], dtype=bool)
        where = np.where(split, place[_all_roots(sets.atom)], -1).tolist()
        known: dict[DimMap, DimMap] = {}  # most are alike
        found: dict[int, tuple[int, DimMap]] = {}
        for v in used:
            at = tuple(where[sets.start[v] : sets.start[v + 1]])
            found[v] = roots[v], known.setdefault(at, at)
        return found

    def _colors(self) -> dict[int, int]:
        """For each group a number; those that are alike have the same."""
        graph, places = self.graph, self.members
        roots, at = np.full(len(graph.values), -1), np.zeros(len(graph.values), dtype=np.int64)
        names: dict[int, set[str]] = defaultdict(set)
        roots[[*places]] = [root for root, _ in places.values()]
        at[[*places]] = _dense_ids((where, graph.pins.get(v)) for v, (_, where) in places.items())
        for v in graph.inputs:
            if v in places:
                names[places[v][0]].add(re.sub(r"\d+", "#", graph.values[v].name))
        found = np.unique(roots[roots >= 0])
        if len(found) <= MAX_UNFOLDED_GROUPS:
            return {int(root): int(root) for root in found}
        alike: dict[OpKind, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            alike[node.kind].append(node)
        values = [np.array([n.values for n in nodes], dtype=np.int64) for nodes in alike.values()]
        inside: list[tuple[Numbers, list[Numbers]]] = []
        for k, (nodes, of) in enumerate(zip(alike.values(), values, strict=True)):
            times = np.array([n.trip_count for n in nodes])
            for p in range(of.shape[1]):
                inside.append((roots[of[:, p]], [np.full(len(of), k), np.full(len(of), p), at[of[:, p]], times]))
        color = np.full(len(graph.values) + 1, -1)  # the last: of what belongs to no group
        kinds = [(self.phases[root], *sorted(names[root])) for root in found]
        color[found] = _dense_ids(zip(kinds, _histograms(inside, found), strict=True))
        for _ in range(COLOR_REFINEMENTS):
            around: list[tuple[Numbers, list[Numbers]]] = []
            for k, of in enumerate(values):
                own = roots[of]
                own = own[(own != own[:, :1]).any(axis=1)]
                what = [np.full(len(own), k), *color[own].T]
                for p in range(own.shape[1]):  # once for each group that a node touches
                    new = (own[:, :p] != own[:, p : p + 1]).all(axis=1)
                    around.append((own[new, p], [c[new] for c in what]))
            color[found] = _dense_ids(zip(color[found], _histograms(around, found), strict=True))
        turn: Counter[int] = Counter()
        turns: dict[int, int] = {}
        for root in map(int, found):
            c = int(color[root])
            turns[root] = 2 * c + turn[c] % 2
            turn[c] += 1
        return turns


def _histograms(found: Iterable[tuple[Numbers, list[Numbers]]], roots: Numbers) -> list[bytes]:
    """For each of ``roots`` what was found of it, how often, in a form that can be compared. ``found`` holds roots, and
    columns of numbers that say what there is of each."""
    pairs = list(found)
    width = max(len(columns) for _, columns in pairs)
    owner, what = np.concatenate([r for r, _ in pairs]), np.zeros(sum(len(r) for r, _ in pairs), dtype=np.int64)
    kinds = 1
    for i in range(width):
        column = np.concatenate([c[i] if i < len(c) else np.full(len(r), -1) for r, c in pairs]) + 1
        n = int(column.max()) + 1
        if kinds * n > MAX_CODE:
            what = np.unique(what, return_inverse=True)[1]
            kinds = int(what.max()) + 1
        what, kinds = what * n + column, kinds * n
    what = np.unique(what, return_inverse=True)[1]
    base = int(what.max()) + 1
    each, often = np.unique((owner * base + what)[owner >= 0], return_counts=True)
    ends = np.searchsorted(each, np.stack([roots, roots + 1]) * base)
    table = np.stack([each % base, often], axis=1)
    return [table[i:j].tobytes() for i, j in ends.T]


def _dense_ids(things: Iterable[Any]) -> list[int]:
    """A number for each, the same for those that are equal."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(x, len(numbers)) for x in things]


class _DisjointSets:
    """Disjoint sets of values, and of their dimensions."""

    def __init__(self, graph: Graph) -> None:
        self.start = [0, *itertools.accumulate(len(v.shape) for v in graph.values)]
        self.value = list(range(len(graph.values)))
        self.atom = list(range(self.start[-1]))
        self.dims = {v: [self.start[v] + d for d, n in enumerate(x.shape) if n > 1] for v, x in enumerate(graph.values)}
        """The dimensions of each set of values."""

    def unite(self, u: int, v: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Puts ``u`` and ``v`` together, dimension with dimension, unless two of one would become one."""
        a, b = _find(self.value, u), _find(self.value, v)
        if a == b:
            return
        a, b = min(a, b), max(a, b)
        atom, i, j = self.atom, self.start[u], self.start[v]
        same = {_find(atom, i + d): _find(atom, j + e) for d, e in pairs}
        if len(set(same.values())) < len(same):
            return
        self.value[b] = a
        for x, y in same.items():
            atom[max(x, y)] = min(x, y)
        self.dims[a] = list(dict.fromkeys([_find(atom, x) for x in (*self.dims[a], *self.dims.pop(b))]))


def _all_roots(parent: list[int]) -> Numbers:
    """Of each element the one that stands for its set."""
    found = np.array(parent, dtype=np.int64)
    while not np.array_equal(further := found[found], found):
        found = further
    return found


def _find(parent: list[int], x: int) -> int:
    while (y := parent[x]) != x:
        parent[x] = x = parent[y]
    return x
