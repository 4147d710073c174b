"""Decoders of published families, from token identifiers to logits: GPT-2, Llama, Qwen 3, Mixtral, Gemma.

What a layer has, its weights say: biases, norms of queries and keys, experts. Layers are stacked and scanned.

Letters in shapes: B batch, S sequence, D width, H query heads, K key-value heads, G = H / K, E head width, F MLP width,
X experts, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from autoshard.errors import ArgumentError
from autoshard.strict_config import Config
from autoshard.weights.models.cache import Position, Tree, recalled


class DecoderSettings(Config):
    """What the weights do not say."""

    activation: Literal["silu", "gelu"] = "silu"
    """``gelu`` is its approximation by a hyperbolic tangent."""
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """``rms_plus_one`` scales by one more than its weight."""
    eps: float = Field(default=1e-6, gt=0)
    rope_base: float | None = Field(default=None, gt=1)
    """None: positions are learned."""
    tied: bool = False
    """Whether the output projection is the embedding."""
    scaled_embedding: bool = False
    """Whether the embedding is multiplied by the root of the width."""
    experts_per_token: int = Field(default=2, ge=1)
    window: int | None = Field(default=None, ge=1)
    """Positions that a token sees, its own among them; None: all before it."""


def logits(settings: DecoderSettings, params: Tree, tokens: jax.Array) -> jax.Array:
    """Next-token logits. tokens: int [B, S] -> float32 [B, S, V]."""
    return projected(settings, params, features(settings, params, tokens))


def features(settings: DecoderSettings, params: Tree, tokens: jax.Array) -> jax.Array:
    """What logits are projected from. tokens: int [B, S] -> [B, S, D]."""
    x, angle = _embedded(settings, params, tokens, 0)
    return normed(settings, params["norm"], blocks(settings, params["layers"], x, angle))


def new_cache(settings: DecoderSettings, params: Tree, batch: int, length: int) -> Tree:
    """A cache for ``batch`` rows of up to ``length`` tokens: keys and values.

    Raises:
      ArgumentError: the model has fewer positions.
    """
    if "positions" in params and length > (most := params["positions"].shape[0]):
        raise ArgumentError(f"{length} tokens are asked for, and the model has {most} positions: ask for fewer")
    of = params["layers"]["attention"]
    layers, *_, key_heads, width = (of["wqkv"] if "wqkv" in of else of["wk"]).shape
    shape = (layers, batch, min(length, settings.window or length), key_heads, width)
    return {name: jnp.zeros(shape, params["embed"].dtype) for name in ("key", "value")}


def step(
    settings: DecoderSettings, params: Tree, cache: Tree, tokens: jax.Array, position: Position
) -> tuple[jax.Array, Tree]:
    """Logits of the token after the last, and the cache with the tokens. tokens: int [B, S] -> float32 [B, V]."""
    x, angle = _embedded(settings, params, tokens, position)

    def layer(carry: tuple[jax.Array, Tree], of: tuple[Tree, jax.Array]) -> tuple[tuple[jax.Array, Tree], None]:
        (x, cache), (p, number) = carry, of
        query, key, value = _heads(settings, p["attention"], normed(settings, p["attention_norm"], x), angle)
        known = recalled(cache, number, position, {"key": key, "value": value}, settings.window)
        mixed = _mixed(p["attention"], query, known.entries["key"], known.entries["value"], known.seen)
        return (_after_attention(settings, p, x + mixed), known.cache), None

    numbers = jnp.arange(jax.tree.leaves(cache)[0].shape[0])
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (params["layers"], numbers))
    return projected(settings, params, normed(settings, params["norm"], x[:, -1:]))[:, 0], cache


def _embedded(
    settings: DecoderSettings, params: Tree, tokens: jax.Array, position: Position
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens from ``position`` on, [B, S, D], and the angle by which `rotated` turns them."""
    x = params["embed"][tokens]
    if settings.scaled_embedding:
        x = x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)
    if "positions" in params:
        x = x + jax.lax.dynamic_slice_in_dim(params["positions"], position, tokens.shape[1])
    if settings.rope_base is None:
        return x, None
    at = (position + jnp.arange(tokens.shape[1])).astype(jnp.float32)[:, None]
    return x, at * frequencies(settings.rope_base, params["layers"]["attention"]["wq"].shape[-1])


def projected(settings: DecoderSettings, params: Tree, x: jax.Array) -> jax.Array:
    """Logits of normed values. x: [B, S, D] -> float32 [B, S, V]."""
    head = params["embed"].T if settings.tied else params["head"]
    return jnp.einsum("bsd,dv->bsv", x, head, preferred_element_type=jnp.float32)


def blocks(settings: DecoderSettings, layers: Tree, x: jax.Array, angle: jax.Array | None) -> jax.Array:
    """All layers. x: [B, S, D], angle: as `rotated` takes it -> [B, S, D]."""

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        x = x + attention(settings, p["attention"], normed(settings, p["attention_norm"], x), angle)
        return _after_attention(settings, p, x), None

    return jax.lax.scan(layer, x, layers)[0]


def _after_attention(settings: DecoderSettings, p: Tree, x: jax.Array) -> jax.Array:
    y = normed(settings, p["mlp_norm"], x)
    return x + (experts if "router" in p["mlp"] else mlp)(settings, p["mlp"], y)


def normed(settings: DecoderSettings, p: Tree, x: jax.Array) -> jax.Array:
    """A layer norm or a norm by the root mean square, over the last dimension and in float32. x: [..., D]."""
    wide = x.astype(jnp.float32)
    if settings.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + settings.eps)
    scale = p["scale"].astype(jnp.float32) + (settings.norm == "rms_plus_one")
    return (wide * scale + p.get("bias", 0.0)).astype(x.dtype)


def attention(settings: DecoderSettings, p: Tree, x: jax.Array, angle: jax.Array | None) -> jax.Array:
    """Causal grouped-query self-attention. x: [B, S, D] -> the same."""
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    if settings.window is not None:
        seen = seen & ~jnp.tril(seen, -settings.window)
    return _mixed(p, *_heads(settings, p, x, angle), seen)


def _heads(
    settings: DecoderSettings, p: Tree, x: jax.Array, angle: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, S, H, E], keys and values [B, S, K, E]."""
    if "wqkv" in p:
        query, key, value = jnp.einsum("bsd,zdhe->zbshe", x, p["wqkv"]) + p["bqkv"][:, None, None]
    else:
        query, key, value = (jnp.einsum("bsd,dhe->bshe", x, p[f"w{n}"]) + p.get(f"b{n}", 0) for n in "qkv")
    if "q_norm" in p:
        query, key = normed(settings, {"scale": p["q_norm"]}, query), normed(settings, {"scale": p["k_norm"]}, key)
    if angle is not None:
        query, key = rotated(query, angle), rotated(key, angle)
    return query, key, value


def _mixed(p: Tree, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """The values that each query finds. seen: bool [S, T], which of T keys -> [B, S, D]."""
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    scores = jnp.einsum("bqkge,btke->bkgqt", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    mixed = jnp.einsum("bkgqt,btke->bqkge", weights, value).reshape(query.shape)
    return jnp.einsum("bshe,hed->bsd", mixed, p["wo"]) + p.get("bo", 0)


def frequencies(base: float, width: int) -> jax.Array:
    """Radians by which a position turns each pair of a head of ``width``. -> [width / 2]."""
    return base ** (-jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))


def rotated(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotary positions (RoFormer, eq. 34) over the halves of the last dimension.

    x: [B, S, H, E] -> the same; angle: [S, E / 2] or [B, S, E / 2], radians.
    """
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def activated(settings: DecoderSettings, x: jax.Array) -> jax.Array:
    """What the MLP's inner values pass. x: of any shape."""
    return jax.nn.silu(x) if settings.activation == "silu" else jax.nn.gelu(x, approximate=True)


def mlp(settings: DecoderSettings, p: Tree, x: jax.Array) -> jax.Array:
    """A gated MLP of three products, or one of two with biases. x: [B, S, D] -> the same."""
    if "gate" in p:
        return (activated(settings, x @ p["gate"]) * (x @ p["up"])) @ p["down"]
    return activated(settings, x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def experts(settings: DecoderSettings, p: Tree, x: jax.Array) -> jax.Array:
    """Gated MLPs, of which each token takes the best few and none is full: all compute, and a token weighs most of
    them with 0. x: [B, S, D] -> the same."""
    probabilities = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    best, which = jax.lax.top_k(probabilities, settings.experts_per_token)
    best = best / best.sum(-1, keepdims=True)
    weights = jnp.einsum("bsk,bskx->bsx", best, jax.nn.one_hot(which, probabilities.shape[-1]))
    inner = activated(settings, jnp.einsum("bsd,xdf->bsxf", x, p["gate"])) * jnp.einsum("bsd,xdf->bsxf", x, p["up"])
    return jnp.einsum("bsxf,xfd,bsx->bsd", inner, p["down"], weights.astype(x.dtype))
