"""Groups of values that share one spec variable in the layout problem, and colors of groups that share it further.

**Groups.** Two values are in one group when a node passes one on as the other with its dimensions kept (elementwise
nodes, views, converts, loop carries) and both have the same phase: parameters (and what is computed from one alone),
forward, backward, the rest. Pinned values are groups of their own. So a parameter can be stored otherwise than it is
used, and a gradient be resharded to its optimizer state. Casts and views of a parameter are a group of their own where
several of them are read (a convolution's gradient reads the weights reversed): one gather serves all.

**Colors.** In a large program, groups with equal values in equal surroundings, as those of a model's repeated layers,
get one color by color refinement (Weisfeiler and Leman, 1968), in alternation of two: a chain of products wants its
weights split by columns and by rows in turn.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import BACKWARD, FORWARD, Graph, Node, OpKind, loop_constants
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.jaxpr.paths import unnumbered

IntArray = npt.NDArray[np.int64]
DimMap = tuple[int, ...]
"""For each dimension of a value, the dimension of its group that it is, or -1 for a dimension of size 1."""
SharedDims = dict[int, dict[int, list[tuple[int, int]]]]
"""By two positions among a node's operands and results, the later first: pairs (dimension of the earlier, of the
later) that have one factor."""
PARAMETER = "parameter"
PARAMETER_COPY = "parameter copy"
PARAMETER_INSIDE = "parameter inside"
"""In a loop, before which what every iteration reads can be resharded once."""
COLOR_REFINEMENTS = 2
"""How many nodes away from a group its surroundings reach."""
SMALL_PROGRAM = 64
"""Most nodes of a program in which only ties unite values, and more nodes choose for themselves."""
MAX_CODE = 1 << 62
"""Limit on integers that encode rows of a table."""
MAX_UNFOLDED_GROUPS = 300
"""Most groups of a program in which each has a color of its own."""


@dataclass(frozen=True)
class FactorCoverage:
    """Which operands and results of a kind of node have which factors of its rule."""

    factors: tuple[str, ...]
    """The factors of more than one element."""
    covering: tuple[int, ...]
    """Positions (operands, then results) of values that have every factor, so that their spec decides how the node
    runs; none for nodes with a local form or a dimension of several factors."""
    exactly_covering: tuple[int, ...]
    """Those among them whose every dimension of more than one element is a factor."""
    reduces: bool
    """Whether some factor is reduced: split, it leaves partial results."""


def factor_coverage(kind: OpKind) -> FactorCoverage:
    """Which values of a kind of node decide, alone, how it runs."""
    rule, sizes = kind.rule, dict(kind.factor_sizes)
    factors = tuple(f for f in rule.factors if sizes[f] > 1)
    dims = (*rule.operands, *rule.results)
    if rule.local is not None or any(len(d) > 1 for ds in dims for d in ds):
        return FactorCoverage(factors, (), (), False)
    factors_of = [{f for d in ds for f in d} for ds in dims]
    covering = tuple(p for p, fs in enumerate(factors_of) if fs.issuperset(factors))
    exact = tuple(
        p for p in covering if kind.tie or all(d or n == 1 for d, n in zip(dims[p], kind.shapes[p], strict=True))
    )
    reduces = any(kind.rule.kind(f) in REDUCTION_KINDS for f in factors)
    return FactorCoverage(factors, covering if factors else (), exact if factors else (), reduces)


def _shared_dims(kind: OpKind, coverage: FactorCoverage) -> SharedDims:
    """For each exactly covering position and each one before it, the dimensions with one factor; empty if only one."""
    dims = (*kind.rule.operands, *kind.rule.results)
    dim_of = {
        p: {dim[0]: d for d, dim in enumerate(dims[p]) if dim and dim[0] in coverage.factors}
        for p in coverage.exactly_covering
    }
    found: SharedDims = {
        p: {q: [(dim_of[q][f], d) for f, d in dim_of[p].items()] for q in coverage.exactly_covering if q < p}
        for p in coverage.exactly_covering
    }
    return found if len(found) > 1 else {}


class ValueGroups:
    """The groups of one graph, each identified by its root: the lowest number of its values.

    In a program of at most `SMALL_PROGRAM` nodes only the two values of a tie share a group.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.small_program = graph, len(graph.nodes) <= SMALL_PROGRAM
        self._coverage: dict[OpKind, FactorCoverage] = {}
        self._sets = _DisjointSets(graph)
        self.non_scalar = [False, *(math.prod(v.shape) > 1 for v in graph.values[1:])]
        """For each value, whether it has more than one element."""
        self.phases = self._value_phases()
        """For each value `PARAMETER`, `FORWARD`, `BACKWARD` or "": values of different phases share no group."""
        shared = {kind: _shared_dims(kind, self.coverage(kind)) for kind in {n.kind for n in graph.nodes}}
        order = {kind: -max(kind.bytes) for kind, found in shared.items() if found}
        uniting = [n for n in graph.nodes if shared[n.kind] and (n.tie or not self.small_program)]
        for node in sorted(uniting, key=lambda n: order[n.kind]):  # the largest first: unions can exclude one another
            self._unite_equally_sharded(node, shared[node.kind])
        self.members = self._members()
        """Root and dimension map of every value that has more than one element."""
        self.color = self._colors()
        """For each root a number; groups of one color share one variable."""

    def rank(self, root: int) -> int:
        """The number of dimensions of a group."""
        return len(self._sets.dims[root])

    def coverage(self, kind: OpKind) -> FactorCoverage:
        """`factor_coverage`, computed once for each kind."""
        found = self._coverage.get(kind)
        if found is None:
            found = self._coverage[kind] = factor_coverage(kind)
        return found

    def _value_phases(self) -> list[str]:
        """For each value `PARAMETER`, `PARAMETER_INSIDE`, `PARAMETER_COPY` (of several casts and views of one that are
        read), or the phase of the node that computes it; "" for all else."""
        graph, inputs = self.graph, self.graph.inputs
        roles = argument_roles(graph)
        parameters = {inputs[i] for i in roles.parameters}
        parameters |= {graph.outputs[o] for i, o in graph.program.carries if i in roles.parameters}
        phases = [""] * len(graph.values)
        for i, v in enumerate(inputs):
            phases[v] = FORWARD if i in roles.batch else ""
        for v in parameters:
            phases[v] = PARAMETER
        of = {v: v for v in parameters}
        """For each parameter, and each view of one, the parameter."""
        constant = set(loop_constants(graph))
        for node in graph.nodes:
            operands = [v for v in node.operands if self.non_scalar[v]]
            whose = {phases[v] for v in operands}
            of_parameter = whose in ({PARAMETER}, {PARAMETER_INSIDE}) and self.coverage(node.kind).covering
            enters = graph.program.pipeline is not None and node.tie and node.trip_count == 1
            enters |= not constant.isdisjoint(node.results)
            own = (PARAMETER_INSIDE if enters else next(iter(whose))) if of_parameter else node.phase
            for v in node.results:
                if not phases[v]:
                    phases[v] = own if of_parameter or own in (FORWARD, BACKWARD) else ""
                    if of_parameter and operands[0] in of and node.kind.traits.view:
                        of[v] = of[operands[0]]
        read: dict[int, set[int]] = defaultdict(set)
        for node in graph.nodes:
            for v in () if self.coverage(node.kind).covering else node.operands:
                if v in of:
                    read[of[v]].add(v)
        for v, parameter in of.items():
            if v != parameter and len(read[parameter]) > 1:
                phases[v] = PARAMETER_COPY
        return phases

    def _unite_equally_sharded(self, node: Node, shared: SharedDims) -> None:
        """Unites the values of ``node`` that are unpinned and of one phase."""
        pins, values, phases = self.graph.pins, node.values, self.phases
        first: dict[str, int] = {}
        for p, earlier in shared.items():
            v = values[p]
            if v and v not in pins:
                q = first.setdefault(phases[v], p)
                if q != p:
                    self._sets.unite(values[q], v, earlier[q])

    def _members(self) -> dict[int, tuple[int, DimMap]]:
        """Root and dimension map of every value with more than one element that a node reads or computes."""
        graph, sets = self.graph, self._sets
        used = sorted({v for n in graph.nodes for v in n.values if self.non_scalar[v]})
        roots, group_dim = _all_roots(sets.value_parent).tolist(), np.full(len(sets.dim_parent), -1)
        for dims in sets.dims.values():
            group_dim[dims] = range(len(dims))
        splittable = np.array([n > 1 for v in graph.values for n in v.shape], dtype=bool)
        dim_map = np.where(splittable, group_dim[_all_roots(sets.dim_parent)], -1).tolist()
        interned: dict[DimMap, DimMap] = {}
        found: dict[int, tuple[int, DimMap]] = {}
        for v in used:
            own = tuple(dim_map[sets.start[v] : sets.start[v + 1]])
            found[v] = roots[v], interned.setdefault(own, own)
        return found

    def _colors(self) -> dict[int, int]:
        """For each root its color: at first by the group's own values and nodes, then refined by its neighbours'
        colors, last alternated between equal groups in the order of their roots."""
        graph, members = self.graph, self.members
        root_of, value_class = np.full(len(graph.values), -1), np.zeros(len(graph.values), dtype=np.int64)
        names: dict[int, set[str]] = defaultdict(set)
        root_of[[*members]] = [root for root, _ in members.values()]
        value_class[[*members]] = _dense_ids((dim_map, graph.pins.get(v)) for v, (_, dim_map) in members.items())
        for v in graph.inputs:
            if v in members:
                names[members[v][0]].add(unnumbered(graph.values[v].name))
        roots = np.unique(root_of[root_of >= 0])
        if len(roots) <= MAX_UNFOLDED_GROUPS:
            return {int(root): int(root) for root in roots}
        by_kind: dict[OpKind, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            by_kind[node.kind].append(node)
        values = [
            np.array([n.values for n in nodes], dtype=np.int64) for nodes in by_kind.values()
        ]  # [nodes, positions]
        occurrences: list[tuple[IntArray, list[IntArray]]] = []
        for k, (nodes, of) in enumerate(zip(by_kind.values(), values, strict=True)):
            trip_counts = np.array([n.trip_count for n in nodes])
            for p in range(of.shape[1]):
                columns = [np.full(len(of), k), np.full(len(of), p), value_class[of[:, p]], trip_counts]
                occurrences.append((root_of[of[:, p]], columns))
        color = np.full(len(graph.values) + 1, -1)  # the last entry is read for values of no group, whose root is -1
        labels = [(self.phases[root], *sorted(names[root])) for root in roots]
        color[roots] = _dense_ids(zip(labels, _histograms(occurrences, roots), strict=True))
        for _ in range(COLOR_REFINEMENTS):
            surroundings: list[tuple[IntArray, list[IntArray]]] = []
            for k, of in enumerate(values):
                groups = root_of[of]
                groups = groups[(groups != groups[:, :1]).any(axis=1)]  # a node within one group is no surrounding
                columns = [np.full(len(groups), k), *color[groups].T]
                for p in range(groups.shape[1]):  # a node counts once for each group that it touches
                    new = (groups[:, :p] != groups[:, p : p + 1]).all(axis=1)
                    surroundings.append((groups[new, p], [c[new] for c in columns]))
            color[roots] = _dense_ids(zip(color[roots], _histograms(surroundings, roots), strict=True))
        seen: Counter[int] = Counter()
        alternated: dict[int, int] = {}
        for root in map(int, roots):
            c = int(color[root])
            alternated[root] = 2 * c + seen[c] % 2
            seen[c] += 1
        return alternated


def _histograms(rows: Iterable[tuple[IntArray, list[IntArray]]], roots: IntArray) -> list[bytes]:
    """For each of ``roots``, which rows it owns and how often, as bytes that are equal if and only if these are.

    ``rows`` holds tables: the owner of each row, [rows], and the columns, each [rows]; shorter tables are padded.
    """
    tables = list(rows)
    width = max(len(columns) for _, columns in tables)
    owner, code = np.concatenate([r for r, _ in tables]), np.zeros(sum(len(r) for r, _ in tables), dtype=np.int64)
    codes = 1
    for i in range(width):
        column = np.concatenate([c[i] if i < len(c) else np.full(len(r), -1) for r, c in tables]) + 1
        n = int(column.max()) + 1
        if codes * n > MAX_CODE:
            code = np.unique(code, return_inverse=True)[1]
            codes = int(code.max()) + 1
        code, codes = code * n + column, codes * n
    code = np.unique(code, return_inverse=True)[1]
    base = int(code.max()) + 1
    owned, counts = np.unique((owner * base + code)[owner >= 0], return_counts=True)
    ranges = np.searchsorted(owned, np.stack([roots, roots + 1]) * base)
    table = np.stack([owned % base, counts], axis=1)
    return [table[i:j].tobytes() for i, j in ranges.T]


def _dense_ids(items: Iterable[Any]) -> list[int]:
    """A number for each item, in order of first occurrence; equal items get one number."""
    ids: dict[Any, int] = {}
    return [ids.setdefault(x, len(ids)) for x in items]


class _DisjointSets:
    """Union-find over values and over their dimensions, in which a union can be refused (so that connected components
    do not serve) and the representative of a set is its smallest element (of SciPy's `DisjointSet`, it is any)."""

    def __init__(self, graph: Graph) -> None:
        self.start = [0, *itertools.accumulate(len(v.shape) for v in graph.values)]
        """For each value, the number of its first dimension."""
        self.value_parent = list(range(len(graph.values)))
        self.dim_parent = list(range(self.start[-1]))
        self.dims = {v: [self.start[v] + d for d, n in enumerate(x.shape) if n > 1] for v, x in enumerate(graph.values)}
        """The dimensions of each set of values, by its root."""

    def unite(self, u: int, v: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Unites ``u`` and ``v``, and their dimensions by ``pairs``, unless two dimensions of one would become one."""
        a, b = _find(self.value_parent, u), _find(self.value_parent, v)
        if a == b:
            return
        a, b = min(a, b), max(a, b)
        parent, i, j = self.dim_parent, self.start[u], self.start[v]
        same = {_find(parent, i + d): _find(parent, j + e) for d, e in pairs}
        if len(set(same.values())) < len(same):
            return
        self.value_parent[b] = a
        for x, y in same.items():
            parent[max(x, y)] = min(x, y)
        self.dims[a] = list(dict.fromkeys([_find(parent, x) for x in (*self.dims[a], *self.dims.pop(b))]))


def _all_roots(parent: list[int]) -> IntArray:
    """The representative of each element's set."""
    found = np.array(parent, dtype=np.int64)
    while not np.array_equal(further := found[found], found):
        found = further
    return found


def _find(parent: list[int], x: int) -> int:
    while (y := parent[x]) != x:
        parent[x] = x = parent[y]
    return x
