"""The rule of sums of products, checked against the sums themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.ir.rule import LocalWork
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import SumProducts
from autoshard.rules import SHIPPED
from autoshard.rules.composed import TABLE
from autoshard.rules.validation.audit import audit_factors
from autoshard.rules.validation.case import Case, load
from autoshard.rules.validation.samples import RandomArrays, Sample
from autoshard.transforms.sum_of_products import sum_of_products_p

HARDWARE = Hardware("cpu", {"float64": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)


def joined(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    """``fun`` of arrays of ``shapes``, with its sum of products as one operation."""
    arrays = [RandomArrays().real(*s) for s in shapes]
    with jax.enable_x64(True):
        program = SumProducts("through")(trace(jax.jit(fun), arrays, {}, MESH, rules=SHIPPED))
        case = load(Sample("sum_of_products", jx.as_fun(program.jaxpr), tuple(arrays)), TABLE)
    assert case is not None
    return case


def wrong(case: Case) -> list[str]:
    with jax.enable_x64(True):
        return [str(f) for f in audit_factors(case) if f.kind == "wrong"]


@pytest.mark.parametrize(
    ("fun", "shapes", "rule"),
    [
        (lambda a, b, c, d: a @ b.T + c @ d, ((4, 6), (8, 6), (4, 6), (6, 8)), "ab, bc, ab, bc -> ac {b: sum}"),
        (
            lambda a, b, c, d: a @ b + c @ d,
            ((4, 6), (6, 8), (4, 9), (9, 8)),
            "a(bc), (bc)d, a(be), (be)d -> ad {b: sum, c: whole, e: whole}",
        ),
        (
            lambda a, b, c, d: jnp.einsum("acd,bcd->ab", a, b) + jnp.einsum("acd,bcd->ab", c, d),
            ((4, 6, 2), (8, 6, 2), (4, 3, 2), (8, 3, 2)),
            "a(bc)d, e(bc)d, abd, ebd -> ae {b: sum, c: whole, d: sum}",
        ),
        (
            lambda a, b, c, d: a @ b.T + jnp.outer(c, d),
            ((4, 6), (8, 6), (4,), (8,)),
            None,
        ),
        (
            lambda a, b, c, d: jnp.einsum("acd,bcd->ab", a, b) + c @ d.T,
            ((4, 6, 2), (8, 6, 2), (4, 6), (8, 6)),
            "abc, dbc, ab, bd -> ad {b: sum, c: whole}",
        ),
        (
            lambda x, y, a, b: ((dw := x.T @ y) @ b, a @ dw),
            ((64, 12), (64, 8), (2, 12), (8, 2)),
            "ab, bc, cd, ea -> ad, ec {a: sum, b: sum, c: sum}",
        ),
        (
            lambda x, w, y, v: (x @ w).reshape(32) - (y @ v).reshape(32) / 2,
            ((4, 6), (6, 8), (4, 6), (6, 8)),
            "ab, bc, ab, bc -> (ac) {b: sum}",
        ),
        (lambda x, w, y, v: ((x @ w) * y[:, :8] + y @ v).sum(0), ((4, 6), (6, 8), (4, 9), (9, 8)), None),
    ],
    ids=["two", "other sizes", "two dimensions", "outer", "one has more", "LoRA", "reshaped", "summed"],
)
def test_every_sharding_that_the_rule_allows_gives_the_same_numbers(
    fun: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], rule: str | None
) -> None:
    if rule is None and len(shapes[-1]) == 1:  # an outer product contracts nothing: the other one stays alone
        with pytest.raises(ValueError, match="no equation of that primitive"):
            joined(fun, *shapes)
        return
    case = joined(fun, *shapes)
    assert wrong(case) == []
    assert rule in (None, str(case.rule))


def test_the_work_of_one_device() -> None:
    """Later products are split by the factors that they have; what they read is stored."""
    case = joined(lambda x, y, a, b: ((dw := x.T @ y) @ b, a @ dw), (64, 12), (64, 8), (2, 12), (8, 2))
    local = case.rule.local
    assert local is not None
    assert local.work is not None
    first, later = 2 * 64 * 12 * 8, 2 * (2 * 12 * 8 * 2)
    assert local.work({}) == LocalWork(first + later, 12 * 8 * 8)
    assert local.work({"b": 4}) == LocalWork(first / 4 + later, 12 * 8 * 8)  # b is summed: what follows is not split
    assert local.work({"a": 2, "b": 4}) == LocalWork(first / 8 + later / 2, 12 * 8 * 8 // 2)
    assert local.starts == ((0, 1),)
    several = joined(lambda a, b, c, d: a @ b.T + c @ d, (4, 6), (8, 6), (4, 6), (6, 8)).rule.local
    assert several is not None
    assert several.work is not None
    assert several.work({"a": 2}) == LocalWork(2 * (2 * 4 * 6 * 8) / 2, 0)
    assert several.starts == ((0, 1), (2, 3))


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "scaled": lambda x, y: x * 3,
    "divided": lambda x, y: x / 2,
    "negated": lambda x, y: -x,
    "times an array": lambda x, y: x * jnp.sin(jnp.arange(x.shape[-1], dtype=x.dtype)),
    "transposed": lambda x, y: x.T,
    "reshaped": lambda x, y: x.reshape(x.shape[0] // 2, 2 * x.shape[1]),
    "reshaped twice": lambda x, y: x.reshape(-1).reshape(x.shape[::-1]),
    "rows": lambda x, y: x[: x.shape[0] // 2],
    "summed and spread": lambda x, y: jnp.broadcast_to(x.sum(0), x.shape),
    "added": lambda x, y: x + y.reshape(x.shape),
    "subtracted": lambda x, y: y.reshape(x.shape) * 2 - x,
    "one more product": lambda x, y: jnp.cos(jnp.ones((2, x.shape[0]), x.dtype)) @ x,
}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(LINEAR)), max_size=5), st.sampled_from([(4, 6, 8), (12, 4, 6), (8, 12, 4)]))
def test_random_linear_programs(steps: list[str], sizes: tuple[int, int, int]) -> None:
    """The operations that such programs become give the same numbers, whole and in every sharding of their rules."""
    m, k, n = sizes

    def fun(x: Any, w: Any, y: Any, v: Any) -> Any:
        terms = [x @ w, y @ v]
        for step in steps:
            terms[0] = LINEAR[step](*terms) if terms[0].size == terms[1].size else LINEAR[step](terms[0], terms[0])
        return jnp.tanh(terms[0]), jnp.tanh(terms[1])

    arrays = [RandomArrays().real(*s) for s in ((m, k), (k, n), (m, 2 * k), (2 * k, n))]
    with jax.enable_x64(True):
        program = SumProducts("through")(trace(jax.jit(fun), arrays, {}, MESH, rules=SHIPPED))
        for got, expected in zip(jx.as_fun(program.jaxpr)(*arrays), fun(*arrays), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, arrays, strict=True))
        for eqn in program.jaxpr.eqns:
            read = [a.val if isinstance(a, jx.Literal) else values[a] for a in eqn.invars]
            out = eqn.primitive.bind(*read, **eqn.params)
            values |= zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
            if eqn.primitive is sum_of_products_p:
                one = Sample("sum_of_products", functools.partial(eqn.primitive.bind, **eqn.params), tuple(read))
                case = load(one, TABLE)
                assert case is not None
                assert wrong(case) == []
