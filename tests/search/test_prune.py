"""Pruning: the bound holds, and no option of an optimum is dropped."""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.problem import Problem
from autoshard.search.prune import PrunedProblem
from tests.search.test_solve import random_problem


def best_of(p: Problem) -> tuple[float, tuple[int, ...]]:
    """The optimum, and the first assignment that attains it."""
    choices = itertools.product(*(range(len(u)) for u in p.unary))
    return min((p.cost(c), c) for c in choices)


@given(st.integers(0, 2**32), st.floats(1.0, 2.0))
def test_the_optimum_survives_and_costs_the_same(seed: int, known: float) -> None:
    p = random_problem(seed)
    cost, choice = best_of(p)
    pruned = PrunedProblem(p, cost * known)
    for _ in range(3):
        pruned.sweep(cost * known)
        assert pruned.bound <= cost + 1e-9
        assert all(c in remaining for c, remaining in zip(choice, pruned.options, strict=True))
        inner = [int(np.flatnonzero(remaining == c)[0]) for c, remaining in zip(choice, pruned.options, strict=True)]
        assert pruned.original_assignment(inner) == choice
        assert pruned.bound + pruned.reparametrized().cost(inner) == pytest.approx(cost)


def test_a_chain_is_solved_by_one_sweep_each_way() -> None:
    rng = np.random.default_rng(0)
    p = Problem(tuple(rng.random(4) for _ in range(6)), {(i, i + 1): rng.random((4, 4)) for i in range(5)})
    cost, choice = best_of(p)
    pruned = PrunedProblem(p, cost)
    pruned.sweep(cost)
    assert pruned.bound == pytest.approx(cost)
    assert pruned.original_assignment([0] * 6) == choice


def test_options_of_infinite_cost_are_dropped() -> None:
    table = np.array([[math.inf, 1.0], [2.0, math.inf]])
    pruned = PrunedProblem(Problem((np.zeros(2), np.zeros(2)), {(0, 1): table}), math.inf)
    pruned.sweep(math.inf)
    assert pruned.bound == 1.0
    pruned.sweep(1.0)
    assert pruned.original_assignment([0, 0]) == (0, 1)


def test_tables_are_freed_with_the_problem() -> None:
    """They may be gigabytes, and to Python's search for cycles a few objects, which does not hurry for them."""
    p = Problem((np.zeros(2), np.zeros(2)), {(0, 1): np.eye(2)})
    pruned = PrunedProblem(p, 1.0)
    pruned.sweep(1.0)
    tables = [weakref.ref(edge.table) for edge in pruned.edges[0, 1]]
    gc.disable()
    try:
        del pruned
        assert [table() for table in tables] == [None, None]
    finally:
        gc.enable()
