"""planner: Program -> PlanRecord, the stages in their order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.cost.compiler_options import effective_options
from autoshard.ir.build_graph import build_graph
from autoshard.ir.dim_classes import DimClass
from autoshard.ir.graph import Graph
from autoshard.ir.program import Leaf, Program, aval_text
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Spec, replicated
from autoshard.jaxpr import dtype_name
from autoshard.plan.constraints import islands, sharding_constraints
from autoshard.plan.decisions import Alternative, Place
from autoshard.plan.record import PlanRecord
from autoshard.search.candidates import Candidate, Search
from autoshard.search.search import search
from autoshard.search.solved_layouts import mostly


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked of planning."""

    strategy: str = "auto"
    memory_budget: float | None = None
    strict: bool = False
    passes: tuple[str, ...] = ()
    compiler_options: tuple[tuple[str, Any], ...] = ()


def make_plan(program: Program, request: PlanRequest) -> tuple[PlanRecord, Graph]:
    """Plans ``program``: rules, propagation and search, then the pins that lowering needs.

    Raises:
      RuleError, SpecError, ArgumentError, MemoryBudgetError: as `flatten.flatten` and `search.search`.
    """
    graph = build_graph(program, strict=request.strict)
    best, s = search(graph, request.strategy, budget_of(request, program), request.compiler_options)
    return plan_from_candidate(graph, best, s, request), graph


def budget_of(request: PlanRequest, program: Program) -> float:
    """Bytes per device that a plan may use."""
    return request.memory_budget if request.memory_budget is not None else program.mesh.hardware.memory


def plan_from_candidate(graph: Graph, best: Candidate, s: Search, request: PlanRequest) -> PlanRecord:
    """The account of a layout that was chosen."""
    program, layout = graph.program, best.layout
    outs = {o: i for i, o in program.carries}

    def place(leaf: Leaf, value: int, spec: Spec, why: str) -> Place:
        return Place(leaf.path, leaf.aval.shape, dtype_name(leaf.aval.dtype), spec, why, leaf.donated)

    inputs = tuple(
        place(leaf, v, layout.specs[v], _why(leaf, v, layout))
        for leaf, v in zip(program.inputs, graph.inputs, strict=True)
    )
    outputs: list[Place] = []
    for o, (leaf, v) in enumerate(zip(program.outputs, graph.outputs, strict=True)):
        spec = layout.specs[v] if v else replicated(len(leaf.aval.shape))
        why = _why(leaf, v, layout)
        if leaf.pin is not None:
            spec, why = leaf.pin, "pinned"
        elif o in outs:
            spec, why = inputs[outs[o]].spec, f"as {inputs[outs[o]].path}, which it replaces"
        outputs.append(place(leaf, v, spec, why))
    split = tuple(
        (c.name, c.size, _carried_by(c, layout, axes)) for c, axes in zip(s.classes, best.choice.split, strict=True)
    )
    return PlanRecord(
        name=program.name,
        mesh=program.mesh,
        strategy=request.strategy,
        inputs=inputs,
        outputs=tuple(outputs),
        intermediates=sharding_constraints(graph, layout, s.cost_model, [p.spec for p in outputs]),
        islands=islands(graph, layout, s.cost_model),
        cost=best.cost,
        memory=best.memory,
        fingerprint=fingerprint(graph),
        dim_splits=split,
        storage=best.choice.storage,
        zero=best.choice.zero,
        alternatives=_alternatives(best, s),
        diagnostics=(*map(str, graph.diagnostics), *_dropped(graph, layout)),
        passes=request.passes,
        memory_budget=s.budget if math.isfinite(s.budget) else None,
        considered=len(s.tried),
        bound=s.bound,
        compiler_options=effective_options(best.all_gather_fusion_disabled, request.compiler_options),
        in_tree=program.in_tree,
        out_tree=program.out_tree,
    )


def fingerprint(graph: Graph) -> str:
    """A digest of the program's operations, shapes, argument paths and mesh axes; not of its source lines."""
    digest = hashlib.sha256()
    program = graph.program
    digest.update(repr((sorted(program.mesh.shape.items()), program.mesh.axis_names, program.carries)).encode())
    for leaf in (*program.inputs, *program.outputs):
        digest.update(f"{leaf.path} {aval_text(leaf.aval)} {leaf.donated}\n".encode())
    kinds: Mapping[int, str] = {}
    lines: list[str] = []
    for n in graph.nodes:
        text = kinds.get(id(n.kind)) or kinds.setdefault(  # type: ignore[attr-defined]
            id(n.kind), f"{n.kind.op} {n.kind.rule} {n.kind.shapes} {n.kind.bits}"
        )
        lines.append(f"{text} {n.operands} {n.results} {n.trip_count}\n")
    digest.update("".join(lines).encode())
    return digest.hexdigest()[:32]


def _why(leaf: Leaf, v: int, layout: Layout) -> str:
    if leaf.pin is not None:
        return "pinned"
    found = dict.fromkeys(layout.origins.get((v, d), "") for d in range(len(leaf.aval.shape)))
    return "; ".join(filter(None, found))


def _carried_by(c: DimClass, layout: Layout, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that split a class: those chosen, or, where pins or propagation decided, what its arguments have."""
    have = [layout.specs[v].dims[d] for v, d in c.inputs]
    return chosen if not have or chosen in have else mostly(have)


def _alternatives(best: Candidate, s: Search) -> tuple[Alternative, ...]:
    """The runners-up, one a distinct cost: the cheapest other layouts that fit, led by the fastest of all if memory
    alone stood in its way; then those that do not fit."""
    fastest = min(s.tried.values(), key=lambda c: c.cost.seconds)
    order = sorted(s.tried.values(), key=s.key)
    seen = {(best.cost.seconds, best.memory.peak)}
    rows: list[Alternative] = []
    for c in [fastest, *order] if fastest.cost.seconds < best.cost.seconds else order:
        key = (c.cost.seconds, c.memory.peak)
        if key not in seen and len(rows) < 5:
            seen.add(key)
            rows.append(Alternative(describe_choice(c, s), c.cost.seconds, c.memory.peak))
    return tuple(rows)


def describe_choice(c: Candidate, s: Search) -> str:
    """A choice in words: ``batch over data; w1.1 over model; state in parts over data``."""
    words = [f"{k.name} over {'+'.join(a)}" for k, a in zip(s.classes, c.choice.split, strict=True) if a]
    if c.choice.zero:
        what = "state" if c.choice.zero == 3 else "optimizer state"
        words.append(f"{what} in parts over {'+'.join(c.choice.storage)}")
    words += [f"{s.graph.program.inputs[i].path} as {spec}" for i, spec in dict(c.choice.inputs).items()]
    return "; ".join(words) or "nothing split"


def _dropped(graph: Graph, layout: Layout) -> list[str]:
    return [
        f"{graph.values[v].name or v}: {spec} was wanted and could not be had whole: {why}"
        for v, spec, why in layout.dropped
    ]
