"""Combined scalar reductions: scalars that are summed pay one latency together, others their own."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from autoshard.cost.cost import CostModel
from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.collective import collective_seconds
from tests.programs import graph, mesh

MESH = mesh(data=4)
ROWS = Spec((("data",), ()))
ONE = collective_seconds("all-reduce", ("data",), 4, MESH)


def transfers(fun, count):
    g = graph(fun, ((64, 64),) * count, MESH)
    return CostModel(g).cost(propagate(g, [], dict.fromkeys(g.inputs, ROWS))).transfers


def test_a_global_norm_pays_one_latency() -> None:
    assert transfers(lambda *xs: jnp.sqrt(sum(jnp.sum(x * x) for x in xs)), 5) == pytest.approx(ONE)


def test_scalars_that_are_not_added_pay_one_latency_each() -> None:
    assert transfers(lambda x, y: jnp.sum(x) * jnp.sum(y), 2) == pytest.approx(2 * ONE)


def test_vectors_are_not_combined() -> None:
    four = collective_seconds("all-reduce", ("data",), 64 * 4, MESH)
    assert transfers(lambda x, y: jnp.sum(x, 0) + jnp.sum(y, 0), 2) == pytest.approx(2 * four)
