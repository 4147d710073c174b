"""Products and what is linear in them become one operation where less is reduced then; everything else stays."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import SumProducts
from autoshard.passes.sum_products import MAX_PRODUCTS
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline
from autoshard.transforms.sum_of_products import sum_of_products_p

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rewritten(fun: Any, *args: Any, option: str = "") -> Program:
    return Pipeline((SumProducts(option),)).run(trace(jax.jit(fun), args, {}, MESH, rules=SHIPPED))[0]


def joined(jaxpr: jx.Jaxpr) -> list[jx.JaxprEqn]:
    """The sums of products, at every depth."""
    return [e for e in jaxpr.eqns if e.primitive is sum_of_products_p] + [
        e for eqn in jaxpr.eqns for r in jx.regions(eqn) for e in joined(r.body)
    ]


def products(eqn: jx.JaxprEqn) -> int:
    return sum(step.flops > 0 for step in eqn.params["steps"])


X, W, V = normal(8, 16), normal(16, 4, seed=1), normal(16, 4, seed=2)


def same(fun: Any, *args: Any, option: str = "") -> list[jx.JaxprEqn]:
    """The sums in ``fun`` rewritten, which gives what ``fun`` does."""
    program = rewritten(fun, *args, option=option)
    got = jx.as_fun(program.jaxpr)(*jax.tree.leaves(args))
    chex.assert_trees_all_close(got, jax.tree.leaves(fun(*args)), rtol=1e-5, atol=1e-5, strict=True)
    return joined(program.jaxpr)


def test_two_products_that_are_added_become_one_operation() -> None:
    (eqn,) = same(lambda x, w, v: x @ w + jnp.sin(x) @ v, X, W, V)
    assert str(eqn.params["rule"]) == "ab, bc, ab, bc -> ac {b: sum}"
    assert eqn.params["flops"] == 2 * (2 * 8 * 16 * 4)


def test_what_is_no_product_is_added_afterwards() -> None:
    (eqn,) = same(lambda x, w, v, b: x @ w + b + x @ v, X, W, V, normal(8, 4))
    assert len(eqn.invars) == 4


def test_transposed_products_with_batch_dimensions() -> None:
    def fun(q: jax.Array, k: jax.Array) -> jax.Array:
        return (
            jnp.einsum("bhe,bte->bht", q, k)
            + jnp.einsum("bte,bhe->bht", k, q)
            + jnp.einsum("bhe,bte->tbh", q, k).transpose(1, 2, 0)
        )

    (eqn,) = same(fun, normal(2, 3, 5), normal(2, 7, 5, seed=1))
    assert products(eqn) == 3


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w, v: ((y := x @ w) + x @ v, y),
        lambda x, w, v: x @ w,
        lambda x, w, v: jnp.sin((x @ w).T * 2),
        lambda x, w, v: jnp.sin(x @ w) + x @ v,
        lambda x, w, v: x @ w + (x @ v)[:1],
        lambda x, w, v: (x @ w) * (x @ v),
        lambda x, w, v: (x @ w) / (1 + x[:, :1] ** 2) + x @ v,
        lambda x, w, v: (x @ w) / 0 + x @ v,
        lambda x, w, v: (x @ w) * jnp.inf + x @ v,
        lambda x, w, v: jnp.where(x[:, :1] > 0, x @ w, 1) + x @ v,
        lambda x, w, v: ((x @ w).astype("bfloat16") + (x @ v).astype("bfloat16")).astype("float32"),
        lambda x, w, v: (x.astype("bfloat16") @ w.astype("bfloat16")) * 3 + x.astype("bfloat16") @ v.astype("bfloat16"),
        lambda x, w, v: (x @ w).astype("int32") + (x @ v).astype("int32"),
        lambda x, w, v: jnp.sin((x @ w)[:, 1:]),
        lambda x, w, v: (x.T @ (x @ w)) @ jnp.sin(v.T),
    ],
    ids=[
        "a result too",
        "one product",
        "nothing less to reduce",
        "nonlinear between",
        "stretched",
        "product of two",
        "divided by what may be zero",
        "divided by zero",
        "times infinity",
        "chosen from another",
        "rounded to fewer bits",
        "scaled in few bits",
        "truncated",
        "a dimension that could be split no longer",
        "later products",
    ],
)
def test_other_values_stay(fun: Any) -> None:
    assert same(fun, X, W, V) == []


@pytest.mark.parametrize(
    ("fun", "steps"),
    [
        (lambda x, w, v: jnp.tanh((x @ w + (x @ v) * 3).T * 2), "dot_general dot_general mul add"),
        (lambda x, w, v: x @ w - (x @ v).T.T / 4, "dot_general dot_general transpose transpose div sub"),
        (lambda x, w, v: -(x @ w) * x[:, :1] + x @ v, "dot_general neg mul dot_general add"),
        (lambda x, w, v: (x @ w).sum(0), "dot_general reduce_sum"),
        (lambda x, w, v: (y := x @ w) + x @ v + jnp.sum(y), "dot_general dot_general add reduce_sum"),
        (
            lambda x, w, v: (x @ w).reshape(4, -1) + (x @ v).reshape(4, -1),
            "dot_general reshape dot_general reshape add",
        ),
        (lambda x, w, v: x @ w + jnp.matmul(x, v, precision="highest"), "dot_general dot_general add"),
        (
            lambda x, w, v: x @ w + (x.astype("bfloat16") @ v.astype("bfloat16")).astype("float32"),
            "dot_general dot_general convert_element_type add",
        ),
        (lambda x, w, v: x @ w + jnp.sin(x @ v) + (x @ v) * 3 + 1, "dot_general dot_general mul add"),
    ],
    ids=[
        "scaled and transposed",
        "divided by a number",
        "times an array",
        "summed",
        "two results",
        "reshaped",
        "other precision",
        "widened",
        "other terms between",
    ],
)
def test_what_is_linear_is_part_of_it(fun: Any, steps: str) -> None:
    (eqn,) = same(fun, X, W, V)
    assert " ".join(step.primitive.name for step in eqn.params["steps"]) == steps


def test_later_products_only_where_asked_for_and_small() -> None:
    x, y, a, b = normal(64, 16), normal(64, 16, seed=1), normal(16, 2, seed=2), normal(2, 16, seed=3)

    def lora(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        dw = x.T @ y
        return jnp.sin(dw @ b.T), jnp.sin(a.T @ dw)

    def wide(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        return jnp.sin((x.T @ y) @ (a @ b))

    assert same(lora, x, y, a, b) == []
    (eqn,) = same(lora, x, y, a, b, option="through")
    assert str(eqn.params["rule"]) == "ab, bc, cd, ea -> ad, ec {a: sum, b: sum, c: sum}"
    assert same(wide, x, y, a, b, option="through") == []
    with pytest.raises(PassError, match="only option"):
        rewritten(lora, x, y, a, b, option="thru")


def test_effects_stay_in_order() -> None:
    """The sum could only stand before what reads its first result if the second callback came before the first."""
    seen: list[str] = []

    def fun(x: jax.Array, w: jax.Array, a: jax.Array) -> Any:
        h = x @ w
        total = h.sum(0)
        jax.experimental.io_callback(lambda _: seen.append("first"), None, total, ordered=True)
        scale = jax.experimental.io_callback(lambda y: seen.append("second") or y, a, a, ordered=True)
        return (h * scale).sum(0)

    program = rewritten(fun, X, W, normal(1, 4))
    jx.as_fun(program.jaxpr)(X, W, normal(1, 4))
    jax.effects_barrier()
    assert seen == ["first", "second"]
    assert joined(program.jaxpr) == []


def test_operations_that_wait_for_one_another_are_not_one() -> None:
    """The second result is computed of the first, once that is reduced."""

    def fun(x: jax.Array, w: jax.Array) -> Any:
        h = x @ w
        return (h.sum(0) + (h * jnp.sin(h.sum(0))).sum(0)).sum()

    for eqn in same(fun, X, W):
        assert len(eqn.outvars) == 1


def test_gradients_of_what_several_projections_read() -> None:
    def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return sum((jnp.tanh(x @ w) ** 2).sum() for w in weights)  # type: ignore[return-value]

    (eqn,) = same(jax.grad(loss), X, [normal(16, n, seed=n) for n in (4, 8, 8)])
    assert products(eqn) == 3


def test_inside_a_loop() -> None:
    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + x @ w), None), x, None, length=3)[0]

    assert len(same(fun, normal(8, 8), normal(8, 8, seed=1))) == 1


@pytest.mark.parametrize("split", [("m", None), (None, "m")], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_partial_sums_are_reduced_once_and_numbers_stay(split: Any, dtype: str) -> None:
    """Rows of the weights split: each product is partial, and their sum is reduced once, or scattered."""
    mesh = {"m": 8}
    x, y, w, v = (
        a.astype(dtype)
        for a in (
            10 * normal(8, 16),
            10 * normal(8, 32, seed=1),
            10 * normal(16, 24, seed=2),
            10 * normal(32, 24, seed=3),
        )
    )

    def fun(x: jax.Array, y: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return x @ w + y @ v

    rows = jax.sharding.PartitionSpec(None, "m"), jax.sharding.PartitionSpec("m", None)
    step = autoshard.jit(
        fun,
        mesh=mesh,
        in_shardings=(rows[0], rows[0], rows[1], rows[1]),
        out_shardings=jax.sharding.PartitionSpec(*split),
    )
    np.testing.assert_allclose(step(x, y, w, v), fun(x, y, w, v), rtol=1e-4, atol=1e-3)
    text = step.lower(x, y, w, v).compile().as_text()
    assert text.count(" reduce-scatter(") == 1
    assert " all-reduce(" not in text


def test_many_products_become_several_operations_and_nothing_recurses() -> None:
    """As many terms as Python's stack has frames."""
    xs = [normal(2, 3, seed=i) for i in range(1000)]
    ys = [normal(3, 2, seed=i) for i in range(1000)]
    eqns = same(lambda xs, ys: sum(x @ y for x, y in zip(xs, ys, strict=True)), xs, ys)
    first = 1  # is added to the number that Python's sums start with
    assert [len(eqn.invars) // 2 for eqn in eqns] == [MAX_PRODUCTS] * 31 + [1000 - first - 31 * MAX_PRODUCTS]
    assert same(sum, xs) == []
