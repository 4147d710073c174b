"""T5, 1.0 and 1.1: an encoder and a decoder with biases by relative position.

arXiv:1910.10683. Letters in shapes: B batch, S source, T target, D width, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from autoshard.strict_config import Config
from autoshard.weights.models.cache import Tree
from autoshard.weights.models.decoder import DecoderSettings, normed


class EncoderDecoderSettings(Config):
    """What the weights do not say."""

    norm: Literal["rms"] = "rms"
    activation: Literal["relu", "gated-gelu"] = "relu"
    eps: float = Field(default=1e-6, gt=0)
    max_distance: int = Field(default=128, ge=2)
    """Of relative positions; those beyond share the last bucket."""
    scaled: bool = True
    """Whether logits are divided by the root of the width."""


def logits(settings: EncoderDecoderSettings, params: Tree, source: jax.Array, target: jax.Array) -> jax.Array:
    """Logits of the token after each of ``target``. source: int [B, S], target: int [B, T] -> float32 [B, T, V]."""
    norms = DecoderSettings(eps=settings.eps)
    encoded, x = params["embed"][source], params["embed"][target]
    bias = relative_bias(settings, params["encoder"]["relative"], source.shape[1], causal=False)

    def encoder_layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        y = normed(norms, p["attention_norm"], x)
        x = x + _attention(p["attention"], y, y, bias)
        return x + _mlp(p["mlp"], normed(norms, p["mlp_norm"], x)), None

    encoded, _ = jax.lax.scan(encoder_layer, encoded, params["encoder"]["layers"])
    encoded = normed(norms, params["encoder"]["norm"], encoded)
    causal = relative_bias(settings, params["decoder"]["relative"], target.shape[1], causal=True)

    def decoder_layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        y = normed(norms, p["attention_norm"], x)
        x = x + _attention(p["attention"], y, y, causal)
        x = x + _attention(p["cross"], normed(norms, p["cross_norm"], x), encoded, 0.0)
        return x + _mlp(p["mlp"], normed(norms, p["mlp_norm"], x)), None

    x, _ = jax.lax.scan(decoder_layer, x, params["decoder"]["layers"])
    x = normed(norms, params["decoder"]["norm"], x)
    if settings.scaled:
        x = x * x.shape[-1] ** -0.5
    head = params["head"] if "head" in params else params["embed"].T
    return jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)


def relative_bias(settings: EncoderDecoderSettings, table: jax.Array, size: int, *, causal: bool) -> jax.Array:
    """What is added to scores, which are causal or of both directions. table: [buckets, H] -> [H, size, size]."""
    distance = jnp.arange(size)[None, :] - jnp.arange(size)[:, None]
    buckets = table.shape[0] if causal else table.shape[0] // 2
    after = 0 if causal else buckets * (distance > 0)
    far = jnp.maximum(-distance, 0) if causal else jnp.abs(distance)
    exact = buckets // 2
    steps = jnp.log(jnp.maximum(far, 1).astype(jnp.float32) / exact) / math.log(settings.max_distance / exact)
    wide = jnp.minimum(exact + (steps * (buckets - exact)).astype(jnp.int32), buckets - 1)
    bias = table[after + jnp.where(far < exact, far, wide)].astype(jnp.float32).transpose(2, 0, 1)
    return jnp.where(distance > 0, jnp.finfo(jnp.float32).min, bias) if causal else bias


def _attention(p: Tree, x: jax.Array, other: jax.Array, bias: jax.Array | float) -> jax.Array:
    """``x`` attends to ``other``; scores are not scaled. x: [B, T, D], other: [B, S, D] -> [B, T, D]."""
    query = jnp.einsum("btd,dhe->bthe", x, p["wq"])
    key, value = (jnp.einsum("bsd,dhe->bshe", other, p[name]) for name in ("wk", "wv"))
    scores = jnp.einsum("bthe,bshe->bhts", query, key, preferred_element_type=jnp.float32) + bias
    mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores).astype(x.dtype), value)
    return jnp.einsum("bthe,hed->btd", mixed, p["wo"])


def _mlp(p: Tree, x: jax.Array) -> jax.Array:
    """An MLP of two products, or a gated one of three. x: [B, S, D] -> the same."""
    if "gate" in p:
        return (jax.nn.gelu(x @ p["gate"], approximate=True) * (x @ p["up"])) @ p["down"]
    return jax.nn.relu(x @ p["inner"]) @ p["down"]
