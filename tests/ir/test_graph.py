"""The printed form of a graph."""

from __future__ import annotations

import jax.numpy as jnp

from autoshard.ir.graph import graph_lines
from tests.programs import graph, mesh


def test_graph_lines() -> None:
    g = graph(lambda x, w: jnp.sin(x @ w), ((8, 4), (4, 2)), mesh(a=2, b=4))
    product, sine = graph_lines(g)
    assert product.startswith("   0 %3[8, 2] = dot_general %1[8, 4], %2[4, 2]  ab, bc -> ac {b: sum} | sum: 0 1  plain")
    assert sine.startswith("   1 %4[8, 2] = sin %3[8, 2]  ab -> ab  plain")
