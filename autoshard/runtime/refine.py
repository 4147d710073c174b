"""Compiles the layouts with the least predicted time and chooses by the compiler's reported memory and estimated time.

Predicted times order the plans of a program nearly as the compiler does (`benchmarks/results/targets.md`). So the first
few distinct layouts are compiled; those that fit in memory come first, then the least estimated time.
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
from autoshard.backend.compile_cache import CachedCompilation, cache_folder, cache_key, load, store
from autoshard.backend.executable import Executable
from autoshard.errors import CompileError, SpecError
from autoshard.ir.build_graph import build_graph
from autoshard.ir.graph import Diagnostic, Graph
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import ArgumentAval
from autoshard.machine.hardware import require_compiler
from autoshard.plan.decisions import Trial
from autoshard.plan.planner import PlanRequest, budget_of, describe_splits, plan_from_candidate
from autoshard.plan.record import PlanRecord
from autoshard.runtime.stages import Planned
from autoshard.search.candidates import Candidate, Search
from autoshard.search.search import explore
from autoshard.search.strategies import PRESETS, preset_choices
from autoshard.units import size_text

MEMORY_ERROR = 1.25
"""Factor within which peak memory is predicted: a layout predicted over the budget by less may fit, and one predicted
under it by less may not."""
TIME_ERROR = 1.5
"""Factor within which time is predicted: slower layouts are compiled last."""


@dataclass(frozen=True, eq=False)
class PricedLayout:
    """A layout with its predicted cost and memory, not yet a plan."""

    traced: Program
    """Before the passes."""
    graph: Graph
    candidate: Candidate
    search: Search
    request: PlanRequest
    strategy: str
    """The strategy that it belongs to: a preset, or the one that the user named."""
    rank: int
    """Its rank by predicted time among the layouts of the same program and strategy, from 0."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of one call."""
        return self.candidate.cost.seconds

    def fits(self, budgets: float) -> bool:
        """Whether its predicted peak is at most ``budgets`` times the memory budget."""
        return self.candidate.memory.peak <= self.search.budget * budgets


def priced_layouts(traced: Program, program: Program, request: PlanRequest) -> Iterator[PricedLayout]:
    """Every distinct layout of ``program`` that the search priced; for ``auto`` those of the presets, too, first: a
    layout belongs to the preset that it is of, also where ``auto`` prices it."""
    graph = build_graph(program, strict=request.strict)
    try:
        s = explore(graph, request.strategy, budget_of(request, program), request.compiler_options)[1]
    except SpecError:  # a preset splits nothing of what an optional pass makes
        return
    tried = list(s.tried.values())
    found: dict[str, list[Candidate]] = {}
    for name in PRESETS if request.strategy == "auto" else ():
        if name != "auto":
            try:
                found[name] = [s.price(choice) for choice in preset_choices(s, name)]
            except SpecError:  # the batch does not divide over the preset's axes
                continue
    found[request.strategy] = tried
    seen: set[Any] = set()
    for strategy, candidates in found.items():
        rank = 0
        for c in sorted(candidates, key=s.key):
            key = c.layout.specs, tuple(c.layout.strategies.items())
            if key not in seen:
                yield PricedLayout(traced, graph, c, s, request, strategy, rank)
                seen.add(key)
                rank += 1


def compile_order(found: Sequence[PricedLayout]) -> list[PricedLayout]:
    """``found`` in the order in which to compile them, for variety: the best; the best of a preset, or of another one;
    the best that fits with a margin; then, of those that may fit, the best of each strategy under each set of passes,
    then the second best of each, and so on. The cheapest layouts alone would be near duplicates of one, and share what
    the model has wrong."""

    def first(limit: float, *but: str) -> list[PricedLayout]:
        return sorted((d for d in found if d.fits(limit) and d.strategy not in but), key=lambda d: d.seconds)[:1]

    best = first(1)
    best += first(1, "auto", *(d.strategy for d in best))
    best += first(1 / MEMORY_ERROR)
    slow = TIME_ERROR * min((d.seconds for d in best), default=math.inf)
    rest = sorted(
        (d for d in found if d.fits(MEMORY_ERROR)), key=lambda d: (d.rank if d.seconds <= slow else math.inf, d.seconds)
    )
    return list(dict.fromkeys((*best, *rest)))


def refine(
    predicted_best: Planned,
    programs: Iterable[tuple[Program, Program, PlanRequest]],
    avals: tuple[ArgumentAval, ...],
    max_layouts: int,
    cache: str | os.PathLike[str] | None = None,
) -> tuple[Planned, jax.stages.Lowered | None]:
    """Compiles up to ``max_layouts`` distinct layouts and returns the plan with the least estimated time that fits.

    Args:
      predicted_best: the plan with the least predicted time; always among those compiled.
      programs: for each candidate mesh and sequence of passes, the program before and after the passes, and the
        request.
      avals: shape, dtype and weak type of the step's flat arguments.
      cache: folder of cached compilations; None as in `compile_cache.cache_folder`.

    Returns:
      The chosen plan and its lowered step; no lowered step where the program closes over tracers.

    Raises:
      MeshError: this machine cannot compile for the mesh.
      CompileError: the compiler refuses every layout, for other reasons than memory; or the mesh is of accelerators,
        and the compiler for CPU.
    """
    plan = predicted_best.plan
    require_compiler(plan.mesh)
    if jx.any_tracer(predicted_best.graph.program.jaxpr.consts):
        note = Diagnostic(
            "not refined: the step closes over tracers of an outer trace, and cannot be compiled by itself"
        )
        return predicted_best._replace(plan=replace(plan, diagnostics=(*plan.diagnostics, note))), None
    layouts = {_layout_key(plan): (predicted_best, plan.strategy)}
    for d in compile_order([d for candidate in programs for d in priced_layouts(*candidate)]):
        if len(layouts) == max_layouts:
            break
        other = plan_from_candidate(d.graph, d.candidate, d.search, d.request)
        layouts.setdefault(_layout_key(other), (Planned(d.traced, d.graph, other), d.strategy))
    folder, trials, steps = cache_folder(cache), list[Trial](), list[tuple[Planned, jax.stages.Lowered]]()
    for planned, strategy in layouts.values():
        lowered = Executable(planned.graph.program, planned.graph, planned.plan, avals).lowered
        compilation = _compile_or_load(lowered, planned.plan, folder)
        trials.append(_trial(planned.plan, _difference_text(planned.plan, plan, strategy), compilation))
        steps.append((planned, lowered))
    compiled = [i for i, t in enumerate(trials) if not t.refusal]
    if not compiled:
        reasons = "; ".join(f"{t.text}: {t.refusal}" for t in trials)
        raise CompileError(f"{plan.name}: the compiler refuses all {len(trials)} layouts compiled: {reasons}")
    best = min(compiled, key=lambda i: _preference(trials[i]))
    trials[best] = replace(trials[best], chosen=True)
    planned, lowered = steps[best]
    notes = (*planned.plan.diagnostics, *_over_memory_diagnostics(trials[best]))
    return planned._replace(plan=replace(planned.plan, refined=tuple(trials), diagnostics=notes)), lowered


def _layout_key(plan: PlanRecord) -> Any:
    """Equal for two plans exactly when they lower to the same constraints and local forms."""
    inside = tuple((p.value, p.node, p.spec, p.waypoints, p.ahead) for p in plan.intermediates)
    ends = tuple(tuple(p.spec for p in side) for side in (plan.inputs, plan.outputs))
    return plan.fingerprint, plan.mesh, *ends, inside, tuple((i.node, i.axes, i.reduced_specs) for i in plan.islands)


def _compile_or_load(lowered: jax.stages.Lowered, plan: PlanRecord, folder: Path) -> Compilation | str:
    """The compilation of a step, from the cache in ``folder`` if it has it; or the compiler's error, its first line.

    Such errors are not cached: they may pass.
    """
    key = cache_key(lowered, plan)
    entry = load(folder, key)
    if entry is None:
        try:
            c = compile_plan(plan, lowered)
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0]
        entry = CachedCompilation(key=key, usage=c.usage, out_of_memory=c.out_of_memory, estimate=c.estimate)
        store(folder, entry)
    return entry.compilation(plan)


def _trial(plan: PlanRecord, text: str, c: Compilation | str) -> Trial:
    predicted, peak = plan.cost.seconds, plan.memory.peak
    if isinstance(c, str):
        return Trial(text, predicted, peak, refusal=c)
    available = c.available_bytes if plan.memory_budget is None else min(c.available_bytes, int(plan.memory_budget))
    if c.estimate is None:
        return Trial(text, predicted, peak, c.needed_bytes, available)
    e = c.estimate
    return Trial(text, predicted, peak, c.needed_bytes, available, e.scheduled, e.seconds, e.exact)


def _preference(t: Trial) -> tuple[float, ...]:
    """Sort key, best first: bytes over the memory available (0 for all that fits), then estimated time."""
    return (
        max(0, t.needed_bytes - t.available_bytes),
        math.inf if t.seconds is None else t.seconds,
        math.inf if t.serial is None else t.serial,
    )


def _over_memory_diagnostics(best: Trial) -> Iterator[Diagnostic]:
    if not best.fits:
        missing = size_text(best.needed_bytes - best.available_bytes, 2)
        yield Diagnostic(
            f"none of the layouts that were compiled fits in memory as the compiler reports it; the chosen one needs "
            f"{missing} more, the least of them; compile more layouts (refine=), or use a smaller batch or more devices"
        )


def _difference_text(plan: PlanRecord, first: PlanRecord, strategy: str) -> str:
    """A plan by what differs from ``first``: ``fsdp: batch over data; w as [data, _]``."""
    words = describe_splits(((d.name, d.axes) for d in plan.dim_splits), plan.zero_stage, plan.storage_axes)
    ran, before = ([p.written for p in each.passes] for each in (plan, first))
    words += [f"with {p}" for p in ran if p not in before] + [f"without {p}" for p in before if p not in ran]
    if plan.mesh != first.mesh:
        words.append(f"the mesh {plan.mesh}")
    else:
        differ = [f"{p.path} as {p.spec}" for p, q in zip(plan.inputs, first.inputs, strict=True) if p.spec != q.spec]
        words += differ[:2] + ([f"{len(differ) - 2} more arguments differ"] if len(differ) > 2 else [])
    return f"{strategy}: {'; '.join(words) or 'nothing split'}"
