"""Qwen2-VL: images through a tower of patches into the places of a decoder that are theirs.

arXiv:2409.12191. Letters in shapes: B batch, S sequence, N patches of all images, D width of the decoder, W of the
tower, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from autoshard.strict_config import Config
from autoshard.weights.models.cache import Tree
from autoshard.weights.models.decoder import DecoderSettings, blocks, frequencies, normed, projected, rotated

type Grid = Sequence[tuple[int, int, int]]
"""Of each image the numbers of frames, rows and columns of patches."""


class VisionLanguageSettings(Config):
    """What the weights do not say."""

    eps: float = Field(default=1e-6, gt=0)
    """Of the decoder's norms; the tower's have 1e-6."""
    rope_base: float = Field(default=1e6, gt=1)
    """Of the decoder; the tower's is 10,000."""
    sections: tuple[int, int, int]
    """Pairs of a head that turn by frame, by row and by column."""
    tied: bool = False
    """Whether the output projection is the embedding."""
    image_token: int = Field(ge=0)
    """What stands where an image is."""
    merged_side: int = Field(default=2, ge=1)
    """Rows and columns of patches that become one place of the decoder."""
    mlp_ratio: float = 4
    """Of the tower; the weights have it."""


def logits(
    settings: VisionLanguageSettings,
    params: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    patches: jax.Array,
    grid: Grid,
) -> jax.Array:
    """Next-token logits.

    tokens: int [B, S]; positions: int [3, B, S], of `token_positions`; patches: [N, T, Y, X, C], in blocks of
    `VisionLanguageSettings.merged_side` squared -> float32 [B, S, V].
    """
    return logits_of_seen(settings, params, tokens, positions, encoded(settings, params["vision"], patches, grid))


def logits_of_equal_images(
    settings: VisionLanguageSettings,
    params: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    patches: jax.Array,
    grid: tuple[int, int, int],
) -> jax.Array:
    """Next-token logits where each row has one image, all of one grid: rows are split over devices with their patches.

    tokens: int [B, S]; positions: int [B, 3, S]; patches: [B, N, T, Y, X, C] -> float32 [B, S, V].
    """
    seen = jax.vmap(lambda image: encoded(settings, params["vision"], image, [grid]))(patches)
    return logits_of_seen(settings, params, tokens, jnp.moveaxis(positions, 1, 0), seen.reshape(-1, seen.shape[-1]))


def logits_of_seen(
    settings: VisionLanguageSettings, params: Tree, tokens: jax.Array, positions: jax.Array, seen: jax.Array
) -> jax.Array:
    """Next-token logits of text and of what the tower made of its images. seen: [places of all images, D]; the others
    as `logits` takes them.
    """
    parts = DecoderSettings(eps=settings.eps, tied=settings.tied)
    x, here = params["embed"][tokens], tokens == settings.image_token
    which = jnp.cumsum(here.reshape(-1)).reshape(here.shape) - 1
    x = jnp.where(here[..., None], seen[jnp.clip(which, 0, len(seen) - 1)].astype(x.dtype), x)
    channel = np.repeat(np.arange(3), settings.sections)
    turned = jnp.moveaxis(positions.astype(jnp.float32)[channel], 0, -1)
    angle = turned * frequencies(settings.rope_base, 2 * len(channel))
    return projected(parts, params, normed(parts, params["norm"], blocks(parts, params["layers"], x, angle)))


def encoded(settings: VisionLanguageSettings, p: Tree, patches: jax.Array, grid: Grid) -> jax.Array:
    """What the tower makes of images. patches: [N, T, Y, X, C] -> [N / merged_side ** 2, D]."""
    parts = DecoderSettings(norm="layer", eps=1e-6)
    places, frames = patch_places(grid, settings.merged_side)
    x = jnp.einsum("ntyxc,tyxcw->nw", patches, p["patch"])
    head = p["layers"]["attention"]["wqkv"].shape[-1]
    angle = (jnp.asarray(places)[:, :, None] * frequencies(10_000.0, head // 2)).reshape(len(places), head // 2)
    alone = frames[:, None] == frames[None, :]

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        a, m = p["attention"], p["mlp"]
        qkv = jnp.einsum("nd,zdhe->znhe", normed(parts, p["attention_norm"], x), a["wqkv"]) + a["bqkv"][:, None]
        query, key = (rotated(part[None], angle)[0] for part in qkv[:2])
        scores = jnp.einsum("qhe,khe->hqk", query, key, preferred_element_type=jnp.float32) * head**-0.5
        shares = jax.nn.softmax(jnp.where(alone, scores, jnp.finfo(jnp.float32).min)).astype(x.dtype)
        x = x + jnp.einsum("hqk,khe,hed->qd", shares, qkv[2], a["wo"]) + a["bo"]
        y = normed(parts, p["mlp_norm"], x) @ m["up"] + m["up_bias"]
        return x + (y * jax.nn.sigmoid(1.702 * y)) @ m["down"] + m["down_bias"], None

    x, _ = jax.lax.scan(layer, x, p["layers"])
    m = p["merger"]
    x = normed(parts, m["norm"], x).reshape(-1, m["up"].shape[0])
    return jax.nn.gelu(x @ m["up"] + m["up_bias"], approximate=False) @ m["down"] + m["down_bias"]


def patch_places(grid: Grid, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch, [N, 2], and the number of its frame, [N]: in blocks of ``side`` squared."""
    places: list[np.ndarray] = []
    for frames, rows, columns in grid:
        one = np.indices((rows, columns)).reshape(2, rows // side, side, columns // side, side)
        places += [one.transpose(1, 3, 2, 4, 0).reshape(-1, 2)] * frames
    frames = np.repeat(np.arange(len(places)), [len(place) for place in places])
    return np.concatenate(places), frames


def token_positions(settings: VisionLanguageSettings, tokens: np.ndarray, grid: Grid) -> np.ndarray:
    """Frame, row and column of each token; of text all three are its position, which goes on after an image's largest.

    tokens: int [B, S] -> int [3, B, S].
    """
    found, images = np.zeros((3, *tokens.shape), np.int32), iter(grid)
    for row, line in enumerate(tokens):
        at = start = 0
        while at < len(line):
            if line[at] != settings.image_token:
                found[:, row, at] = start
                at, start = at + 1, start + 1
                continue
            frames, rows, columns = next(images)
            shape = (frames, rows // settings.merged_side, columns // settings.merged_side)
            size = int(np.prod(shape))
            found[:, row, at : at + size] = start + np.indices(shape).reshape(3, -1)
            at, start = at + size, start + max(shape)
    return found
