"""The layout problem of a graph: choose a spec for every value so that the predicted seconds of one call are least.

**Variables.** Restrictions keep them few; what is proven is proven within them.

- *Groups* (`autoshard.search.value_groups`): values that nodes pass on unchanged share one variable, whose options are
  the group's specs (`add_group_variables`). Groups of one color share it too.
- *Followed nodes* (`NodeCosts.followed`): a node with a value that has every factor runs as that value's spec says.
- *Choosing nodes* (`_add_nodes`): any other node (products, gathers, reshapes that split) has a variable whose options
  assign mesh axes to its factors; nodes of one kind on the same variables share it.
- *Copies* (`_add_copies`): a value that several choosing nodes read has a variable for the spec it has when read, so
  that one reshard serves them all.

**Costs**, in seconds: of every node, trip count times compute and the collectives of its local form (unary), and trip
count times the cheapest reshard between a value's own spec and the one that a node demands or leaves (pairwise, or
unary where one variable decides both). Bytes of arguments cost a little (`_add_argument_costs`).

**Budgets** (`LayoutProblem.byte_budget`): bytes per device of the values that are alive at one moment of the step.

**Neighbourhoods**, one for each mesh axis: assignments that differ in what that axis shards (`_neighbourhoods`).

docs/math/layout-problem.md has the formulas, and what the problem leaves out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.cost.cost import find_moved_outputs, find_per_call_inputs
from autoshard.cost.node_strategy import compute_seconds, expressible_factors
from autoshard.cost.overlap.seconds_waited import seconds_waited
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.search.layout_problem import FactorAxes, LayoutProblem, StrategyLimits, byte_budget
from autoshard.search.node_costs import NodeCosts
from autoshard.search.problem import Array, Indices, ProblemBuilder
from autoshard.search.spec_tables import Binding, SpecTables, all_splits, neighbouring_splits
from autoshard.search.value_groups import PARAMETER, PARAMETER_COPY, PARAMETER_INSIDE, DimMap, ValueGroups

MAX_AXES = 3
"""Most mesh axes with which the layout problem of a program is solved as a whole."""
ARGUMENT_BYTE_WEIGHT = 1e-6
"""Cost of a byte of an argument, in reads of a byte from memory: decides between layouts that are equal otherwise."""


def build_problem(
    graph: Graph,
    limits: StrategyLimits | None = None,
    near_layouts: Sequence[Layout] = (),
    groups: ValueGroups | None = None,
) -> LayoutProblem:
    """The layout problem of ``graph``. Values that the user pinned have one option, or those that the pin leaves open.

    Args:
      limits: restrictions of a preset.
      near_layouts: if given, the options of an unpinned variable are those that it has in these layouts, and those that
        differ from one of them in the dimension that one axis shards.
      groups: those of ``graph``, if computed before.
    """
    return _LayoutProblemBuilder(graph, limits or StrategyLimits(), near_layouts, groups or ValueGroups(graph)).build()


def value_options(graph: Graph, groups: ValueGroups) -> tuple[Mapping[int, Binding], Sequence[Sequence[Spec]]]:
    """Of the layout problem of ``graph``, the bindings of its values, and the options of the variables that these name:
    all but its costs."""
    builder = _LayoutProblemBuilder(graph, StrategyLimits(), (), groups)
    builder.add_group_variables()
    return builder.bindings, builder.spec_tables.options


class _LayoutProblemBuilder:
    """Adds variables and costs one after the other: groups, copies, nodes, arguments."""

    def __init__(
        self, graph: Graph, limits: StrategyLimits, near_layouts: Sequence[Layout], groups: ValueGroups
    ) -> None:
        self.graph, self.mesh, self.limits, self.near_layouts = graph, graph.program.mesh, limits, near_layouts
        self.axes = self.mesh.nontrivial_axes
        self.groups = groups
        self.builder = ProblemBuilder()
        self.node_options: dict[int, tuple[int, Sequence[FactorAxes]]] = {}
        self.neighbourhoods: list[list[Indices]] = []
        """For each variable, the labels of its options in each axis's neighbourhood."""
        self.variables: dict[Any, int] = {}
        """By a group's color, or by what tells copies apart."""
        self.bindings: dict[int, Binding] = {}
        self.spec_tables = SpecTables((), self.mesh)
        self.node_costs = NodeCosts(groups, self.spec_tables)

    def build(self) -> LayoutProblem:
        self.add_group_variables()
        self._add_all_nodes(self._add_copies())
        slack = self._add_argument_costs()
        neighbourhoods = tuple(zip(*self.neighbourhoods, strict=True)) if len(self.axes) > 1 else ()
        options = tuple(self.spec_tables.options)
        return LayoutProblem(self.builder.build(neighbourhoods), self.bindings, options, self.node_options, slack)

    def add_group_variables(self) -> None:
        """A variable for each color of groups, and the bindings of their values.

        A dimension's size is the greatest common divisor over all values that have it, so that every option divides
        every one of them.
        """
        graph, members, color = self.graph, self.groups.members, self.groups.color
        stored = {color[members[v][0]] for v in self.limits.stored if v in members}
        sizes: dict[int, list[int]] = {}
        near: dict[int, list[list[Axes]]] = {}  # of each color, the axes of its dimensions in each of the near layouts
        batch: dict[int, set[int]] = defaultdict(set)
        pinned: dict[int, tuple[Spec, set[int]]] = {}
        shapes: dict[tuple[int, DimMap], set[tuple[int, ...]]] = defaultdict(set)
        for v, (root, dim_map) in members.items():
            c = color[root]
            rank = self.groups.rank(root)
            sizes.setdefault(c, [0] * rank)
            if self.limits.batch_dims:
                batch[c].update(d for e, d in enumerate(dim_map) if d >= 0 and (v, e) in self.limits.batch_dims)
            if (c, dim_map) not in shapes:
                known = near.setdefault(c, [[()] * rank for _ in self.near_layouts])
                for layout, dims in zip(self.near_layouts, known, strict=True):
                    for d, axes in zip(dim_map, layout.specs[v].dims, strict=True):
                        if d >= 0:
                            dims[d] = axes
            shapes[c, dim_map].add(graph.values[v].shape)
            if v in graph.pins:
                pin = Spec(tuple(graph.pins[v].dims[dim_map.index(d)] for d in range(rank)))
                pinned[c] = pin, {dim_map[e] for e in graph.unconstrained_dims.get(v, ())}
        for (c, dim_map), found in shapes.items():
            for shape, (e, d) in itertools.product(found, enumerate(dim_map)):
                if d >= 0:
                    sizes[c][d] = math.gcd(sizes[c][d], shape[e])
        for c, dims in sizes.items():
            free = self.limits.allowed(self._split_options(dims, (Spec(tuple(k)) for k in near[c])), batch[c])
            free = self.limits.storing(free) if c in stored else free
            self._add_variable(c, self._pin_options(*pinned[c], dims) if c in pinned else free)
        self.bindings.update(
            (v, Binding(self.variables[color[root]], dim_map)) for v, (root, dim_map) in members.items()
        )

    def _add_all_nodes(self, copies: Mapping[tuple[int, int], Binding]) -> None:
        """The costs of all nodes, once for those of one kind whose values have the same bindings."""
        graph = self.graph
        copying = {n for _, n in copies}
        number: dict[Binding | None, int] = {None: 0}  # bindings are compared for every node, so by a number each
        numbers = {v: number.setdefault(b, len(number)) for v, b in self.bindings.items()}
        copied = {key: number.setdefault(b, len(number)) for key, b in copies.items()}
        bindings = list(number)
        equal: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.trip_count:
                key = [numbers.get(v, 0) for v in node.values]
                if n in copying:
                    key = [copied.get((v, n), k) for v, k in zip(node.values, key, strict=True)]
                equal[node.kind, *key].append(n)
        elementwise: dict[Binding, float] = defaultdict(float)
        for (kind, *key), nodes in equal.items():
            found = {bindings[k] for k in key if k}
            binding = found.pop() if len(found) == 1 and self.node_costs.is_elementwise(kind) else None
            if binding is None:
                self._add_nodes(kind, [bindings[k] for k in key], nodes)
            else:  # within one group nothing is resharded, and compute is proportional to the elements of a part
                executions = sum(graph.nodes[n].trip_count for n in nodes)
                elementwise[binding] += executions * compute_seconds(kind, kind.bytes, 1, self.mesh)
        for binding, seconds in elementwise.items():
            parts = self.spec_tables.shard_counts(self.spec_tables.value_specs(*binding))
            self.builder.add_unary(binding.variable, seconds / parts)

    def _add_variable(self, key: Any, options: Sequence[Spec]) -> int:
        i = self.variables[key] = self.builder.add_variable(len(options))
        self.spec_tables.add_variable(options)
        first = self.spec_tables.canonical[i]
        labels = self.neighbourhoods[first] if first < i else self._neighbourhoods(enumerate(o.dims) for o in options)
        self.neighbourhoods.append(labels)
        return i

    def _neighbourhoods(self, options: Iterable[Iterable[tuple[Any, Axes]]]) -> list[Indices]:
        """For each mesh axis, labels that are equal for options that differ at most in what that axis shards.

        An option is given as (dimension or factor, axes) pairs.
        """
        sharded = list(map(self._sharded_dims, options))
        return [np.array(_equal_but_for(sharded, axis)) for axis in range(len(self.axes))]

    def _sharded_dims(self, option: Iterable[tuple[Any, Axes]]) -> tuple[Any, ...]:
        """For each mesh axis, the dimension or factor that it shards, or None."""
        sharded = {a: d for d, axes in option for a in axes}
        return tuple([sharded.get(a) for a in self.axes])

    def _pin_options(self, pin: Spec, unconstrained: set[int], sizes: Sequence[int]) -> list[Spec]:
        """The pin, and every way to shard its unconstrained dimensions further."""
        left = [
            n // self.mesh.axes_size(axes) if d in unconstrained else 1
            for d, (n, axes) in enumerate(zip(sizes, pin.dims, strict=True))
        ]
        unused = tuple(a for a in self.axes if a not in pin.axes)
        further = all_splits(tuple(left), unused, self.mesh)
        return [Spec(tuple(a + b for a, b in zip(pin.dims, s.dims, strict=True))) for s in further]

    def _split_options(self, sizes: Sequence[int], near: Iterable[Spec]) -> Sequence[Spec]:
        """Every way to shard dimensions of these ``sizes``; with near layouts, the neighbours of the specs ``near``."""
        if not self.near_layouts:
            return all_splits(tuple(sizes), self.axes, self.mesh)
        found = (s for spec in near for s in neighbouring_splits(spec, tuple(sizes), self.axes, self.mesh))
        return list(dict.fromkeys(found))

    def _add_argument_costs(self) -> float:
        """Adds what arguments cost: a little for each byte per device, so that of layouts that are equal otherwise the
        smallest wins; the seconds to write the inputs of each call (its batch); and those in which results leave for
        another memory. Returns the most that the first can come to."""
        values, bandwidth, host = self.graph.values, self.mesh.hardware.memory_rate, self.mesh.hardware.host_bandwidth
        weight = ARGUMENT_BYTE_WEIGHT / bandwidth
        per_call = {v: float(values[v].bytes) for v in find_per_call_inputs(self.graph) if v in self.bindings}
        arguments = {v: float(values[v].bytes) for v in self.graph.inputs if v in self.bindings}
        stored = self._bytes_per_device(arguments)
        for i, load in stored.items():
            self.builder.add_unary(i, load * weight)
        for i, load in self._bytes_per_device(per_call).items():
            self.builder.add_unary(i, load / bandwidth)
        moved = Counter(v for v in find_moved_outputs(self.graph) if v in self.bindings)
        for i, load in self._bytes_per_device({v: float(n * values[v].bytes) for v, n in moved.items()}).items():
            if host:
                self.builder.add_unary(i, load / host)
        return weight * sum(float(load.max()) for load in stored.values())

    def _bytes_per_device(self, sizes: Mapping[int, float]) -> Mapping[int, Array]:
        """Of these values, by variable and option."""
        return byte_budget(sizes, math.inf, self.bindings, self.spec_tables.options, self.mesh).loads

    def _add_copies(self) -> dict[tuple[int, int], Binding]:
        """Adds copy variables: for a value and a choosing node that reads it, the binding of the copy that it reads.

        Values of one group that are read by the same kinds of nodes, in the same positions, share a copy variable. Its
        reshard is priced as of the reader that hides most of it: no layout costs less.
        """
        graph = self.graph
        readers: dict[int, list[int]] = defaultdict(list)
        for n, node in enumerate(graph.nodes):
            if node.trip_count and not self.node_costs.follows(node.kind, (self.bindings.get(v) for v in node.values)):
                for v in dict.fromkeys(node.operands):
                    if v in self.bindings:
                        readers[v].append(n)
        found: dict[tuple[int, int], Binding] = {}
        executions: Counter[tuple[Binding, Binding, tuple[tuple[OpKind, int], ...], int]] = Counter()
        for v, nodes in readers.items():
            if len(nodes) < 2:
                continue
            own, shape = self.bindings[v], graph.values[v].shape
            uses = tuple(sorted((id(graph.nodes[n].kind), graph.nodes[n].values.index(v)) for n in nodes))
            key = "copy", *own, uses
            j = self.variables.get(key)
            if j is None:
                batch = [d for d in range(len(shape)) if (v, d) in self.limits.batch_dims]
                options = self.limits.allowed(self._split_options(shape, self._near_specs(v, nodes)), batch)
                is_parameter = self._is_parameter(v)
                j = self._add_variable(
                    key, self.limits.sharding_parameters(options, lambda s: s.axes) if is_parameter else options
                )
            copy = Binding(j, tuple(d if n > 1 else -1 for d, n in enumerate(shape)))
            reads = tuple(dict.fromkeys((graph.nodes[n].kind, graph.nodes[n].operands.index(v)) for n in nodes))
            bits = max(kind.sent_bits[i] for kind, i in reads)
            executions[own, copy, reads, bits] += max(graph.nodes[n].trip_count for n in nodes)
            found.update(((v, n), copy) for n in nodes)
        for (own, copy, reads, bits), count in executions.items():
            src, dst = self.spec_tables.value_specs(*own), self.spec_tables.value_specs(*copy)
            first, i = reads[0]
            seconds = self.spec_tables.reshard_matrix(src, dst, first.shapes[i], bits)
            waited = [
                seconds_waited(seconds, kind, i, self.mesh, self.spec_tables.hideable_matrix(src, dst, kind, i))
                for kind, i in reads
            ]
            self.builder.add_pairwise(own.variable, copy.variable, count * functools.reduce(np.minimum, waited))
        return found

    def _is_parameter(self, v: int) -> bool:
        return self.groups.phases[v] in (PARAMETER, PARAMETER_COPY, PARAMETER_INSIDE) or v in self.limits.frozen

    def _near_specs(self, v: int, nodes: Sequence[int]) -> Iterator[Spec]:
        """The specs of a value in the near layouts, and those that ``nodes`` demand of it there."""
        for layout in self.near_layouts:
            yield layout.specs[v]
            for n in nodes:
                if n in layout.strategies:
                    node = self.graph.nodes[n]
                    strategy = self.node_costs.strategy(node.kind, dict(layout.strategies[n]))
                    yield strategy.in_specs[node.operands.index(v)]

    def _add_nodes(self, kind: OpKind, bindings: Sequence[Binding | None], nodes: Sequence[int]) -> None:
        """Adds the costs of ``nodes``, of one kind and with equal bindings; and if they choose, their variable."""
        costs, executions = self.node_costs, float(sum(self.graph.nodes[n].trip_count for n in nodes))
        if not any(bindings) or not any(kind.shapes):
            return
        followed = costs.followed(kind, bindings)
        if not followed:
            options = self._factor_axes_options(kind, nodes[0])
            i = self.builder.add_variable(len(options))
            self.spec_tables.add_variable(())
            self.neighbourhoods.append(self._neighbourhoods(axes.items() for axes in options))
            factor_axes = [tuple(sorted(axes.items())) for axes in options]
            self.node_options.update((n, (i, factor_axes)) for n in nodes)
            self._add_terms(i, *costs.cost_terms(kind, bindings, i, *costs.strategy_costs(kind, options), executions))
            return
        terms = {
            i: costs.cost_terms(kind, bindings, i, *costs.following_costs(kind, p, i, dim_map), executions)
            for p, (i, dim_map) in followed.items()
        }
        if len(terms) == 2 == len({b.variable for b in bindings if b}):  # it follows whichever of the two is cheaper
            (i, (unary_i, pairwise_i)), (j, (unary_j, pairwise_j)) = terms.items()
            following_i = unary_i[:, None] + pairwise_i.get(j, 0.0)
            following_j = unary_j + pairwise_j[i].T if i in pairwise_j else unary_j
            self.builder.add_pairwise(i, j, np.minimum(following_i, following_j))
        else:
            i, found = next(iter(terms.items()))
            self._add_terms(i, *found)

    def _add_terms(self, i: int, unary: Array, pairwise: Mapping[int, Array]) -> None:
        self.builder.add_unary(i, unary)
        for j, table in pairwise.items():
            self.builder.add_pairwise(i, j, table)

    def _factor_axes_options(self, kind: OpKind, node: int) -> list[dict[str, Axes]]:
        """Every way to assign mesh axes to the factors of ``node``, within the limits and, if given, near layouts."""
        values = self.graph.nodes[node].values
        free = [(f, n) for f, n in kind.factor_sizes if n > 1 and kind.rule.kind(f) != "whole"]
        batch_factors = {dim[0] for p, d, dim in kind.factored_dims if (values[p], d) in self.limits.batch_dims}
        batch = [k for k, (f, _) in enumerate(free) if f in batch_factors]
        near = [Spec(tuple(dict(l.strategies.get(node, ())).get(f, ()) for f, _ in free)) for l in self.near_layouts]
        splits = self.limits.allowed(self._split_options([n for _, n in free], near), batch)
        found = [{f: axes for (f, _), axes in zip(free, s.dims, strict=True) if axes} for s in splits]
        kept = [expressible_factors(kind, axes, self.mesh) for axes in found]
        options = list({tuple(sorted(axes.items())): axes for axes in kept}.values())
        for p in range(len(kind.rule.operands)) if self.limits.parameter_axes else ():
            if self._is_parameter(values[p]):
                options = list(
                    self.limits.sharding_parameters(
                        options, lambda axes, p=p: self.node_costs.strategy(kind, axes).in_specs[p].axes
                    )
                )
        return options


def _equal_but_for(options: Sequence[tuple[Any, ...]], k: int) -> list[int]:
    """Labels that are equal for tuples that differ at most in entry ``k``."""
    seen: dict[Any, int] = {}
    return [seen.setdefault((*o[:k], *o[k + 1 :]), len(seen)) for o in options]
