"""Models as people write them, run as pipelines: Linen, NNX, plain dicts, with dropout, experts, images.

One of them runs in the suite; ``AUTOSHARD_COMBINATIONS=all`` runs all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import autoshard
from autoshard import MeshConfig
from tests.combinations import ALL
from tests.models import CLASSES, HEADS, VOCAB, WIDTH, adamw, cross_entropy, images, tokens
from tests.pipelined_steps import train_state, trained

type Form = tuple[Any, Callable[..., jax.Array], Callable[[int], Any]]
"""Parameters, a loss of them and of a batch, and batches."""
LAYERS, EXPERTS = 4, 4
MESH = MeshConfig(axes={"stage": 2, "data": 2, "model": 2}, pipeline="stage")


class Block(linen.Module):
    """Causal or full attention and an MLP, with dropout: [batch, position, feature]."""

    causal: bool
    drop: float = 0.0

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None
        h = linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x), mask=mask)
        x = x + linen.Dropout(self.drop, deterministic=not self.drop)(h)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))))


class Language(linen.Module):
    """[batch, position] tokens to logits."""

    drop: float

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Embed(VOCAB, WIDTH)(x)
        for _ in range(LAYERS):
            x = Block(True, self.drop)(x)
        return linen.Dense(VOCAB)(linen.LayerNorm()(x))


class Vision(linen.Module):
    """[batch, row, column, channel] images to the logits of classes."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Conv(WIDTH, (4, 4), (4, 4))(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("position", linen.initializers.normal(0.1), x.shape[1:])
        for _ in range(LAYERS):
            x = Block(False)(x)
        return linen.Dense(CLASSES)(linen.LayerNorm()(x).mean(1))


def linen_form(model: linen.Module, batches: Callable[[int], Any]) -> Form:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(params, batch["x"], rngs={"dropout": jax.random.key(2)}), batch["y"])  # pyright: ignore[reportArgumentType]

    return model.init(keys, batches(0)["x"]), loss, batches


class Layer(nnx.Module):
    """An MLP with a norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """[batch, position] tokens to logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def experts_form() -> Form:
    """Each token goes to one of the experts of a layer; a loss of each layer balances them."""
    key = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(next(key), shape)

    layers = {
        "gate": normal(LAYERS, WIDTH, EXPERTS),
        "up": normal(LAYERS, EXPERTS, WIDTH, WIDTH),
        "down": normal(LAYERS, EXPERTS, WIDTH, WIDTH),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            gates = jax.nn.softmax(x @ w["gate"])
            chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS) * gates
            inside = jax.nn.gelu(jnp.einsum("bsm,emh->bseh", x, w["up"]))
            return x + jnp.einsum("bseh,ehm,bse->bsm", inside, w["down"], chosen), (gates**2).mean()

        x, balance = jax.lax.scan(layer, params["embed"][batch["x"]], params["layers"])
        return cross_entropy(x @ params["embed"].T, batch["y"]) + 0.1 * balance.mean()

    return {"embed": normal(VOCAB, WIDTH), "layers": layers}, loss, tokens


FORMS: dict[str, Callable[[], Form]] = {
    "experts": experts_form,
    "linen-dropout": lambda: linen_form(Language(0.1), tokens),
    "vit": lambda: linen_form(Vision(), images),
}


@pytest.mark.parametrize("name", FORMS if ALL else ["experts"])
def test_losses_and_parameters_are_those_of_one_device(name: str) -> None:
    params, loss, batches = FORMS[name]()
    step, state = trained(loss), train_state(params)
    planned, alone = autoshard.jit(step, mesh=MESH, microbatches=4, schedule="1f1b"), jax.jit(step)
    found = expected = state
    for i in range(2):
        expected, wanted = alone(expected, batches(i))
        found, metrics = planned(found, batches(i))
        assert_close(wanted, metrics, 0)
    assert_close(expected, found, 1e-6)


@pytest.mark.skipif(not ALL, reason="AUTOSHARD_COMBINATIONS=all runs it")
def test_an_nnx_model_is_updated_as_on_one_device() -> None:
    def step(model: Stack, optimizer: nnx.Optimizer[Stack], batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["x"]), batch["y"]))(model)
        optimizer.update(model, grads)
        return loss

    models = [Stack(nnx.Rngs(0)) for _ in range(2)]
    optimizers = [nnx.Optimizer(model, adamw(), wrt=nnx.Param) for model in models]
    steps = nnx.jit(step), autoshard.jit(step, mesh=MESH, microbatches=4, schedule="1f1b")
    for i in range(2):
        one, other = (run(m, o, tokens(i)) for run, m, o in zip(steps, models, optimizers, strict=True))
        assert_close(one, other, 0)
    one, other = (nnx.to_pure_dict(nnx.state(model)) for model in models)
    assert_close(one, other, 1e-6)


def assert_close(expected: Any, found: Any, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), expected, found)
