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

from autoshard.cost.cost import compute_seconds, expressible_factors, find_per_call_inputs
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.search.node_costs import End, NodeCosts
from autoshard.search.problem import Array, Budget, Indices, Problem, ProblemBuilder
from autoshard.search.spec_tables import SpecTables, all_splits, neighbouring_splits, value_spec
from autoshard.search.value_groups import PARAMETER, DimMap, ValueGroups

ARGUMENT_BYTE_WEIGHT = 1e-6
"""What a byte of an argument costs, in reads of a byte from memory."""

FactorAxes = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class LayoutProblem:
    """A problem, and what its variables say of the graph's values."""

    problem: Problem
    bindings: Mapping[int, tuple[int, DimMap]]
    """Variable and places of each value that has one."""
    options: Sequence[Sequence[Spec]]
    """Of each group's dimensions; of what is no group, nothing."""
    node_options: Mapping[int, tuple[int, Sequence[FactorAxes]]]
    """Variable of each node that has one, and the axes of its factors under each option."""
    slack: float
    """How much more than the layout's seconds a choice can cost in the problem, which charges a little for memory."""

    def factor_axes(self, choice: Sequence[int]) -> dict[int, FactorAxes]:
        """The axes of the factors of every node that has a variable."""
        return {n: options[choice[i]] for n, (i, options) in self.node_options.items()}

    def byte_budget(self, held: Mapping[int, float], limit: float, mesh: LogicalMesh) -> Budget:
        """The budget that values of so many bytes keep together: bytes per device."""
        return byte_budget(held, limit, self.bindings, self.options, mesh)

    def value_specs(self, choice: Sequence[int]) -> dict[int, Spec]:
        """The spec of every value that a variable decides."""
        known = {end: value_spec(self.options[end[0]][choice[end[0]]], end[1]) for end in set(self.bindings.values())}
        return {v: known[end] for v, end in self.bindings.items()}


def byte_budget(
    held: Mapping[int, float],
    limit: float,
    where: Mapping[int, tuple[int, DimMap]],
    options: Sequence[Sequence[Spec]],
    mesh: LogicalMesh,
) -> Budget:
    """The load of the values ``held``, by bytes, under the options of the variables that decide them."""
    total: Counter[tuple[int, DimMap]] = Counter()
    for v, n in held.items():
        if v in where:
            total[where[v]] += n  # type: ignore[assignment]
        else:
            limit -= n
    loads: dict[int, Array] = {}
    for (i, places), n in total.items():
        parts = np.array([math.prod(mesh.axes_size(o.dims[p]) for p in places if p >= 0) for o in options[i]])
        loads[i] = n / parts + loads.get(i, 0.0)
    return Budget(loads, limit)


@dataclass(frozen=True)
class StrategyLimits:
    """What a preset says of the batch."""

    batch_dims: frozenset[tuple[int, int]] = frozenset()
    """The dimensions that belong to it: (value, dimension)."""
    batch_axes: Axes = ()
    """Axes that split it wherever they can, and nothing else of what has it."""
    parameter_axes: Axes = ()
    """Axes that do not split it, but every parameter that they can, wherever it is used."""

    def allowed(self, options: Iterable[Spec], batch: Collection[int]) -> list[Spec]:
        """Those of ``options`` that are allowed, where the dimensions ``batch`` are the batch's."""
        found = [s for s in options if not any(a in self.parameter_axes for d in batch for a in s.dims[d])]
        if batch:
            found = [
                s
                for s in found
                if not any(a in self.batch_axes for d, x in enumerate(s.dims) if d not in batch for a in x)
            ]
        most = [s for s in found if all(any(a in s.dims[d] for d in batch) for a in self.batch_axes)]
        return most if batch and most else found

    def sharding_parameters[T](self, options: Sequence[T], axes: Callable[[T], Collection[str]]) -> Sequence[T]:
        """Those of ``options`` that split a parameter as it is to be, if any do."""
        return [o for o in options if set(self.parameter_axes) <= set(axes(o))] or options


def build_problem(
    graph: Graph, limits: StrategyLimits | None = None, about: Sequence[Layout] = (), groups: ValueGroups | None = None
) -> LayoutProblem:
    """The problem of laying out ``graph``, whose groups these are; the user's pins leave the values that they name one
    option.

    With layouts ``about``, each variable that is not pinned has what it has there, and what differs from that in what
    one axis splits.
    """
    return _LayoutProblemBuilder(graph, limits or StrategyLimits(), about, groups or ValueGroups(graph)).build()


class _LayoutProblemBuilder:
    """Adds up the tables."""

    def __init__(self, graph: Graph, limits: StrategyLimits, about: Sequence[Layout], groups: ValueGroups) -> None:
        self.graph, self.mesh, self.limits, self.near_layouts = graph, graph.program.mesh, limits, about
        self.axes = self.mesh.nontrivial_axes
        self.groups = groups
        self.builder = ProblemBuilder()
        self.node_options: dict[int, tuple[int, Sequence[FactorAxes]]] = {}
        self.neighbourhoods: list[list[Indices]] = []
        self.variables: dict[Any, int] = {}
        self.spec_tables = SpecTables((), self.mesh)
        self.options = self.spec_tables.options
        self.node_costs = NodeCosts(groups, self.spec_tables)

    def build(self) -> LayoutProblem:
        graph, places, color = self.graph, self.groups.members, self.groups.color
        sizes: dict[int, list[int]] = {}
        known: dict[int, list[list[Axes]]] = {}
        batch: dict[int, set[int]] = defaultdict(set)
        pinned: dict[int, tuple[Spec, set[int]]] = {}
        shapes: dict[tuple[int, DimMap], set[tuple[int, ...]]] = defaultdict(set)
        for v, (root, where) in places.items():
            c = color[root]
            rank = self.groups.rank(root)
            sizes.setdefault(c, [0] * rank)
            if self.limits.batch_dims:
                batch[c].update(p for d, p in enumerate(where) if p >= 0 and (v, d) in self.limits.batch_dims)
            if (c, where) not in shapes:
                for l, dims in zip(
                    self.near_layouts, known.setdefault(c, [[()] * rank for _ in self.near_layouts]), strict=True
                ):
                    for p, axes in zip(where, l.specs[v].dims, strict=True):
                        if p >= 0:
                            dims[p] = axes
            shapes[c, where].add(graph.values[v].shape)
            if v in graph.pins:
                given = Spec(tuple(graph.pins[v].dims[where.index(p)] for p in range(rank)))
                pinned[c] = given, {where[d] for d in graph.unconstrained_dims.get(v, ())}
        for (c, where), found in shapes.items():
            for shape, (d, p) in itertools.product(found, enumerate(where)):
                if p >= 0:
                    sizes[c][p] = math.gcd(sizes[c][p], shape[d])
        for c, dims in sizes.items():
            free = self.limits.allowed(self._split_options(dims, (Spec(tuple(k)) for k in known[c])), batch[c])
            self._add_variable(c, self._pin_options(*pinned[c], dims) if c in pinned else free)
        where = {v: (self.variables[color[root]], at) for v, (root, at) in places.items()}
        self.where = where
        copies = self._add_copies()
        read = {n for _, n in copies}
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        number: dict[End, int] = {None: 0}  # ends are compared for every node: by a number each
        numbers = {v: number.setdefault(end, len(number)) for v, end in where.items()}
        copied = {at: number.setdefault(end, len(number)) for at, end in copies.items()}
        ends = list(number)
        for n, node in enumerate(graph.nodes):
            if node.trip_count:
                key = [numbers.get(v, 0) for v in node.values]
                if n in read:
                    key = [copied.get((v, n), k) for v, k in zip(node.values, key, strict=True)]
                alike[node.kind, *key].append(n)
        plain: Counter[tuple[int, DimMap]] = Counter()
        for (kind, *key), nodes in alike.items():
            found = {ends[k] for k in key if k}
            end = found.pop() if len(found) == 1 and self.node_costs.is_elementwise(kind) else None
            if end is None:
                self._add_nodes(kind, [ends[k] for k in key], nodes)
            else:  # values that lie alike, element by element
                times = sum(graph.nodes[n].trip_count for n in nodes)
                plain[end] += times * compute_seconds(kind, kind.bytes, 1, self.mesh)  # type: ignore[assignment]
        for (i, at), seconds in plain.items():
            self.builder.add_unary(i, seconds / self.spec_tables.shard_counts(self.spec_tables.value_specs(i, at)))
        slack = self._add_argument_costs()
        kin = tuple(zip(*self.neighbourhoods, strict=True)) if len(self.axes) > 1 else ()
        return LayoutProblem(self.builder.build(kin), where, tuple(self.options), self.node_options, slack)

    def _add_variable(self, key: Any, options: Sequence[Spec]) -> int:
        i = self.variables[key] = self.builder.add_variable(len(options))
        self.spec_tables.add_variable(options)
        first = self.spec_tables.canonical[i]
        self.neighbourhoods.append(
            self.neighbourhoods[first] if first < i else self._neighbourhoods(enumerate(o.dims) for o in options)
        )
        return i

    def _neighbourhoods(self, options: Iterable[Iterable[tuple[Any, Axes]]]) -> list[Indices]:
        """For each axis: the same number for options that differ at most in what that axis splits."""
        places = list(map(self._sharded_dims, options))
        return [np.array(_equal_but_for(places, axis)) for axis in range(len(self.axes))]

    def _sharded_dims(self, split: Iterable[tuple[Any, Axes]]) -> tuple[Any, ...]:
        """What each of the mesh's axes splits, or None."""
        where = {a: d for d, axes in split for a in axes}
        return tuple([where.get(a) for a in self.axes])

    def _pin_options(self, pin: Spec, free: set[int], sizes: Sequence[int]) -> list[Spec]:
        """What a pin allows: itself, and where it leaves dimensions open, every way to split those further."""
        sizes = [
            n // self.mesh.axes_size(a) if d in free else 1
            for d, (n, a) in enumerate(zip(sizes, pin.dims, strict=True))
        ]
        rest = tuple(a for a in self.axes if a not in pin.axes)
        more = all_splits(tuple(sizes), rest, self.mesh)
        return [Spec(tuple(a + b for a, b in zip(pin.dims, m.dims, strict=True))) for m in more]

    def _split_options(self, sizes: Sequence[int], known: Iterable[Spec]) -> Sequence[Spec]:
        """Every way to split ``sizes``; where the search is about some layouts, those near what they have."""
        if not self.near_layouts:
            return all_splits(tuple(sizes), self.axes, self.mesh)
        return list(
            dict.fromkeys(s for spec in known for s in neighbouring_splits(spec, tuple(sizes), self.axes, self.mesh))
        )

    def _add_argument_costs(self) -> float:
        """Charges a little for what arguments take, so that of layouts that are equal otherwise the smallest wins; the
        most that it can come to."""
        bandwidth = self.mesh.hardware.bandwidth
        price = ARGUMENT_BYTE_WEIGHT / bandwidth
        brought = {v: float(self.graph.values[v].bytes) for v in find_per_call_inputs(self.graph) if v in self.where}
        held = {v: float(self.graph.values[v].bytes) for v in self.graph.inputs if v in self.where}
        row = byte_budget(held, math.inf, self.where, self.options, self.mesh)
        for i, load in row.loads.items():
            self.builder.add_unary(i, load * price)
        for i, load in byte_budget(brought, math.inf, self.where, self.options, self.mesh).loads.items():
            self.builder.add_unary(i, load / bandwidth)
        return price * sum(float(load.max()) for load in row.loads.values())

    def _add_copies(self) -> dict[tuple[int, int], tuple[int, DimMap]]:
        """For a value and an equation that reads it: the variable that says how it lies when read."""
        graph = self.graph
        readers: dict[int, list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.trip_count and not self.node_costs.follows(node.kind, (self.where.get(v) for v in node.values)):
                for v in dict.fromkeys(node.operands):
                    if v in self.where:
                        readers[v].append(n)
        found: dict[tuple[int, int], tuple[int, DimMap]] = {}
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
                batch = [d for d in range(len(shape)) if (v, d) in self.limits.batch_dims]
                options = self.limits.allowed(self._split_options(shape, self._reference_specs(v, nodes)), batch)
                parameter = self.groups.phases[v] == PARAMETER
                j = self._add_variable(
                    key, self.limits.sharding_parameters(options, lambda s: s.axes) if parameter else options
                )
            edges[i, where, j, at, shape, graph.values[v].bits] += max(graph.nodes[n].trip_count for n in nodes)
            found.update({(v, n): (j, at) for n in nodes})
        for (i, where, j, at, shape, bits), times in edges.items():
            seconds = self.spec_tables.reshard_matrix(
                self.spec_tables.value_specs(i, where), self.spec_tables.value_specs(j, at), shape, bits
            )
            self.builder.add_pairwise(i, j, times * seconds)
        return found

    def _reference_specs(self, v: int, nodes: Sequence[int]) -> Iterator[Spec]:
        """How a value lies, and how equations read it, in what the search is about."""
        for l in self.near_layouts:
            yield l.specs[v]
            for n in nodes:
                if n in l.strategies:
                    node = self.graph.nodes[n]
                    yield self.node_costs.strategy(node.kind, dict(l.strategies[n])).in_specs[node.operands.index(v)]

    def _add_nodes(self, kind: OpKind, ends: Sequence[End], nodes: Sequence[int]) -> None:
        """Adds what nodes of a kind cost, whose values have these variables."""
        times = float(sum(self.graph.nodes[n].trip_count for n in nodes))
        if not any(ends) or not any(kind.shapes):
            return
        leaders = self.node_costs.followed(kind, ends)
        if not leaders:
            chosen = self._factor_axes_options(kind, nodes[0])
            i = self.builder.add_variable(len(chosen))
            self.spec_tables.add_variable(())
            self.neighbourhoods.append(self._neighbourhoods(c.items() for c in chosen))
            factors = [tuple(sorted(c.items())) for c in chosen]
            self.node_options.update((n, (i, factors)) for n in nodes)
            self._add_terms(
                i, *self.node_costs.cost_terms(kind, ends, i, *self.node_costs.strategy_costs(kind, chosen), times)
            )
            return
        found = {
            i: self.node_costs.cost_terms(kind, ends, i, *self.node_costs.following_costs(kind, p, i, at), times)
            for p, (i, at) in leaders.items()
        }
        if len(found) == 2 == len({end[0] for end in ends if end}):  # whichever of the two it is better run as
            (i, (alone, others)), (j, (beside, back)) = found.items()
            led = alone[:, None] + others.get(j, 0.0)
            self.builder.add_pairwise(i, j, np.minimum(led, beside + back[i].T if i in back else beside))
        else:
            i, costs = next(iter(found.items()))
            self._add_terms(i, *costs)

    def _add_terms(self, i: int, alone: Array, others: Mapping[int, Array]) -> None:
        self.builder.add_unary(i, alone)
        for j, table in others.items():
            self.builder.add_pairwise(i, j, table)

    def _factor_axes_options(self, kind: OpKind, node: int) -> list[dict[str, Axes]]:
        """Every way to give the axes to a kind's factors, of a node."""
        values = self.graph.nodes[node].values
        free = [(f, n) for f, n in kind.factor_sizes if n > 1 and kind.rule.kind(f) != "whole"]
        of_batch = {dim[0] for p, d, dim in kind.factored_dims if (values[p], d) in self.limits.batch_dims}
        batch = [k for k, (f, _) in enumerate(free) if f in of_batch]
        known = [Spec(tuple(dict(l.strategies.get(node, ())).get(f, ()) for f, _ in free)) for l in self.near_layouts]
        options = self.limits.allowed(self._split_options([n for _, n in free], known), batch)
        found = [dict(zip((f for f, _ in free), o.dims, strict=True)) for o in options]
        kept = [expressible_factors(kind, {f: a for f, a in c.items() if a}, self.mesh) for c in found]
        ways = list({tuple(sorted(h.items())): h for h in kept}.values())
        for p in range(len(kind.rule.operands)) if self.limits.parameter_axes else ():
            if self.groups.phases[values[p]] == PARAMETER:
                ways = list(
                    self.limits.sharding_parameters(
                        ways, lambda w, p=p: self.node_costs.strategy(kind, w).in_specs[p].axes
                    )
                )
        return ways


def _equal_but_for(options: Sequence[tuple[Any, ...]], axis: int) -> list[int]:
    """The same number for options that differ at most in what one axis splits."""
    seen: dict[Any, int] = {}
    return [seen.setdefault((*o[:axis], *o[axis + 1 :]), len(seen)) for o in options]
