"""What is asked of planning, and the record of the candidate that won the search."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cost.compiler_options import effective_options, pipeline_options
from autoshard.cost.memory import Memory, MemoryModel
from autoshard.cost.profile_step import profile_step
from autoshard.ir.dim_classes import DimClass
from autoshard.ir.graph import BACKWARD, Diagnostic, Graph, Node
from autoshard.ir.program import Leaf, Program, aval_text
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec, replicated
from autoshard.jaxpr import dtype_name, source
from autoshard.pipelining.price import PipelinePrice, price_pipeline
from autoshard.plan.constraints import gathers_ahead, islands, reshard_waypoints, sharding_constraints
from autoshard.plan.decisions import (
    Alternative,
    BatchDim,
    Constraint,
    DimSplit,
    HeldValue,
    PipelinePlan,
    Place,
    PlaceReason,
)
from autoshard.plan.record import PlanRecord
from autoshard.search.candidates import Candidate, Search
from autoshard.search.solved_layouts import most_common
from autoshard.search.strategies import batch_remarks
from autoshard.transforms.held_values.names import ResidualGroup, residual_groups
from autoshard.transforms.pipeline import PassReport

MAX_ALTERNATIVES = 8
"""Most layouts that a plan names beside its own."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked of planning."""

    strategy: str = "auto"
    memory_budget: float | None = None
    """Bytes per device."""
    strict: bool = False
    passes: tuple[PassReport, ...] = ()
    """The passes that ran on the program, and what each changed."""
    compiler_options: tuple[tuple[str, Any], ...] = ()


def budget_of(request: PlanRequest, program: Program) -> float:
    """Bytes per device that a plan may use."""
    return request.memory_budget if request.memory_budget is not None else program.mesh.hardware.memory


def plan_from_candidate(graph: Graph, best: Candidate, s: Search, request: PlanRequest) -> PlanRecord:
    """The plan that candidate ``best`` of the search ``s`` amounts to."""
    program, layout = graph.program, best.layout
    inputs = tuple(_place(leaf, v, graph, layout) for leaf, v in zip(program.inputs, graph.inputs, strict=True))
    replaced = {o: inputs[i] for i, o in program.carries}
    outputs = tuple(
        _place(leaf, v, graph, layout, replaced.get(o))
        for o, (leaf, v) in enumerate(zip(program.outputs, graph.outputs, strict=True))
    )
    dim_splits = tuple(
        DimSplit(c.name, c.size, _split_axes(c, layout, axes))
        for c, axes in zip(s.classes, best.choice.class_axes, strict=True)
    )
    constraints = sharding_constraints(graph, layout, s.cost_model, [p.spec for p in outputs])
    room = min(budget_of(request, program), program.mesh.hardware.remat_threshold) - best.memory.peak
    constraints, taken = gathers_ahead(constraints, graph, s.memory_model, room)
    ahead: dict[tuple[int, Spec | None], bool] = {(c.value, c.spec): bool(c.waypoints) for c in constraints if c.ahead}
    memory = replace(best.memory, temporaries=best.memory.temporaries + taken, peak=best.memory.peak + taken)
    return PlanRecord(
        name=program.name,
        mesh=program.mesh,
        strategy=request.strategy,
        inputs=inputs,
        outputs=outputs,
        intermediates=constraints,
        islands=islands(graph, layout, s.cost_model),
        cost=s.cost_model.cost(layout, ahead) if ahead else best.cost,
        memory=memory,
        fingerprint=fingerprint(graph),
        dim_splits=dim_splits,
        batch=tuple(_batch_dims(s)),
        storage_axes=best.choice.storage_axes,
        zero_stage=best.choice.zero_stage,
        alternatives=_alternatives(best, s),
        diagnostics=(*graph.diagnostics, *_conflicts(graph, layout), *batch_remarks(s, request.strategy)),
        passes=request.passes,
        memory_budget=s.budget if math.isfinite(s.budget) else None,
        considered=len(s.tried),
        bound=s.bound,
        compiler_options=effective_options(
            graph,
            best.memory.peak,
            best.cost.collectives,
            best.all_gather_fusion_disabled,
            request.compiler_options,
            best.memory.host,
        ),
        residuals=tuple(_held_values(graph, layout, s.memory_model)),
        profile=profile_step(s.memory_model, layout, all_gather_fusion_disabled=best.all_gather_fusion_disabled),
        in_tree=program.in_tree,
        out_tree=program.out_tree,
    )


def pipelined_plan(record: PlanRecord, graph: Graph, best: Candidate, s: Search, budget: float) -> PlanRecord:
    """``record``, the plan of candidate ``best`` over one stage's devices, as that of a pipeline over the whole mesh.

    What has a row for each layer (stacked weights, their gradients and optimizer state) is split over the stages too;
    all else is whole on every stage. Where the schedule is open it is the fastest within ``budget``, in bytes per
    device.

    Raises:
      PipelineError, ScheduleError: as `price_pipeline`.
    """
    program = graph.program
    priced, *others = price_pipeline(graph, best, s, budget)
    split, stages = priced.split, priced.stages
    over_stages = functools.partial(split.spec, moved=stages.moves_layers)

    def staged_place(place: Place, leaf: Leaf, value: int) -> Place:
        return place if leaf.pin is not None else replace(place, spec=over_stages(place.spec, value))

    inputs = tuple(map(staged_place, record.inputs, program.inputs, graph.inputs))
    outputs = [*map(staged_place, record.outputs, program.outputs, graph.outputs)]
    for i, o in program.carries:
        if program.outputs[o].pin is None:
            outputs[o] = replace(outputs[o], spec=inputs[i].spec)

    def staged(c: Constraint) -> Constraint:
        before = None if c.resharded_from is None else over_stages(c.resharded_from, c.value)
        after, through = over_stages(c.spec, c.value), tuple(over_stages(spec, c.value) for spec in c.waypoints)
        if before and c.resharded_from and not split.splits_as_planned(c.resharded_from, c.spec, c.value):
            through = reshard_waypoints(before, after, graph.values[c.value], split.mesh)
        return replace(c, spec=after, waypoints=through, resharded_from=before)

    peak, count = priced.memory.peak, stages.schedule.stages
    return replace(
        record,
        mesh=split.mesh,
        inputs=inputs,
        outputs=tuple(outputs),
        intermediates=tuple(map(staged, record.intermediates)),
        cost=priced.cost,
        memory=_staged_memory(record.memory, priced, best.layout, s.memory_model, peak),
        bound=0.0,
        compiler_options=pipeline_options(record.compiler_options, split.mesh),
        profile=None,
        alternatives=tuple(
            Alternative(_described(p), p.cost.seconds, p.memory.peak) for p in others[:MAX_ALTERNATIVES]
        ),
        pipeline=PipelinePlan(
            stages.axis,
            count,
            stages.schedule.microbatches,
            priced.name,
            stages.schedule,
            stages.layers,
            stages.stored,
            priced.bubble,
            priced.ideal_bubble,
            priced.seconds,
            (peak,) * count,
            record.profile,
        ),
    )


def _staged_memory(whole: Memory, priced: PipelinePrice, layout: Layout, model: MemoryModel, peak: int) -> Memory:
    """``whole``, the memory of all layers on one stage, as that of a stage, which takes ``peak``."""

    def staged(values: Iterable[int]) -> int:
        return round(sum(model.size(v, layout.specs[v]) * priced.split.share(v) for v in values))

    def arguments(positions: Iterable[int]) -> int:
        return staged(model.graph.inputs[i] for i in positions)

    parameters, optimizer, inputs = map(arguments, (model.roles.parameters, model.roles.optimizer, model.roles.batch))
    gradients = staged(map(int, model.live_ranges.gradients))
    residuals = priced.memory.residuals
    temporaries = max(0, peak - parameters - optimizer - inputs - residuals)
    return Memory(parameters, optimizer, inputs, gradients, residuals, temporaries, peak, whole.host)


def _described(priced: PipelinePrice) -> str:
    layers = priced.stages.layers
    cut = f"{layers[0]} layers" if len(set(layers)) == 1 else f"{'+'.join(map(str, layers))} layers"
    return f"the schedule {priced.name or 'given'} of parts of {cut}"


def fingerprint(graph: Graph) -> str:
    """A digest of the program's operations, shapes, argument paths and mesh axes; not of its source lines."""
    digest = hashlib.sha256()
    program = graph.program
    digest.update(repr((sorted(program.mesh.shape.items()), program.mesh.axis_names, program.carries)).encode())
    for leaf in (*program.inputs, *program.outputs):
        digest.update(f"{leaf.path} {aval_text(leaf.aval)} {leaf.donated}\n".encode())
    kinds: dict[int, str] = {}
    lines: list[str] = []
    for n in graph.nodes:
        text = kinds.get(id(n.kind)) or kinds.setdefault(
            id(n.kind), f"{n.kind.op} {n.kind.rule} {n.kind.shapes} {n.kind.bits}"
        )
        lines.append(f"{text} {n.operands} {n.results} {n.trip_count}\n")
    digest.update("".join(lines).encode())
    return digest.hexdigest()[:32]


def _place(leaf: Leaf, v: int, graph: Graph, layout: Layout, replaced: Place | None = None) -> Place:
    """The record of an argument, or of a result that replaces the argument ``replaced``; ``v`` is its value, or 0."""
    rank = len(leaf.aval.shape)
    spec, (reason, sources) = layout.specs[v] if v else replicated(rank), _reason(v, rank, graph, layout)
    if leaf.pin is not None:
        spec, reason, sources = leaf.whole_pin or leaf.pin, "placed" if leaf.placed else "pinned", ()
    elif replaced is not None:
        spec, reason, sources = replaced.spec, "replaces", ()
    path = replaced.path if replaced is not None else None
    dtype = dtype_name(leaf.aval.dtype)
    stored, kind = leaf.stored_shape, leaf.memory_kind
    return Place(leaf.path, leaf.shape, dtype, spec, reason, sources, leaf.donated, path, kind, leaf.offloaded, stored)


def _reason(v: int, rank: int, graph: Graph, layout: Layout) -> tuple[PlaceReason, tuple[str, ...]]:
    """What decided the splits of a value, and the equations that they were propagated from."""
    origins = [layout.origins[v, d] for d in range(rank) if (v, d) in layout.origins]
    nodes = [graph.nodes[n] for n in origins if isinstance(n, int)]
    sources = tuple(dict.fromkeys(f"{n.kind.op} at {n.source}" if n.source else n.kind.op for n in nodes))
    decided: tuple[PlaceReason, ...] = ("pinned", "loading", "returned", "solved", "chosen")
    for reason in decided:
        if reason in origins:
            return reason, sources
    return "propagated" if nodes else "replicated", sources


def _batch_dims(s: Search) -> Iterator[BatchDim]:
    """What of the arguments is the batch, in their order."""
    paths = dict(zip(s.graph.inputs, (leaf.path for leaf in s.graph.program.inputs), strict=True))
    found = {m for c in s.classes if c.is_batch for m in c.inputs}
    return (BatchDim(path, d) for v, path in paths.items() for u, d in sorted(found) if u == v)


def _split_axes(c: DimClass, layout: Layout, chosen: Axes) -> Axes:
    """The axes that split a class: those chosen, or, where pins or propagation decided, those most arguments have."""
    have = [layout.specs[v].dims[d] for v, d in c.inputs]
    return chosen if not have or chosen in have else most_common(have)


def _alternatives(best: Candidate, s: Search) -> tuple[Alternative, ...]:
    """The best other candidates, one for each distinct cost: those that fit first. A faster one that does not fit comes
    before all."""
    fastest = min(s.tried.values(), key=lambda c: c.cost.seconds)
    order = sorted(s.tried.values(), key=s.key)
    seen = {(best.cost.seconds, best.memory.peak)}
    rows: list[Alternative] = []
    for c in [fastest, *order] if fastest.cost.seconds < best.cost.seconds else order:
        key = (c.cost.seconds, c.memory.peak)
        if key not in seen and len(rows) < MAX_ALTERNATIVES:
            seen.add(key)
            rows.append(Alternative(describe_choice(c, s), c.cost.seconds, c.memory.peak))
    return tuple(rows)


def describe_choice(c: Candidate, s: Search) -> str:
    """A choice as text: ``batch over data; w1.1 over model; state sharded over data``."""
    split = zip((k.name for k in s.classes), c.choice.class_axes, strict=True)
    words = describe_splits(split, c.choice.zero_stage, c.choice.storage_axes)
    words += ["gathered before loops"] if c.choice.before_loops else []
    words += [f"{s.graph.program.inputs[i].path} as {spec}" for i, spec in dict(c.choice.argument_specs).items()]
    return "; ".join(words) or "nothing split"


def describe_splits(splits: Iterable[tuple[str, Axes]], zero_stage: int, storage_axes: Axes) -> list[str]:
    """Names with the axes that split each, and what of the state is sharded in storage, one text each."""
    words = [f"{name} over {'+'.join(axes)}" for name, axes in splits if axes]
    if zero_stage:
        words.append(f"{'state' if zero_stage == 3 else 'optimizer state'} sharded over {'+'.join(storage_axes)}")
    return words


DEVICE, HOST = "device", "host"
"""The memories in which a value waits for the backward part."""


def _held_values(graph: Graph, layout: Layout, model: MemoryModel) -> Iterator[HeldValue]:
    """The values of ``graph``'s program that may be held, in order of first execution, priced under ``layout``."""
    maker = {v: i for i, node in enumerate(graph.nodes) if not node.tie for v in node.results}
    return (_held_value(g, graph, layout, model, maker) for g in residual_groups(graph.program))


def _held_value(
    group: ResidualGroup, graph: Graph, layout: Layout, model: MemoryModel, maker: dict[int, int]
) -> HeldValue:
    held, host, size, seconds = 0, 0, 0, 0.0
    for member in group.members:
        made = [graph.ids[v] for v in member.eqn.outvars if v in graph.ids]
        ways = [_way_backward(graph, v) for v in made]
        if HOST in ways:
            host += member.layers
        elif any(ways):
            held += member.layers
        size = max(size, sum(model.size(v, layout.specs[v]) for v in made))
        nodes = {maker[v] for v in made if v in maker}
        seconds = max(seconds, sum(model.cost_model.node_cost(n, layout).seconds for n in nodes))
    again, at = min(group.again, group.layers), source(group.members[0].eqn)
    return HeldValue(group.name, at, group.layers, min(held, group.layers - again), host, again, size, seconds)


def _way_backward(graph: Graph, v: int) -> str:
    """In whose memory value ``v``, or a view of it, waits for the backward part, `HOST` or `DEVICE`; empty where that
    does not read it."""
    todo, seen = [(v, DEVICE)], {v}
    while todo:
        value, memory = todo.pop()
        for node in _readers(graph, value):
            if node.phase == BACKWARD and not node.tie:
                return memory
            traits = node.kind.traits
            if (node.tie and node.trip_count) or traits.view or traits.fused_into_consumer or traits.casts:
                new = set(node.results) - seen
                seen |= new
                todo += [(r, HOST if graph.values[r].host else memory) for r in new]
    return ""


def _readers(graph: Graph, v: int) -> Iterator[Node]:
    return (graph.nodes[i] for i in graph.uses[v] if v in graph.nodes[i].operands)


def _conflicts(graph: Graph, layout: Layout) -> Iterator[Diagnostic]:
    for v, wanted, had in layout.dropped:
        name = graph.values[v].name or v
        yield Diagnostic(f"{name}: {wanted} was requested, but {had} was decided before and conflicts with it")
