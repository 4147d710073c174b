"""Lowering: what is planned is what the compiler emits, and values stay what they are."""

from __future__ import annotations

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import Audit, audit
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from tests.programs import mlp_args, mlp_step


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def layers(params: Any, batch: Any) -> tuple[Any, Any]:
    """A step of a scanned residual network."""

    def loss(p: Any) -> Any:
        def block(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        h, _ = jax.lax.scan(block, batch["x"], p["blocks"])
        return jnp.mean((h @ p["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


LAYERS = ({"blocks": {"up": (4, 32, 64), "down": (4, 64, 32)}, "out": (32, 16)}, {"x": (64, 32), "y": (64, 16)})


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp", "zero2", "fsdp_tp", "replicated"])
@pytest.mark.parametrize(("fun", "args"), [(mlp_step, mlp_args(64, 16, 32)), (layers, LAYERS)], ids=["mlp", "scanned"])
def test_planned_and_emitted_collectives_agree(fun: Any, args: Any, strategy: str, mesh: dict[str, int]) -> None:
    params, batch = (shapes(a) for a in args)
    step = autoshard.jit(fun, mesh=mesh, strategy=strategy, donate_argnums=0)
    plan = step.plan(params, batch)
    found = audit(step.lower(params, batch).compile(), plan)
    assert found.clean, str(found)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def scattered(fun: Any, mesh: Any, ins: Any, outs: Any, *args: Any, scatters: int = 1) -> Audit:
    """The audit of ``fun``, whose only reductions are ``scatters`` reduce-scatters, as planned."""
    step = autoshard.jit(fun, mesh=mesh, in_shardings=ins, out_shardings=outs)
    chex.assert_trees_all_close(step(*args), jax.jit(fun)(*args), rtol=1e-4, atol=1e-4, strict=True)
    compiled = step.lower(*args).compile()
    found = audit(compiled, step.plan(*args))
    assert found.clean, str(found)
    assert {c.kind for c in found.planned if c.kind != "collective-permute"} == {"reduce-scatter"}
    text = compiled.as_text() or ""
    assert text.count(" reduce-scatter(") == scatters
    assert " all-reduce(" not in text
    return found


X, W = normal(16, 32), normal(32, 24, seed=1)
ALONE, PAIR = {"a": 8}, {"a": 2, "b": 4}


@pytest.mark.parametrize(
    ("mesh", "ins", "out", "scatters"),
    [
        (ALONE, (P(None, "a"), P("a")), P("a"), 1),
        (ALONE, (P(None, "a"), P("a")), P(None, "a"), 1),
        (PAIR, (P(None, ("a", "b")), P(("a", "b"))), P(("a", "b")), 2),
        (PAIR, (P(None, ("a", "b")), P(("a", "b"))), P("a", "b"), 2),
        (PAIR, (P("b", "a"), P("a")), P(("b", "a")), 1),
        (PAIR, (P("b", "a"), P("a")), P(("a", "b")), 1),
    ],
    ids=["rows", "columns", "rows over both", "an axis each", "behind another", "before another"],
)
def test_a_product_with_a_sharded_result_is_reduce_scattered(mesh: Any, ins: Any, out: P, scatters: int) -> None:
    """XLA for CPU by itself would emit an all-reduce and a slice."""
    scattered(jnp.matmul, mesh, ins, out, X, W, scatters=scatters)


def test_the_axis_with_the_fastest_link_is_scattered_over_first() -> None:
    """Devices of one host, then hosts: those carry a fourth."""
    links = {"fast": Link("fast", 1e11, 1e-6), "slow": Link("slow", 1e9, 1e-6)}
    hardware = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, links, 1e-6)
    mesh = LogicalMesh(("a", "b"), (2, 4), hardware, ("slow", "fast"))
    found = scattered(jnp.matmul, mesh, (P(None, ("a", "b")), P(("a", "b"))), P(("a", "b")), X, W, scatters=2)
    assert {c.axes: c.bytes for c in found.emitted} == {("b",): 16 * 24 * 4, ("a",): 16 * 24}


def test_over_axes_of_equal_links_the_product_is_scattered_as_it_is() -> None:
    """XLA for TPU makes all-reduces of what is reshaped first."""
    specs = (P(None, ("a", "b")), P(("a", "b")))
    step = autoshard.jit(jnp.matmul, mesh=PAIR, in_shardings=specs, out_shardings=P(("a", "b")))
    text = step.lower(X, W).as_text()
    assert text.count("stablehlo.reduce_scatter") == 2
    assert "stablehlo.reshape" not in text


def test_a_loop_carried_product_is_reduce_scattered_in_every_iteration() -> None:
    def fun(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    scattered(fun, ALONE, (P(None, "a"), P(None, "a")), P(None, "a"), normal(16, 64), normal(3, 64, 64, seed=1) / 8)


def test_a_product_with_several_sharded_uses_is_reduce_scattered_once() -> None:
    def fun(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.sin(y), y * y.max(1, keepdims=True)

    scattered(fun, ALONE, (P(None, "a"), P("a")), (P("a"), P("a")), X, W)


def test_the_gradient_of_a_convolution_is_reduce_scattered() -> None:
    """As that of a product, where the batch is split and the images are not."""

    def gradient(x: Any, t: Any) -> Any:
        def loss(w: Any) -> Any:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers) * t)

        return jax.grad(loss)(jnp.zeros((3, 3, 8, 16)))

    scattered(gradient, ALONE, P("a"), P(None, None, "a"), normal(64, 8, 8, 8) / 8, normal(64, 8, 8, 16, seed=1))


def test_a_product_over_a_padded_dimension_is_reduce_scattered() -> None:
    """1023 rows, padded to 128 on each device."""
    scattered(lambda x: x[:-1].T @ x[1:] / 1000, ALONE, P("a"), P("a"), normal(1024, 64))


def test_a_constraint_inside_a_loop_is_in_the_lowered_program() -> None:
    def fun(x: Any, ws: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return jnp.tanh(autoshard.annotate(h @ w, P(None, "a"))), None

        return jax.lax.scan(body, x, ws)[0]

    x, ws = np.ones((8, 16), "f4"), np.full((3, 16, 16), 0.1, "f4")
    step = autoshard.jit(fun, mesh={"a": 8})
    text = step.lower(x, ws).as_text()
    assert "sdy.sharding_constraint" in text
    assert '[{}, {"a"}]' in text
    np.testing.assert_allclose(step(x, ws), jax.jit(fun)(x, ws), rtol=1e-6)


def test_what_the_user_named_is_so_named_in_the_compiled_program() -> None:
    """Which profiles show: source lines, scopes, and arguments."""

    @jax.named_scope("block")
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w["up"])

    def fun(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: block(x, w).sum())(w)

    step = autoshard.jit(fun, mesh={"a": 8}, in_shardings=(P("a"), {"up": P("a")}), out_shardings={"up": P("a")})
    text = step.lower(normal(8, 16), {"up": normal(16, 8)}).compile().as_text()
    assert __file__ in text
    assert re.search(r"all-gather\(.*op_name=\"w\[\\'up\\'\]\"", text), "a gathered argument"
    assert "jit(fun)/jvp(block)/dot_general" in text


def test_nothing_is_constrained_on_one_device() -> None:
    params, batch = (shapes(a) for a in LAYERS)
    step = autoshard.jit(layers, mesh={"data": 1})
    assert step.plan(params, batch).cost.collectives == ()
    assert "all-" not in step.lower(params, batch).compile().as_text()


def test_a_product_of_bools_is_a_product_of_bools() -> None:
    step = autoshard.jit(jnp.matmul, mesh=ALONE, in_shardings=(P(None, "a"), P("a")), out_shardings=P("a"))
    x, w = normal(64, 64) > 1, normal(64, 64, seed=1) > 1
    np.testing.assert_array_equal(step(x, w), x @ w)
