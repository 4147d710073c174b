"""layouts: what solving a program's space finds, as layouts of the program."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout, propagate
from autoshard.ir.spec import Axes, Spec
from autoshard.search.build_problem import Limits, build
from autoshard.search.candidates import PROVEN, Candidate, Choice, Search, stored_in_parts
from autoshard.search.merged_axes import View, views
from autoshard.search.problem import restricted
from autoshard.search.solve import another, lightest, solve, unbudgeted
from autoshard.search.spec_tables import lies

CHOSEN = "solved for"
"""Why a value that the solver decides lies as it does."""
AXES = 3
"""Most mesh axes for which the space is solved as a whole."""
COARSE = 2
"""Of more, neighbours are first taken together until so many are left."""
ROUNDS = 3
"""How often it is looked near what was found so, at the most."""
GAIN = 1e-3
"""What that has to gain to be done again, as a share of the time."""
MOMENTS = 5
"""Most moments of a step whose memory is held within the budget while solving."""


def solved(s: Search, limits: Limits | None = None, stored: Axes = ()) -> Iterator[Choice]:
    """What solving the program's space finds within ``limits``: the best without the budget, then with it until it is
    kept. What the step carries lies in parts over ``stored``, beside how it is used.

    Memory is least known where it peaks, and that moves with the layout; so each answer that is over the budget adds
    the moment of its own peak to the problem, what it moves there included. Where no answer keeps all of them, the last
    is one that holds little.
    """
    number = itertools.count(1)
    if 0 < len(s.axes) <= AXES:
        (whole,) = views(s.graph, AXES)
        yield from _seen(s, whole, number, limits, stored)
    elif s.axes and limits is None:  # which name the mesh's own axes
        yield from _refined(s, number)


def _refined(s: Search, number: Iterator[int]) -> Iterator[Choice]:
    """What solving finds on few axes, neighbours taken together, and then near that on more of them; again near the
    best alone as long as it gains. Under pins that cannot be said on so few, what it finds on more."""
    found: list[Candidate] = []  # the best of each view

    def noted(choices: Iterator[Choice]) -> Sequence[Choice]:
        every = list(choices)
        found.append(s.best(every))
        return every

    coarse = [*views(s.graph, COARSE)]
    for view in coarse or views(s.graph, AXES):
        yield from noted(_seen(s, view, number))
    for turn in range(ROUNDS if coarse else 0):
        before = min(found, key=s.key)
        starts = [before] if turn else sorted(found, key=s.key)
        for view in views(s.graph, AXES):
            about = [layout for c in starts if (layout := view.layout(c.layout)) is not None]
            if about:
                yield from noted(_seen(s, view, number, about=about))
        now = min(found, key=s.key)
        if s.key(now)[0] == s.key(before)[0] and now.cost.seconds >= before.cost.seconds * (1 - GAIN):
            return


def _seen(
    s: Search,
    view: View,
    number: Iterator[int],
    limits: Limits | None = None,
    stored: Axes = (),
    about: Sequence[Layout] = (),
) -> Iterator[Choice]:
    """What solving finds for ``view``, or there near the layouts ``about``; layouts are numbered."""
    graph, sizes = s.graph, s.graph.program.mesh
    space = build(view.graph, limits, about, s.groups)
    problem, sure = space.problem, limits is None and view.graph is graph and not about

    def laid(found: Sequence[int]) -> Candidate:
        specs, ways = view.specs(space.specs(found)), view.ways(space.ways(found))
        for i, o in graph.program.carries if stored else ():
            v, out = graph.inputs[i], graph.outputs[o]
            if v in specs and out:
                shape = graph.values[v].shape
                specs[v] = specs[out] = stored_in_parts(specs[v], shape, stored, sizes.shape)
        open_ = {v: specs[v] for v in graph.open if v in specs}
        given = {v: x for v, x in specs.items() if v not in graph.pins}
        layout = propagate(graph, [open_], given)
        origins = {k: why if k[0] in graph.pins or k[0] not in specs else CHOSEN for k, why in layout.origins.items()}
        layout = replace(layout, origins=origins, ways=ways)
        split = tuple(mostly(layout.specs[v].dims[d] for v, d in c.inputs) for c in s.classes)
        return s.add(Choice(split, stored, 3 if stored else 0, solved=next(number)), layout)

    for _ in range(MOMENTS):
        try:
            found = solve(problem)
        except PlanError:
            found = lightest(problem)
        if sure:
            s.bound = max(s.bound, found.bound - space.slack)
        candidate = laid(found.choice)
        layout, peak = candidate.layout, candidate.memory.peak
        yield candidate.choice
        if not (stored or problem.rows) and candidate.cost.seconds > found.cost * (1 + PROVEN):
            yield laid(another(problem)).choice  # the tables lack something of what the layout costs
        if peak <= s.budget or not problem.fits(found.choice):
            return
        held = s.lives.held(layout, apart=candidate.apart)
        moment = int(held.argmax())
        beside = int(held[moment] - s.lives.over_time(s.lives.sizes(layout))[moment])
        alive = {v: float(graph.values[v].bytes) for v in graph.inputs} | s.lives.alive(moment)
        row = space.row(alive, s.budget - beside, view.graph.program.mesh)
        if (load := row.load(found.choice)) <= row.limit:  # it is over the budget for what the row cannot say
            row, sure = replace(row, limit=load - (peak - s.budget)), False  # which other layouts need not keep
        problem = replace(problem, rows=(*problem.rows, row))


def marginals(graph: Graph, v: int) -> list[tuple[Spec, float]]:
    """Every way in which value ``v`` can lie, with the seconds of the best layout found in which it does, memory aside.

    None where it cannot lie in more than one, or the mesh has too many axes to solve for.
    """
    if not 0 < len(graph.program.mesh.split_axes) <= AXES:
        return []
    space = build(graph)
    if v not in space.where:
        return []
    i, places = space.where[v]
    whole = [np.arange(len(u)) for u in space.problem.unary]
    found: list[tuple[Spec, float]] = []
    for k, option in enumerate(space.options[i]):
        one = [*whole[:i], np.array([k]), *whole[i + 1 :]]
        found.append((lies(option, places), unbudgeted(restricted(space.problem, one, kin=True)).cost))
    return found if len(found) > 1 else []


def mostly(found: Iterable[Axes]) -> Axes:
    """The commonest; the longest of equally common ones."""
    have = Counter(found)
    return max(have, key=lambda a: (have[a], len(a)), default=())
