"""Combined scalar reductions: scalars that are summed pay one latency together, others their own."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.cost import CostModel
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from autoshard.search.search import explore
from tests.programs import CHIP, graph, mesh

MESH = mesh(data=4)
ROWS = Spec((("data",), ()))
ONE, FIVE = (collective_seconds("all-reduce", ("data",), 4 * n, MESH) for n in (1, 5))
COMBINED = replace(MESH, hardware=replace(CHIP, combined_all_reduces=True))


def transfers(fun, count, on=MESH):
    g = graph(fun, ((64, 64),) * count, on)
    return CostModel(g).cost(propagate(g, [], dict.fromkeys(g.inputs, ROWS))).transfers


def test_a_global_norm_pays_one_latency() -> None:
    assert transfers(lambda *xs: jnp.sqrt(sum(jnp.sum(x * x) for x in xs)), 5) == pytest.approx(FIVE)


def test_scalars_that_are_not_added_pay_one_latency_each() -> None:
    assert transfers(lambda x, y: jnp.sum(x) * jnp.sum(y), 2) == pytest.approx(2 * ONE)


def test_vectors_are_combined_where_the_hardware_table_says_so() -> None:
    def statistics(x, y):
        return jnp.sum(x, 0) + jnp.sum(y, 0)

    one, two = (collective_seconds("all-reduce", ("data",), 64 * 4 * n, MESH) for n in (1, 2))
    assert transfers(statistics, 2) == pytest.approx(2 * one)
    assert transfers(statistics, 2, COMBINED) == pytest.approx(two)


def test_reductions_that_wait_for_each_other_are_not_combined() -> None:
    def normalized(x):
        return ((x - jnp.sum(x, 0)) ** 2).sum(0)

    one = collective_seconds("all-reduce", ("data",), 64 * 4, MESH)
    assert transfers(normalized, 1, COMBINED) == pytest.approx(2 * one)


def test_reductions_in_loops_pay_their_own() -> None:
    def looped(x, y):
        return jax.lax.fori_loop(0, 3, lambda _, s: (s[0] + s[1].sum(0), s[1] * (1 + s[1].sum(0))), (y[0], x))

    assert transfers(looped, 2, COMBINED) == pytest.approx(transfers(looped, 2))


def test_tables_of_the_layout_problem_have_the_savings_of_single_nodes() -> None:
    g = graph(lambda x, y: (x.sum(0), y.sum(0), x.sum(0) @ y), ((64, 64), (64, 64)), COMBINED)
    found, s = explore(g, "auto", math.inf)
    assert s.bound == pytest.approx(found.cost.seconds, rel=1e-6)
    assert any(n.kind.combined_count > 1 for n in g.nodes)
