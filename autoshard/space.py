"""space: a graph as a `Problem`: the least that has to be decided, and what each decision costs.

**Groups.** Values that equations pass on unchanged in shape (elementwise, views, converts, loop carries) lie alike: one
variable decides them all. What is kept apart, so that it may lie otherwise: parameters (and what is made of one alone),
the forward pass, the backward pass, and the rest of the step (the optimizer). A parameter whose group is split and
whose use is not is gathered there: FSDP. A gradient that is brought to an optimizer state in parts: ZeRO.

**Led equations.** One whose operands and results include a value that has every factor runs as that value lies.

**Choices.** Any other equation (products, gathers, reshapes that split) has a variable of its own: which mesh axes
split which of its factors. Its tables say what it takes to bring operands there, and results to where they lie.

**Copies.** A value that several such equations read has a variable for how it lies when read, so that moving it once
serves them all.

**Folding.** Groups of one color, as those of an unrolled model's layers, share one variable, and so do equations on
them: their costs are added up.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost import Way, held, way
from autoshard.graph import Graph, Kind
from autoshard.groups import Form, Groups, Places
from autoshard.mesh import LogicalMesh
from autoshard.problem import Array, Builder, Problem, Row
from autoshard.routes import prices
from autoshard.spec import Axes, Spec

HELD = 1e-4
"""What a byte of an argument costs, in reads of a byte from memory."""

Factors = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class Space:
    """A problem, and what its variables say of the graph's values."""

    problem: Problem
    where: Mapping[int, tuple[int, Places]]
    """Variable and places of each value that has one."""
    options: Sequence[Sequence[Spec]]
    """Of each group's dimensions; of what is no group, nothing."""
    nodes: Mapping[int, tuple[int, Sequence[Factors]]]
    """Variable of each node that has one, and the axes of its factors under each option."""

    def ways(self, choice: Sequence[int]) -> dict[int, Factors]:
        """The axes of the factors of every node that has a variable."""
        return {n: options[choice[i]] for n, (i, options) in self.nodes.items()}

    def row(self, held: Mapping[int, float], limit: float, mesh: LogicalMesh) -> Row:
        """The budget that values of so many bytes keep together: bytes per device."""
        return row_of(held, limit, self.where, self.options, mesh)

    def specs(self, choice: Sequence[int]) -> dict[int, Spec]:
        """The spec of every value that a variable decides."""
        options = [o[c] if o else Spec(()) for o, c in zip(self.options, choice, strict=True)]
        return {
            v: Spec(tuple(options[i].dims[p] if p >= 0 else () for p in places))
            for v, (i, places) in self.where.items()
        }


def row_of(
    held: Mapping[int, float],
    limit: float,
    where: Mapping[int, tuple[int, Places]],
    options: Sequence[Sequence[Spec]],
    mesh: LogicalMesh,
) -> Row:
    """The load of the values ``held``, by bytes, under the options of the variables that decide them."""
    total: Counter[tuple[int, Places]] = Counter()
    for v, n in held.items():
        if v in where:
            total[where[v]] += n  # type: ignore[assignment]
        else:
            limit -= n
    loads: dict[int, Array] = {}
    for (i, places), n in total.items():
        parts = np.array([math.prod(mesh.axes_size(o.dims[p]) for p in places if p >= 0) for o in options[i]])
        loads[i] = n / parts + loads.get(i, 0.0)
    return Row(loads, limit)


def build(graph: Graph) -> Space:
    """The problem of laying out ``graph``; the user's pins leave the values that they name one option."""
    return _Assembly(graph).space()


class _Assembly:
    """Adds up the tables."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.mesh = graph, graph.program.mesh
        self.axes = tuple(a for a, n in self.mesh.shape.items() if n > 1)
        self.groups = Groups(graph)
        self.builder = Builder()
        self.options: list[Sequence[Spec]] = []
        self.nodes: dict[int, tuple[int, Sequence[Factors]]] = {}
        self.kin: list[list[tuple[tuple[Any, Axes], ...]]] = []
        """For each option, the axes of each dimension or factor."""
        self.variables: dict[Any, int] = {}
        self.ways: dict[tuple[Kind, tuple[Any, ...]], Way] = {}

    def space(self) -> Space:
        graph, places, color = self.graph, self.groups.places, self.groups.color
        sizes: dict[int, list[int]] = {}
        pinned: dict[int, tuple[Spec, set[int]]] = {}
        for v, (root, where) in places.items():
            c = color[root]
            rank = self.groups.rank(root)
            known = sizes.setdefault(c, [0] * rank)
            for d, p in enumerate(where):
                if p >= 0:
                    known[p] = math.gcd(known[p], graph.values[v].shape[d])
            if v in graph.pins:
                given = Spec(tuple(graph.pins[v].dims[where.index(p)] for p in range(rank)))
                pinned[c] = given, {where[d] for d in graph.open.get(v, ())}
        for c, dims in sizes.items():
            self._variable(c, self._within(*pinned[c], dims) if c in pinned else self._splits(dims))
        where = {v: (self.variables[color[root]], at) for v, (root, at) in places.items()}
        self.where = where
        copies = self._copies()
        alike: dict[Any, list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.times:
                ends = tuple(copies.get((v, n), where.get(v)) for v in node.values)
                alike[node.kind, ends].append(n)
        for (kind, ends), nodes in alike.items():
            self._node(kind, ends, nodes)
        self._held()
        kin = tuple(tuple(np.array(_labels(k, axis)) for k in self.kin) for axis in self.axes)
        return Space(self.builder.done(kin if len(kin) > 1 else ()), where, tuple(self.options), self.nodes)

    def _variable(self, key: Any, options: Sequence[Spec]) -> int:
        i = self.variables[key] = self.builder.variable(len(options))
        self.options.append(options)
        self.kin.append([tuple(enumerate(o.dims)) for o in options])
        return i

    def _within(self, pin: Spec, free: set[int], sizes: Sequence[int]) -> list[Spec]:
        """What a pin allows: itself, and where it leaves dimensions open, every way to split those further."""
        sizes = [
            n // self.mesh.axes_size(a) if d in free else 1
            for d, (n, a) in enumerate(zip(sizes, pin.dims, strict=True))
        ]
        rest = tuple(a for a in self.axes if a not in pin.axes)
        more = splits(tuple(sizes), rest, self.mesh)
        return [Spec(tuple(a + b for a, b in zip(pin.dims, m.dims, strict=True))) for m in more]

    def _splits(self, sizes: Sequence[int]) -> list[Spec]:
        return splits(tuple(sizes), self.axes, self.mesh)

    def _held(self) -> None:
        """Charges a little for what arguments take, so that of layouts that are equal otherwise the smallest wins."""
        held = {v: float(self.graph.values[v].bytes) for v in self.graph.inputs if v in self.where}
        row = row_of(held, math.inf, self.where, self.options, self.mesh)
        for i, load in row.loads.items():
            self.builder.alone(i, load * HELD / self.mesh.hardware.bandwidth)

    def _copies(self) -> dict[tuple[int, int], tuple[int, Places]]:
        """For a value and an equation that reads it: the variable that says how it lies when read."""
        graph = self.graph
        readers: dict[int, list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.times and not self.groups.form(node.kind).full:
                for v in dict.fromkeys(node.operands):
                    if v in self.where:
                        readers[v].append(n)
        found: dict[tuple[int, int], tuple[int, Places]] = {}
        edges: Counter[Any] = Counter()
        for v, nodes in readers.items():
            if len(nodes) < 2:
                continue
            i, where = self.where[v]
            readings = tuple(sorted((id(graph.nodes[n].kind), graph.nodes[n].values.index(v)) for n in nodes))
            shape = graph.values[v].shape
            at = tuple(d if n > 1 else -1 for d, n in enumerate(shape))
            key = "copy", i, where, readings
            j = self.variables.get(key)
            if j is None:
                j = self._variable(key, self._splits(shape))
            edges[i, where, j, at, shape, graph.values[v].bits] += max(graph.nodes[n].times for n in nodes)
            found.update({(v, n): (j, at) for n in nodes})
        for (i, where, j, at, shape, bits), times in edges.items():
            self._between(i, self._lies(i, where), j, self._lies(j, at), shape, bits, times)
        return found

    def _lies(self, i: int, where: Places) -> list[Spec]:
        """How a value with these places lies under each option of variable ``i``."""
        return [Spec(tuple(o.dims[p] if p >= 0 else () for p in where)) for o in self.options[i]]

    def _between(
        self, i: int, src: Sequence[Spec], j: int, dst: Sequence[Spec], shape: Places, bits: int, times: float
    ) -> None:
        """Adds what it takes to bring a value from how ``i`` has it to how ``j`` has it."""
        if i == j and src == dst:
            return
        a, b = _distinct(src), _distinct(dst)
        table = prices(tuple(a), tuple(b), shape, bits, self.mesh)
        self.builder.between(i, j, times * table[np.ix_([a[s] for s in src], [b[d] for d in dst])])

    def _along(self, pairs: Sequence[tuple[Spec, Spec]], shape: Places, bits: int) -> Array:
        """Seconds between the two specs of each pair."""
        if all(a == b for a, b in pairs):
            return np.zeros(len(pairs))
        srcs, dsts = _distinct(a for a, _ in pairs), _distinct(b for _, b in pairs)
        table = prices(tuple(srcs), tuple(dsts), shape, bits, self.mesh)
        return np.array([table[srcs[a], dsts[b]] for a, b in pairs])

    def _node(self, kind: Kind, ends: Sequence[tuple[int, Places] | None], nodes: Sequence[int]) -> None:
        """Adds what nodes of a kind cost, whose values have these variables."""
        times = float(sum(self.graph.nodes[n].times for n in nodes))
        form, operands = self.groups.form(kind), len(kind.rule.operands)
        if not any(ends) or not any(kind.shapes):
            return
        dims = (*kind.rule.operands, *kind.rule.results)
        leader = self._leader(kind, form, ends)
        if leader is None:
            chosen = self._chosen(kind)
            i = self.builder.variable(len(chosen))
            self.options.append([])
            ways = [tuple(sorted(c.items())) for c in chosen]
            self.kin.append(list(ways))
            self.nodes.update((n, (i, ways)) for n in nodes)
        else:
            i, where = ends[leader] or (0, ())
            chosen = [
                {dim[0]: o.dims[p] for dim, p in zip(dims[leader], where, strict=True) if dim and p >= 0 and o.dims[p]}
                for o in self.options[i]
            ]
        ways = [self._way(kind, c) for c in chosen]
        self.builder.alone(i, np.array([times * w.seconds(self.mesh) if w.possible else math.inf for w in ways]))
        for p, end in enumerate(ends):
            asked = [w.needs[p] if p < operands else w.gives[p - operands] for w in ways]
            shape, bits = kind.shapes[p], kind.bits[p]
            if end is None:  # a scalar, or what no other equation reads: only its terms cost
                if p >= operands:
                    self.builder.alone(i, times * self._along([(a, a.reduced()) for a in asked], shape, bits))
                continue
            j, where = end
            lies = self._lies(j, where)
            if j == i:
                pairs = zip(lies, asked, strict=True) if p < operands else zip(asked, lies, strict=True)
                self.builder.alone(i, times * self._along(list(pairs), shape, bits))
            elif p < operands:
                self._between(j, lies, i, asked, shape, bits, times)
            else:
                self._between(i, asked, j, lies, shape, bits, times)

    def _leader(self, kind: Kind, form: Form, ends: Sequence[tuple[int, Places] | None]) -> int | None:
        """The position of the value as whose group lies, the equation runs: a result's, else the largest operand's."""
        full = [p for p in form.full if ends[p] is not None]
        results = [p for p in full if p >= len(kind.rule.operands)]
        return max(results or full, key=lambda p: (math.prod(kind.shapes[p]), -p), default=None)

    def _way(self, kind: Kind, chosen: Mapping[str, Axes]) -> Way:
        kept = {f: axes for f, axes in chosen.items() if kind.rule.kind(f) != "whole"}
        key = kind, tuple(sorted(kept.items()))
        if key not in self.ways:
            self.ways[key] = way(kind, kept, self.mesh)
        return self.ways[key]

    def _chosen(self, kind: Kind) -> list[dict[str, Axes]]:
        """Every way to give the axes to a kind's factors."""
        free = [(f, n) for f, n in kind.sizes if n > 1 and kind.rule.kind(f) != "whole"]
        found = [dict(zip((f for f, _ in free), o.dims, strict=True)) for o in self._splits([n for _, n in free])]
        kept = [held(kind, {f: a for f, a in c.items() if a}, self.mesh) for c in found]
        return list({tuple(sorted(h.items())): h for h in kept}.values())


def splits(sizes: Sequence[int], axes: Axes, mesh: LogicalMesh) -> list[Spec]:
    """Every way to split dimensions of ``sizes``: each axis on one or none, in mesh order where several meet."""
    found: list[Spec] = []
    for chosen in itertools.product(range(-1, len(sizes)), repeat=len(axes)):
        dims = tuple(tuple(a for a, c in zip(axes, chosen, strict=True) if c == d) for d in range(len(sizes)))
        if all(n % mesh.axes_size(d) == 0 for n, d in zip(sizes, dims, strict=True)):
            found.append(Spec(dims))
    return found


def _labels(options: Sequence[tuple[tuple[Any, Axes], ...]], axis: str) -> list[int]:
    """The same number for options that differ at most in what ``axis`` splits."""
    seen: dict[Any, int] = {}
    rest = (tuple((d, tuple(a for a in axes if a != axis)) for d, axes in o) for o in options)
    return [seen.setdefault(frozenset(p for p in r if p[1]), len(seen)) for r in rest]


def _distinct(specs: Iterable[Spec]) -> dict[Spec, int]:
    return {s: k for k, s in enumerate(dict.fromkeys(specs))}
