"""DeepSeek-V3: attention with queries, keys and values of low rank, and experts chosen by groups.

arXiv:2412.19437, sections 2.1.1 and 2.1.2. Letters in shapes: B batch, S sequence, D width, H heads, X experts.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from autoshard.strict_config import Config
from autoshard.weights.models.cache import Position, Recalled, Tree, recalled
from autoshard.weights.models.decoder import DecoderSettings, frequencies, mlp, normed, rotated


class MLASettings(Config):
    """What the weights do not say."""

    activation: Literal["silu"] = "silu"
    eps: float = Field(default=1e-6, gt=0)
    """Of the norms of layers; those of ranks have 1e-6."""
    rope_base: float = Field(default=10_000.0, gt=1)
    rope_width: int = Field(ge=2)
    """Of the part of a query that has a position."""
    key_width: int = Field(ge=1)
    """Of the part that has none."""
    dense_layers: int = Field(ge=0)
    """Layers before the first with experts."""
    groups: int = Field(default=8, ge=1)
    """Of experts."""
    groups_per_token: int = Field(default=4, ge=1)
    experts_per_token: int = Field(default=8, ge=1)
    routed_scale: float = 2.5
    """What the experts' sum is multiplied by."""
    shared_experts: int = Field(default=1, ge=1)

    @property
    def parts(self) -> DecoderSettings:
        """For norms and MLPs, which are those of other decoders."""
        return DecoderSettings(activation=self.activation, eps=self.eps)


def logits(settings: MLASettings, params: Tree, tokens: jax.Array) -> jax.Array:
    """Next-token logits. tokens: int [B, S] -> float32 [B, S, V]."""

    def attended(p: Tree, y: jax.Array, cache: Tree, number: jax.Array) -> tuple[jax.Array, Tree]:
        return attention(settings, p, y), cache

    x, _ = _run(settings, params, tokens, None, attended)
    return jnp.einsum("bsd,dv->bsv", x, params["head"], preferred_element_type=jnp.float32)


def new_cache(settings: MLASettings, params: Tree, batch: int, length: int) -> Tree:
    """A cache for ``batch`` rows of up to ``length`` tokens: what keys and values are made of."""
    layers, rank = params["layers"]["attention"]["kv_norm"].shape
    shape = (layers, batch, length)
    dtype = params["embed"].dtype
    return {"latent": jnp.zeros((*shape, rank), dtype), "turned": jnp.zeros((*shape, settings.rope_width), dtype)}


def step(
    settings: MLASettings, params: Tree, cache: Tree, tokens: jax.Array, position: Position
) -> tuple[jax.Array, Tree]:
    """Logits of the token after the last, and the cache with the tokens. tokens: int [B, S] -> float32 [B, V]."""

    def attended(p: Tree, y: jax.Array, cache: Tree, number: jax.Array) -> tuple[jax.Array, Tree]:
        query, latent, turned = _projected(settings, p, y, position)
        known = recalled(cache, number, position, {"latent": latent, "turned": turned})
        return _from_latents(settings, p, query, known), known.cache

    x, cache = _run(settings, params, tokens, cache, attended)
    return jnp.einsum("bd,dv->bv", x[:, -1], params["head"], preferred_element_type=jnp.float32), cache


def _run(settings: MLASettings, params: Tree, tokens: jax.Array, cache: Tree, attended: Any) -> tuple[jax.Array, Tree]:
    """All layers: the dense ones, then those with experts. tokens: int [B, S] -> [B, S, D]."""
    x = params["embed"][tokens]
    first, parts = settings.dense_layers, settings.parts
    numbers = jnp.arange(params["layers"]["mlp_norm"]["scale"].shape[0])

    def dense(p: Tree, x: jax.Array) -> jax.Array:
        return mlp(parts, p, x)

    def routed(p: Tree, x: jax.Array) -> jax.Array:
        return experts(settings, p, x)

    for name, part, inner in (("dense", slice(None, first), dense), ("moe", slice(first, None), routed)):
        if name not in params:
            continue

        def layer(carry: tuple[jax.Array, Tree], p: tuple[Tree, Tree, jax.Array], inner: Any = inner) -> Any:
            x, cache = carry
            mixed, cache = attended(p[0]["attention"], normed(parts, p[0]["attention_norm"], x), cache, p[2])
            x = x + mixed
            return (x + inner(p[1], normed(parts, p[0]["mlp_norm"], x)), cache), None

        layers = jax.tree.map(lambda w, part=part: w[part], params["layers"])
        (x, cache), _ = jax.lax.scan(layer, (x, cache), (layers, params[name], numbers[part]))
    return normed(parts, params["norm"], x), cache


def attention(settings: MLASettings, p: Tree, x: jax.Array) -> jax.Array:
    """Causal latent attention. x: [B, S, D] -> the same."""
    nope = settings.key_width
    query, latent, turned = _projected(settings, p, x, 0)
    both = jnp.einsum("bsr,rhn->bshn", latent, p["kv_up"])
    key, value = both[..., :nope], both[..., nope:]
    scores = jnp.einsum("bqhe,bkhe->bhqk", query[..., :nope], key, preferred_element_type=jnp.float32)
    scores = scores + jnp.einsum("bqhe,bke->bhqk", query[..., nope:], turned, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bkho->bqho", jax.nn.softmax(scores).astype(x.dtype), value)
    return jnp.einsum("bsho,hod->bsd", mixed, p["wo"])


def _projected(
    settings: MLASettings, p: Tree, x: jax.Array, position: Position
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, the second part turned, [B, S, H, E]; what keys and values are made of [B, S, R]; turned keys."""
    nope, ranks = settings.key_width, DecoderSettings(eps=1e-6)
    at = (position + jnp.arange(x.shape[1])).astype(jnp.float32)[:, None]
    angle = at * frequencies(settings.rope_base, settings.rope_width)
    query = jnp.einsum("bsq,qha->bsha", normed(ranks, {"scale": p["q_norm"]}, x @ p["q_down"]), p["q_up"])
    latent, shared = jnp.split(x @ p["kv_down"], [p["kv_norm"].shape[0]], axis=-1)
    turned = rotated(_halves(query[..., nope:]), angle)
    query = jnp.concatenate([query[..., :nope], turned], axis=-1)
    return (
        query,
        normed(ranks, {"scale": p["kv_norm"]}, latent),
        rotated(_halves(shared[:, :, None]), angle)[:, :, 0],
    )


def _from_latents(settings: MLASettings, p: Tree, query: jax.Array, known: Recalled) -> jax.Array:
    """Attention to what keys and values are made of, without making them (section 2.1.2 of arXiv:2405.04434)."""
    nope, latent = settings.key_width, known.entries["latent"]
    asked = jnp.einsum("bqhe,rhe->bqhr", query[..., :nope], p["kv_up"][..., :nope])
    scores = jnp.einsum("bqhr,bkr->bhqk", asked, latent, preferred_element_type=jnp.float32) + jnp.einsum(
        "bqhe,bke->bhqk", query[..., nope:], known.entries["turned"], preferred_element_type=jnp.float32
    )
    scores = jnp.where(known.seen, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bkr->bqhr", jax.nn.softmax(scores).astype(query.dtype), latent)
    mixed = jnp.einsum("bqhr,rho->bqho", mixed, p["kv_up"][..., nope:])
    return jnp.einsum("bsho,hod->bsd", mixed, p["wo"])


def _halves(x: jax.Array) -> jax.Array:
    """Pairs of neighbours, as the weights have them, become those of the two halves."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def experts(settings: MLASettings, p: Tree, x: jax.Array) -> jax.Array:
    """The experts of each token's best groups, and one for all; none is full. x: [B, S, D] -> the same."""
    gates = jax.nn.sigmoid(jnp.einsum("bsd,dx->bsx", x.astype(jnp.float32), p["router"].astype(jnp.float32)))
    biased = gates + p["router_bias"]
    grouped = biased.reshape(*biased.shape[:-1], settings.groups, -1)
    _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), settings.groups_per_token)
    open_groups = jax.nn.one_hot(best, settings.groups).sum(-2) > 0
    allowed = jnp.where(open_groups[..., None], grouped, -jnp.inf).reshape(biased.shape)
    _, which = jax.lax.top_k(allowed, settings.experts_per_token)
    weights = gates * jax.nn.one_hot(which, gates.shape[-1]).sum(-2)
    weights = (settings.routed_scale * weights / (weights.sum(-1, keepdims=True) + 1e-20)).astype(x.dtype)
    inner = jax.nn.silu(jnp.einsum("bsd,xdf->bsxf", x, p["gate"])) * jnp.einsum("bsd,xdf->bsxf", x, p["up"])
    return jnp.einsum("bsxf,xfd,bsx->bsd", inner, p["down"], weights) + mlp(settings.parts, p["shared"], x)
