"""A graph in print."""

from __future__ import annotations

import jax.numpy as jnp

from autoshard.ir.graph import describe
from tests.programs import graph, mesh


def test_a_graph_prints_one_line_a_node() -> None:
    g = graph(lambda x, w: jnp.sin(x @ w), ((8, 4), (4, 2)), mesh(a=2, b=4))
    lines = list(describe(g))
    assert len(lines) == len(g.nodes)
    assert "dot_general" in lines[0]
    assert "{" in lines[0]
    assert "sum" in lines[0]
