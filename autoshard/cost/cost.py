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
(`autoshard.ir.combined_reductions`). Compute and transfers are added, with no overlap but of three kinds: gathers of
weights and reductions of their gradients run beside products, and in a pipeline on some chips reshards of a product in
rings beside it (both `autoshard.cost.overlap`), and exchanges of an operation in rounds beside its own products
(`NodeStrategy.hidden_seconds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.cost.fusions import with_memory_traffic
from autoshard.cost.node_cost import NodeCost, OperandPositions, cheapest_node_cost, node_cost
from autoshard.cost.node_strategy import node_strategy
from autoshard.cost.overlap.beside_products import with_hidden_transfers
from autoshard.cost.overlap.node_reshards import Resharded, seconds_waited_by
from autoshard.cost.reshard import reshard_collectives
from autoshard.ir.dim_classes import argument_roles
from autoshard.ir.graph import Graph, Node, OpKind
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import ALL_REDUCE, COLLECTIVE_PERMUTE, Collective, collective_seconds
from autoshard.machine.mesh import LogicalMesh
from autoshard.units import time_text


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
    hidden: float = 0.0
    """Seconds of collectives that are no part of ``seconds``, since they run beside products."""

    @property
    def transfers(self) -> float:
        """Seconds in which a device waits for collectives."""
        return self.seconds - self.compute

    @property
    def sent(self) -> float:
        """Seconds of all collectives."""
        return self.transfers + self.hidden

    def scheduled(self, hidden: float) -> float:
        """Seconds of the call where the share ``hidden`` of its collectives runs beside compute, as far as it lasts."""
        return scheduled_seconds(self.compute, self.sent, hidden)

    def __repr__(self) -> str:
        many = sum(c.count for c in self.collectives)
        return f"<Cost of a call: {time_text(self.compute)} compute, {time_text(self.sent)} in {many} collectives>"


def scheduled_seconds(compute: float, sent: float, hidden: float) -> float:
    """Seconds of work that sends for ``sent`` seconds, of which the share ``hidden`` runs beside compute, as far as it
    lasts."""
    return max(compute, hidden * sent) + (1 - hidden) * sent


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
    hidden: float = 0.0
    """Seconds over all executions, no part of ``seconds``, in which products run."""


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
        self.graph, self.mesh = with_hidden_transfers(with_memory_traffic(graph)), graph.program.mesh
        self._cache: dict[
            tuple[OpKind, tuple[Spec, ...], tuple[tuple[str, Axes], ...] | None, OperandPositions], NodeCost
        ] = self.graph.kinds.node_costs(self.mesh)
        self.free_to_reshard = set[int]()
        """Broadcasts of scalars, and of such broadcasts, and iotas: XLA's partitioner recomputes them in whatever spec
        they are read."""
        for n in graph.nodes:
            operands = zip(n.operands, n.kind.shapes, strict=False)
            if n.kind.traits.broadcasts and all(not shape or v in self.free_to_reshard for v, shape in operands):
                self.free_to_reshard.update(n.results)
        self._free_operands = [
            tuple([i for i, v in enumerate(n.operands) if v in self.free_to_reshard]) for n in graph.nodes
        ]
        self.per_call_inputs, self.moved_outputs = find_per_call_inputs(graph), find_moved_outputs(graph)
        self.first_of: dict[int, int] = {}
        """For each view (or reversal) of another value, the value at the root of the chain of views; for what an
        operation makes of the same operands again, what it made first: XLA computes it once."""
        made: dict[Node, tuple[int, ...]] = {}
        for n in graph.nodes:
            read = tuple([self.first_of.get(v, v) for v in n.operands])
            if any(read[:1]) and n.kind.traits.view:
                self.first_of.update((v, read[0]) for v in n.results)
            elif read and not n.tie:
                first = made.setdefault(n._replace(operands=read, results=(), source=""), n.results)
                self.first_of.update(zip(n.results, first, strict=True) if first != n.results else ())
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
        (kind, operands, results, *_), specs = self.graph.nodes[node], layout.specs
        free_operands = self._free_operands[node]
        key = kind, tuple([specs[v] for v in operands + results]), layout.strategies.get(node), free_operands
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = (
                cheapest_node_cost(kind, key[1], self.mesh, free_operands)
                if key[2] is None
                else node_cost(kind, key[1], node_strategy(kind, dict(key[2]), self.mesh), self.mesh, free_operands)
            )
        return found

    def cost(self, layout: Layout, ahead: Mapping[tuple[int, Spec | None], bool] | None = None) -> Cost:
        """Predicted cost of one call under ``layout``.

        Args:
          ahead: values that loops gather an iteration ahead, and before the first one too, with the specs that they are
            gathered to: whether in several steps, of which only the first is ahead.
        """
        host, transfers, hidden, nodes = self.output_transfer_seconds(layout), 0.0, 0.0, self.graph.nodes
        compute = self.input_write_seconds(layout) + host
        collectives: list[Collective] = []
        for charge in self.charges(layout):
            compute += charge.compute
            host += charge.compute if charge.node < len(nodes) and nodes[charge.node].kind.host_transfer else 0.0
            begun: set[tuple[int, Spec | None]] = set()
            for t in charge.transfers:
                c, key = t.collective, (t.value, t.after)
                in_steps = None if ahead is None or t.of_result else ahead.get(key)
                if in_steps is not None and not (in_steps and key in begun):
                    transfers += (t.seconds + t.hidden) / c.count
                    c = replace(c, count=c.count + 1)
                begun.add(key)
                transfers += t.seconds
                hidden += t.hidden
                collectives.append(c)
        return Cost(compute + transfers, compute, tuple(collectives), host, hidden)

    def _halos(self, node: Node, run: NodeCost) -> tuple[int, Spec, tuple[Collective, ...]] | None:
        """Of which operand a node exchanges which halos; None without, or of several operands."""
        operands = {halo.operand for halo in node.kind.rule.halos}
        found = tuple(c for c in run.collectives if c.kind == COLLECTIVE_PERMUTE)
        if not found or len(operands) != 1:
            return None
        (i,) = operands
        return self.first_of.get(node.operands[i], node.operands[i]), run.in_specs[i], found

    def _sent_bits(self, runs: Sequence[NodeCost], specs: Sequence[Spec]) -> Mapping[tuple[int, Spec], int]:
        """Bits per element in which values are resharded, by value and the spec that nodes demand: the most that any of
        these reads."""
        found: dict[tuple[int, Spec], int] = {}
        for node, run in zip(self.graph.nodes, runs, strict=True):
            if run.resharded and node.trip_count:
                for v, required, bits in zip(node.operands, run.in_specs, node.kind.sent_bits, strict=False):
                    if required is not specs[v] and required != specs[v]:
                        found[v, required] = max(bits, found.get((v, required), 0))
        return found

    def charges(self, layout: Layout) -> Iterator[Charge]:
        """What each node that executes adds to the cost under ``layout``, in order of execution."""
        specs, values = layout.specs, self.graph.values
        charged: set[tuple[int, Spec]] = set()
        sent: set[tuple[int, Collective]] = set()
        sent_on_shards: set[object] = set()
        runs = self.node_costs(layout)
        sent_bits = self._sent_bits(runs, specs)
        for number, (node, run) in enumerate(zip(self.graph.nodes, runs, strict=True)):
            if not node.trip_count:
                continue
            compute = run.compute_seconds * node.trip_count
            if not run.resharded and not run.collectives:
                yield Charge(number, compute)
                continue
            moves = [
                (v, specs[v], required, sent_bits[v, required], False)
                for v, required in zip(node.operands, run.in_specs, strict=True)
                if required != specs[v] and (v, required) not in charged and v not in self.free_to_reshard
            ]
            charged.update((v, required) for v, _, required, _, _ in moves)
            made_as = zip(node.results, run.out_specs, strict=True)
            moves += [(v, made, specs[v], values[v].bits, True) for v, made in made_as if made != specs[v]]
            halos, first = self._halos(node, run), [self.first_of.get(v, v) for v in node.operands[:1]]
            keys = [halos if c.kind == COLLECTIVE_PERMUTE else (*first, c) for c in run.collectives]
            issued = [
                Transfer(replace(c, redundant=True) if key and key in sent_on_shards else c, 0.0, 0)
                for key, c in zip(keys, run.collectives, strict=True)
            ]
            sent_on_shards.update(keys)
            for v, src, dst, bits, made in moves:
                for c in reshard_collectives(src, dst, values[v].shape, bits, self.mesh):
                    key = self.first_of.get(v, v), c
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
            priced = _partly_hidden(priced, node, run, self.mesh)
            yield Charge(number, compute, tuple(priced))
        last: list[Transfer] = []
        for v, leaf in zip(self.graph.outputs, self.graph.program.outputs, strict=True):
            if v and leaf.pin is not None and leaf.pin != specs[v]:  # its value is pinned to another spec elsewhere
                for c in reshard_collectives(specs[v], leaf.pin, values[v].shape, values[v].bits, self.mesh):
                    seconds = collective_seconds(c.kind, c.axes or (), c.bytes, self.mesh)
                    last.append(Transfer(replace(c, source=leaf.path), seconds, v, specs[v], leaf.pin))
        yield Charge(len(self.graph.nodes), 0.0, tuple(last))


def _partly_hidden(transfers: Sequence[Transfer], node: Node, run: NodeCost, mesh: LogicalMesh) -> list[Transfer]:
    """The collectives of a node, of which some run beside products."""
    if node.kind.beside is None and not run.hidden_seconds:
        return list(transfers)
    ends = [*((v, False) for v in node.operands), *((v, True) for v in node.results)]
    whole, specs = defaultdict[tuple[int, bool], float](float), dict[tuple[int, bool], tuple[Spec, Spec]]()
    for t in transfers:
        whole[t.value, t.of_result] += t.seconds / node.trip_count
        if t.before is not None and t.after is not None:
            specs[t.value, t.of_result] = t.before, t.after
    moved = [Resharded(ends.index(end), *found, whole[end]) for end, found in specs.items()]
    waited = dict(zip(specs, seconds_waited_by(node.kind, moved, mesh), strict=True))
    waited[0, False] = whole[0, False] - run.hidden_seconds
    shares = [waited[t.value, t.of_result] / whole[t.value, t.of_result] if t.seconds else 1.0 for t in transfers]
    return [
        t._replace(seconds=t.seconds * share, hidden=t.seconds * (1 - share))
        for t, share in zip(transfers, shares, strict=True)
    ]


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
