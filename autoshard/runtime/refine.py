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
from autoshard.backend.compilation import Compilation, compilation
from autoshard.backend.compile_cache import Answer, digest, folder, load, store
from autoshard.backend.executable import Executable
from autoshard.errors import CompileError, SpecError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import Aval
from autoshard.plan.adopt import passes_of
from autoshard.plan.decisions import Trial
from autoshard.plan.planner import PlanRequest, budget_of, plan_from_candidate
from autoshard.plan.record import PlanRecord
from autoshard.search.candidates import Candidate, Search
from autoshard.search.search import explore
from autoshard.search.strategies import PRESETS, preset
from autoshard.units import size_text

NEAR = 1.25
"""Memory is predicted within about a fifth: what is over the budget by no more than this may fit after all, and what is
under it by less may not."""
ALIKE = 1.5
"""Seconds are predicted within about this factor; what is slower by more is asked about last."""


@dataclass(frozen=True, eq=False)
class Draft:
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

    def within(self, share: float) -> bool:
        """Whether it is predicted to take at most this share of the budget."""
        return self.candidate.memory.peak <= self.search.budget * share


def drafts(program: Program, request: PlanRequest) -> Iterator[Draft]:
    """Every layout of ``program`` that the search tried; for ``auto`` what the presets would do as well."""
    graph = build_graph(program, strict=request.strict)
    s = explore(graph, request.strategy, budget_of(request, program), request.compiler_options)[1]
    found = {request.strategy: list(s.tried.values())}
    for name in PRESETS if request.strategy == "auto" else ():
        if name != "auto":
            try:
                found[name] = [s.price(choice) for choice in preset(s, name)]
            except SpecError:  # the batch does not divide as the preset would have it
                continue
    seen: set[Any] = set()
    for strategy, candidates in found.items():
        rank = 0
        for c in sorted(candidates, key=s.key):
            key = c.layout.specs, tuple(c.layout.strategies.items())
            if key not in seen:
                yield Draft(graph, c, s, request, strategy, rank)
                seen.add(key)
                rank += 1


def ordered(found: Sequence[Draft]) -> list[Draft]:
    """``found`` as the compiler is to be asked about them: the best; the best that is sure to fit; then, of those that
    may fit, the best of each strategy under each set of passes, lest the few be one layout with trifles changed; then
    the second best of each, and so on."""

    def first(limit: float) -> list[Draft]:
        return sorted((d for d in found if d.within(limit)), key=lambda d: d.seconds)[:1]

    best = [*first(1), *first(1 / NEAR)]
    slow = ALIKE * min((d.seconds for d in best), default=math.inf)
    rest = sorted(
        (d for d in found if d.within(NEAR)), key=lambda d: (d.rank if d.seconds <= slow else math.inf, d.seconds)
    )
    return list(dict.fromkeys((*best, *rest)))


def refine(
    made: tuple[PlanRecord, Graph],
    programs: Iterable[tuple[Program, PlanRequest]],
    avals: tuple[Aval, ...],
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
    chosen = {_layout(plan): (plan, graph, plan.strategy)}
    for d in ordered([d for program, request in programs for d in drafts(program, request)]):
        if len(chosen) == most:
            break
        other = plan_from_candidate(d.graph, d.candidate, d.search, d.request)
        chosen.setdefault(_layout(other), (other, d.graph, d.strategy))
    at, trials, steps = folder(cache), list[Trial](), list[tuple[PlanRecord, Graph, jax.stages.Lowered]]()
    for other, its, strategy in chosen.values():
        lowered = Executable(its.program, its, other, avals).lowered
        trials.append(_trial(other, _told(other, plan, strategy), _ask(lowered, other, at)))
        steps.append((other, its, lowered))
    compiled = [i for i, t in enumerate(trials) if not t.reason]
    if not compiled:
        reasons = "; ".join(f"{t.text}: {t.reason}" for t in trials)
        raise CompileError(f"{plan.name}: the compiler refuses every layout that it was asked about: {reasons}")
    best = min(compiled, key=lambda i: _key(trials[i]))
    trials[best] = replace(trials[best], chosen=True)
    plan, graph, lowered = steps[best]
    return replace(plan, refined=tuple(trials), diagnostics=(*plan.diagnostics, *_unfit(trials[best]))), graph, lowered


def _layout(plan: PlanRecord) -> Any:
    """What makes two plans lay something out differently."""
    inside = tuple((p.value, p.node, p.spec, p.waypoints) for p in plan.intermediates)
    ends = tuple(tuple(p.spec for p in side) for side in (plan.inputs, plan.outputs))
    return plan.fingerprint, plan.mesh, *ends, inside, tuple((i.node, i.axes, i.reduced_specs) for i in plan.islands)


def _ask(lowered: jax.stages.Lowered, plan: PlanRecord, at: Path) -> Compilation | str:
    """What the compiler says of a step, from the folder ``at`` if it was asked before; or why it will not have it."""
    asked = digest(lowered, plan)
    answer = load(at, asked)
    if answer is None:
        try:
            c = compilation(plan, lowered)
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0]
        answer = Answer(asked=asked, usage=c.usage, refusal=c.refusal, estimate=c.estimate)
        store(at, answer)
    return answer.of(plan)


def _trial(plan: PlanRecord, text: str, said: Compilation | str) -> Trial:
    predicted, peak = plan.cost.seconds, plan.memory.peak
    if isinstance(said, str):
        return Trial(text, predicted, peak, reason=said)
    has = said.has if plan.memory_budget is None else min(said.has, int(plan.memory_budget))
    if said.estimate is None:
        return Trial(text, predicted, peak, said.needs, has)
    e = said.estimate
    return Trial(text, predicted, peak, said.needs, has, e.seconds, e.bound, e.exact)


def _key(t: Trial) -> tuple[float, ...]:
    """Sorts the best first; of what does not fit, what lacks least."""
    never = math.inf
    return (
        max(0, t.required - t.available),
        never if t.seconds is None else t.seconds,
        never if t.overlapped is None else t.overlapped,
    )


def _unfit(best: Trial) -> Iterator[str]:
    if not best.fits:
        lacks = size_text(best.required - best.available, 2)
        yield (
            f"none of the layouts that were compiled fits by the compiler's account: the one that was chosen lacks "
            f"{lacks}, the least; refine with more of them, or use a smaller batch or more devices"
        )


def _told(plan: PlanRecord, first: PlanRecord, strategy: str) -> str:
    """A plan in words, by what it has otherwise than ``first``: ``fsdp: batch over data; w as [data, _]``."""
    words = [f"{name} over {'+'.join(axes)}" for name, _, axes in plan.dim_splits if axes]
    if plan.zero:
        words.append(f"{'state' if plan.zero == 3 else 'optimizer state'} in parts over {'+'.join(plan.storage)}")
    ran, before = passes_of(plan.passes), passes_of(first.passes)
    words += [f"with {p}" for p in ran if p not in before] + [f"without {p}" for p in before if p not in ran]
    if plan.mesh != first.mesh:
        words.append(f"the mesh {plan.mesh}")
    else:
        otherwise = [
            f"{p.path} as {p.spec}" for p, q in zip(plan.inputs, first.inputs, strict=True) if p.spec != q.spec
        ]
        words += otherwise[:2] + ([f"{len(otherwise) - 2} more otherwise"] if len(otherwise) > 2 else [])
    return f"{strategy}: {'; '.join(words) or 'nothing split'}"
