"""DeepSeek-V3: attention with queries, keys and values of low rank, and experts chosen by groups.

arXiv:2412.19437, sections 2.1.1 and 2.1.2. Letters in shapes: B batch, S sequence, D width, H heads, X experts.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from autoshard.strict_config import Config
from autoshard.weights.models.decoder import DecoderSettings, Tree, frequencies, mlp, normed, rotated


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
    x = params["embed"][tokens]
    first, parts = settings.dense_layers, settings.parts

    def dense(p: Tree, x: jax.Array) -> jax.Array:
        return mlp(parts, p, x)

    def routed(p: Tree, x: jax.Array) -> jax.Array:
        return experts(settings, p, x)

    for name, part, inner in (("dense", slice(None, first), dense), ("moe", slice(first, None), routed)):
        if name not in params:
            continue

        def layer(x: jax.Array, p: tuple[Tree, Tree], inner: Any = inner) -> tuple[jax.Array, None]:
            x = x + attention(settings, p[0]["attention"], normed(parts, p[0]["attention_norm"], x))
            return x + inner(p[1], normed(parts, p[0]["mlp_norm"], x)), None

        x, _ = jax.lax.scan(layer, x, (jax.tree.map(lambda w, part=part: w[part], params["layers"]), params[name]))
    x = normed(parts, params["norm"], x)
    return jnp.einsum("bsd,dv->bsv", x, params["head"], preferred_element_type=jnp.float32)


def attention(settings: MLASettings, p: Tree, x: jax.Array) -> jax.Array:
    """Causal latent attention. x: [B, S, D] -> the same."""
    nope, ranks = settings.key_width, DecoderSettings(eps=1e-6)
    latent = normed(ranks, {"scale": p["q_norm"]}, x @ p["q_down"])
    query = jnp.einsum("bsq,qha->bsha", latent, p["q_up"])
    latent, shared = jnp.split(x @ p["kv_down"], [p["kv_norm"].shape[0]], axis=-1)
    both = jnp.einsum("bsr,rhn->bshn", normed(ranks, {"scale": p["kv_norm"]}, latent), p["kv_up"])
    key, value = both[..., :nope], both[..., nope:]
    at = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None]
    angle = at * frequencies(settings.rope_base, settings.rope_width)
    q_turned, k_turned = (rotated(_halves(t), angle) for t in (query[..., nope:], shared[:, :, None]))
    scores = jnp.einsum("bqhe,bkhe->bhqk", query[..., :nope], key, preferred_element_type=jnp.float32)
    scores = scores + jnp.einsum("bqhe,bke->bhqk", q_turned, k_turned[:, :, 0], preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bkho->bqho", jax.nn.softmax(scores).astype(x.dtype), value)
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
