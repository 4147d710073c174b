"""The price of a step as a pipeline, from that of its loop on one stage's devices.

Each stage runs its ticks one after the other; those between which something goes wait for each other. A device has the
state and the gradients of its own layers, and residuals of several micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard import jaxpr as jx
from autoshard.cost.cost import Cost
from autoshard.errors import PipelineError
from autoshard.ir.graph import Graph
from autoshard.ir.program import PipelineRequest
from autoshard.ir.propagate import Layout
from autoshard.machine.collective import ALL_REDUCE, COLLECTIVE_PERMUTE, Collective, collective_seconds
from autoshard.pipelining.chain import Chain, find_chain, scan_groups
from autoshard.pipelining.exchange import seconds_of_ticks
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stage_dims import StageDims
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.tick_tables import TickTables, tick_tables
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation
from autoshard.search.candidates import Search


@dataclass(frozen=True)
class PipelinePrice:
    """A step as a pipeline, and what it costs."""

    stages: Stages
    split: StageDims
    cost: Cost
    bubble: float
    """The share of the step in which a stage is idle, on average."""
    seconds: tuple[float, ...]
    """Of each stage's operations, in one call."""
    more_bytes: int
    """Bytes that a device needs more than for all layers on one stage, one micro-batch at a time."""


def price_pipeline(graph: Graph, layout: Layout, models: Search, cost: Cost) -> PipelinePrice:
    """The price of ``graph`` as the pipeline that its program asks for, where each stage runs by ``layout``.

    Args:
      models: that price layouts of ``graph``.
      cost: of ``layout`` over one stage's devices, where they run all layers.

    Raises:
      PipelineError: the step has no chain of layers, or one that does not fit the stages; or it says itself how
        something in the loop lies over the stages.
      ScheduleError: the schedule is wrong.
    """
    program, request = graph.program, graph.program.pipeline
    assert request is not None
    chain = find_chain(program.jaxpr, program.name, program.rules)
    schedule = _schedule(request, chain, program.name)
    split = StageDims(graph, chain, request)
    _check_maps(graph)
    seconds = _Seconds.of(graph, layout, models, chain, split, schedule)
    stages = Stages(request.axis, schedule, _balanced(chain.layers, schedule, seconds))
    tables = tick_tables(schedule)
    ticks = [[seconds.of_slot(stages, s, slot) for s, slot in enumerate(row)] for row in schedule.table]
    busy = tuple(map(sum, zip(*ticks, strict=True)))
    sending = _sending(graph, layout, models, chain, tables)
    each = [collective_seconds(COLLECTIVE_PERMUTE, (request.axis,), size, request.mesh) for size in sending]
    alone, loop = (seconds_of_ticks(tables, ticks, t) for t in ([0.0] * len(each), each))
    transfers = _transfers(graph, layout, models, chain, tables, request, sending)
    summed = sum(
        collective_seconds(c.kind, c.axes or (), c.bytes, request.mesh) for c in transfers if c.kind == ALL_REDUCE
    )
    total = seconds.outside + loop + summed
    inside = tuple(_rescaled(cost.collectives, chain, max(stages.layers) * schedule.chunks))
    return PipelinePrice(
        stages,
        split,
        Cost(total, seconds.compute_share * (seconds.outside + alone), (*inside, *transfers)),
        sum(alone - b for b in busy) / (schedule.stages * total) if total else 0.0,
        busy,
        _more_bytes(layout, models, graph, chain, split, stages, tables),
    )


def _schedule(request: PipelineRequest, chain: Chain, name: str) -> Schedule:
    """The schedule by which the chain of the step ``name`` runs.

    Raises:
      PipelineError: it does not fit the stages, the layers or the micro-batches.
      ScheduleError: the user's own is wrong.
    """
    stages, microbatches = request.stages, chain.groups.length
    if isinstance(request.schedule, Schedule):
        schedule = request.schedule
        schedule.check()
    else:
        schedule = Schedule.named(request.schedule or "1f1b", stages=stages, microbatches=microbatches)
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise PipelineError(
            f"{name}: the schedule is of {schedule.stages} stages and {schedule.microbatches} micro-batches, the mesh "
            f"axis {request.axis!r} has {stages} and the step {microbatches}"
        )
    parts = stages * schedule.chunks
    if parts > chain.layers:
        raise PipelineError(
            f"{name}: {stages} stages of {schedule.chunks} chunks need {parts} layers, and the chain at "
            f"{jx.source(chain.forward)} has {chain.layers}: give the axis {request.axis!r} {chain.layers} devices or "
            "fewer, or take a schedule with fewer chunks"
        )
    return schedule


def _check_maps(graph: Graph) -> None:
    """Raises `PipelineError` where the step has a `jax.shard_map` of the user's."""
    for e in jx.walk(graph.program.jaxpr):
        if jx.is_shard_map(e):
            raise PipelineError(f"{jx.source(e)}: a step with a jax.shard_map of its own does not run as a pipeline")


@dataclass(frozen=True)
class _Seconds:
    """Seconds on one stage's devices: of a layer and of what is around the layers, for one micro-batch."""

    forward: float
    backward: float
    """Where it is split, of its first part."""
    weights: float
    """Of its second part."""
    before: float
    last: float
    first: float
    outside: float
    """Of a call, outside of the loop."""
    compute_share: float

    @classmethod
    def of(
        cls, graph: Graph, layout: Layout, models: Search, chain: Chain, split: StageDims, schedule: Schedule
    ) -> _Seconds:
        region = dict(_regions(graph, chain))
        if schedule.splits_backward:
            late = split_backward(chain.backward).of_weights.eqns
            made = (v for e in late for v in (*e.outvars, *(u for r in jx.regions(e) for u in _defined(r.body))))
            region |= {graph.ids[v]: "weights" for v in made if v in graph.ids}
        found, compute, everything = defaultdict[str, float](float), 0.0, 0.0
        for charge in models.cost_model.charges(layout):
            seconds = charge.compute + sum(t.seconds for t in charge.transfers)
            node = graph.nodes[charge.node] if charge.node < len(graph.nodes) else None
            results = () if node is None else node.results
            where = next((region[v] for v in results if v in region), "outside")
            share = min((split.share(v) for v in results), default=1.0) if where == "outside" else 1.0
            found[where] += seconds * share
            compute, everything = compute + charge.compute, everything + seconds
        count = chain.groups.length
        return cls(
            found["forward"] / count / chain.layers,
            found["backward"] / count / chain.layers,
            found["weights"] / count / chain.layers,
            found["before"] / count,
            found["last"] / count,
            found["first"] / count,
            found["outside"],
            compute / everything if everything else 1.0,
        )

    def of_part(self, operation: Operation, part: int, layers: int, parts: int) -> float:
        """Of one operation of a part of the model, for a micro-batch."""
        if operation is Operation.FORWARD:
            return layers * self.forward + self.before * (part == 0)
        if operation is Operation.WEIGHT_GRADIENT:
            return layers * self.weights
        return layers * self.backward + self.last * (part == parts - 1) + self.first * (part == 0)

    def of_slot(self, stages: Stages, stage: int, slot: object) -> float:
        """Of what a stage runs at a tick; 0 where it is idle."""
        if slot is None:
            return 0.0
        operation, chunk, _ = slot  # pyright: ignore[reportGeneralTypeIssues]
        part = stages.schedule.placement[chunk][stage]
        return self.of_part(operation, part, stages.layers[part], len(stages.layers))


def _regions(graph: Graph, chain: Chain) -> Iterator[tuple[int, str]]:
    """The values made in the loop, each with where it is: in the chain's scans, or around them at which stage."""
    for eqn in chain.body.eqns:
        where = "forward" if eqn is chain.forward else "backward" if eqn is chain.backward else ""
        if not where:
            places = chain.where(eqn.outvars[0]) if eqn.outvars and eqn.outvars[0] in chain.places else frozenset()
            where = next(iter(sorted(places)), "outside" if chain.invariant.issuperset(eqn.outvars) else "before")
        made = [*eqn.outvars, *(v for r in jx.regions(eqn) for v in _defined(r.body))]
        yield from ((graph.ids[v], where) for v in made if v in graph.ids)


def _defined(jaxpr: jx.Jaxpr) -> Iterator[jx.Var]:
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for r in jx.regions(eqn):
            yield from _defined(r.body)


def _balanced(layers: int, schedule: Schedule, seconds: _Seconds) -> tuple[int, ...]:
    """Layers of each part: as many of each where they divide; else those left over go to the parts that have least to
    do beside them."""
    parts = schedule.stages * schedule.chunks
    found = [layers // parts] * parts
    extra = [
        sum(seconds.of_part(operation, p, 0, parts) for operation in (Operation.FORWARD, Operation.BACKWARD))
        for p in range(parts)
    ]
    for p in sorted(range(parts), key=lambda p: (extra[p], p))[: layers % parts]:
        found[p] += 1
    return tuple(found)


def _sending(graph: Graph, layout: Layout, models: Search, chain: Chain, tables: TickTables) -> list[int]:
    """Of each route, activations before gradients, the bytes that a device sends."""
    sides = (chain.forward, tables.activations), (chain.backward, tables.gradients)
    return [
        _bytes_of(graph, layout, models, eqn.outvars[: scan_groups(eqn).carry]) for eqn, routes in sides for _ in routes
    ]


def _transfers(
    graph: Graph,
    layout: Layout,
    models: Search,
    chain: Chain,
    tables: TickTables,
    request: PipelineRequest,
    sending: Sequence[int],
) -> tuple[Collective, ...]:
    """What stages send: after ticks the activations and gradients, after the loop the sums that only one stage has."""
    axes, line, found = (request.axis,), jx.source(chain.forward), list[Collective]()
    for number, exchange in enumerate(tables.exchanges):
        taken = float((tables.exchange == number).mean())
        found += [
            Collective(COLLECTIVE_PERMUTE, axes, size, len(tables.ticks), line, taken=taken)
            for size, pairs in zip(sending, exchange, strict=True)
            if pairs and size
        ]
    plain = [i for i, a in chain.sums.items() if not (isinstance(a, jx.Var) and a in chain.per_layer)]
    summed = _bytes_of(graph, layout, models, [chain.loop.outvars[i] for i in plain])
    if summed and request.mesh.shape[request.axis] > 1:
        found.append(Collective(ALL_REDUCE, axes, summed, 1, line))
    return tuple(found)


def _bytes_of(graph: Graph, layout: Layout, models: Search, variables: Sequence[jx.Var]) -> int:
    """Bytes per device."""
    values = [graph.ids[v] for v in variables if v in graph.ids]
    return sum(models.memory_model.size(v, layout.specs[v]) for v in values)


def _rescaled(collectives: Sequence[Collective], chain: Chain, rows: int) -> Iterator[Collective]:
    """The collectives of one stage: those of the layers run only for its own."""
    each = chain.groups.length * chain.layers
    for c in collectives:
        yield replace(c, count=c.count // chain.layers * rows) if c.count and c.count % each == 0 else c


def _more_bytes(
    layout: Layout,
    models: Search,
    graph: Graph,
    chain: Chain,
    split: StageDims,
    stages: Stages,
    tables: TickTables,
) -> int:
    """Bytes that a device needs more than for all layers on one stage, one micro-batch at a time: less state and fewer
    gradients, but residuals of several micro-batches, of its own layers, and what it received."""
    size = models.memory_model.size

    def bytes_of(v: int) -> int:
        return size(v, layout.specs[v]) if v else 0

    state = {*graph.inputs, *(graph.ids[v] for v in chain.loop.outvars if v in graph.ids)} - {0}
    saved = sum(bytes_of(v) * (1 - split.share(v)) for v in state)
    groups = scan_groups(chain.backward)
    kept = {
        a for a in chain.backward.invars[groups.consts + groups.carry :] if isinstance(a, jx.Var) and chain.where(a)
    }
    residuals = sum(bytes_of(graph.ids[v]) for v in kept)
    rows = max(stages.layers) * tables.slots[2] / chain.layers
    carries = [
        (e.outvars[: scan_groups(e).carry], count)
        for e, counts in ((chain.forward, (tables.slots[0], tables.slots[4])), (chain.backward, (tables.slots[1],)))
        for count in counts
    ]
    rings = sum(bytes_of(graph.ids[v]) * count for variables, count in carries for v in variables)
    between = 0.0
    if stages.schedule.splits_backward:
        inner = split_backward(chain.backward).kept
        between = sum(bytes_of(graph.ids[v]) for v in inner) * max(stages.layers) * tables.slots[3]
    return round(residuals * (rows - 1) + rings + between - saved)
