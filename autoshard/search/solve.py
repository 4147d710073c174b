"""solve: the best choice of a `Problem`, and a bound that no choice can go below.

Without budgets, variables are eliminated (`autoshard.search.eliminate`). Where tables would become large, options that are in
no good choice are left out first (`autoshard.search.prune`), until what is left is eliminated exactly.

Budgets are priced (Lagrange): the price of a byte rises until the choice fits, and the best dual value is the bound.
`exactly` hands a problem to HiGHS as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from autoshard.errors import PlanError
from autoshard.search.eliminate import CostTable, Solution, eliminate
from autoshard.search.problem import REL_TOLERANCE, Assignment, Problem, restricted
from autoshard.search.prune import PrunedProblem

MAX_TABLE_ENTRIES = 1 << 21
"""Most entries of a table in elimination."""
MAX_MILP_ENTRIES = 4000
"""Most entries of all tables for which budgets are kept exactly."""
MAX_TABLE_ENTRIES_UNPRUNED = 1 << 15
"""Most entries of a table in elimination before options have been left out."""
PRUNING_ROUNDS = 10
"""Most rounds of leaving options out."""
LOCAL_SEARCH_ROUNDS = 16
"""Most rounds of improving one variable at a time."""
BISECTIONS = 8
"""How often the gap between a price that is too low and one that is not is halved."""
LEAST_LOAD_MULTIPLIER = 1e3
"""The price of a whole budget where costs do not matter, in costs of the dearest options of all."""
MAX_MULTIPLIER = 1e6
"""The highest price of a whole budget, in costs of the best choice without it."""


def solve(problem: Problem, small: int = MAX_MILP_ENTRIES) -> Solution:
    """A choice that keeps the budgets: the best where its pairs' tables have at most ``small`` entries or pricing the
    budgets happens to find it, else one near it.

    Raises:
      PlanError: no choice keeps them, or none that was tried.
    """
    if problem.infeasible():
        raise PlanError("no choice keeps the budgets")
    best = solve_without_budgets(problem)
    found = best.assignment if problem.fits(best.assignment) else None
    if found is None and sum(t.size for t in problem.pairwise.values()) <= small:
        return solve_milp(problem)
    prices, choice = [0.0] * len(problem.budgets), best.assignment

    def tried(prices: Sequence[float], near: Assignment) -> Assignment:
        nonlocal found
        priced = problem.lagrangian(prices)
        choice = (
            neighbourhood_search(priced, near) if problem.neighbourhoods else solve_without_budgets(priced).assignment
        )
        if problem.fits(choice) and (found is None or problem.cost(choice) < problem.cost(found)):
            found = choice
        return choice

    while found is None:
        over = [row.load(choice) / max(row.limit, 1.0) for row in problem.budgets]
        r = int(np.argmax(over))
        row, low = problem.budgets[r], prices[r]
        if low:  # priced already, and another budget's price has undone it
            break
        high = best.cost / max(row.limit, 1.0) / 64
        while row.load(choice) > row.limit and high < MAX_MULTIPLIER * best.cost / max(row.limit, 1.0):
            low, high = high, 4 * high
            prices[r] = high
            choice = tried(prices, choice)
        if row.load(choice) > row.limit:
            break
        for _ in range(BISECTIONS):  # the cheapest price that keeps it
            prices[r] = (low * high) ** 0.5
            near = tried(prices, choice)
            if row.load(near) > row.limit:
                low = prices[r]
            else:
                high, choice = prices[r], near
        prices[r] = high
    if found is None:
        raise PlanError("no choice was found that keeps the budgets")
    bound = best.bound
    if any(prices):
        found = _descend_within_budgets(problem, found)
        dual = solve_without_budgets(problem.lagrangian(prices)).bound
        bound = max(bound, dual - sum(p * r.limit for p, r in zip(prices, problem.budgets, strict=True)))
    return Solution(found, problem.cost(found), min(bound, problem.cost(found)))


def least_load(problem: Problem) -> Solution:
    """A choice that takes little of the budgets, whatever it costs; nothing is known of what it could cost."""
    tables = (*problem.unary, *problem.pairwise.values())
    most = sum(float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables)
    found = solve_without_budgets(
        problem.lagrangian([LEAST_LOAD_MULTIPLIER * most / max(row.limit, 1.0) for row in problem.budgets])
    ).assignment
    return Solution(found, problem.cost(found), 0.0)


def solve_without_budgets(problem: Problem, largest: int = MAX_TABLE_ENTRIES) -> Solution:
    """The best choice, budgets aside; its gap is 0 unless what narrowing leaves needs a table of more than ``largest``
    entries."""
    rough = min(largest, MAX_TABLE_ENTRIES_UNPRUNED)
    best = eliminate(problem, rough)
    if best.optimal:
        return best
    narrow, known = PrunedProblem(problem, best.cost), dict[tuple[int, bytes], Assignment]()
    for _ in range(PRUNING_ROUNDS):
        narrow.sweep(best.cost)
        before, best = best.assignment, _eliminate_remaining(problem, best, narrow, rough)
        if best.assignment == before and problem.neighbourhoods and not best.optimal:
            best = _improve_solution(problem, best, known)
        if best.optimal:  # again with the costs as they were: of equal choices the first, as everywhere
            near = eliminate(restricted(problem, narrow.options), rough)
            if near.cost <= best.cost * (1 + REL_TOLERANCE):
                best = Solution(narrow.original_assignment(near.assignment), near.cost, min(best.bound, near.cost))
            return best
    best = _eliminate_remaining(problem, best, narrow, largest)
    return _improve_solution(problem, best, known) if problem.neighbourhoods and not best.optimal else best


def eliminate_and_improve(problem: Problem) -> Assignment:
    """A good choice that is found otherwise, budgets aside: by elimination alone, and improved."""
    first = eliminate(problem, MAX_TABLE_ENTRIES).assignment
    return min((neighbourhood_search(problem, c) for c in (first, [0] * len(first))), key=problem.cost)


def _improve_solution(problem: Problem, best: Solution, known: dict[tuple[int, bytes], Assignment]) -> Solution:
    choice = neighbourhood_search(problem, best.assignment, known)
    cost = problem.cost(choice)
    return Solution(choice, cost, min(cost, best.bound))


def _eliminate_remaining(problem: Problem, best: Solution, narrow: PrunedProblem, largest: int) -> Solution:
    """The better of ``best`` and what elimination finds with the costs moved, with the higher bound."""
    near = eliminate(narrow.reparametrized(), largest)
    choice = min(best.assignment, narrow.original_assignment(near.assignment), key=problem.cost)
    cost = problem.cost(choice)
    return Solution(choice, cost, min(cost, max(best.bound, narrow.bound + near.bound)))


def neighbourhood_search(
    problem: Problem, choice: Sequence[int], known: dict[tuple[int, bytes], Assignment] | None = None
) -> Assignment:
    """Looks for better choices near ``choice``: all variables at once among kindred options, each kind in its turn.

    ``known`` keeps what was found, by the kind and the label of every variable, for this problem's next search.
    """
    best, known = tuple(choice), {} if known is None else known
    for _ in range(LOCAL_SEARCH_ROUNDS):
        before = best
        for k, labels in enumerate(problem.neighbourhoods):
            at = np.array([l[c] for l, c in zip(labels, best, strict=True)])
            key = k, at.tobytes()
            if key not in known:
                options = [np.flatnonzero(l == x) for l, x in zip(labels, at, strict=True)]
                near = eliminate(restricted(problem, options), MAX_TABLE_ENTRIES)
                known[key] = tuple(int(o[c]) for o, c in zip(options, near.assignment, strict=True))
            best = known[key]
        if problem.cost(best) >= problem.cost(before):
            return before
    return best


def _descend_within_budgets(problem: Problem, choice: Assignment) -> Assignment:
    """Uses what the budgets leave: changes one variable at a time for the better, as long as they are kept."""
    found = list(choice)
    spent = [row.load(found) for row in problem.budgets]
    beside = _tables_by_variable(problem)
    for _ in range(LOCAL_SEARCH_ROUNDS):
        before = tuple(found)
        for i, costs in enumerate(problem.unary):
            now = found[i]
            total = costs + sum((f.costs_of(i, found) for f in beside[i]), np.zeros(len(costs)))
            for r, row in enumerate(problem.budgets):
                load = row.loads.get(i)
                if load is not None:
                    total = np.where(spent[r] + load - load[now] > row.limit, math.inf, total)
            best = int(np.argmin(total))
            if total[best] < total[now]:
                found[i] = best
                spent = [row.load(found) for row in problem.budgets]
        if tuple(found) == before:
            break
    return tuple(found)


def _tables_by_variable(problem: Problem) -> list[list[CostTable]]:
    """For each variable, the pairs that it is in."""
    beside: list[list[CostTable]] = [[] for _ in problem.unary]
    for pair, table in problem.pairwise.items():
        for i in pair:
            beside[i].append(CostTable(pair, table))
    return beside


def solve_milp(problem: Problem) -> Solution:
    """The best choice that keeps the budgets, by HiGHS, with the bound that it proved.

    Raises:
      PlanError: no choice keeps the budgets.
    """
    at, columns = [], 0
    for u in problem.unary:
        at.append(columns)
        columns += len(u)
    whole = columns
    cost = [np.concatenate(problem.unary)]
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(terms: list[tuple[int, float]], low: float, high: float) -> None:
        entries.extend((len(lower), c, x) for c, x in terms)
        lower.append(low)
        upper.append(high)

    for i, u in enumerate(problem.unary):
        row([(at[i] + k, 1.0) for k in range(len(u))], 1, 1)
    for (i, j), table in problem.pairwise.items():
        n, m = table.shape
        for k in range(n):  # what a pair does is what each of the two does
            row([(columns + k * m + l, 1.0) for l in range(m)] + [(at[i] + k, -1.0)], 0, 0)
        for l in range(m):
            row([(columns + k * m + l, 1.0) for k in range(n)] + [(at[j] + l, -1.0)], 0, 0)
        cost.append(table.ravel())
        columns += n * m
    for budget in problem.budgets:
        row([(at[i] + k, x) for i, load in budget.loads.items() for k, x in enumerate(load)], -math.inf, budget.limit)
    c = np.concatenate(cost)
    never = ~np.isfinite(c)
    r, k, x = zip(*entries, strict=True)
    matrix = scipy.sparse.csr_array((x, (r, k)), shape=(len(lower), columns))
    most: Any = np.where(never, 0.0, 1.0)
    low: Any = np.array(lower)
    high: Any = np.array(upper)
    scale = np.abs(c[~never]).max() or 1.0
    result = scipy.optimize.milp(
        np.where(never, 0.0, c) / scale,
        integrality=np.arange(columns) < whole,
        bounds=scipy.optimize.Bounds(0, most),
        constraints=scipy.optimize.LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise PlanError(f"no choice keeps the budgets: {result.message}")
    choice = tuple(int(np.argmax(result.x[a : a + len(u)])) for a, u in zip(at, problem.unary, strict=True))
    return Solution(choice, problem.cost(choice), float(result.mip_dual_bound) * scale)
