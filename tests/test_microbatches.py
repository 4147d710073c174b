"""`autoshard.jit(..., microbatches=N)`: losses and parameters are those of the whole batch on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.backend.audit import audit
from autoshard.errors import ArgumentError, MicrobatchError, SpecError
from tests import models

BATCH, SEQ, VOCAB, WIDTH, HEADS, LAYERS, STEPS = 16, 8, 32, 16, 4, 2, 3
Tree = Any
OPTIMIZER = models.adamw()


def normal(*shape: int, seed: int, scale: float = 0.3) -> jax.Array:
    return scale * jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def blocks() -> Tree:
    return {
        "qkv": normal(LAYERS, 3, WIDTH, HEADS, WIDTH // HEADS, seed=1),
        "out": normal(LAYERS, HEADS, WIDTH // HEADS, WIDTH, seed=2),
        "up": normal(LAYERS, WIDTH, 2 * WIDTH, seed=3),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH, seed=4),
    }


def transformed(h: jax.Array, layers: Tree, keys: jax.Array, *, scan: bool, causal: bool) -> jax.Array:
    """[batch, seq, width] through attention with dropout and a feed-forward network, layer by layer."""

    def layer(h: jax.Array, at: Any) -> tuple[jax.Array, None]:
        w, key = at
        q, k, v = jnp.einsum("bsd,zdhe->zbshe", h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3), w["qkv"])
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9) if causal else scores
        mixed = jnp.einsum("bhqk,bkhe,hed->bqd", jax.nn.softmax(scores), v, w["out"])
        h = h + mixed * jax.random.bernoulli(key, 0.9, mixed.shape)
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    if scan:
        return jax.lax.scan(layer, h, (layers, keys))[0]
    for i in range(LAYERS):
        h, _ = layer(h, jax.tree.map(lambda x, i=i: x[i], (layers, keys)))
    return h


def decoder(*, scan: bool, tied: bool) -> tuple[Tree, Callable[..., jax.Array], models.Batch]:
    params = {"embed": normal(VOCAB, WIDTH, seed=5), "layers": blocks()}
    params |= {} if tied else {"head": normal(WIDTH, VOCAB, seed=6)}
    batch = {k: v % VOCAB for k, v in models.tokens(0).items()}

    def loss(params: Tree, batch: Any, key: jax.Array) -> jax.Array:
        h = transformed(
            params["embed"][batch["x"]], params["layers"], jax.random.split(key, LAYERS), scan=scan, causal=True
        )
        return models.cross_entropy(h @ (params["embed"].T if tied else params["head"]), batch["y"])

    return params, loss, batch


def vision() -> tuple[Tree, Callable[..., jax.Array], models.Batch]:
    params = {"patches": normal(48, WIDTH, seed=5), "layers": blocks(), "head": normal(WIDTH, models.CLASSES, seed=6)}

    def loss(params: Tree, batch: Any, key: jax.Array) -> jax.Array:
        x = batch["x"].reshape(-1, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 48)
        keys = jax.random.split(key, LAYERS)
        h = transformed(x @ params["patches"], params["layers"], keys, scan=True, causal=False)
        return models.cross_entropy(h.mean(1) @ params["head"], batch["y"])

    return params, loss, models.images(0)


def convolutions() -> tuple[Tree, Callable[..., jax.Array], models.Batch]:
    params = {
        "first": normal(3, 3, 3, 8, seed=5),
        "second": normal(3, 3, 8, 16, seed=6),
        "head": normal(16, models.CLASSES, seed=7),
    }

    def loss(params: Tree, batch: Any, key: jax.Array) -> jax.Array:
        x = batch["x"]
        for name in ("first", "second"):
            x = jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.silu(x)
        return models.cross_entropy(x.mean((1, 2)) @ params["head"], batch["y"])

    return params, loss, models.images(0)


MODELS = {
    "scanned": lambda: decoder(scan=True, tied=False),
    "unrolled": lambda: decoder(scan=False, tied=False),
    "tied": lambda: decoder(scan=True, tied=True),
    "vision": vision,
    "convolutions": convolutions,
}


def training(model: str) -> tuple[Callable[[Tree, Any], Any], Tree, models.Batch]:
    """A step with AdamW and clipping, its state and its batch."""
    params, loss, batch = MODELS[model]()

    def step(state: Tree, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3), state["step"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, value

    return step, {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}, batch


def run(step: Any, state: Tree, batch: Any) -> tuple[Tree, list[float]]:
    losses: list[float] = []
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state["params"], losses


@functools.cache
def on_one_device(model: str) -> tuple[Tree, list[float]]:
    """Of the whole batch."""
    fun, state, batch = training(model)
    return run(jax.jit(fun), state, batch)


@pytest.mark.parametrize(
    ("model", "parts", "mesh"),
    [
        ("scanned", 2, {"data": 2, "model": 4}),
        ("scanned", 4, {"data": 8}),
        ("unrolled", 2, {"data": 2, "model": 4}),
        ("tied", 4, {"data": 2, "model": 4}),
        ("vision", 4, {"data": 2, "model": 4}),
        ("convolutions", 2, {"data": 8}),
    ],
)
def test_training_is_that_of_the_whole_batch_on_one_device(model, parts, mesh):
    fun, state, batch = training(model)
    step = autoshard.jit(fun, mesh=mesh, microbatches=parts)
    got, losses = run(step, state, batch)
    want, expected = on_one_device(model)
    plan = step.plan(state, batch)
    assert plan.passes[0].written == f"microbatch:{parts}"
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_gradients_are_reduced_once_after_the_loop():
    fun, state, batch = training("scanned")
    step = autoshard.jit(fun, mesh={"data": 8}, strategy="dp", microbatches=2)
    plan = step.plan(state, batch)
    assert [p.name for p in plan.passes[:2]] == ["microbatch", "accumulate"]
    reduced = [c for c in plan.cost.collectives if c.kind == "all-reduce"]
    assert reduced
    assert all(c.count == 1 for c in reduced)
    assert audit(step.lower(state, batch).compile(), plan).clean


def test_one_is_the_whole_batch_and_none_is_the_planners_choice():
    fun, state, batch = training("convolutions")
    for microbatches in (1, None):
        plan = autoshard.jit(fun, mesh={"data": 8}, microbatches=microbatches).plan(state, batch)
        assert not [p for p in plan.passes if p.name == "microbatch"]


def test_bad_input_is_one_clear_error():
    fun, state, batch = training("convolutions")
    for wrong in (0, -2, 1.5, "4", True):
        with pytest.raises(ArgumentError, match=r"microbatches=.*: must be a number of parts of the batch, 1 or more"):
            autoshard.jit(fun, microbatches=wrong)
    with pytest.raises(MicrobatchError, match=r"dimension 0 of batch\['x'\] \[16, 8, 8, 3\] has 16 examples, which 3"):
        autoshard.jit(fun, mesh={"data": 8}, microbatches=3).plan(state, batch)
    with pytest.raises(MicrobatchError, match="the sum over the whole batch, at .*models.py:"):
        autoshard.jit(models.conv.step, mesh={"data": 8}, microbatches=2).plan(*models.conv.make(), models.images(0))
    with pytest.raises(MicrobatchError, match="has no batch"):
        autoshard.jit(jax.grad(lambda w: jnp.sum(w @ w)), mesh={"data": 8}, microbatches=2).plan(normal(8, 8, seed=0))
    with pytest.raises(SpecError, match="each of 4 micro-batches: strategy 'dp' splits the batch over data in 8 parts"):
        autoshard.jit(fun, mesh={"data": 8}, microbatches=4, strategy="dp").plan(state, batch)
