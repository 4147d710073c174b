"""Solved layouts: solutions of a program's layout problem, propagated to whole layouts and priced once more.

On at most `MAX_AXES` mesh axes the problem is solved as a whole (`_solve_on_mesh`), first without a memory budget. A
layout whose peak exceeds the budget adds that moment to the problem as a `Budget`, and it is solved again. With more
axes, neighbours are merged until `COARSE_AXES` are left, and the solutions refined on `MAX_AXES` merged axes near what
was found (`_coarse_to_fine`); no bound is known of those.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout, Origin, propagate
from autoshard.ir.spec import Axes, Spec
from autoshard.search.build_problem import MAX_AXES, build_problem
from autoshard.search.candidates import BOUND_TOLERANCE, Candidate, Choice, Search, zero_sharded
from autoshard.search.layout_problem import StrategyLimits, least_sizes
from autoshard.search.merged_axes import MergedMesh, merged_meshes
from autoshard.search.problem import restricted
from autoshard.search.solve import eliminate_and_improve, least_load, solve, solve_without_budgets
from autoshard.search.spec_tables import value_spec

COARSE_AXES = 2
"""Axes that are left in the coarse problems of a mesh of more."""
REFINEMENT_ROUNDS = 3
MIN_GAIN = 1e-3
"""Relative gain of a refinement round below which there is no next one."""
MAX_MEMORY_BUDGETS = 5
"""Most times that a problem is solved, each time with the peak of the last layout as one more budget."""


def solve_layouts(s: Search, limits: StrategyLimits | None = None, storage_axes: Axes = ()) -> Iterator[Choice]:
    """Solves the layout problem within ``limits``; yields a choice for each layout found, all priced.

    The first is found without a memory budget; each further one with one budget more, until one fits. If the budgets
    cannot all be kept, the last is a layout of little memory. Carried state and frozen parameters are stored sharded
    over ``storage_axes`` beyond how they are used.
    """
    number = itertools.count(1)
    if 0 < len(s.axes) <= MAX_AXES:
        (whole,) = merged_meshes(s.graph, MAX_AXES)
        yield from _solve_on_mesh(s, whole, number, limits, storage_axes)
    elif s.axes and limits is None:  # limits name actual axes, which merged meshes do not have
        yield from _coarse_to_fine(s, number)


def _coarse_to_fine(s: Search, number: Iterator[int]) -> Iterator[Choice]:
    """Solves on `COARSE_AXES` merged axes, then on `MAX_AXES` near the layouts found; again near the best alone while
    it gains. If the user's pins cannot be expressed on the coarse meshes, only on `MAX_AXES`."""
    best_of_mesh: list[Candidate] = []

    def recorded(choices: Iterator[Choice]) -> Sequence[Choice]:
        found = list(choices)
        best_of_mesh.append(s.best(found))
        return found

    coarse = [*merged_meshes(s.graph, COARSE_AXES)]
    for merged in coarse or merged_meshes(s.graph, MAX_AXES):
        yield from recorded(_solve_on_mesh(s, merged, number))
    for k in range(REFINEMENT_ROUNDS if coarse else 0):
        before = min(best_of_mesh, key=s.key)
        starts = [before] if k else sorted(best_of_mesh, key=s.key)
        for merged in merged_meshes(s.graph, MAX_AXES):
            near = [layout for c in starts if (layout := merged.merge_layout(c.layout)) is not None]
            if near:
                yield from recorded(_solve_on_mesh(s, merged, number, near_layouts=near))
        now = min(best_of_mesh, key=s.key)
        if s.key(now)[0] == s.key(before)[0] and now.cost.seconds >= before.cost.seconds * (1 - MIN_GAIN):
            return


def _solve_on_mesh(
    s: Search,
    merged: MergedMesh,
    number: Iterator[int],
    limits: StrategyLimits | None = None,
    storage_axes: Axes = (),
    near_layouts: Sequence[Layout] = (),
) -> Iterator[Choice]:
    """Solves the layout problem over ``merged`` axes; if given, near ``near_layouts``. Takes layouts' numbers from
    ``number``, and raises the search's bound if the problem is that of the whole graph on the actual mesh."""
    graph, mesh = s.graph, s.graph.program.mesh
    layout_problem = build_problem(merged.graph, limits, near_layouts, s.groups)
    problem = layout_problem.problem
    bound_holds = limits is None and merged.graph is graph and not near_layouts

    def price(assignment: Sequence[int]) -> Candidate:
        specs = merged.expand_specs(layout_problem.value_specs(assignment))
        strategies = merged.expand_factor_axes(layout_problem.factor_axes(assignment))
        stored = [(graph.inputs[i], graph.outputs[o]) for i, o in graph.program.carries]
        stored += [(graph.inputs[i], graph.inputs[i]) for i in s.frozen]
        for v, out in stored if storage_axes else ():
            if v in specs and out:
                specs[v] = specs[out] = zero_sharded(specs[v], graph.values[v].shape, storage_axes, mesh.shape)
        unconstrained = {v: specs[v] for v in graph.unconstrained_dims if v in specs}
        given = {v: spec for v, spec in specs.items() if v not in graph.pins}
        layout = propagate(graph, [unconstrained], given)
        origins: dict[tuple[int, int], Origin] = {
            k: o if k[0] in graph.pins or k[0] not in specs else "solved" for k, o in layout.origins.items()
        }
        layout = replace(layout, origins=origins, strategies=strategies)
        class_axes = tuple(most_common(layout.specs[v].dims[d] for v, d in c.inputs) for c in s.classes)
        zero_stage = 3 if storage_axes else 0
        return s.price_layout(Choice(class_axes, storage_axes, zero_stage, solved_number=next(number)), layout)

    # At `fullest` values take most in the specs that split them most.
    device_bytes = {v: float(value.device_bytes) for v, value in enumerate(graph.values)}
    sizes = least_sizes(device_bytes, layout_problem.bindings, layout_problem.options, merged.graph.program.mesh)
    fullest, least_peak = s.memory_model.least_peak({} if storage_axes else sizes)
    relaxed = solve_without_budgets(problem)
    for _ in range(MAX_MEMORY_BUDGETS):
        try:
            solution = solve(problem, relaxed)
        except PlanError:
            solution = least_load(problem)
        if bound_holds:
            s.bound = max(s.bound, solution.bound - layout_problem.slack)
        candidate = price(solution.assignment)
        layout, peak = candidate.layout, candidate.memory.peak
        yield candidate.choice
        fits, without_limits = peak <= s.budget, not (storage_axes or problem.budgets)
        if fits and without_limits and candidate.cost.seconds > solution.cost * (1 + BOUND_TOLERANCE):
            # The problem leaves out part of what this layout costs, so another good assignment can turn out cheaper.
            yield price(eliminate_and_improve(problem)).choice
        hopeless = least_peak > s.budget  # of little memory at `fullest`, and then where that layout takes most
        if fits or (not problem.fits(solution.assignment) and not (hopeless and len(problem.budgets) == 1)):
            return
        usage = s.memory_model.usage(layout, all_gather_fusion_disabled=candidate.all_gather_fusion_disabled)
        moment = int(usage.argmax())
        resharded = int(usage[moment] - s.memory_model.live_bytes(s.memory_model.sizes(layout))[moment])
        if hopeless and not problem.budgets:
            moment, resharded = fullest, 0
        elif hopeless and moment == fullest:
            return
        live = s.memory_model.live_values(moment)
        live.update((v, device_bytes[v] + live.get(v, 0.0)) for v in graph.inputs)
        budget = layout_problem.byte_budget(live, s.budget - resharded, merged.graph.program.mesh)
        bound_holds = bound_holds and resharded <= 0  # what other layouts reshard at this moment may be less
        if (load := budget.load(solution.assignment)) <= budget.limit:
            # What exceeds it is not in the budget's loads. A tighter limit helps, but other layouts need not keep it.
            budget, bound_holds = replace(budget, limit=load - (peak - s.budget)), False
        problem = replace(problem, budgets=(*problem.budgets, budget))


def min_marginals(graph: Graph, v: int) -> list[tuple[Spec, float]]:
    """For each spec that value ``v`` can have, the predicted seconds of the cheapest layout found that has it, memory
    ignored. Empty if it can have only one, or the mesh has more than `MAX_AXES` axes."""
    if not 0 < len(graph.program.mesh.nontrivial_axes) <= MAX_AXES:
        return []
    layout_problem = build_problem(graph)
    if v not in layout_problem.bindings:
        return []
    i, dim_map = layout_problem.bindings[v]
    every = [np.arange(len(u)) for u in layout_problem.problem.unary]
    found: list[tuple[Spec, float]] = []
    for k, option in enumerate(layout_problem.options[i]):
        fixed = [*every[:i], np.array([k]), *every[i + 1 :]]
        solution = solve_without_budgets(restricted(layout_problem.problem, fixed, neighbourhoods=True))
        found.append((value_spec(option, dim_map), solution.cost))
    return found if len(found) > 1 else []


def most_common(found: Iterable[Axes]) -> Axes:
    """The most frequent of ``found``; of equally frequent ones the longest."""
    counts = Counter(found)
    return max(counts, key=lambda axes: (counts[axes], len(axes)), default=())
