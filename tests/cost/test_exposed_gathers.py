"""Which values a product waits for: those that another one has just made, or a loop has just begun with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.exposed_gathers import exposed_values, gathered_axis
from autoshard.ir.spec import Spec
from tests.programs import graph, mesh

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


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((("a", "b"), ()), (("a",), ()), (0, "b")),
        (((), ("a",)), ((), ()), (1, "a")),
        ((("a", "b"), ()), ((), ()), None),
        ((("a", "b"), ()), (("b",), ()), None),
        ((("a",), ("b",)), ((), ()), None),
        (((), ()), (("a",), ()), None),
    ],
    ids=["the minor axis", "an axis alone", "two axes", "the major axis", "two dimensions", "a slice"],
)
def test_a_gather_over_one_axis(before: Any, after: Any, found: tuple[int, str] | None) -> None:
    assert gathered_axis(Spec(before), Spec(after)) == found
