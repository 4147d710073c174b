"""ViT: an encoder of patches of an image, and a class read from the first position.

arXiv:2010.11929. Letters in shapes: B batch, Y X pixels, C channels, D width, H heads, E head width, K classes.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from autoshard.strict_config import Config
from autoshard.weights.models.cache import Tree
from autoshard.weights.models.decoder import DecoderSettings, normed


class VisionSettings(Config):
    """What the weights do not say."""

    norm: Literal["layer"] = "layer"
    eps: float = Field(default=1e-12, gt=0)
    image_size: int = Field(default=224, ge=1)
    """Pixels of a side."""


def logits(settings: VisionSettings, params: Tree, images: jax.Array) -> jax.Array:
    """Logits of classes. images: [B, Y, X, C] -> float32 [B, K]."""
    norms = DecoderSettings(norm=settings.norm, eps=settings.eps)
    rows, columns, channels, width = params["patch"].shape
    batch, side, _, _ = images.shape
    cut = images.reshape(batch, side // rows, rows, side // columns, columns, channels)
    x = jnp.einsum("bmynxc,yxcd->bmnd", cut, params["patch"]).reshape(batch, -1, width) + params["patch_bias"]
    x = jnp.concatenate([jnp.broadcast_to(params["token"], (batch, 1, width)), x], axis=1) + params["positions"]

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        x = x + _attention(p["attention"], normed(norms, p["attention_norm"], x))
        y = normed(norms, p["mlp_norm"], x)
        y = jax.nn.gelu(y @ p["mlp"]["up"] + p["mlp"]["up_bias"], approximate=False)
        return x + y @ p["mlp"]["down"] + p["mlp"]["down_bias"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = normed(norms, params["norm"], x)[:, 0]
    return jnp.einsum("bd,dk->bk", x, params["head"], preferred_element_type=jnp.float32) + params["head_bias"]


def _attention(p: Tree, x: jax.Array) -> jax.Array:
    """Each position attends to all. x: [B, S, D] -> the same."""
    query, key, value = (jnp.einsum("bsd,dhe->bshe", x, p[f"w{n}"]) + p[f"b{n}"] for n in "qkv")
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores).astype(x.dtype), value)
    return jnp.einsum("bshe,hed->bsd", mixed, p["wo"]) + p["bo"]
