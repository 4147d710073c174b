"""Minimises a `Problem` within its budgets, with a lower bound on the cost of every assignment within them.

Without budgets (`solve_without_budgets`): `autoshard.search.eliminate` with small tables; where that leaves a gap,
`autoshard.search.prune` drops options and large-neighbourhood search (`neighbourhood_search`) improves the known
assignment, in turn, until what remains is eliminated exactly or the rounds are used up.

With budgets (`solve`): small problems go to HiGHS as a mixed-integer linear program (`solve_milp`). In larger ones,
each budget's load is priced by a Lagrange multiplier, which grows until the assignment fits and is then bisected; the
greatest value of the Lagrangian dual on the way is the bound.

The bound is one of this problem, that is, of the cost model and of the layouts that the problem can express: not of
every program that computes the same, nor of the clock (docs/math/elimination.md).
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
"""Limit on a table's entries in elimination."""
MAX_TABLE_ENTRIES_UNPRUNED = 1 << 15
"""The same before and while options are pruned: a quick upper bound is enough there."""
MAX_MILP_ENTRIES = 4000
"""Limit on the entries of all pairwise tables together for a problem with budgets to go to HiGHS."""
PRUNING_ROUNDS = 10
LOCAL_SEARCH_ROUNDS = 16
BISECTIONS = 8
"""Most geometric bisections between a multiplier that is too low and one that suffices."""
MIN_GAIN = 1e-4
"""Share of the cost: where the bound is no further from it, no nearer multiplier is searched for."""
LEAST_LOAD_MULTIPLIER = 1e3
"""Multiplier for which loads outweigh all costs: per whole budget, in units of the sum of all tables' largest costs."""
MAX_MULTIPLIER = 1e6
"""Multiplier beyond which a budget is given up: per whole budget, in units of the optimum without budgets."""


def solve(
    problem: Problem,
    relaxed: Solution | None = None,
    *,
    milp_entries: int = MAX_MILP_ENTRIES,
) -> Solution:
    """An assignment within the budgets, and a lower bound on the cost of all such assignments.

    ``relaxed`` is the solution without budgets, where it is known (`solve_without_budgets`).

    It is optimal if the optimum without budgets fits and was proven, or if the pairwise tables have at most
    ``milp_entries`` entries; otherwise `Solution.gap` says what is not proven.

    Raises:
      PlanError: no assignment is within the budgets, or none that was tried.
    """
    if problem.infeasible():
        raise PlanError("no assignment is within the budgets")
    relaxed = relaxed or solve_without_budgets(problem)
    best = relaxed.assignment if problem.fits(relaxed.assignment) else None
    if best is None and sum(t.size for t in problem.pairwise.values()) <= milp_entries:
        return solve_milp(problem)
    multipliers, current, bound = [0.0] * len(problem.budgets), relaxed.assignment, relaxed.bound

    def minimise_lagrangian() -> Assignment:
        nonlocal best, bound
        dual = solve_without_budgets(problem.lagrangian(multipliers))
        bound = max(bound, dual.bound - sum(m * b.limit for m, b in zip(multipliers, problem.budgets, strict=True)))
        found = dual.assignment
        if problem.fits(found) and (best is None or problem.cost(found) < problem.cost(best)):
            best = found
        return found

    while best is None:
        r = int(np.argmax([b.load(current) / max(b.limit, 1.0) for b in problem.budgets]))
        budget, low = problem.budgets[r], multipliers[r]
        if low:  # its multiplier was found, and that of another budget has undone the effect
            break
        scale = relaxed.cost / max(budget.limit, 1.0)
        high = scale / 64
        while budget.load(current) > budget.limit and high < MAX_MULTIPLIER * scale:
            low, high = high, 4 * high
            multipliers[r] = high
            current = minimise_lagrangian()
        if budget.load(current) > budget.limit:
            break
        for _ in range(BISECTIONS):  # towards the least multiplier under which the budget is kept
            if best is not None and problem.cost(best) - bound <= MIN_GAIN * problem.cost(best):
                break
            multipliers[r] = (low * high) ** 0.5
            found = minimise_lagrangian()
            if budget.load(found) > budget.limit:
                low = multipliers[r]
            else:
                high, current = multipliers[r], found
        multipliers[r] = high
    if best is None:
        raise PlanError("no assignment within the budgets was found")
    if any(multipliers):
        best = _descend_within_budgets(problem, best)
    return Solution(best, problem.cost(best), min(bound, problem.cost(best)))


def least_load(problem: Problem) -> Solution:
    """An assignment of small loads at any cost, for budgets that cannot all be kept. Its bound is 0."""
    tables = (*problem.unary, *problem.pairwise.values())
    worst = sum(float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables)
    multipliers = [LEAST_LOAD_MULTIPLIER * worst / max(b.limit, 1.0) for b in problem.budgets]
    found = solve_without_budgets(problem.lagrangian(multipliers)).assignment
    return Solution(found, problem.cost(found), 0.0)


def solve_without_budgets(problem: Problem, max_entries: int = MAX_TABLE_ENTRIES) -> Solution:
    """Minimises ``problem`` without its budgets.

    It is optimal unless what pruning leaves still needs a table of more than ``max_entries`` entries.
    """
    unpruned_entries = min(max_entries, MAX_TABLE_ENTRIES_UNPRUNED)
    best = eliminate(problem, unpruned_entries)
    if best.optimal:
        return best
    pruned, cache = PrunedProblem(problem, best.cost), dict[tuple[int, bytes], Assignment]()
    for _ in range(PRUNING_ROUNDS):
        pruned.sweep(best.cost)
        before, best = best.assignment, _eliminate_remaining(problem, best, pruned, unpruned_entries)
        if best.assignment == before and problem.neighbourhoods and not best.optimal:
            best = _improve_solution(problem, best, cache)
        if best.optimal:  # once more with the original costs: ties are then broken as in an unpruned problem
            tied = eliminate(restricted(problem, pruned.options), unpruned_entries)
            if tied.cost <= best.cost * (1 + REL_TOLERANCE):
                best = Solution(pruned.original_assignment(tied.assignment), tied.cost, min(best.bound, tied.cost))
            return best
    best = _eliminate_remaining(problem, best, pruned, max_entries)
    return _improve_solution(problem, best, cache) if problem.neighbourhoods and not best.optimal else best


def eliminate_and_improve(problem: Problem) -> Assignment:
    """A second good assignment, found without pruning: elimination and neighbourhood search, budgets ignored."""
    first, cache = eliminate(problem, MAX_TABLE_ENTRIES).assignment, dict[tuple[int, bytes], Assignment]()
    return min((neighbourhood_search(problem, start, cache) for start in (first, [0] * len(first))), key=problem.cost)


def _improve_solution(problem: Problem, best: Solution, cache: dict[tuple[int, bytes], Assignment]) -> Solution:
    found = neighbourhood_search(problem, best.assignment, cache)
    cost = problem.cost(found)
    return Solution(found, cost, min(cost, best.bound))


def _eliminate_remaining(problem: Problem, best: Solution, pruned: PrunedProblem, max_entries: int) -> Solution:
    """The cheaper of ``best`` and what eliminating the remaining options finds, with the higher of the two bounds."""
    remaining = eliminate(pruned.reparametrized(), max_entries)
    found = min(best.assignment, pruned.original_assignment(remaining.assignment), key=problem.cost)
    cost = problem.cost(found)
    return Solution(found, cost, min(cost, max(best.bound, pruned.bound + remaining.bound)))


def neighbourhood_search(
    problem: Problem, start: Sequence[int], cache: dict[tuple[int, bytes], Assignment] | None = None
) -> Assignment:
    """Large-neighbourhood search from ``start``, budgets ignored: for each of the problem's neighbourhoods in turn (one
    for each mesh axis), re-solves by elimination with every variable free to take any option of its present label (to
    change what that axis shards), until nothing improves.

    ``cache`` keeps solutions, by neighbourhood and labels, between calls for the same problem.
    """
    best, cache = tuple(start), {} if cache is None else cache
    for _ in range(LOCAL_SEARCH_ROUNDS):
        before = best
        for k, labels in enumerate(problem.neighbourhoods):
            current = np.array([l[c] for l, c in zip(labels, best, strict=True)])
            key = k, current.tobytes()
            if key not in cache:
                options = [np.flatnonzero(l == label) for l, label in zip(labels, current, strict=True)]
                found = eliminate(restricted(problem, options), MAX_TABLE_ENTRIES)
                cache[key] = tuple(int(o[c]) for o, c in zip(options, found.assignment, strict=True))
            best = cache[key]
        if problem.cost(best) >= problem.cost(before):
            return before
    return best


def _descend_within_budgets(problem: Problem, start: Assignment) -> Assignment:
    """Coordinate descent: changes one variable at a time to its cheapest option that keeps all budgets."""
    found = list(start)
    loads = [budget.load(found) for budget in problem.budgets]
    tables = _tables_by_variable(problem)
    for _ in range(LOCAL_SEARCH_ROUNDS):
        before = tuple(found)
        for i, unary in enumerate(problem.unary):
            now = found[i]
            costs = unary + sum((t.costs_of(i, found) for t in tables[i]), np.zeros(len(unary)))
            for r, budget in enumerate(problem.budgets):
                load = budget.loads.get(i)
                if load is not None:
                    costs = np.where(loads[r] + load - load[now] > budget.limit, math.inf, costs)
            best = int(np.argmin(costs))
            if costs[best] < costs[now]:
                found[i] = best
                loads = [budget.load(found) for budget in problem.budgets]
        if tuple(found) == before:
            break
    return tuple(found)


def _tables_by_variable(problem: Problem) -> list[list[CostTable]]:
    """For each variable, the pairwise tables that mention it."""
    tables: list[list[CostTable]] = [[] for _ in problem.unary]
    for pair, costs in problem.pairwise.items():
        for i in pair:
            tables[i].append(CostTable(pair, costs))
    return tables


def solve_milp(problem: Problem) -> Solution:
    """The optimum within the budgets, by HiGHS as a mixed-integer linear program, with HiGHS's bound.

    A binary b[i, k] says that variable i has option k; a continuous q[i, k, j, l] says that i has k and j has l:

        sum_k b[i, k] = 1,   sum_l q[i, k, j, l] = b[i, k],   sum_k q[i, k, j, l] = b[j, l]

    (the formulation of Alpa's intra-operator pass: Zheng et al., OSDI 2022, section 4.2).

    Raises:
      PlanError: no assignment is within the budgets.
    """
    first_column, columns = [], 0
    for u in problem.unary:
        first_column.append(columns)
        columns += len(u)
    binaries = columns
    cost = [np.concatenate(problem.unary)]
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def add_row(terms: list[tuple[int, float]], low: float, high: float) -> None:
        entries.extend((len(lower), c, x) for c, x in terms)
        lower.append(low)
        upper.append(high)

    for i, u in enumerate(problem.unary):
        add_row([(first_column[i] + k, 1.0) for k in range(len(u))], 1, 1)
    for (i, j), table in problem.pairwise.items():
        n, m = table.shape
        for k in range(n):
            add_row([(columns + k * m + l, 1.0) for l in range(m)] + [(first_column[i] + k, -1.0)], 0, 0)
        for l in range(m):
            add_row([(columns + k * m + l, 1.0) for k in range(n)] + [(first_column[j] + l, -1.0)], 0, 0)
        cost.append(table.ravel())
        columns += n * m
    for budget in problem.budgets:
        terms = [(first_column[i] + k, x) for i, load in budget.loads.items() for k, x in enumerate(load)]
        # HiGHS's tolerances are absolute, and where it rounds out of them it prints.
        unit = max(1.0, abs(budget.limit) / 1e4)
        add_row([(c, x / unit) for c, x in terms], -math.inf, budget.limit / unit)
    costs = np.concatenate(cost)
    forbidden = ~np.isfinite(costs)
    rows, cols, coefficients = zip(*entries, strict=True)
    matrix = scipy.sparse.csr_array((coefficients, (rows, cols)), shape=(len(lower), columns))
    most: Any = np.where(forbidden, 0.0, 1.0)
    low: Any = np.array(lower)
    high: Any = np.array(upper)
    scale = np.abs(costs[~forbidden]).max() or 1.0  # seconds of one step are too small for HiGHS's tolerances
    result = scipy.optimize.milp(
        np.where(forbidden, 0.0, costs) / scale,
        integrality=np.arange(columns) < binaries,
        bounds=scipy.optimize.Bounds(0, most),
        constraints=scipy.optimize.LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise PlanError(f"no assignment is within the budgets: {result.message}")
    found = tuple(int(np.argmax(result.x[c : c + len(u)])) for c, u in zip(first_column, problem.unary, strict=True))
    return Solution(found, problem.cost(found), float(result.mip_dual_bound) * scale)
