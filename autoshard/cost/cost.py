"""Cost model: seconds of one call of a step under a `Layout`, from a `Graph` and the hardware of its mesh.

For each node the model takes the cheapest strategy: an assignment of mesh axes to the factors of the node's rule, which
fixes the specs it reads its operands in and the (perhaps partial) specs it produces its results in. Per execution,

    compute   = max(FLOPs / (rate * parts), bytes read and written per device / memory rate, kernel overhead)
                + copies of operands with their halos
    transfers = reshards of operands from the layout's specs to ``in_specs``, and of results from ``out_specs`` to the
                layout's specs, halo exchanges, and the collectives of a local form

Both are summed over nodes, weighted by trip count. FLOPs of a convolution are those on whole tiles
(`autoshard.cost.convolution`). Only operations whose FLOPs matter (products) are charged so; elementwise operations and
reductions are charged for the buffers that their fusions read and write (`autoshard.cost.fusions`), views for nothing,
and any other operation for writing its results. Rates are those that XLA reaches (`Hardware`). What moves between the
memories of the host and of the device takes its bytes over that bandwidth, and counts as compute. A reshard of one
value to one spec is charged once, however many nodes read it; all-reduces that XLA combines share one latency
(`autoshard.ir.combined_reductions`). Compute and transfers are added, with no overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.cost.fusions import with_memory_traffic
from autoshard.cost.node_strategy import NodeStrategy, expressible_factors, node_strategy
from autoshard.cost.reshard import combined_saving, reshard_collectives, reshard_seconds, spec_after_reduction
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph, Node, OpKind
from autoshard.ir.propagate import Layout, factor_axes
from autoshard.ir.spec import REDUCTION_KINDS, Axes, Spec
from autoshard.machine.collective import ALL_REDUCE, COLLECTIVE_PERMUTE, Collective, collective_seconds
from autoshard.machine.mesh import LogicalMesh
from autoshard.units import time_text

OperandPositions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cheapest strategy of nodes of one kind under given operand and result specs, with its cost."""

    in_specs: tuple[Spec, ...]
    """Spec in which each operand is read."""
    out_specs: tuple[Spec, ...]
    """Spec in which each result is produced, partial axes included, before it is resharded to the layout's spec."""
    compute_seconds: float
    """Compute seconds of one execution on one device."""
    seconds: float
    """Seconds of one execution, reshards of operands and results included."""
    collectives: tuple[Collective, ...] = ()
    """Halo exchanges and the collectives inside the local form."""
    local_axes: Axes = ()
    """Mesh axes that split the rule's `local` factor."""
    uses_local_form: bool = False
    """Whether the node runs as its rule's local form in a `shard_map` island; otherwise XLA partitions it."""
    resharded: bool = False
    """Whether ``in_specs`` and ``out_specs`` differ from the layout's specs."""
    stored_bytes: int = 0
    """As of the strategy."""


@dataclass(frozen=True, repr=False)
class Cost:
    """Predicted seconds of one call of the step, and its collectives."""

    seconds: float
    """Compute and transfers, added."""
    compute: float
    """Seconds of compute."""
    collectives: tuple[Collective, ...]
    """Every collective of the call, with its trip count and source line."""
    host: float = 0.0
    """Seconds of ``compute`` in which arrays go between the memories of the host and of the device."""

    @property
    def transfers(self) -> float:
        """Seconds spent in collectives."""
        return self.seconds - self.compute

    def scheduled(self, hidden: float) -> float:
        """Seconds of the call where the share ``hidden`` of the transfers runs beside compute, as far as that lasts."""
        return max(self.compute, hidden * self.transfers) + (1 - hidden) * self.transfers

    def __repr__(self) -> str:
        many = sum(c.count for c in self.collectives)
        return f"<Cost of a call: {time_text(self.compute)} compute, {time_text(self.transfers)} in {many} collectives>"


class Transfer(NamedTuple):
    """A collective of the call, and what it is for."""

    collective: Collective
    seconds: float
    """Over all executions."""
    value: int
    """The value that is resharded; 0 of a halo exchange and of a collective inside a local form."""
    before: Spec | None = None
    after: Spec | None = None
    """Specs of the value before and after its whole reshard, of which this collective may be one step."""
    of_result: bool = False
    """Whether the node makes the value, rather than reads it."""


class Charge(NamedTuple):
    """What one node adds to the predicted seconds of a call, over all its executions."""

    node: int
    """Its number; the number of nodes for results that are pinned to another spec than they have in the step."""
    compute: float
    """Seconds."""
    transfers: tuple[Transfer, ...] = ()


class CostModel:
    """Prices layouts of one graph. Nodes of one kind under the same specs are priced once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.mesh = with_memory_traffic(graph), graph.program.mesh
        self._cache: dict[
            tuple[OpKind, tuple[Spec, ...], tuple[tuple[str, Axes], ...] | None, OperandPositions], NodeCost
        ] = self.graph.node_cost_cache
        self.free_to_reshard = {
            v
            for n in graph.nodes
            if n.kind.traits.broadcasts and not any(map(len, n.kind.shapes[: len(n.operands)]))
            for v in n.results
        }
        """Broadcasts of scalars and iotas: XLA's partitioner recomputes them in whatever spec they are read."""
        self.per_call_inputs, self.moved_outputs = find_per_call_inputs(graph), find_moved_outputs(graph)
        self.view_of: dict[int, int] = {}
        """For each view (or reversal) of another value, the value at the root of the chain of views."""
        for n in graph.nodes:
            if any(n.operands[:1]) and n.kind.traits.view:
                self.view_of.update((v, self.view_of.get(n.operands[0], n.operands[0])) for v in n.results)
        self._last: tuple[Layout | None, list[NodeCost]] = None, []
        """The layout priced last and its node costs, which the memory model and the plan ask for next."""

    def input_write_seconds(self, layout: Layout) -> float:
        """Seconds to write what is not carried from call to call (the batch) to device memory."""
        values = self.graph.values
        local = sum(values[v].bytes / layout.specs[v].num_shards(self.mesh.shape) for v in self.per_call_inputs)
        return local / self.mesh.hardware.memory_rate

    def output_transfer_seconds(self, layout: Layout) -> float:
        """Seconds to move the results that leave for another memory than they are computed in."""
        values, bandwidth = self.graph.values, self.mesh.hardware.host_bandwidth
        moved = sum(values[v].bytes / layout.specs[v].num_shards(self.mesh.shape) for v in self.moved_outputs)
        return moved / bandwidth if bandwidth else 0.0

    def node_costs(self, layout: Layout) -> Sequence[NodeCost]:
        """The cost of each node under ``layout``, by node number."""
        if self._last[0] is not layout:
            self._last = layout, [self.node_cost(n, layout) for n in range(len(self.graph.nodes))]
        return self._last[1]

    def node_cost(self, node: int, layout: Layout) -> NodeCost:
        """The cost of the node of this number under ``layout``."""
        kind, specs = self.graph.nodes[node].kind, layout.specs
        free_operands = tuple([i for i, v in enumerate(self.graph.nodes[node].operands) if v in self.free_to_reshard])
        key = kind, tuple([specs[v] for v in self.graph.nodes[node].values]), layout.strategies.get(node), free_operands
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = (
                cheapest_node_cost(kind, key[1], self.mesh, free_operands)
                if key[2] is None
                else _node_cost(kind, key[1], node_strategy(kind, dict(key[2]), self.mesh), self.mesh, free_operands)
            )
        return found

    def cost(self, layout: Layout) -> Cost:
        """Predicted cost of one call under ``layout``."""
        host, transfers, nodes = self.output_transfer_seconds(layout), 0.0, self.graph.nodes
        compute = self.input_write_seconds(layout) + host
        collectives: list[Collective] = []
        for charge in self.charges(layout):
            compute += charge.compute
            host += charge.compute if charge.node < len(nodes) and nodes[charge.node].kind.host_transfer else 0.0
            for t in charge.transfers:
                transfers += t.seconds
                collectives.append(t.collective)
        return Cost(compute + transfers, compute, tuple(collectives), host)

    def _halos(self, node: Node, run: NodeCost) -> tuple[int, Spec, tuple[Collective, ...]] | None:
        """Of which operand a node exchanges which halos; None without, or of several operands."""
        operands = {halo.operand for halo in node.kind.rule.halos}
        found = tuple(c for c in run.collectives if c.kind == COLLECTIVE_PERMUTE)
        if not found or len(operands) != 1:
            return None
        (i,) = operands
        return self.view_of.get(node.operands[i], node.operands[i]), run.in_specs[i], found

    def charges(self, layout: Layout) -> Iterator[Charge]:
        """What each node that executes adds to the cost under ``layout``, in order of execution."""
        specs, values = layout.specs, self.graph.values
        charged: set[tuple[int, Spec]] = set()
        sent: set[tuple[int, Collective]] = set()
        sent_on_shards: set[object] = set()
        for number, (node, run) in enumerate(zip(self.graph.nodes, self.node_costs(layout), strict=True)):
            if not node.trip_count:
                continue
            compute = run.compute_seconds * node.trip_count
            if not run.resharded and not run.collectives:
                yield Charge(number, compute)
                continue
            moves = [
                (v, specs[v], required, False)
                for v, required in zip(node.operands, run.in_specs, strict=True)
                if required != specs[v] and (v, required) not in charged and v not in self.free_to_reshard
            ]
            charged.update((v, required) for v, _, required, _ in moves)
            made_as = zip(node.results, run.out_specs, strict=True)
            moves += [(v, made, specs[v], True) for v, made in made_as if made != specs[v]]
            halos, first = self._halos(node, run), [self.view_of.get(v, v) for v in node.operands[:1]]
            keys = [halos if c.kind == COLLECTIVE_PERMUTE else (*first, c) for c in run.collectives]
            issued = [
                Transfer(replace(c, redundant=True) if key and key in sent_on_shards else c, 0.0, 0)
                for key, c in zip(keys, run.collectives, strict=True)
            ]
            sent_on_shards.update(keys)
            for v, src, dst, made in moves:
                for c in reshard_collectives(src, dst, values[v].shape, values[v].bits, self.mesh):
                    key = self.view_of.get(v, v), c
                    issued.append(Transfer(replace(c, redundant=True) if key in sent else c, 0.0, v, src, dst, made))
                    sent.add(key)
            priced: list[Transfer] = []
            for t in issued:
                c = t.collective
                seconds = collective_seconds(c.kind, c.axes or (), c.bytes, self.mesh)
                if c.kind == ALL_REDUCE and (count := node.kind.combined_count) > 1:
                    seconds -= (1 - 1 / count) * collective_seconds(c.kind, c.axes or (), 0, self.mesh)
                c = replace(c, count=node.trip_count, source=node.source)
                priced.append(t._replace(collective=c, seconds=seconds * node.trip_count))
            yield Charge(number, compute, tuple(priced))
        last: list[Transfer] = []
        for v, leaf in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if v and leaf.pin is not None and leaf.pin != specs[v]:  # its value is pinned to another spec elsewhere
                for c in reshard_collectives(specs[v], leaf.pin, values[v].shape, values[v].bits, self.mesh):
                    seconds = collective_seconds(c.kind, c.axes or (), c.bytes, self.mesh)
                    last.append(Transfer(replace(c, source=leaf.path), seconds, v, specs[v], leaf.pin))
        yield Charge(len(self.graph.nodes), 0.0, tuple(last))


def find_per_call_inputs(graph: Graph) -> list[int]:
    """The arguments of a step that are not carried from call to call and that are written to device memory, as value
    numbers; none if nothing is carried."""
    batch = [graph.inputs[i] for i in sorted(argument_roles(graph).batch)] if graph.program.carries else []
    return [v for v in batch if not graph.values[v].host]


def find_moved_outputs(graph: Graph) -> list[int]:
    """The results of a step that leave for another memory, the host's or the device's, than they are in, as value
    numbers."""
    leaves = zip(graph.outputs, graph.program.outputs, strict=True)
    return [v for v, leaf in leaves if v and graph.values[v].host != (leaf.memory_kind is not None)]


def cheapest_node_cost(
    kind: OpKind, specs: tuple[Spec, ...], mesh: LogicalMesh, free_operands: OperandPositions = ()
) -> NodeCost:
    """The cheapest strategy for a node whose operands and results have ``specs``.

    Strategies that gather an operand, or move its axes to another factor, instead of reducing a partial result must
    send fewer bytes as well as take less time: a gather of a small value is slightly faster than a reduction, but XLA
    combines many small reductions into one.

    Args:
      specs: of the operands, then of the results.
      free_operands: positions of operands that cost nothing to reshard (`CostModel.free_to_reshard`).
    """
    state = [s.dims for s in specs]
    proposed = (factor_axes(kind, state, mesh.shape, first) for first in (None, *range(len(specs))))
    found = _deduplicated(expressible_factors(kind, assignment, mesh) for assignment in proposed)
    found = _deduplicated([*found, *(_in_place(kind, assignment) for assignment in found)])
    best = _cheapest_of(kind, specs, found, mesh, free_operands)
    if not any(k in REDUCTION_KINDS for _, k in kind.rule.kinds):
        return best
    reduced = [f for f, k in kind.rule.kinds if k in REDUCTION_KINDS]
    fewer = [({f}, assignment) for assignment in found for f in assignment]
    fewer += [(set(reduced), assignment) for assignment in found]
    smaller = _deduplicated({f: a for f, a in c.items() if f not in dropped} for dropped, c in fewer)
    other = _cheapest_of(kind, specs, smaller, mesh, free_operands)
    if other.seconds >= best.seconds:
        return best
    other_bytes, best_bytes = (_bytes_sent(kind, specs, cost, mesh, free_operands) for cost in (other, best))
    return other if other_bytes < best_bytes else best


def _cheapest_of(
    kind: OpKind,
    specs: tuple[Spec, ...],
    found: Sequence[Mapping[str, Axes]],
    mesh: LogicalMesh,
    free_operands: OperandPositions,
) -> NodeCost:
    """The cheapest of these assignments, their variants with idle axes reassigned, and those without the local form."""
    tried = {tuple(sorted(assignment.items())) for assignment in found}
    for assignment in found:
        tried |= {tuple(sorted(other.items())) for other in _reassign_idle_axes(kind, specs, assignment, mesh)}
    if kind.rule.local is not None:  # gather what the local form would split
        tried |= {tuple((f, axes) for f, axes in pairs if kind.rule.kind(f) != "local") for pairs in tried}
    strategies = (node_strategy(kind, dict(pairs), mesh) for pairs in sorted(tried))
    costs = (_node_cost(kind, specs, s, mesh, free_operands) for s in strategies if s.feasible)
    return min(costs, key=lambda cost: cost.seconds)


def _deduplicated(assignments: Iterable[dict[str, Axes]]) -> list[dict[str, Axes]]:
    return list({tuple(sorted(a.items())): a for a in assignments}.values())


def _in_place(kind: OpKind, assignment: Mapping[str, Axes]) -> dict[str, Axes]:
    """The assignment in which the local factor is split in place (`Local.in_place`), where it can be."""
    in_place = kind.rule.local.in_place if kind.rule.local is not None else None
    return {in_place if in_place and kind.rule.kind(f) == "local" else f: axes for f, axes in assignment.items()}


def _reshards(
    specs: tuple[Spec, ...], run: NodeCost | NodeStrategy, free_operands: OperandPositions
) -> list[tuple[int, Spec, Spec]]:
    """The reshards of a node: (position among operands and results, source spec, destination spec)."""
    ends = [*zip(specs, run.in_specs, strict=False), *zip(run.out_specs, specs[len(run.in_specs) :], strict=True)]
    return [(i, a, b) for i, (a, b) in enumerate(ends) if a != b and i not in free_operands]


def _bytes_sent(
    kind: OpKind, specs: tuple[Spec, ...], run: NodeCost, mesh: LogicalMesh, free_operands: OperandPositions
) -> float:
    """Bytes that leave a device in one execution."""
    reshards = _reshards(specs, run, free_operands)
    issued = [c for i, a, b in reshards for c in reshard_collectives(a, b, kind.shapes[i], kind.bits[i], mesh)]
    return sum(c.wire_bytes(mesh) for c in (*issued, *run.collectives))


def _reassign_idle_axes(
    kind: OpKind, specs: Sequence[Spec], assignment: Mapping[str, Axes], mesh: LogicalMesh
) -> Iterator[dict[str, Axes]]:
    """Assignments in which axes that would go unused split one more parallel factor.

    The axes of a dimension that the node cannot split are moved to one that it can, and back afterwards: two
    all-to-alls rather than an all-gather.
    """
    used = {a for axes in assignment.values() for a in axes}
    idle = tuple(dict.fromkeys(a for s in specs for a in s.axes if a not in used))
    for f, size in kind.factor_sizes if idle else ():
        axes = (*assignment.get(f, ()), *idle)
        if kind.rule.kind(f) == "parallel" and size % mesh.axes_size(axes) == 0:
            reassigned = expressible_factors(kind, {**assignment, f: axes}, mesh)
            if f in reassigned:
                yield reassigned


def _node_cost(
    kind: OpKind,
    specs: tuple[Spec, ...],
    strategy: NodeStrategy,
    mesh: LogicalMesh,
    free_operands: OperandPositions = (),
) -> NodeCost:
    transfers = sum(
        reshard_seconds(a, b, kind.shapes[i], kind.bits[i], mesh) - combined_saving(a, b, kind.combined_count, mesh)
        for i, a, b in _reshards(specs, strategy, free_operands)
    )
    return NodeCost(
        strategy.in_specs,
        strategy.out_specs,
        strategy.compute_seconds,
        strategy.seconds(mesh) + transfers,
        strategy.collectives or (),
        strategy.local_axes,
        _uses_local_form(kind, specs, strategy, mesh),
        (*strategy.in_specs, *strategy.out_specs) != specs,
        strategy.stored_bytes,
    )


def _uses_local_form(kind: OpKind, specs: Sequence[Spec], strategy: NodeStrategy, mesh: LogicalMesh) -> bool:
    """Whether the local form runs (`Local.used_when`): by default where its factor is split or halos are exchanged, and
    always where the rule has neither."""
    if kind.rule.local is None:
        return False
    if kind.rule.local.used_when == "partial":
        return any(s.partial for s in strategy.out_specs)
    if kind.rule.local.used_when == "scattered":
        n = len(strategy.in_specs)
        ends = zip(strategy.out_specs, specs[n:], kind.shapes[n:], kind.bits[n:], strict=True)
        scattered = any(
            spec_after_reduction(made, target, shape, bits, mesh).dims != made.dims
            for made, target, shape, bits in ends
        )
        return scattered or any(strategy.in_specs[h.operand].dims[h.dim] for h in kind.rule.halos)
    kinds = dict(kind.rule.kinds)
    if "halo" in kinds.values():
        return any(specs[i].dims[d] for i, d, dim in kind.factored_dims if kinds.get(dim[0]) == "halo")
    return bool(strategy.local_axes) or kind.rule.local.used_when == "always" or "local" not in kinds.values()
