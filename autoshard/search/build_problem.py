"""space: a graph as a `Problem`: the least that has to be decided, and what each decision costs.

**Groups.** Values that equations pass on unchanged in shape (elementwise, views, converts, loop carries) lie alike: one
variable decides them all. What is kept apart, so that it may lie otherwise: parameters (and what is made of one alone),
the forward pass, the backward pass, and the rest of the step (the optimizer). A parameter whose group is split and
whose use is not is gathered there: FSDP. A gradient that is brought to an optimizer state in parts: ZeRO.

**Led equations.** One whose operands and results include a value that has every factor runs as that value lies. In a
program of few equations, where every value is a group, only if no other way can be better: what puts terms together
has a choice, and so has what joins values of three groups.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.cost.cost import brought_anew, compute, held
from autoshard.ir.graph import Graph, Kind
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.node_costs import End, Tables
from autoshard.search.problem import Array, Builder, Labels, Problem, Row
from autoshard.search.spec_tables import Lays, lies, near, splits
from autoshard.search.value_groups import PARAMETER, Groups, Places

HELD = 1e-6
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
    slack: float
    """How much more than the layout's seconds a choice can cost in the problem, which charges a little for memory."""

    def ways(self, choice: Sequence[int]) -> dict[int, Factors]:
        """The axes of the factors of every node that has a variable."""
        return {n: options[choice[i]] for n, (i, options) in self.nodes.items()}

    def row(self, held: Mapping[int, float], limit: float, mesh: LogicalMesh) -> Row:
        """The budget that values of so many bytes keep together: bytes per device."""
        return row_of(held, limit, self.where, self.options, mesh)

    def specs(self, choice: Sequence[int]) -> dict[int, Spec]:
        """The spec of every value that a variable decides."""
        known = {end: lies(self.options[end[0]][choice[end[0]]], end[1]) for end in set(self.where.values())}
        return {v: known[end] for v, end in self.where.items()}


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


@dataclass(frozen=True)
class Limits:
    """What a preset says of the batch."""

    batch: frozenset[tuple[int, int]] = frozenset()
    """The dimensions that belong to it: (value, dimension)."""
    only: Axes = ()
    """Axes that split it wherever they can, and nothing else of what has it."""
    never: Axes = ()
    """Axes that do not split it, but every parameter that they can, wherever it is used."""

    def within(self, options: Iterable[Spec], batch: Collection[int]) -> list[Spec]:
        """Those of ``options`` that are allowed, where the dimensions ``batch`` are the batch's."""
        found = [s for s in options if not any(a in self.never for d in batch for a in s.dims[d])]
        if batch:
            found = [
                s for s in found if not any(a in self.only for d, x in enumerate(s.dims) if d not in batch for a in x)
            ]
        most = [s for s in found if all(any(a in s.dims[d] for d in batch) for a in self.only)]
        return most if batch and most else found

    def splitting[T](self, options: Sequence[T], axes: Callable[[T], Collection[str]]) -> Sequence[T]:
        """Those of ``options`` that split a parameter as it is to be, if any do."""
        return [o for o in options if set(self.never) <= set(axes(o))] or options


def build(
    graph: Graph, limits: Limits | None = None, about: Sequence[Layout] = (), groups: Groups | None = None
) -> Space:
    """The problem of laying out ``graph``, whose groups these are; the user's pins leave the values that they name one
    option.

    With layouts ``about``, each variable that is not pinned has what it has there, and what differs from that in what
    one axis splits.
    """
    return _Assembly(graph, limits or Limits(), about, groups or Groups(graph)).space()


class _Assembly:
    """Adds up the tables."""

    def __init__(self, graph: Graph, limits: Limits, about: Sequence[Layout], groups: Groups) -> None:
        self.graph, self.mesh, self.limits, self.about = graph, graph.program.mesh, limits, about
        self.axes = self.mesh.split_axes
        self.groups = groups
        self.builder = Builder()
        self.nodes: dict[int, tuple[int, Sequence[Factors]]] = {}
        self.kin: list[list[Labels]] = []
        self.variables: dict[Any, int] = {}
        self.lays = Lays((), self.mesh)
        self.options = self.lays.options
        self.tables = Tables(groups, self.lays)

    def space(self) -> Space:
        graph, places, color = self.graph, self.groups.places, self.groups.color
        sizes: dict[int, list[int]] = {}
        known: dict[int, list[list[Axes]]] = {}
        batch: dict[int, set[int]] = defaultdict(set)
        pinned: dict[int, tuple[Spec, set[int]]] = {}
        shapes: dict[tuple[int, Places], set[tuple[int, ...]]] = defaultdict(set)
        for v, (root, where) in places.items():
            c = color[root]
            rank = self.groups.rank(root)
            sizes.setdefault(c, [0] * rank)
            if self.limits.batch:
                batch[c].update(p for d, p in enumerate(where) if p >= 0 and (v, d) in self.limits.batch)
            if (c, where) not in shapes:
                for l, dims in zip(self.about, known.setdefault(c, [[()] * rank for _ in self.about]), strict=True):
                    for p, axes in zip(where, l.specs[v].dims, strict=True):
                        if p >= 0:
                            dims[p] = axes
            shapes[c, where].add(graph.values[v].shape)
            if v in graph.pins:
                given = Spec(tuple(graph.pins[v].dims[where.index(p)] for p in range(rank)))
                pinned[c] = given, {where[d] for d in graph.open.get(v, ())}
        for (c, where), found in shapes.items():
            for shape, (d, p) in itertools.product(found, enumerate(where)):
                if p >= 0:
                    sizes[c][p] = math.gcd(sizes[c][p], shape[d])
        for c, dims in sizes.items():
            free = self.limits.within(self._splits(dims, (Spec(tuple(k)) for k in known[c])), batch[c])
            self._variable(c, self._within(*pinned[c], dims) if c in pinned else free)
        where = {v: (self.variables[color[root]], at) for v, (root, at) in places.items()}
        self.where = where
        copies = self._copies()
        read = {n for _, n in copies}
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        number: dict[End, int] = {None: 0}  # ends are compared for every node: by a number each
        numbers = {v: number.setdefault(end, len(number)) for v, end in where.items()}
        copied = {at: number.setdefault(end, len(number)) for at, end in copies.items()}
        ends = list(number)
        for n, node in enumerate(graph.nodes):
            if node.times:
                key = [numbers.get(v, 0) for v in node.values]
                if n in read:
                    key = [copied.get((v, n), k) for v, k in zip(node.values, key, strict=True)]
                alike[node.kind, *key].append(n)
        plain: Counter[tuple[int, Places]] = Counter()
        for (kind, *key), nodes in alike.items():
            found = {ends[k] for k in key if k}
            end = found.pop() if len(found) == 1 and self.tables.plain(kind) else None
            if end is None:
                self._node(kind, [ends[k] for k in key], nodes)
            else:  # values that lie alike, element by element
                times = sum(graph.nodes[n].times for n in nodes)
                plain[end] += times * compute(kind, kind.bytes, 1, self.mesh)  # type: ignore[assignment]
        for (i, at), seconds in plain.items():
            self.builder.alone(i, seconds / self.lays.parts(self.lays.lies(i, at)))
        slack = self._held()
        kin = tuple(zip(*self.kin, strict=True)) if len(self.axes) > 1 else ()
        return Space(self.builder.done(kin), where, tuple(self.options), self.nodes, slack)

    def _variable(self, key: Any, options: Sequence[Spec]) -> int:
        i = self.variables[key] = self.builder.variable(len(options))
        self.lays.add(options)
        first = self.lays.alike[i]
        self.kin.append(self.kin[first] if first < i else self._kin(enumerate(o.dims) for o in options))
        return i

    def _kin(self, options: Iterable[Iterable[tuple[Any, Axes]]]) -> list[Labels]:
        """For each axis: the same number for options that differ at most in what that axis splits."""
        places = list(map(self._places, options))
        return [np.array(_labels(places, axis)) for axis in range(len(self.axes))]

    def _places(self, split: Iterable[tuple[Any, Axes]]) -> tuple[Any, ...]:
        """What each of the mesh's axes splits, or None."""
        where = {a: d for d, axes in split for a in axes}
        return tuple([where.get(a) for a in self.axes])

    def _within(self, pin: Spec, free: set[int], sizes: Sequence[int]) -> list[Spec]:
        """What a pin allows: itself, and where it leaves dimensions open, every way to split those further."""
        sizes = [
            n // self.mesh.axes_size(a) if d in free else 1
            for d, (n, a) in enumerate(zip(sizes, pin.dims, strict=True))
        ]
        rest = tuple(a for a in self.axes if a not in pin.axes)
        more = splits(tuple(sizes), rest, self.mesh)
        return [Spec(tuple(a + b for a, b in zip(pin.dims, m.dims, strict=True))) for m in more]

    def _splits(self, sizes: Sequence[int], known: Iterable[Spec]) -> Sequence[Spec]:
        """Every way to split ``sizes``; where the search is about some layouts, those near what they have."""
        if not self.about:
            return splits(tuple(sizes), self.axes, self.mesh)
        return list(dict.fromkeys(s for spec in known for s in near(spec, tuple(sizes), self.axes, self.mesh)))

    def _held(self) -> float:
        """Charges a little for what arguments take, so that of layouts that are equal otherwise the smallest wins; the
        most that it can come to."""
        bandwidth = self.mesh.hardware.bandwidth
        price = HELD / bandwidth
        brought = {v: float(self.graph.values[v].bytes) for v in brought_anew(self.graph) if v in self.where}
        held = {v: float(self.graph.values[v].bytes) for v in self.graph.inputs if v in self.where}
        row = row_of(held, math.inf, self.where, self.options, self.mesh)
        for i, load in row.loads.items():
            self.builder.alone(i, load * price)
        for i, load in row_of(brought, math.inf, self.where, self.options, self.mesh).loads.items():
            self.builder.alone(i, load / bandwidth)
        return price * sum(float(load.max()) for load in row.loads.values())

    def _copies(self) -> dict[tuple[int, int], tuple[int, Places]]:
        """For a value and an equation that reads it: the variable that says how it lies when read."""
        graph = self.graph
        readers: dict[int, list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.times and not self.tables.led(node.kind, (self.where.get(v) for v in node.values)):
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
                batch = [d for d in range(len(shape)) if (v, d) in self.limits.batch]
                options = self.limits.within(self._splits(shape, self._read(v, nodes)), batch)
                parameter = self.groups.labels[v] == PARAMETER
                j = self._variable(key, self.limits.splitting(options, lambda s: s.axes) if parameter else options)
            edges[i, where, j, at, shape, graph.values[v].bits] += max(graph.nodes[n].times for n in nodes)
            found.update({(v, n): (j, at) for n in nodes})
        for (i, where, j, at, shape, bits), times in edges.items():
            seconds = self.lays.moves(self.lays.lies(i, where), self.lays.lies(j, at), shape, bits)
            self.builder.between(i, j, times * seconds)
        return found

    def _read(self, v: int, nodes: Sequence[int]) -> Iterator[Spec]:
        """How a value lies, and how equations read it, in what the search is about."""
        for l in self.about:
            yield l.specs[v]
            for n in nodes:
                if n in l.ways:
                    node = self.graph.nodes[n]
                    yield self.tables.way(node.kind, dict(l.ways[n])).needs[node.operands.index(v)]

    def _node(self, kind: Kind, ends: Sequence[End], nodes: Sequence[int]) -> None:
        """Adds what nodes of a kind cost, whose values have these variables."""
        times = float(sum(self.graph.nodes[n].times for n in nodes))
        if not any(ends) or not any(kind.shapes):
            return
        leaders = self.tables.leaders(kind, ends)
        if not leaders:
            chosen = self._chosen(kind, nodes[0])
            i = self.builder.variable(len(chosen))
            self.lays.add(())
            self.kin.append(self._kin(c.items() for c in chosen))
            factors = [tuple(sorted(c.items())) for c in chosen]
            self.nodes.update((n, (i, factors)) for n in nodes)
            self._add(i, *self.tables.costs(kind, ends, i, *self.tables.run(kind, chosen), times))
            return
        found = {
            i: self.tables.costs(kind, ends, i, *self.tables.led_by(kind, p, i, at), times)
            for p, (i, at) in leaders.items()
        }
        if len(found) == 2 == len({end[0] for end in ends if end}):  # whichever of the two it is better run as
            (i, (alone, others)), (j, (beside, back)) = found.items()
            led = alone[:, None] + others.get(j, 0.0)
            self.builder.between(i, j, np.minimum(led, beside + back[i].T if i in back else beside))
        else:
            i, costs = next(iter(found.items()))
            self._add(i, *costs)

    def _add(self, i: int, alone: Array, others: Mapping[int, Array]) -> None:
        self.builder.alone(i, alone)
        for j, table in others.items():
            self.builder.between(i, j, table)

    def _chosen(self, kind: Kind, node: int) -> list[dict[str, Axes]]:
        """Every way to give the axes to a kind's factors, of a node."""
        values = self.graph.nodes[node].values
        free = [(f, n) for f, n in kind.sizes if n > 1 and kind.rule.kind(f) != "whole"]
        of_batch = {dim[0] for p, d, dim in kind.places if (values[p], d) in self.limits.batch}
        batch = [k for k, (f, _) in enumerate(free) if f in of_batch]
        known = [Spec(tuple(dict(l.ways.get(node, ())).get(f, ()) for f, _ in free)) for l in self.about]
        options = self.limits.within(self._splits([n for _, n in free], known), batch)
        found = [dict(zip((f for f, _ in free), o.dims, strict=True)) for o in options]
        kept = [held(kind, {f: a for f, a in c.items() if a}, self.mesh) for c in found]
        ways = list({tuple(sorted(h.items())): h for h in kept}.values())
        for p in range(len(kind.rule.operands)) if self.limits.never else ():
            if self.groups.labels[values[p]] == PARAMETER:
                ways = list(self.limits.splitting(ways, lambda w, p=p: self.tables.way(kind, w).needs[p].axes))
        return ways


def _labels(options: Sequence[tuple[Any, ...]], axis: int) -> list[int]:
    """The same number for options that differ at most in what one axis splits."""
    seen: dict[Any, int] = {}
    return [seen.setdefault((*o[:axis], *o[axis + 1 :]), len(seen)) for o in options]
