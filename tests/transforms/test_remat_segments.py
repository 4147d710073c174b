"""The choose_cuts against every possible choice of choose_cuts, and against the closed form of a chain."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.transforms.remat.segments import LiveValue, choose_cuts, saved_bytes


@st.composite
def lines(draw):
    n = draw(st.integers(1, 9))
    values = [
        LiveValue(at, draw(st.integers(at, n - 1)), draw(st.integers(0, 9)))
        for at in range(n)
        for _ in range(draw(st.integers(0, 2)))
    ]
    return n, values, draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))


@given(lines())
@settings(max_examples=150)
def test_cuts_are_inside_and_never_need_more_memory_than_none(line):
    n, values, residual = line
    chosen = choose_cuts(n, values, residual)
    assert list(chosen) == sorted(set(chosen))
    assert all(0 < c < n for c in chosen)
    assert saved_bytes(n, values, residual, chosen) <= sum(residual)


@given(lines())
@settings(max_examples=150)
def test_cuts_are_within_their_bound_of_the_best(line):
    n, values, residual = line
    best = min(saved_bytes(n, values, residual, at) for k in range(n) for at in itertools.combinations(range(1, n), k))
    growth = (sum(residual) / max(residual)) ** (1 / 23) if any(residual) else 1
    assert saved_bytes(n, values, residual, choose_cuts(n, values, residual)) <= 1.02 * growth * best * (1 + 1e-6)


def test_a_chain_of_equal_layers_needs_the_square_root():
    # Layers of ten steps; the state between layers is one unit, every step leaves one unit for later.
    layers, steps = 64, 10
    n = layers * steps
    values = [LiveValue(i * steps - 1, (i + 1) * steps - 1, 1) for i in range(1, layers)]
    values += [LiveValue(i, i + 1, 3) for i in range(n - 1) if (i + 1) % steps]
    chosen = choose_cuts(n, values, [1] * n)
    assert all(c % steps == 0 for c in chosen)
    ideal = 2 * math.sqrt(n)
    assert saved_bytes(n, values, [1] * n, chosen) <= 1.2 * ideal


def test_small_gains_beside_much_that_is_saved_anyway_are_not_worth_their_work():
    values = [LiveValue(i, i + 1, 1) for i in range(9)]
    assert choose_cuts(10, values, [10] * 10)
    assert not choose_cuts(10, values, [10] * 10, saved_anyway=10_000)


def test_a_value_that_is_live_throughout_counts_once():
    values = [LiveValue(0, 99, 5), *(LiveValue(i, i + 1, 1) for i in range(99))]
    chosen = choose_cuts(100, values, [10] * 100)
    assert len(chosen) > 5
    assert saved_bytes(100, values, [10] * 100, chosen) < 250


def test_nothing_to_gain_means_no_cut():
    assert choose_cuts(3, [LiveValue(0, 2, 100), LiveValue(1, 2, 100)], [1, 1, 1]) == ()
    assert choose_cuts(4, [], [0, 0, 0, 0]) == ()
    assert choose_cuts(1, [], [7]) == ()
