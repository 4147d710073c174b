"""Small steps whose layers are stacked and scanned over, and which accumulate gradients over micro-batches: what a
pipeline runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.models import HEADS, SEQ, VOCAB, WIDTH, adamw, cross_entropy

Params = dict[str, Any]


def decoder_params(layers: int, *, tied: bool = False) -> Params:
    """Of `decoder_loss`: weights of all layers stacked; without a head where that is the embedding again."""
    key = iter(jax.random.split(jax.random.key(0), 16))

    def normal(*shape: int, scale: float = 0.2) -> jax.Array:
        return scale * jax.random.normal(next(key), shape)

    stacked = {
        "norm": jnp.ones((layers, WIDTH)),
        "qkv": normal(layers, 3, WIDTH, HEADS, WIDTH // HEADS),
        "out": normal(layers, HEADS, WIDTH // HEADS, WIDTH),
        "up": normal(layers, WIDTH, 2 * WIDTH),
        "down": normal(layers, 2 * WIDTH, WIDTH),
    }
    head = {} if tied else {"head": normal(WIDTH, VOCAB)}
    return {"embed": normal(VOCAB, WIDTH, scale=0.5), "layers": stacked, "scale": jnp.ones(WIDTH), **head}


def apart(params: Params) -> Params:
    """``params`` with the weights of each layer apart."""
    layers = len(params["layers"]["norm"])
    return {**params, "layers": [jax.tree.map(lambda x: x[i], params["layers"]) for i in range(layers)]}  # noqa: B023


def rms_norm(x: jax.Array, scale: jax.Array | float) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def decoder_loss(params: Params, batch: Any) -> jax.Array:
    """Mean cross-entropy of a decoder with causal attention; its layers run in one scan, or where the weights of each
    are apart, one after the other."""
    mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        q, k, v = jnp.einsum("bsd,zdhe->zbshe", rms_norm(x, w["norm"]), w["qkv"])
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * math.sqrt(HEADS / WIDTH)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = params["embed"][batch["x"]]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x, _ = layer(x, w)
    else:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    head = params["head"] if "head" in params else params["embed"].T
    return cross_entropy(rms_norm(x, params["scale"]) @ head, batch["y"])


def accumulated(loss: Callable[..., jax.Array], microbatches: int) -> Callable[[Params, Any], Any]:
    """``(params, batch)`` -> mean loss and gradients, in a scan over micro-batches."""

    def step(params: Params, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            new = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(lambda s, x: s + x / microbatches, sums, new), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zero, parts)[0]

    return step


def trained(loss: Callable[..., jax.Array], microbatches: int | None = None) -> Callable[[Any, Any], Any]:
    """An AdamW step with gradients clipped by their global norm; accumulated over micro-batches where there are any."""
    gradients = jax.value_and_grad(loss) if microbatches is None else accumulated(loss, microbatches)

    def train(state: Any, batch: Any) -> Any:
        value, grads = gradients(state["params"], batch)
        updates, opt = adamw().update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value, "norm": optax.tree.norm(grads)}

    return train


def train_state(params: Params) -> Any:
    return {"params": params, "opt": adamw().init(params)}
