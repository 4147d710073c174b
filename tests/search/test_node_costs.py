"""Node costs computed for all options at once equal those computed option by option."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from autoshard.search.build_problem import build_problem
from autoshard.search.node_costs import NodeCosts
from autoshard.search.value_groups import SMALL_PROGRAM
from tests.programs import graph, mesh
from tests.search.test_build_problem import CASES, program


def whole_rows(x: jax.Array) -> jax.Array:
    """Of many nodes on one group of values, one can be split along one dimension of three only."""
    for _ in range(SMALL_PROGRAM):
        x = jnp.tanh(x)
    return x + lax.linalg.cholesky(x, symmetrize_input=False)


@pytest.mark.parametrize("axes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}], ids=str)
@pytest.mark.parametrize("case", [*CASES, "whole rows"])
def test_all_options_at_once_cost_what_they_do_one_by_one(
    case: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = program(case, axes) if case in CASES else graph(whole_rows, ((8, 64, 64),), mesh(**axes))
    at_once = build_problem(g).problem
    monkeypatch.setattr(NodeCosts, "is_elementwise", lambda *_: False)
    monkeypatch.setattr(
        NodeCosts, "following_costs", lambda self, *args: self.strategy_costs(args[0], self._followed_axes(*args))
    )
    one_by_one = build_problem(g).problem
    for a, b in zip(at_once.unary, one_by_one.unary, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert at_once.pairwise.keys() == one_by_one.pairwise.keys()
    for pair, table in at_once.pairwise.items():
        np.testing.assert_allclose(table, one_by_one.pairwise[pair], rtol=1e-12)
