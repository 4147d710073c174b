"""refine: of the layouts that planning likes best, the one that the compiler likes best.

Predictions put the plans of a program in nearly the compiler's order (`benchmarks/results/targets.md`). So the first
few that differ are compiled: what fits by the compiler's account goes before what does not, then the fewest seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.backend.compilation import Compilation, compile_plan
from autoshard.backend.compile_cache import CachedCompilation, cache_folder, digest, load, store
from autoshard.backend.executable import Executable
from autoshard.errors import CompileError, SpecError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import ArgumentAval
from autoshard.plan.decisions import Trial
from autoshard.plan.planner import PlanRequest, budget_of, describe_splits, plan_from_candidate
from autoshard.plan.record import PlanRecord
from autoshard.search.candidates import Candidate, Search
from autoshard.search.search import explore
from autoshard.search.strategies import PRESETS, preset_choices
from autoshard.units import size_text

MEMORY_ERROR = 1.25
"""Memory is predicted within about a fifth: what is over the budget by no more than this may fit after all, and what is
under it by less may not."""
TIME_ERROR = 1.5
"""Seconds are predicted within about this factor; what is slower by more is asked about last."""


@dataclass(frozen=True, eq=False)
class PricedLayout:
    """A layout that was priced, and is no plan yet."""

    graph: Graph
    candidate: Candidate
    search: Search
    request: PlanRequest
    strategy: str
    """That it is of: a preset, or the one that was asked for."""
    rank: int
    """Among those of the same program and strategy."""

    @property
    def seconds(self) -> float:
        """Predicted, of one call."""
        return self.candidate.cost.seconds

    def fits(self, share: float) -> bool:
        """Whether it is predicted to take at most this share of the budget."""
        return self.candidate.memory.peak <= self.search.budget * share


def priced_layouts(program: Program, request: PlanRequest) -> Iterator[PricedLayout]:
    """Every layout of ``program`` that the search tried; for ``auto`` what the presets would do as well."""
    graph = build_graph(program, strict=request.strict)
    s = explore(graph, request.strategy, budget_of(request, program), request.compiler_options)[1]
    found = {request.strategy: list(s.tried.values())}
    for name in PRESETS if request.strategy == "auto" else ():
        if name != "auto":
            try:
                found[name] = [s.price(choice) for choice in preset_choices(s, name)]
            except SpecError:  # the batch does not divide as the preset would have it
                continue
    seen: set[Any] = set()
    for strategy, candidates in found.items():
        rank = 0
        for c in sorted(candidates, key=s.key):
            key = c.layout.specs, tuple(c.layout.strategies.items())
            if key not in seen:
                yield PricedLayout(graph, c, s, request, strategy, rank)
                seen.add(key)
                rank += 1


def compile_order(found: Sequence[PricedLayout]) -> list[PricedLayout]:
    """``found`` as the compiler is to be asked about them: the best; the best that is sure to fit; then, of those that
    may fit, the best of each strategy under each set of passes, lest the few be one layout with trifles changed; then
    the second best of each, and so on."""

    def first(limit: float) -> list[PricedLayout]:
        return sorted((d for d in found if d.fits(limit)), key=lambda d: d.seconds)[:1]

    best = [*first(1), *first(1 / MEMORY_ERROR)]
    slow = TIME_ERROR * min((d.seconds for d in best), default=math.inf)
    rest = sorted(
        (d for d in found if d.fits(MEMORY_ERROR)), key=lambda d: (d.rank if d.seconds <= slow else math.inf, d.seconds)
    )
    return list(dict.fromkeys((*best, *rest)))


def refine(
    made: tuple[PlanRecord, Graph],
    programs: Iterable[tuple[Program, PlanRequest]],
    avals: tuple[ArgumentAval, ...],
    most: int,
    cache: str | os.PathLike[str] | None = None,
) -> tuple[PlanRecord, Graph, jax.stages.Lowered | None]:
    """The plan that the compiler likes best of ``most``: the one ``made``, and other layouts of ``programs``.

    Args:
      programs: the step on each mesh and after each set of passes that may serve, with what was asked of planning.
      avals: of the step's flat arguments.
      cache: the folder where answers of the compiler are kept; None as `answers.folder` says.

    Returns:
      The plan, its graph, and the step lowered so.

    Raises:
      MeshError: this machine cannot compile for the mesh.
      CompileError: the compiler refuses every layout, for other reasons than memory.
    """
    plan, graph = made
    if jx.any_tracer(graph.program.jaxpr.consts):
        said = "not refined: the step closes over values of a trace around it, and cannot be compiled by itself"
        return replace(plan, diagnostics=(*plan.diagnostics, said)), graph, None
    chosen = {_layout_key(plan): (plan, graph, plan.strategy)}
    for d in compile_order([d for program, request in programs for d in priced_layouts(program, request)]):
        if len(chosen) == most:
            break
        other = plan_from_candidate(d.graph, d.candidate, d.search, d.request)
        chosen.setdefault(_layout_key(other), (other, d.graph, d.strategy))
    at, trials, steps = cache_folder(cache), list[Trial](), list[tuple[PlanRecord, Graph, jax.stages.Lowered]]()
    for other, its, strategy in chosen.values():
        lowered = Executable(its.program, its, other, avals).lowered
        trials.append(_trial(other, _difference_text(other, plan, strategy), _compile_or_load(lowered, other, at)))
        steps.append((other, its, lowered))
    compiled = [i for i, t in enumerate(trials) if not t.refusal]
    if not compiled:
        reasons = "; ".join(f"{t.text}: {t.refusal}" for t in trials)
        raise CompileError(f"{plan.name}: the compiler refuses every layout that it was asked about: {reasons}")
    best = min(compiled, key=lambda i: _preference(trials[i]))
    trials[best] = replace(trials[best], chosen=True)
    plan, graph, lowered = steps[best]
    return (
        replace(plan, refined=tuple(trials), diagnostics=(*plan.diagnostics, *_over_memory_diagnostics(trials[best]))),
        graph,
        lowered,
    )


def _layout_key(plan: PlanRecord) -> Any:
    """What makes two plans lay something out differently."""
    inside = tuple((p.value, p.node, p.spec, p.waypoints) for p in plan.intermediates)
    ends = tuple(tuple(p.spec for p in side) for side in (plan.inputs, plan.outputs))
    return plan.fingerprint, plan.mesh, *ends, inside, tuple((i.node, i.axes, i.reduced_specs) for i in plan.islands)


def _compile_or_load(lowered: jax.stages.Lowered, plan: PlanRecord, at: Path) -> Compilation | str:
    """What the compiler says of a step, from the folder ``at`` if it was asked before; or why it will not have it."""
    asked = digest(lowered, plan)
    answer = load(at, asked)
    if answer is None:
        try:
            c = compile_plan(plan, lowered)
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0]
        answer = CachedCompilation(digest=asked, usage=c.usage, refusal=c.refusal, estimate=c.estimate)
        store(at, answer)
    return answer.compilation(plan)


def _trial(plan: PlanRecord, text: str, said: Compilation | str) -> Trial:
    predicted, peak = plan.cost.seconds, plan.memory.peak
    if isinstance(said, str):
        return Trial(text, predicted, peak, refusal=said)
    has = said.available_bytes if plan.memory_budget is None else min(said.available_bytes, int(plan.memory_budget))
    if said.estimate is None:
        return Trial(text, predicted, peak, said.needed_bytes, has)
    e = said.estimate
    return Trial(text, predicted, peak, said.needed_bytes, has, e.seconds, e.bound, e.exact)


def _preference(t: Trial) -> tuple[float, ...]:
    """Sorts the best first; of what does not fit, what lacks least."""
    never = math.inf
    return (
        max(0, t.needed_bytes - t.available_bytes),
        never if t.seconds is None else t.seconds,
        never if t.overlapped is None else t.overlapped,
    )


def _over_memory_diagnostics(best: Trial) -> Iterator[str]:
    if not best.fits:
        lacks = size_text(best.needed_bytes - best.available_bytes, 2)
        yield (
            f"none of the layouts that were compiled fits by the compiler's account: the one that was chosen lacks "
            f"{lacks}, the least; refine with more of them, or use a smaller batch or more devices"
        )


def _difference_text(plan: PlanRecord, first: PlanRecord, strategy: str) -> str:
    """A plan in words, by what it has otherwise than ``first``: ``fsdp: batch over data; w as [data, _]``."""
    words = describe_splits(((d.name, d.axes) for d in plan.dim_splits), plan.zero_stage, plan.storage_axes)
    ran, before = ([p.written for p in each.passes] for each in (plan, first))
    words += [f"with {p}" for p in ran if p not in before] + [f"without {p}" for p in before if p not in ran]
    if plan.mesh != first.mesh:
        words.append(f"the mesh {plan.mesh}")
    else:
        otherwise = [
            f"{p.path} as {p.spec}" for p, q in zip(plan.inputs, first.inputs, strict=True) if p.spec != q.spec
        ]
        words += otherwise[:2] + ([f"{len(otherwise) - 2} more otherwise"] if len(otherwise) > 2 else [])
    return f"{strategy}: {'; '.join(words) or 'nothing split'}"
