"""Narrowing: a bound that never lies, and no option of a best choice is left out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.problem import Problem
from autoshard.search.prune import PrunedProblem
from tests.search.test_solve import random_problem


def best_of(p: Problem) -> tuple[float, tuple[int, ...]]:
    """The least cost of all choices, and the first choice of that cost."""
    choices = itertools.product(*(range(len(u)) for u in p.unary))
    return min((p.cost(c), c) for c in choices)


@given(st.integers(0, 2**32), st.floats(1.0, 2.0))
def test_the_best_choice_is_left_and_costs_the_same(seed: int, known: float) -> None:
    p = random_problem(seed)
    cost, choice = best_of(p)
    narrow = PrunedProblem(p, cost * known)
    for _ in range(3):
        narrow.sweep(cost * known)
        assert narrow.bound <= cost + 1e-9
        assert all(c in left for c, left in zip(choice, narrow.options, strict=True))
        near = [int(np.flatnonzero(left == c)[0]) for c, left in zip(choice, narrow.options, strict=True)]
        assert narrow.original_assignment(near) == choice
        assert narrow.bound + narrow.reparametrized().cost(near) == pytest.approx(cost)


def test_a_chain_is_solved_by_one_sweep_each_way() -> None:
    rng = np.random.default_rng(0)
    p = Problem(tuple(rng.random(4) for _ in range(6)), {(i, i + 1): rng.random((4, 4)) for i in range(5)})
    cost, choice = best_of(p)
    narrow = PrunedProblem(p, cost)
    narrow.sweep(cost)
    assert narrow.bound == pytest.approx(cost)
    assert narrow.original_assignment([0] * 6) == choice


def test_what_cannot_be_had_counts_as_the_dearest() -> None:
    table = np.array([[math.inf, 1.0], [2.0, math.inf]])
    narrow = PrunedProblem(Problem((np.zeros(2), np.zeros(2)), {(0, 1): table}), math.inf)
    narrow.sweep(math.inf)
    assert narrow.bound == 1.0
    narrow.sweep(1.0)
    assert narrow.original_assignment([0, 0]) == (0, 1)
