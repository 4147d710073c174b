"""The solver against enumeration: optima where it claims them, and bounds that hold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.search import solve as solve_module
from autoshard.search.eliminate import Solution, eliminate
from autoshard.search.problem import Budget, Problem
from autoshard.search.solve import least_load, solve, solve_milp, solve_without_budgets


def random_problem(seed: int, budget_count: int = 0) -> Problem:
    """Two to six variables of one to four options, most pairs of them with a table."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, rng.integers(2, 7))
    pairs = {
        (i, j): rng.random((sizes[i], sizes[j]))
        for i, j in itertools.combinations(range(len(sizes)), 2)
        if rng.random() < 0.6
    }
    budgets = [
        Budget({i: rng.random(n) for i, n in enumerate(sizes)}, rng.uniform(0.3, 0.6) * len(sizes))
    ] * budget_count
    neighbourhoods = (tuple(np.arange(n) // 2 for n in sizes),)
    return Problem(tuple(rng.random(n) for n in sizes), pairs, tuple(budgets), neighbourhoods)


def every(p: Problem) -> float:
    """The least cost of all assignments within the budgets."""
    choices = itertools.product(*(range(len(u)) for u in p.unary))
    return min((p.cost(c) for c in choices if p.fits(c)), default=math.inf)


@given(st.integers(0, 2**32))
def test_elimination_finds_the_optimum(seed: int) -> None:
    p = random_problem(seed)
    found = solve_without_budgets(p)
    assert found.cost == pytest.approx(every(p), abs=1e-12)
    assert found.gap < 1e-12
    assert found.cost == p.cost(found.assignment)


@given(st.integers(0, 2**32))
def test_with_mini_buckets_the_bound_holds(seed: int) -> None:
    p = random_problem(seed)
    found = solve_without_budgets(p, max_entries=8)
    assert found.bound <= every(p) + 1e-12
    assert found.cost >= every(p) - 1e-12


def test_tables_that_would_be_too_large_are_minimised_apart() -> None:
    """Of three variables of two options each, two must have the same one, which costs 1; no two alone must."""
    p = Problem((np.zeros(2),) * 3, dict.fromkeys([(0, 1), (1, 2), (0, 2)], np.eye(2)))
    assert [(eliminate(p, n).bound, eliminate(p, n).cost) for n in (8, 4)] == [(1, 1), (0, 1)]


@given(st.integers(0, 2**32))
def test_highs_agrees(seed: int) -> None:
    p = random_problem(seed, budget_count=seed % 2)
    if every(p) == math.inf:
        with pytest.raises(PlanError, match="no assignment is within the budgets"):
            solve_milp(p)
    else:
        found = solve_milp(p)
        assert found.cost == pytest.approx(every(p), abs=1e-6)
        assert found.bound == pytest.approx(found.cost, abs=1e-6)
        assert p.fits(found.assignment)


@given(st.integers(0, 2**32))
def test_budgets_are_kept_and_the_gap_is_honest(seed: int) -> None:
    p = random_problem(seed, budget_count=1)
    best = every(p)
    try:
        found = solve(p, milp_entries=seed % 2 * 4000)
    except PlanError:
        assert best == math.inf or seed % 2 == 0
        return
    assert p.fits(found.assignment)
    assert found.bound - 1e-9 <= best <= found.cost + 1e-9


@given(st.integers(0, 2**32))
def test_the_bound_is_at_least_that_without_budgets(seed: int) -> None:
    p = random_problem(seed, budget_count=1)
    try:
        found = solve(p, milp_entries=0)
    except PlanError:
        return
    assert found.bound >= min(solve_without_budgets(p).bound, found.cost) - 1e-9


def test_no_nearer_multiplier_is_searched_for_where_the_bound_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gap of 100 % allowed every problem ends where the budgets are first kept, and its bound holds still."""
    solved, real = list[int](), solve_module.solve_without_budgets

    def counted(problem: Problem, *args: int) -> Solution:
        solved[-1] += 1
        return real(problem, *args)

    monkeypatch.setattr(solve_module, "solve_without_budgets", counted)
    for gap in (1e-4, 1.0):
        monkeypatch.setattr(solve_module, "MIN_GAIN", gap)
        solved.append(0)
        for seed in range(40):
            p = random_problem(seed, budget_count=1)
            try:
                found = solve(p, milp_entries=0)
            except PlanError:
                continue
            assert found.bound - 1e-9 <= every(p) <= found.cost + 1e-9
    assert solved[1] < solved[0] / 2


def test_pricing_a_budget_finds_the_best_of_most_problems() -> None:
    found = 0
    for seed in range(100):
        p = random_problem(seed, budget_count=1)
        try:
            found += solve(p, milp_entries=0).cost <= every(p) * 1.02
        except PlanError:
            found += every(p) == math.inf
    assert found >= 70


@pytest.mark.parametrize("seed", range(40))
def test_no_change_of_one_variable_within_the_budgets_is_cheaper(seed: int) -> None:
    p = random_problem(seed, budget_count=1)
    try:
        found = solve(p, milp_entries=0)
    except PlanError:
        return
    for i, u in enumerate(p.unary):
        changed = [(*found.assignment[:i], k, *found.assignment[i + 1 :]) for k in range(len(u))]
        assert min(p.cost(c) for c in changed if p.fits(c)) == found.cost


def test_an_option_of_infinite_cost_is_not_taken() -> None:
    p = Problem((np.array([0.0, 1.0]), np.zeros(2)), {(0, 1): np.array([[math.inf, math.inf], [3.0, 2.0]])})
    assert solve_without_budgets(p).assignment == (1, 1)
    assert solve_milp(p).assignment == (1, 1)


@pytest.mark.parametrize("seed", range(40))
def test_infeasible_problems_have_no_assignment_within_the_budgets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unary = tuple(np.where(rng.random(3) < 0.3, math.inf, rng.random(3)) for _ in range(4))
    unary = tuple(np.where(np.isinf(u).all(), 1.0, u) for u in unary)
    row = Budget({i: rng.random(3) for i in range(4)}, float(rng.uniform(0.2, 1.2)))
    problem = Problem(unary, {}, (row,))
    kept = [c for c in itertools.product(range(3), repeat=4) if problem.fits(c) and math.isfinite(problem.cost(c))]
    assert problem.infeasible() is not bool(kept)
    if not kept:
        with pytest.raises(PlanError, match="within the budgets"):
            solve(problem, milp_entries=0)
        allowed = [c for c in itertools.product(range(3), repeat=4) if math.isfinite(problem.cost(c))]
        assert row.load(least_load(problem).assignment) == pytest.approx(min(map(row.load, allowed)))


def test_neighbourhoods_lead_out_of_a_local_optimum() -> None:
    """Variables that must change together: no single change improves, a change of all does."""
    table = np.full((4, 4), 5.0)
    np.fill_diagonal(table, [3.0, 2.0, 1.0, 0.5])
    wide = {(0, 1): table, (1, 2): table, (0, 2): table}
    neighbourhoods = tuple(tuple(np.array(k) for _ in range(3)) for k in ([0, 0, 1, 1], [0, 1, 0, 1]))
    p = Problem((np.zeros(4),) * 3, wide, neighbourhoods=neighbourhoods)
    assert solve_without_budgets(p, max_entries=4).assignment == (3, 3, 3)


def test_two_products_on_a_mesh_of_two_by_two() -> None:
    """XLA's solver test in plain numbers: [64,64] x [64,128] x [128,64] on (2, 2), one axis costs 1 %."""
    # Options of a product's factors (rows, contracted, columns): which axis splits which; beta of the axes is (.01, 1).
    beta, n = (0.01, 1.0), 2

    def reduced(axis: int, size: float) -> float:
        return 2 * (n - 1) / n * size * beta[axis]

    options = [(a, b) for a in range(3) for b in range(3) if a != b]  # factor split by axis 0, by axis 1
    first = np.array([sum(reduced(k, 64 * 128 / n) for k in (0, 1) if o[k] == 1) for o in options])
    second = np.array([sum(reduced(k, 64 * 64 / n) for k in (0, 1) if o[k] == 1) for o in options])
    # The hidden value is (rows, columns) of the first, (rows, contracted) of the second: free where they agree.
    agree = [
        [all((x == 0) == (y == 0) and (x == 2) == (y == 1) for x, y in zip(o, p, strict=True)) for p in options]
        for o in options
    ]
    p = Problem((first, second), {(0, 1): np.where(agree, 0.0, math.inf)})
    found = solve_without_budgets(p)
    o, q = (options[c] for c in found.assignment)
    assert (o, q) == ((2, 0), (1, 0))  # axis 0 on the hidden dimension, axis 1 on the rows
    assert found.cost == pytest.approx(reduced(0, 64 * 64 / n))
    assert solve_milp(p).assignment == found.assignment
