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

from autoshard.dims import roles
from autoshard.graph import BACKWARD, FORWARD, Graph, Kind, Node

Places = tuple[int, ...]
"""For each dimension of a value, the dimension of its group, or -1."""
PARAMETER = "parameter"
ROUNDS = 2
"""How far from a group its surroundings reach, in equations."""
FOLDED = 300
"""Groups above which those that are alike are given one color."""


@dataclass(frozen=True)
class Form:
    """Which values of a kind of node have what factors."""

    factors: tuple[str, ...]
    """Those of more than one element."""
    full: tuple[int, ...]
    """Positions of the values that have every factor; none where a choice is to be made."""
    exact: tuple[int, ...]
    """Those of them that have nothing but factors."""


def form_of(kind: Kind) -> Form:
    rule, sizes = kind.rule, dict(kind.sizes)
    factors = tuple(f for f in rule.factors if sizes[f] > 1)
    dims = (*rule.operands, *rule.results)
    if rule.local is not None or any(len(d) > 1 for ds in dims for d in ds):
        return Form(factors, (), ())
    have = [{f for d in ds for f in d} for ds in dims]
    full = tuple(p for p, fs in enumerate(have) if fs.issuperset(factors))
    exact = tuple(p for p in full if kind.tie or all(d or n == 1 for d, n in zip(dims[p], kind.shapes[p], strict=True)))
    return Form(factors, full if factors else (), exact if factors else ())


class Groups:
    """The groups of one graph. A group goes by the number of one of its values, its root."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.forms: dict[Kind, Form] = {}
        self.sets = _Sets(graph)
        self.labels = self._labels()
        for node in sorted(graph.nodes, key=lambda n: -max((graph.values[v].bytes for v in n.values), default=0)):
            self._follow(node)
        used = {v for n in graph.nodes for v in n.values if v and math.prod(graph.values[v].shape) > 1}
        self.places = {v: self._places(v) for v in sorted(used)}
        """Root and places of every value that has more than one element."""
        self.color = self._colors()
        """For each root a number; groups that are alike have the same."""

    def rank(self, root: int) -> int:
        """How many dimensions a group has."""
        return len(self.sets.atoms[root])

    def form(self, kind: Kind) -> Form:
        found = self.forms.get(kind)
        if found is None:
            found = self.forms[kind] = form_of(kind)
        return found

    def _labels(self) -> list[str]:
        """For each value `PARAMETER`, or the phase of the equation that makes it."""
        graph, inputs = self.graph, self.graph.inputs
        state = roles(graph)
        parameters = {inputs[i] for i in state.parameters}
        parameters |= {graph.outputs[o] for i, o in graph.program.carries if i in state.parameters}
        labels = [""] * len(graph.values)
        for i, v in enumerate(inputs):
            labels[v] = FORWARD if i in state.batch else ""
        for v in parameters:
            labels[v] = PARAMETER
        for node in graph.nodes:
            large = [v for v in node.operands if v and math.prod(graph.values[v].shape) > 1]
            alone = bool(large) and all(labels[v] == PARAMETER for v in large) and self.form(node.kind).full
            for v in node.results:
                if not labels[v]:
                    labels[v] = PARAMETER if alone else node.phase if node.phase in (FORWARD, BACKWARD) else ""
        return labels

    def _follow(self, node: Node) -> None:
        """Groups the values of ``node`` that lie alike."""
        graph, form = self.graph, self.form(node.kind)
        dims = (*node.kind.rule.operands, *node.kind.rule.results)
        first: dict[str, int] = {}
        for p in form.exact:
            v = node.values[p]
            if not v or v in graph.pins:
                continue
            other = first.setdefault(self.labels[v], p)
            if other != p:
                there = {dim[0]: d for d, dim in enumerate(dims[other]) if dim}
                pairs = [(there[dim[0]], d) for d, dim in enumerate(dims[p]) if dim and dim[0] in form.factors]
                self.sets.unite(node.values[other], v, pairs)

    def _places(self, v: int) -> tuple[int, Places]:
        root = self.sets.root(v)
        order = {a: i for i, a in enumerate(self.sets.atoms[root])}
        shape = self.graph.values[v].shape
        return root, tuple(order[self.sets.dim(v, d)] if n > 1 else -1 for d, n in enumerate(shape))

    def _colors(self) -> dict[int, int]:
        """For each group a number; those that are alike have the same."""
        graph, places = self.graph, self.places
        numbers: dict[Any, int] = {}

        def number(x: Any) -> int:
            return numbers.setdefault(x, len(numbers))

        inside: dict[int, Counter[Any]] = defaultdict(Counter)
        for node in graph.nodes:
            for p, v in enumerate(node.values):
                if v in places:
                    root, where = places[v]
                    inside[root][id(node.kind), p, where, node.times, v in graph.pins and graph.pins[v]] += 1
        if len(inside) <= FOLDED:
            return {root: root for root in inside}
        names: dict[int, set[str]] = defaultdict(set)
        for v in graph.inputs:
            if v in places:
                names[places[v][0]].add(re.sub(r"\d+", "#", graph.values[v].name))
        color = {
            root: number((self.labels[root], tuple(sorted(names[root])), frozenset(found.items())))
            for root, found in inside.items()
        }
        for _ in range(ROUNDS):
            around: dict[int, Counter[Any]] = defaultdict(Counter)
            for node in graph.nodes:
                roots = [places[v][0] if v in places else -1 for v in node.values]
                if len(set(roots)) > 1:
                    what = number((id(node.kind), tuple(color.get(r, -1) for r in roots)))
                    for r in set(roots) - {-1}:
                        around[r][what] += 1
            color = {r: number((c, frozenset(around[r].items()))) for r, c in color.items()}
        turn: Counter[int] = Counter()
        for root in sorted(color):
            c = color[root]
            color[root] = number((c, turn[c] % 2))
            turn[c] += 1
        return color


class _Sets:
    """Disjoint sets of values, and of their dimensions."""

    def __init__(self, graph: Graph) -> None:
        self.start = [0, *itertools.accumulate(len(v.shape) for v in graph.values)]
        self.value = list(range(len(graph.values)))
        self.atom = list(range(self.start[-1]))
        self.atoms = {
            v: [self.start[v] + d for d, n in enumerate(x.shape) if n > 1] for v, x in enumerate(graph.values)
        }
        """The dimensions of each set of values."""

    def root(self, v: int) -> int:
        return _find(self.value, v)

    def dim(self, v: int, d: int) -> int:
        return _find(self.atom, self.start[v] + d)

    def unite(self, u: int, v: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Puts ``u`` and ``v`` together, dimension with dimension, unless two of one would become one."""
        a, b = sorted((self.root(u), self.root(v)))
        same = {self.dim(u, d): self.dim(v, e) for d, e in pairs}
        if a == b or len(set(same.values())) < len(same):
            return
        self.value[b] = a
        for x, y in same.items():
            self.atom[max(x, y)] = min(x, y)
        self.atoms[a] = list(dict.fromkeys(_find(self.atom, x) for x in (*self.atoms[a], *self.atoms.pop(b))))


def _find(parent: list[int], x: int) -> int:
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x
