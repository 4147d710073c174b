"""The price of a step as a pipeline, from that of its loop on one stage's devices.

Each stage runs its ticks one after the other; those between which something goes wait for each other. A device has the
state and the gradients of its own layers, and residuals of several micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard import jaxpr as jx
from autoshard.cost.cost import Cost
from autoshard.errors import PipelineError
from autoshard.ir.graph import Graph
from autoshard.ir.program import PipelineRequest
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVE_PERMUTE,
    Collective,
    collective_seconds,
)
from autoshard.machine.mesh import LogicalMesh
from autoshard.pipelining.chain import Chain, find_chain, scan_groups
from autoshard.pipelining.exchange import seconds_of_ticks
from autoshard.pipelining.stage_dims import StageDims, finest_split, stacked_weights
from autoshard.pipelining.stage_memory import StageBytes, StageMemory
from autoshard.pipelining.stage_seconds import StageSeconds
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.sums_of_parts import additions, sum_after
from autoshard.pipelining.tick_tables import TickTables, tick_tables
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation
from autoshard.search.candidates import Candidate, Search

NAMED = ("gpipe", "1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-v")
"""The schedules that are compared where the user names none, beside those that hold more for a shorter bubble."""


@dataclass(frozen=True)
class PipelinePrice:
    """A step as a pipeline, and what it costs."""

    stages: Stages
    split: StageDims
    cost: Cost
    bubble: float
    """The share of the step in which a stage is idle, on average."""
    ideal_bubble: float
    """The same of the schedule alone: stages of equal parts that send in no time, and nothing outside of the loop."""
    seconds: tuple[float, ...]
    """Of each stage's operations, in one call."""
    memory: StageBytes
    name: str
    """Of the schedule; empty of the user's own."""


def price_pipeline(
    graph: Graph, best: Candidate, models: Search, budget: float = math.inf
) -> tuple[PipelinePrice, ...]:
    """The prices of ``graph`` as the pipeline that its program asks for, where each stage runs by the layout of
    ``best``: the fastest schedule that needs ``budget`` bytes per device at most first, or else the smallest.

    Args:
      models: that price layouts of ``graph``.

    Raises:
      PipelineError: the step has no chain of layers, or one that does not fit the stages; or it says itself how
        something in the loop is split over the stages.
      ScheduleError: the schedule is wrong.
    """
    program, request = graph.program, graph.program.pipeline
    assert request is not None
    chain = find_chain(program.jaxpr, program.name, program.rules)
    schedules = _schedules(request, chain, program.name)
    split, layout = StageDims(graph, chain, request), best.layout
    memory = StageMemory(graph, best, models.memory_model, chain, split)
    _check_maps(graph)
    seconds = {
        splits: StageSeconds.of(graph, layout, models, chain, split, splits=splits)
        for splits in {schedule.splits_backward for schedule in schedules.values()}
    }
    around = _around(graph, layout, models, chain, split)
    priced = [
        _price(graph, layout, models, chain, memory, own, around, name, stages)
        for name, schedule in schedules.items()
        for own in (seconds[schedule.splits_backward],)
        for layers in _cuts(chain.layers, schedule, own)
        for stages in (Stages(request.axis, schedule, layers, split.stored, turned=chain.turned),)
    ]
    return tuple(sorted(priced, key=lambda p: (max(p.memory.peak - budget, 0), p.cost.seconds, p.memory.peak)))


def _price(
    graph: Graph,
    layout: Layout,
    models: Search,
    chain: Chain,
    memory: StageMemory,
    seconds: StageSeconds,
    around: _Around,
    name: str,
    stages: Stages,
) -> PipelinePrice:
    request, schedule, split = graph.program.pipeline, stages.schedule, memory.split
    assert request is not None
    tables, runs = tick_tables(schedule), schedule.microbatches * schedule.chunks
    forwards, backwards = (
        [] if e is None else _made_whole(graph, layout, models, e.outvars[: scan_groups(e).carry], runs, jx.source(e))
        for e in (chain.forward, chain.backward)
    )
    received = {o: forwards if o is Operation.FORWARD else backwards for o in Operation}
    received[Operation.WEIGHT_GRADIENT] = []
    whole = {o: sum(_seconds_of(c, request.mesh) for c in found) for o, found in received.items()}
    ticks = [
        [seconds.of_slot(stages, s, slot) + (whole[slot.operation] if slot else 0.0) for s, slot in enumerate(row)]
        for row in schedule.table
    ]
    busy = tuple(map(sum, zip(*ticks, strict=True)))
    sending = _sending(graph, layout, models, chain, tables)
    each = [collective_seconds(COLLECTIVE_PERMUTE, (request.axis,), size, request.mesh) for size in sending]
    alone, loop = (seconds_of_ticks(tables, ticks, t) for t in ([0.0] * len(each), each))
    once = (*around.sums, *_rows_sent(around, stages, request.axis, jx.source(chain.forward)))
    total = seconds.outside + loop
    total += sum(_seconds_of(c, request.mesh) * c.count for c in once)
    rows = max(stages.layers) * schedule.chunks
    inside = (*seconds.collectives, *(replace(c, count=c.count * rows) for c in seconds.of_each_layer))
    sent = tuple(_sent(tables, sending, request.axis, jx.source(chain.forward)))
    return PipelinePrice(
        stages,
        split,
        Cost(
            total,
            seconds.compute_share * (seconds.outside + alone),
            (*inside, *sent, *forwards, *backwards, *once),
        ),
        sum(alone - b for b in busy) / (schedule.stages * total) if total else 0.0,
        schedule.bubble(seconds.of_layers()),
        busy,
        memory.of(stages, tables),
        name,
    )


def _schedules(request: PipelineRequest, chain: Chain, name: str) -> dict[str, Schedule]:
    """The schedules by which the chain of the step ``name`` can run: the one that the user gives, or those published
    that have no more parts than there are layers; of a chain without a backward their forwards, each order once.

    Raises:
      PipelineError: it does not fit the stages, the layers or the micro-batches.
      ScheduleError: the user's own is wrong.
    """
    stages, microbatches, given = request.stages, chain.groups.length, request.schedule
    if isinstance(given, Schedule):
        given.check()
        found = {"": given}
    else:
        more = {f"zb:{n}" for n in (stages * 3 // 2, 2 * stages - 1) if stages < n <= microbatches}
        names = (*NAMED, *sorted(more)) if given is None else (given,)
        found = {n: Schedule.named(n, stages=stages, microbatches=microbatches) for n in names}
    if chain.backward is None:
        forwards = {schedule.forward_only(): n for n, schedule in reversed(found.items())}
        found = {n: schedule for schedule, n in reversed(forwards.items())}
    first = next(iter(found.values()))
    if (first.stages, first.microbatches) != (stages, microbatches):
        raise PipelineError(
            f"{name}: the schedule is of {first.stages} stages and {first.microbatches} micro-batches, the mesh "
            f"axis {request.axis!r} has {stages} devices and the step {microbatches} micro-batches: make the schedule "
            f"for these, as Schedule.named(..., stages={stages}, microbatches={microbatches})"
        )
    if chain.backward is not None and not first.has_backward:
        raise PipelineError(
            f"{name}: the schedule has no backwards, and the chain at {jx.source(chain.forward)} has one"
        )
    fitting = {n: s for n, s in found.items() if stages * s.chunks <= chain.layers}
    if not fitting:
        chunks, layers = first.chunks, chain.layers
        remedies = (
            [f"give the axis {request.axis!r} {layers // chunks} devices or fewer"] if layers >= 2 * chunks else []
        )
        if chunks > 1 and layers >= stages:
            remedies.append(f"take a schedule of {layers // stages} chunks a stage or fewer")
        of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
        raise PipelineError(
            f"{name}: {stages} stages{of_chunks} need {stages * chunks} layers, and the chain at "
            f"{jx.source(chain.forward)} has {layers}: {', or '.join(remedies) or 'take a schedule of fewer chunks'}"
        )
    return fitting


def _check_maps(graph: Graph) -> None:
    """Raises `PipelineError` where the step has a `jax.shard_map` of the user's."""
    for e in jx.walk(graph.program.jaxpr):
        if jx.is_shard_map(e):
            raise PipelineError(f"{jx.source(e)}: a step with a jax.shard_map of its own does not run as a pipeline")


def _cuts(layers: int, schedule: Schedule, seconds: StageSeconds) -> set[tuple[int, ...]]:
    """Layers of each part: as many of each, where they divide, so that weights stay where they are kept; and so many
    that stages take as long as others, with what some run beside layers."""
    stages, parts = schedule.stages, schedule.stages * schedule.chunks
    operations = [Operation.FORWARD] + [Operation.BACKWARD] * schedule.has_backward
    operations += [Operation.WEIGHT_GRADIENT] * schedule.splits_backward
    each = sum(seconds.of_layers()[operation] for operation in operations)
    found, loads = [1] * parts, [0.0] * stages
    for row in schedule.placement:
        for stage, part in enumerate(row):
            loads[stage] += each + sum(seconds.of_part(operation, part, 0, parts) for operation in operations)
    for _ in range(layers - parts):
        stage = min(range(stages), key=lambda s: (loads[s], s))
        found[min((row[stage] for row in schedule.placement), key=lambda part: (found[part], part))] += 1
        loads[stage] += each
    even = {(layers // parts,) * parts} if layers % parts == 0 else set[tuple[int, ...]]()
    return {tuple(found), *even}


def _sending(graph: Graph, layout: Layout, models: Search, chain: Chain, tables: TickTables) -> list[int]:
    """Of each route, activations before gradients, the bytes that a device sends."""
    sides = (chain.forward, tables.activations), (chain.backward, tables.gradients)
    carried = [(eqn.outvars[: scan_groups(eqn).carry], routes) for eqn, routes in sides if eqn is not None]
    return [_bytes_of(graph, layout, models, values, sent=True) for values, routes in carried for _ in routes]


def _sent(tables: TickTables, sending: Sequence[int], axis: str, line: str) -> Iterator[Collective]:
    """What stages send after ticks."""
    for number, exchange in enumerate(tables.exchanges):
        count = int((tables.exchange == number).sum())
        for size, pairs in zip(sending, exchange, strict=True):
            if pairs and size:
                yield Collective(COLLECTIVE_PERMUTE, (axis,), size, count, line)


class _Around(NamedTuple):
    """What stages send before and after the loop."""

    sums: tuple[Collective, ...]
    """Sums and stacked results that only one stage has, or that several have terms of."""
    weights: tuple[int, ...]
    """Bytes per device of those with a row for each layer, of all layers."""
    layer_sums: tuple[int, ...]
    """Of sums with a row for each layer."""


def _around(graph: Graph, layout: Layout, models: Search, chain: Chain, split: StageDims) -> _Around:
    line, axis, mesh = jx.source(chain.forward), split.axis, split.mesh
    layered = {i for i, a in chain.sums.items() if isinstance(a, jx.Var) and a in chain.per_layer}
    begin, outs = chain.groups.carry, chain.body.outvars[chain.groups.carry :]
    added = additions(graph.program.jaxpr, chain)
    plain = [sum_after(chain, added, i) for i in chain.sums if i not in layered]
    stacked = [v for v, out in zip(chain.loop.outvars[begin:], outs, strict=True) if chain.where(out)]

    def sizes(variables: Sequence[jx.Var], *, sent: bool = False) -> tuple[int, ...]:
        found = (_bytes_of(graph, layout, models, [v], sent=sent) for v in variables)
        return tuple(size for size in found if size and mesh.shape[axis] > 1)

    return _Around(
        (
            *(Collective(ALL_REDUCE, (axis,), size, 1, line) for size in (*sizes(plain, sent=True), *sizes(stacked))),
            *_made_whole(graph, layout, models, plain, 1, line),
        ),
        sizes(stacked_weights(chain)),
        sizes([sum_after(chain, added, i) for i in layered]),
    )


def _rows_sent(around: _Around, stages: Stages, axis: str, line: str) -> Iterator[Collective]:
    """Rows of layers that a stage runs and does not store; where all stages store all, those of sums."""
    layers = sum(stages.layers)
    if not stages.splits_layers:
        rows = stages.places.size * stages.rows.shape[1]
        yield from (Collective(ALL_GATHER, (axis,), size * rows // layers, 1, line) for size in around.layer_sums)
    elif stages.moves_layers:
        for sizes, moves in ((around.weights, stages.before), (around.layer_sums, stages.after)):
            for size, sent in itertools.product(sizes, moves.rounds):
                yield Collective(COLLECTIVE_PERMUTE, (axis,), size * sent.rows.shape[1] // layers, 1, line)


def _made_whole(
    graph: Graph, layout: Layout, models: Search, variables: Sequence[jx.Var], count: int, line: str
) -> list[Collective]:
    """Gathers of what was sent split more finely than the layout has it."""
    found, sizes = list[Collective](), graph.program.mesh.shape
    for v in (graph.ids[v] for v in variables if v in graph.ids):
        value, spec = graph.values[v], layout.specs[v]
        finest = finest_split(value.shape, spec.dims, sizes)
        for fine, axes in zip(finest, spec.dims, strict=True):
            if fine != axes:
                size = models.memory_model.size(v, spec)
                found.append(Collective(ALL_GATHER, fine[len(axes) :], size, count, line))
    return found


def _seconds_of(c: Collective, mesh: LogicalMesh) -> float:
    """Of one run."""
    return collective_seconds(c.kind, c.axes or (), c.bytes, mesh)


def _bytes_of(graph: Graph, layout: Layout, models: Search, variables: Sequence[jx.Var], *, sent: bool = False) -> int:
    """Bytes per device; of scalars too, which take no memory.

    Args:
      sent: split as finely as they can be.
    """
    values = [graph.ids[v] for v in variables if v in graph.ids]
    sizes, found = graph.program.mesh.shape, 0
    for v in values:
        shape, spec = graph.values[v].shape, layout.specs[v]
        spec = Spec(tuple(finest_split(shape, spec.dims, sizes))) if sent else spec
        found += models.memory_model.size(v, spec) if shape else graph.values[v].bits // 8
    return found
