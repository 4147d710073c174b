"""Partial sums stay partial through what is linear in them: numbers, and what is reduced, as planned and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.machine.mesh import Hardware, Link, LogicalMesh

RANK = 4


def mesh(sizes: tuple[int, ...]) -> LogicalMesh:
    """Eight CPU devices, with slow links."""
    links = {"link": Link("link", 1e8, 1e-7)}
    hardware = Hardware("slow links", {"float32": 1e11, "bfloat16": 1e11}, 1e12, 1e11, links, 1e-8)
    names = ("data", "model")[: len(sizes)]
    return LogicalMesh(names, sizes, hardware, ("link",) * len(sizes), tuple(jax.devices()))


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5, dtype)


def reductions(step: Any, *args: Any) -> dict[str, int]:
    """Bytes, per device, of what the compiled step reduces, by kind; planned and emitted are the same."""
    found = audit(step.lower(*args).compile(), step.plan(*args))
    assert found.clean, str(found)
    return {
        row.kind: sum(c.bytes * c.count for c in row.emitted)
        for row in found.rows
        if row.kind in ("all-reduce", "reduce-scatter") and row.emitted
    }


def lora(factors: Any, frozen: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    def loss(factors: Any) -> jax.Array:
        return jnp.mean((x @ (frozen + factors["a"] @ factors["b"]) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(factors)
    return jax.tree.map(lambda p, g: p - 0.1 * g, factors, grads), value


def scanned_lora(layers: Any, frozen: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    def loss(layers: Any) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> Any:
            return jnp.tanh(h @ (p[0] + p[1]["a"] @ p[1]["b"])), None

        return jnp.mean((jax.lax.scan(layer, x, (frozen, layers))[0] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads), value


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_lora_reduces_the_gradients_of_its_factors_alone(sizes: tuple[int, ...]) -> None:
    """Not the gradient of the whole weight, of which these are products."""
    width, batch, loss = 64, 512, 4
    factors = {"a": normal(width, RANK), "b": normal(RANK, width, seed=1)}
    args = factors, normal(width, width, seed=2), normal(batch, width, seed=3), normal(batch, width, seed=4)
    step = autoshard.jit(lora, mesh=mesh(sizes), strategy="dp")
    assert reductions(step, *args) == {"all-reduce": 2 * RANK * width * 4 + loss}
    chex.assert_trees_all_close(step(*args), lora(*args), rtol=1e-5, atol=1e-5)
    before = autoshard.jit(lora, mesh=mesh(sizes), strategy="dp", passes=["dead_code", "sum_products"])
    assert reductions(before, *args) == {"all-reduce": width * width * 4 + loss}


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_lora_is_planned_faster(sizes: tuple[int, ...]) -> None:
    width, batch, loss = 64, 512, 4
    factors = {"a": normal(width, RANK), "b": normal(RANK, width, seed=1)}
    args = factors, normal(width, width, seed=2), normal(batch, width, seed=3), normal(batch, width, seed=4)
    split = P(("data", "model")[: len(sizes)])
    step, before = (
        autoshard.jit(
            lora, mesh=mesh(sizes), in_shardings=(P(), P(), split, split), out_shardings=(P(), P()), passes=passes
        )
        for passes in (None, ["dead_code", "sum_products"])
    )
    assert sum(reductions(step, *args).values()) <= 2 * RANK * width * 4 + loss
    assert step.plan(*args).cost.seconds < before.plan(*args).cost.seconds
    chex.assert_trees_all_close(step(*args), lora(*args), rtol=1e-5, atol=1e-5)


def test_lora_in_every_layer_of_a_scan() -> None:
    layers, width, batch = 3, 32, 256
    factors = {"a": normal(layers, width, RANK), "b": normal(layers, RANK, width, seed=1)}
    args = factors, normal(layers, width, width, seed=2), normal(batch, width, seed=3), normal(batch, width, seed=4)
    step = autoshard.jit(scanned_lora, mesh=mesh((8,)), strategy="dp")
    assert reductions(step, *args) == {"all-reduce": layers * 2 * RANK * width * 4 + 4}
    chex.assert_trees_all_close(step(*args), scanned_lora(*args), rtol=1e-5, atol=1e-5)


CHAINS: dict[str, Callable[..., Any]] = {
    "scaled and transposed": lambda x, w, y, v: jnp.tanh((x @ w + (y @ v) * 3).T * 2),
    "subtracted and divided": lambda x, w, y, v: jnp.tanh((x @ w - (y @ v) / 4)[None]),
    "times an array": lambda x, w, y, v: jnp.tanh((x @ w) * jnp.arange(1.0, 25.0) + y @ v),
    "merged dimensions": lambda x, w, y, v: jnp.tanh((x @ w).reshape(-1) + (y @ v).reshape(-1) * 2),
    "three, one of them alone": lambda x, w, y, v: jnp.tanh(x @ w + y @ v + jnp.sin(x) @ w + 1),
}


@pytest.mark.parametrize("sizes", [{"model": 8}, {"data": 2, "model": 4}], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_linear_operations_is_reduced_once(name: str, sizes: dict[str, int]) -> None:
    args = normal(8, 16), normal(16, 24, seed=1), normal(8, 32, seed=2), normal(32, 24, seed=3)
    columns, rows = P("data" if "data" in sizes else None, "model"), P("model")
    step, apart = (
        autoshard.jit(CHAINS[name], mesh=sizes, in_shardings=(columns, rows, columns, rows), passes=passes)
        for passes in (None, [])
    )
    assert reductions(step, *args) == {"reduce-scatter": 8 * 24 * 4 // sizes.get("data", 1)}
    assert sum(reductions(apart, *args).values()) > 8 * 24 * 4 // sizes.get("data", 1)
    np.testing.assert_allclose(step(*args), CHAINS[name](*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w, y, v: jnp.tanh(x @ w) + y @ v,
        lambda x, w, y, v: (x @ w).astype("bfloat16") + (y @ v).astype("bfloat16"),
        lambda x, w, y, v: (x @ w) * (y @ v),
    ],
    ids=["nonlinear", "rounded", "product"],
)
def test_what_is_not_linear_is_computed_of_sums(fun: Callable[..., Any]) -> None:
    args = normal(8, 16), normal(16, 24, seed=1), normal(8, 32, seed=2), normal(32, 24, seed=3)
    step = autoshard.jit(fun, mesh=mesh((8,)), in_shardings=(P(None, "data"), P("data"), P(None, "data"), P("data")))
    assert sum(reductions(step, *args).values()) == 2 * 8 * 24 * 4
    np.testing.assert_allclose(np.asarray(step(*args), "f4"), np.asarray(fun(*args), "f4"), rtol=1e-2, atol=1e-5)


def test_sums_of_few_bits_are_as_exact_as_one_by_one() -> None:
    """Partial sums in bfloat16 are added, as XLA reduces them, and cast to float32 first where the step does so."""
    args = [normal(64, 512, seed=i, dtype=jnp.bfloat16) for i in range(2)]
    args += [normal(512, 64, seed=i, dtype=jnp.bfloat16) for i in (2, 3)]

    def fun(x: Any, y: Any, w: Any, v: Any) -> Any:
        return (x @ w).astype("float32") + (y @ v).astype("float32"), x @ w * 3 + y @ v

    split = P(None, "data"), P(None, "data"), P("data"), P("data")
    exact = [np.asarray(a, "f8") @ np.asarray(w, "f8") for a, w in zip(args[:2], args[2:], strict=True)]
    exact = [exact[0] + exact[1], exact[0] * 3 + exact[1]]
    errors: list[list[float]] = []
    for passes in (None, ["dead_code"]):
        got = autoshard.jit(fun, mesh=mesh((8,)), in_shardings=split, passes=passes)(*args)
        errors.append([float(np.abs(np.asarray(a, "f8") - b).mean()) for a, b in zip(got, exact, strict=True)])
    joined, alone = errors
    assert all(a <= 1.1 * b for a, b in zip(joined, alone, strict=True))
