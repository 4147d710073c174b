"""Rules of several equations as one: factors that values connect are one, and partial sums reach the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import lookup_rule
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.rules import SHIPPED
from autoshard.transforms.composed_rule import ComposedRule, Part, compose

MESH = LogicalMesh(("x",), (8,), Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"l": Link("l", 1e10, 1e-6)}, 1e-6))


def composed(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> ComposedRule | None:
    """Of all equations of ``fun``; what one of them computes and another reads is a partial sum."""
    jaxpr = jx.normalize(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)))
    made = {v for e in jaxpr.eqns for v in e.outvars}
    parts: list[Part] = []
    for eqn in jaxpr.eqns:
        rule = lookup_rule(eqn, SHIPPED, MESH)
        assert rule is not None
        parts.append(Part(eqn, rule, tuple(i for i, a in enumerate(eqn.invars) if isinstance(a, jx.Var) and a in made)))
    return compose(parts, {a for a in jaxpr.outvars if isinstance(a, jx.Var)})


@pytest.mark.parametrize(
    ("fun", "shapes", "rule"),
    [
        (lambda x, w: (x @ w).T * 2, ((4, 6), (6, 8)), "ab, bc -> ca {b: sum}"),
        (lambda x, w: (x @ w).sum(0), ((4, 6), (6, 8)), "ab, bc -> c {a: sum, b: sum}"),
        (lambda x, w, y, v: x @ w + y @ v, ((4, 6), (6, 8), (4, 6), (6, 8)), "ab, bc, ab, bc -> ac {b: sum}"),
        (
            lambda x, w, y, v: x @ w - y @ v,
            ((4, 6), (6, 8), (4, 9), (9, 8)),
            "a(bc), (bc)d, a(be), (be)d -> ad {b: sum, c: whole, e: whole}",
        ),
        (lambda x, w, y, v: x @ w + y @ v, ((4, 5), (5, 8), (4, 6), (6, 8)), None),
        (lambda x, w: (x @ w).reshape(32), ((4, 6), (6, 8)), "ab, bc -> (ac) {b: sum}"),
        (lambda x, w: (x @ w).reshape(2, 2, 8), ((4, 6), (6, 8)), "(ab)c, cd -> abd {c: sum}"),
        (lambda x, w: (x @ w).reshape(8, 2, 3).reshape(4, 12), ((4, 6), (6, 12)), "ab, b(cde) -> a(cde) {b: sum}"),
        (lambda x, w: (x @ w).reshape(6, 8).reshape(4, 12), ((4, 6), (6, 12)), None),
        (
            lambda x, y, a, b: ((d := x @ y) @ b, a @ d),
            ((6, 4), (4, 8), (2, 6), (8, 3)),
            "ab, bc, cd, ea -> ad, ec {a: sum, b: sum, c: sum}",
        ),
        (lambda x, w: (x @ w)[:, :3], ((4, 6), (6, 8)), None),
        (lambda x, w: jnp.broadcast_to((x @ w)[None], (5, 4, 8)), ((4, 6), (6, 8)), "ab, bc -> .ac {b: sum}"),
        (lambda x, w: ((d := x @ w) * 2, d.sum(0)), ((4, 6), (6, 8)), "ab, bc -> ac, c {a: sum, b: sum}"),
        (lambda x, w: x @ w + (x @ w).sum(0), ((4, 6), (6, 8)), None),
    ],
    ids=[
        "a view and a scale",
        "a sum",
        "two products",
        "sizes with a common divisor",
        "sizes without",
        "merged",
        "split",
        "reshaped twice",
        "reshaped across",
        "two later products",
        "sliced",
        "broadcast",
        "two results",
        "rows that one term sums and the other has",
    ],
)
def test_rules(fun: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], rule: str | None) -> None:
    found = composed(fun, *shapes)
    assert (found and str(found.rule)) == rule


def test_what_is_inside_has_factors_and_sizes_that_no_operand_has() -> None:
    found = composed(lambda x, w: jnp.broadcast_to((x @ w)[None], (5, 4, 8)).transpose(1, 0, 2), (4, 6), (6, 8))
    assert found is not None
    *_, spread, last = found.dims
    assert spread == ((5,), ("a",), ("c",))
    assert last == (("a",), (5,), ("c",))
    assert found.factors[0] == ("a", "b", "c")
