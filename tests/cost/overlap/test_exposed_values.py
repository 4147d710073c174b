"""Which values a product waits for, as no other runs while they are gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cost.overlap.exposed_values import exposed_values
from autoshard.ir.spec import Spec
from tests.programs import graph, mesh
from tests.scanned_layers import WIDTH

A, B = (4, 4), (3, 4, 4)


def exposed(fun: Any, *args: Any) -> list[bool]:
    """Of each product, in order, whether what it reads first is exposed."""
    made = graph(fun, args, mesh(data=2))
    found = exposed_values(made)
    return [n.operands[0] in found for n in made.nodes if n.kind.op == "dot_general"]


def test_only_what_the_last_product_has_made_is_exposed() -> None:
    def fun(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.sin(h) @ w, h @ w, jnp.cos(x) @ w

    assert exposed(fun, A, A) == [False, True, False, False]


def test_a_turn_of_a_loop_begins_with_what_is_exposed() -> None:
    def fun(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w, jnp.sin(h) @ w), x, ws)

    assert exposed(fun, A, B) == [True, True, False]


def test_an_activation_is_exposed_where_products_before_it_last_less_than_its_gather() -> None:
    def fun(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.tanh(h) @ w, jnp.sin(h) @ w, jnp.cos(h) @ w

    def found(rows: int, *gathered: int) -> list[bool]:
        made = graph(fun, [(rows, WIDTH), (WIDTH, WIDTH)], mesh(data=2))
        first = [n.operands[0] for n in made.nodes if n.kind.op == "dot_general"]
        whole = {first[g] for g in gathered}
        specs = lambda n, v: (Spec((("data",), ())), Spec(((), ()))) if v in whole else None  # noqa: E731
        return [v in exposed_values(made, specs) for v in first[1:]]

    short, long = 2, 1 << 14
    assert found(long) == found(long, 3) == [True, False, False]
    assert found(short, 3) == [True, False, True]
    assert found(long, 1) == [True, True, False]  # the first of them has a ring, beside which nothing is gathered
    assert found(long, 1, 2) == [True, True, True]
