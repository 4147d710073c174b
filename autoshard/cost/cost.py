"""cost: seconds per equation and per reshard, for a layout on given hardware.

For each node the cheapest way to run it under the layout: which factors are split over which axes, what
that asks of its operands, and what its results then are (perhaps partial). Time is

    compute   = max(flops / (peak * parts), bytes moved per device / bandwidth), at least the chip's overhead
    transfers = the reshards of operands to what the node needs, and of results to what the layout says

summed over nodes, times how often they run. A reshard that several nodes ask of one value is made once.
Compute and transfers are added, not overlapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cost.reshard import reshard_collectives, reshard_seconds, spec_after_reduction
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.halo import rows_per_hop
from autoshard.ir.propagate import Layout, axes_of_dim, factor_axes
from autoshard.ir.spec import REDUCTION_KINDS, Axes, Spec
from autoshard.machine.collective import ALL_REDUCE, COLLECTIVE_PERMUTE, Collective, collective_seconds
from autoshard.machine.mesh import LogicalMesh

VIEWS = frozenset(
    {
        "annotate",
        "bitcast_convert_type",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "iota",
        "name",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
"""Operations that XLA folds into their users."""
SPREAD = frozenset({"broadcast_in_dim", "iota"})
"""Operations whose results are the same everywhere but for the position, when they read scalars alone."""
Positions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """How one kind of node runs with given axes on its factors."""

    in_specs: tuple[Spec, ...]
    """What it asks of each operand."""
    out_specs: tuple[Spec, ...]
    """What its results then are, partial terms included."""
    compute_seconds: float
    """Seconds on one device, once."""
    collectives: tuple[Collective, ...] | None = ()
    """Exchanges of edges, and collectives of the local form when the node runs in it; None where it does not serve so
    many parts."""
    local_axes: Axes = ()
    """Axes that split the local factor."""

    @property
    def feasible(self) -> bool:
        """Whether it can be had: a local form's results are never partial."""
        return self.collectives is not None and not (self.local_axes and any(s.partial for s in self.out_specs))

    def seconds(self, mesh: LogicalMesh) -> float:
        """Compute and collectives of the local form, once; what the operands and results need is not in it."""
        return self.compute_seconds + sum(
            collective_seconds(c.kind, c.axes or (), c.bytes, mesh) for c in self.collectives or ()
        )


@dataclass(frozen=True, slots=True)
class NodeCost:
    """How one kind of node runs under given specs."""

    in_specs: tuple[Spec, ...]
    """What it asks of each operand."""
    out_specs: tuple[Spec, ...]
    """What its results are, partial terms included, before they are brought to the layout's specs."""
    compute_seconds: float
    """Seconds on one device, once."""
    seconds: float
    """Compute and transfers, once."""
    collectives: tuple[Collective, ...] = ()
    """Exchanges of edges, and collectives of the local form when the node runs in it."""
    local_axes: Axes = ()
    """Axes that split the local factor."""
    uses_local_form: bool = False
    """Whether the node runs in its local form; else as XLA partitions it."""
    resharded: bool = False
    """Whether it asks an operand otherwise than that lies, or makes a result so."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one call of the step, and the transfers in it."""

    seconds: float
    compute: float
    collectives: tuple[Collective, ...]

    @property
    def transfers(self) -> float:
        """Seconds spent in collectives."""
        return self.seconds - self.compute


class CostModel:
    """Prices layouts of one graph; alike nodes under alike specs are priced once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.mesh = graph, graph.program.mesh
        self._cache: dict[tuple[OpKind, tuple[Spec, ...], tuple[tuple[str, Axes], ...] | None, Positions], NodeCost] = (
            graph.node_cost_cache
        )
        self.free_to_reshard = {
            v
            for n in graph.nodes
            if n.kind.op in SPREAD and not any(map(len, n.kind.shapes[: len(n.operands)]))
            for v in n.results
        }
        """Values that the partitioner makes again wherever they are read otherwise than they lie."""
        self.per_call_inputs = find_per_call_inputs(graph)
        self.view_of: dict[int, int] = {}
        """Of values that are others seen otherwise, or the other way round, which."""
        for n in graph.nodes:
            if any(n.operands[:1]) and (n.kind.op in VIEWS or n.kind.op == "rev"):
                self.view_of.update((v, self.view_of.get(n.operands[0], n.operands[0])) for v in n.results)
        self._last: tuple[Layout | None, list[NodeCost]] = None, []
        """The layout that was asked for last, and how its nodes run."""

    def input_write_seconds(self, layout: Layout) -> float:
        """Seconds to write what every call of a step brings anew: its batch."""
        values = self.graph.values
        held = sum(values[v].bytes / layout.specs[v].num_shards(self.mesh.shape) for v in self.per_call_inputs)
        return held / self.mesh.hardware.bandwidth

    def node_costs(self, layout: Layout) -> Sequence[NodeCost]:
        """How each node runs under ``layout``."""
        if self._last[0] is not layout:
            self._last = layout, [self._cost_of(n, layout) for n in range(len(self.graph.nodes))]
        return self._last[1]

    def _cost_of(self, node: int, layout: Layout) -> NodeCost:
        kind, specs = self.graph.nodes[node].kind, layout.specs
        anew = tuple([i for i, v in enumerate(self.graph.nodes[node].operands) if v in self.free_to_reshard])
        key = kind, tuple([specs[v] for v in self.graph.nodes[node].values]), layout.strategies.get(node), anew
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = (
                cheapest_node_cost(kind, key[1], self.mesh, anew)
                if key[2] is None
                else _node_cost(kind, key[1], node_strategy(kind, dict(key[2]), self.mesh), self.mesh, anew)
            )
        return found

    def cost(self, layout: Layout) -> Cost:
        """Prices ``layout``."""
        specs, values = layout.specs, self.graph.values
        compute, transfers = self.input_write_seconds(layout), 0.0
        collectives: list[Collective] = []
        made: set[tuple[int, Spec]] = set()
        sent: set[tuple[int, Collective]] = set()
        for node, run in zip(self.graph.nodes, self.node_costs(layout), strict=True):
            if not node.trip_count:
                continue
            compute += run.compute_seconds * node.trip_count
            if not run.resharded and not run.collectives:
                continue
            moves = [
                (v, specs[v], need)
                for v, need in zip(node.operands, run.in_specs, strict=True)
                if need != specs[v] and (v, need) not in made and v not in self.free_to_reshard
            ]
            made.update((v, need) for v, _, need in moves)
            moves += [
                (v, give, specs[v]) for v, give in zip(node.results, run.out_specs, strict=True) if give != specs[v]
            ]
            made_here = list(run.collectives)
            for v, src, dst in moves:
                for c in reshard_collectives(src, dst, values[v].shape, values[v].bits, self.mesh):
                    key = self.view_of.get(v, v), c
                    made_here.append(replace(c, again=True) if key in sent else c)
                    sent.add(key)
            for c in made_here:
                share = node.kind.combined_count if c.kind == ALL_REDUCE else 1
                transfers += collective_seconds(c.kind, c.axes or (), c.bytes, self.mesh) * node.trip_count / share
                collectives.append(replace(c, count=node.trip_count, source=node.source))
        for v, leaf in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if v and leaf.pin is not None and leaf.pin != specs[v]:  # what it stands for is pinned elsewhere too
                for c in reshard_collectives(specs[v], leaf.pin, values[v].shape, values[v].bits, self.mesh):
                    transfers += collective_seconds(c.kind, c.axes or (), c.bytes, self.mesh)
                    collectives.append(replace(c, source=leaf.path))
        return Cost(compute + transfers, compute, tuple(collectives))


def find_per_call_inputs(graph: Graph) -> list[int]:
    """The arguments of a step that are not carried from call to call; of a function that carries nothing, none."""
    return [graph.inputs[i] for i in sorted(argument_roles(graph).batch)] if graph.program.carries else []


def cheapest_node_cost(kind: OpKind, specs: tuple[Spec, ...], mesh: LogicalMesh, anew: Positions = ()) -> NodeCost:
    """The cheapest way to run a node whose operands and results have ``specs``; to move operands ``anew`` is free.

    What would be reduced is gathered, or lent, only where less is sent so, too: of small values a gather is a little
    faster than a reduction, but many small reductions can be made at once.
    """
    state = [s.dims for s in specs]
    agreed = (factor_axes(kind, state, mesh.shape, first) for first in (None, *range(len(specs))))
    found = _deduplicated(expressible_factors(kind, chosen, mesh) for chosen in agreed)
    best = _cheapest_of(kind, specs, found, mesh, anew)
    if not any(k in REDUCTION_KINDS for _, k in kind.rule.kinds):
        return best
    reduced = [f for f, k in kind.rule.kinds if k in REDUCTION_KINDS]
    without = [({f}, chosen) for chosen in found for f in chosen] + [(set(reduced), chosen) for chosen in found]
    fewer = _deduplicated({f: a for f, a in c.items() if f not in out} for out, c in without)
    other = _cheapest_of(kind, specs, fewer, mesh, anew)
    faster = other.seconds < best.seconds
    return (
        other
        if faster and _bytes_sent(kind, specs, other, mesh, anew) < _bytes_sent(kind, specs, best, mesh, anew)
        else best
    )


def _cheapest_of(
    kind: OpKind, specs: tuple[Spec, ...], found: Sequence[Mapping[str, Axes]], mesh: LogicalMesh, anew: Positions
) -> NodeCost:
    """The cheapest of these ways, and of those in which axes are lent or a local form is not used."""
    ways = {tuple(sorted(w.items())) for w in found}
    ways |= {tuple(sorted(w.items())) for chosen in found for w in _reassign_idle_axes(kind, specs, chosen, mesh)}
    if kind.rule.local is not None:  # gathering what the local form would split
        ways |= {tuple((f, a) for f, a in w if kind.rule.kind(f) != "local") for w in ways}
    runs = (node_strategy(kind, dict(w), mesh) for w in sorted(ways))
    return min((_node_cost(kind, specs, w, mesh, anew) for w in runs if w.feasible), key=lambda r: r.seconds)


def _deduplicated(ways: Iterable[dict[str, Axes]]) -> list[dict[str, Axes]]:
    return list({tuple(sorted(w.items())): w for w in ways}.values())


def _reshards(specs: tuple[Spec, ...], run: NodeCost | NodeStrategy, anew: Positions) -> list[tuple[int, Spec, Spec]]:
    """Which values of a node are moved, and from where to where."""
    ends = [*zip(specs, run.in_specs, strict=False), *zip(run.out_specs, specs[len(run.in_specs) :], strict=True)]
    return [(i, a, b) for i, (a, b) in enumerate(ends) if a != b and i not in anew]


def _bytes_sent(kind: OpKind, specs: tuple[Spec, ...], run: NodeCost, mesh: LogicalMesh, anew: Positions) -> float:
    """Bytes that leave a device."""
    moves = _reshards(specs, run, anew)
    made = [c for i, a, b in moves for c in reshard_collectives(a, b, kind.shapes[i], kind.bits[i], mesh)]
    return sum(c.sent(mesh) for c in (*made, *run.collectives))


def expressible_factors(kind: OpKind, chosen: Mapping[str, Axes], mesh: LogicalMesh) -> dict[str, Axes]:
    """``chosen`` without the factors that some dimension cannot hold: those behind one that is not split entirely."""
    kept, compound = dict(chosen), [dim for _, _, dim in kind.factored_dims if len(dim) > 1]
    sizes = dict(kind.factor_sizes) if compound else {}
    for _ in compound:  # what is dropped for one may be what another stands behind
        for dim in compound:
            parts = [mesh.axes_size(kept.get(f, ())) == sizes[f] for f in dim]
            for f in dim[parts.index(False) + 1 :] if not all(parts) else ():
                kept.pop(f, None)
    return kept


def _reassign_idle_axes(
    kind: OpKind, specs: Sequence[Spec], chosen: Mapping[str, Axes], mesh: LogicalMesh
) -> Iterator[dict[str, Axes]]:
    """Ways in which axes that split what has to be whole split another factor meanwhile: two all-to-alls."""
    used = {a for axes in chosen.values() for a in axes}
    idle = tuple(dict.fromkeys(a for s in specs for a in s.axes if a not in used))
    for f, size in kind.factor_sizes if idle else ():
        axes = (*chosen.get(f, ()), *idle)
        if kind.rule.kind(f) == "parallel" and size % mesh.axes_size(axes) == 0:
            lent = expressible_factors(kind, {**chosen, f: axes}, mesh)
            if f in lent:
                yield lent


def node_strategy(kind: OpKind, chosen: Mapping[str, Axes], mesh: LogicalMesh) -> NodeStrategy:
    """How a node runs whose factors have the axes ``chosen``."""
    sizes, kinds, shape = dict(kind.factor_sizes), dict(kind.rule.kinds), mesh.shape

    def spec(dims: Sequence[Sequence[str]]) -> Spec:
        return Spec(
            tuple(
                [
                    axes_of_dim(d, chosen, sizes, shape) if len(d) > 1 else chosen.get(d[0], ()) if d else ()
                    for d in dims
                ]
            )
        )

    needs = tuple(map(spec, kind.rule.operands))
    partial = tuple(
        sorted([(a, kinds[f]) for f, axes in chosen.items() if kinds.get(f) in REDUCTION_KINDS for a in axes])
    )
    gives = tuple(map(spec, kind.rule.results))
    if partial:  # a result that has the factor itself is no sum over it
        gives = tuple([Spec(s.dims, tuple([p for p in partial if p[0] not in s.axes])) for s in gives])
    inside = _strategy_collectives(kind, needs, gives, chosen, mesh)
    return NodeStrategy(
        needs, gives, _strategy_compute_seconds(kind, needs, gives, chosen, mesh), inside, _local_axes(kind, chosen)
    )


def _node_cost(
    kind: OpKind, specs: tuple[Spec, ...], w: NodeStrategy, mesh: LogicalMesh, anew: Positions = ()
) -> NodeCost:
    transfers = sum(
        reshard_seconds(a, b, kind.shapes[i], kind.bits[i], mesh) / (kind.combined_count if a.partial else 1)
        for i, a, b in _reshards(specs, w, anew)
    )
    return NodeCost(
        w.in_specs,
        w.out_specs,
        w.compute_seconds,
        w.seconds(mesh) + transfers,
        w.collectives or (),
        w.local_axes,
        _uses_local_form(kind, specs, w, mesh),
        (*w.in_specs, *w.out_specs) != specs,
    )


def _uses_local_form(kind: OpKind, specs: Sequence[Spec], w: NodeStrategy, mesh: LogicalMesh) -> bool:
    """Whether the local form is due: where its factor is split; edges are exchanged; or, with neither, always."""
    if kind.rule.local is None:
        return False
    if kind.rule.local.used_when == "partial":
        return any(s.partial for s in w.out_specs)
    if kind.rule.local.used_when == "scattered":
        n = len(w.in_specs)
        ends = zip(w.out_specs, specs[n:], kind.shapes[n:], kind.bits[n:], strict=True)
        scattered = any(
            spec_after_reduction(give, lies, shape, bits, mesh).dims != give.dims for give, lies, shape, bits in ends
        )
        return scattered or any(w.in_specs[h.operand].dims[h.dim] for h in kind.rule.halos)
    kinds = dict(kind.rule.kinds)
    if "halo" in kinds.values():
        return any(specs[i].dims[d] for i, d, dim in kind.factored_dims if kinds.get(dim[0]) == "halo")
    return bool(w.local_axes) or kind.rule.local.used_when == "always" or "local" not in kinds.values()


def _strategy_collectives(
    kind: OpKind, needs: Sequence[Spec], gives: Sequence[Spec], chosen: Mapping[str, Axes], mesh: LogicalMesh
) -> tuple[Collective, ...] | None:
    """The exchanges of edges and, when a local factor is split, the collectives of the local form; None where it cannot
    be split so."""
    local = _local_axes(kind, chosen)
    halos = [(halo, axes) for halo in kind.rule.halos if (axes := chosen.get(kind.rule.halo_factor(halo), ()))]
    if not halos and not local:
        return ()
    sizes = [math.ceil(b / s.num_shards(mesh.shape)) for b, s in zip(kind.bytes, (*needs, *gives), strict=True)]
    found: list[Collective] = []
    for halo, axes in halos:
        parts, size = mesh.axes_size(axes), sizes[halo.operand]
        own, sides = halo.window.size // parts, halo.window.rows(parts)
        sent = [math.ceil(size * n / own) for rows in sides for n in rows_per_hop(rows, own)]
        found += [Collective(COLLECTIVE_PERMUTE, _in_mesh_order(axes, mesh), n) for n in sent]
        sizes[halo.operand] = math.ceil(size * (own + sum(sides)) / own)
    if not local or kind.rule.local is None:
        return tuple(found)
    moves = kind.rule.local.collectives(mesh.axes_size(local), sizes)
    return None if moves is None else (*found, *(Collective(k, _in_mesh_order(local, mesh), b) for k, b in moves))


def _local_axes(kind: OpKind, chosen: Mapping[str, Axes]) -> Axes:
    """The axes that split the factor for which a local form is there."""
    return next((axes for f, axes in chosen.items() if kind.rule.kind(f) == "local"), ())


def _in_mesh_order(axes: Axes, mesh: LogicalMesh) -> Axes:
    return tuple(a for a in mesh.axis_names if a in axes)


def _strategy_compute_seconds(
    kind: OpKind, needs: Sequence[Spec], gives: Sequence[Spec], chosen: Mapping[str, Axes], mesh: LogicalMesh
) -> float:
    local = [b / s.num_shards(mesh.shape) for b, s in zip(kind.bytes, (*needs, *gives), strict=True)]
    parts: float = math.prod(mesh.axes_size(a) for a in chosen.values())
    axes = _local_axes(kind, chosen)
    if axes and kind.rule.local is not None and kind.rule.local.imbalance is not None:
        parts /= kind.rule.local.imbalance(mesh.axes_size(axes), local)
    return compute_seconds(kind, local, parts, mesh)


def compute_seconds(
    kind: OpKind,
    local: Sequence[Any],
    parts: Any,
    mesh: LogicalMesh,
    least: Callable[[Sequence[Any]], Any] = min,
    most: Callable[[Sequence[Any]], Any] = max,
) -> Any:
    """Seconds on one device of a node whose operands and results have ``local`` bytes there and whose factors are split
    into so many ``parts``; or an array of each, with ``least`` and ``most`` that take arrays."""
    hardware = mesh.hardware
    if kind.op in VIEWS or not kind.shapes:
        return 0.0
    if kind.tie:  # what goes into or out of a loop is a slice of what is stacked there; else nothing moves
        ranks = {len(n) for n in kind.shapes}
        return least(local) / hardware.bandwidth if len(ranks) > 1 else 0.0
    if not kind.flops:  # fused with its neighbours: what it writes counts, what it reads was counted there
        return sum(local[len(kind.rule.operands) :]) / hardware.bandwidth
    return most([kind.flops / parts / hardware.peak(kind.dtype), sum(local) / hardware.bandwidth, hardware.overhead])
