"""layouts: what solving a program's space finds, as layouts of the program."""

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
from autoshard.search.build_problem import StrategyLimits, build_problem
from autoshard.search.candidates import BOUND_TOLERANCE, Candidate, Choice, Search, zero_sharded
from autoshard.search.merged_axes import MergedMesh, merged_meshes
from autoshard.search.problem import restricted
from autoshard.search.solve import eliminate_and_improve, least_load, solve, solve_without_budgets
from autoshard.search.spec_tables import value_spec

MAX_AXES = 3
"""Most mesh axes for which the space is solved as a whole."""
COARSE_AXES = 2
"""Of more, neighbours are first taken together until so many are left."""
REFINEMENT_ROUNDS = 3
"""How often it is looked near what was found so, at the most."""
MIN_GAIN = 1e-3
"""What that has to gain to be done again, as a share of the time."""
MAX_MEMORY_BUDGETS = 5
"""Most moments of a step whose memory is held within the budget while solving."""


def solve_layouts(s: Search, limits: StrategyLimits | None = None, stored: Axes = ()) -> Iterator[Choice]:
    """What solving the program's space finds within ``limits``: the best without the budget, then with it until it is
    kept. What the step carries lies in parts over ``stored``, beside how it is used.

    Memory is least known where it peaks, and that moves with the layout; so each answer that is over the budget adds
    the moment of its own peak to the problem, what it moves there included. Where no answer keeps all of them, the last
    is one that holds little.
    """
    number = itertools.count(1)
    if 0 < len(s.axes) <= MAX_AXES:
        (whole,) = merged_meshes(s.graph, MAX_AXES)
        yield from _solve_on_mesh(s, whole, number, limits, stored)
    elif s.axes and limits is None:  # which name the mesh's own axes
        yield from _coarse_to_fine(s, number)


def _coarse_to_fine(s: Search, number: Iterator[int]) -> Iterator[Choice]:
    """What solving finds on few axes, neighbours taken together, and then near that on more of them; again near the
    best alone as long as it gains. Under pins that cannot be said on so few, what it finds on more."""
    found: list[Candidate] = []  # the best of each view

    def noted(choices: Iterator[Choice]) -> Sequence[Choice]:
        every = list(choices)
        found.append(s.best(every))
        return every

    coarse = [*merged_meshes(s.graph, COARSE_AXES)]
    for view in coarse or merged_meshes(s.graph, MAX_AXES):
        yield from noted(_solve_on_mesh(s, view, number))
    for turn in range(REFINEMENT_ROUNDS if coarse else 0):
        before = min(found, key=s.key)
        starts = [before] if turn else sorted(found, key=s.key)
        for view in merged_meshes(s.graph, MAX_AXES):
            about = [layout for c in starts if (layout := view.merge_layout(c.layout)) is not None]
            if about:
                yield from noted(_solve_on_mesh(s, view, number, about=about))
        now = min(found, key=s.key)
        if s.key(now)[0] == s.key(before)[0] and now.cost.seconds >= before.cost.seconds * (1 - MIN_GAIN):
            return


def _solve_on_mesh(
    s: Search,
    view: MergedMesh,
    number: Iterator[int],
    limits: StrategyLimits | None = None,
    stored: Axes = (),
    about: Sequence[Layout] = (),
) -> Iterator[Choice]:
    """What solving finds for ``view``, or there near the layouts ``about``; layouts are numbered."""
    graph, sizes = s.graph, s.graph.program.mesh
    space = build_problem(view.graph, limits, about, s.groups)
    problem, sure = space.problem, limits is None and view.graph is graph and not about

    def laid(found: Sequence[int]) -> Candidate:
        specs, ways = view.expand_specs(space.value_specs(found)), view.expand_factor_axes(space.factor_axes(found))
        for i, o in graph.program.carries if stored else ():
            v, out = graph.inputs[i], graph.outputs[o]
            if v in specs and out:
                shape = graph.values[v].shape
                specs[v] = specs[out] = zero_sharded(specs[v], shape, stored, sizes.shape)
        open_ = {v: specs[v] for v in graph.unconstrained_dims if v in specs}
        given = {v: x for v, x in specs.items() if v not in graph.pins}
        layout = propagate(graph, [open_], given)
        origins: dict[tuple[int, int], Origin] = {
            k: o if k[0] in graph.pins or k[0] not in specs else "solved" for k, o in layout.origins.items()
        }
        layout = replace(layout, origins=origins, strategies=ways)
        split = tuple(most_common(layout.specs[v].dims[d] for v, d in c.inputs) for c in s.classes)
        return s.price_layout(Choice(split, stored, 3 if stored else 0, solved_number=next(number)), layout)

    for _ in range(MAX_MEMORY_BUDGETS):
        try:
            found = solve(problem)
        except PlanError:
            found = least_load(problem)
        if sure:
            s.bound = max(s.bound, found.bound - space.slack)
        candidate = laid(found.assignment)
        layout, peak = candidate.layout, candidate.memory.peak
        yield candidate.choice
        if not (stored or problem.budgets) and candidate.cost.seconds > found.cost * (1 + BOUND_TOLERANCE):
            yield laid(eliminate_and_improve(problem)).choice  # the tables lack something of what the layout costs
        if peak <= s.budget or not problem.fits(found.assignment):
            return
        held = s.memory_model.usage(layout, all_gather_fusion_disabled=candidate.all_gather_fusion_disabled)
        moment = int(held.argmax())
        beside = int(held[moment] - s.memory_model.live_bytes(s.memory_model.sizes(layout))[moment])
        alive = {v: float(graph.values[v].bytes) for v in graph.inputs} | s.memory_model.live_values(moment)
        row = space.byte_budget(alive, s.budget - beside, view.graph.program.mesh)
        if (load := row.load(found.assignment)) <= row.limit:  # it is over the budget for what the row cannot say
            row, sure = replace(row, limit=load - (peak - s.budget)), False  # which other layouts need not keep
        problem = replace(problem, budgets=(*problem.budgets, row))


def min_marginals(graph: Graph, v: int) -> list[tuple[Spec, float]]:
    """Every way in which value ``v`` can lie, with the seconds of the best layout found in which it does, memory aside.

    None where it cannot lie in more than one, or the mesh has too many axes to solve for.
    """
    if not 0 < len(graph.program.mesh.nontrivial_axes) <= MAX_AXES:
        return []
    space = build_problem(graph)
    if v not in space.bindings:
        return []
    i, places = space.bindings[v]
    whole = [np.arange(len(u)) for u in space.problem.unary]
    found: list[tuple[Spec, float]] = []
    for k, option in enumerate(space.options[i]):
        one = [*whole[:i], np.array([k]), *whole[i + 1 :]]
        found.append((value_spec(option, places), solve_without_budgets(restricted(space.problem, one, kin=True)).cost))
    return found if len(found) > 1 else []


def most_common(found: Iterable[Axes]) -> Axes:
    """The commonest; the longest of equally common ones."""
    have = Counter(found)
    return max(have, key=lambda a: (have[a], len(a)), default=())
