"""The models that compute with published weights: what they give is laid out as their settings and weights say.

`tests/interop` holds their logits against those of `transformers`, where that is installed.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import weights
from autoshard.weights.models import decoder, encoder_decoder, mla, vision, vision_language
from tests.weights.published import CONFIGS, D, V, publish

MODELS = {"decoder": (decoder, decoder.DecoderSettings), "mla": (mla, mla.MLASettings)}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 10)))


def opened(kind, folder):
    found = weights.open_pretrained(publish(folder / kind, kind))
    return found.family.model, found.settings, found.read()


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"qwen2_vl", "t5", "vit"}))
def test_a_decoder_sees_what_comes_before_and_nothing_after(kind, tmp_path):
    name, settings, params = opened(kind, tmp_path)
    module, make = MODELS[name]
    logits = module.logits(make(**settings), params, TOKENS)
    assert (logits.shape, logits.dtype) == ((2, 10, V), jnp.float32)
    changed = np.asarray(module.logits(make(**settings), params, TOKENS.at[:, 5].add(1)))
    np.testing.assert_allclose(changed[:, :5], logits[:, :5], rtol=1e-5, atol=1e-5)
    assert (np.abs(changed[:, 5:] - logits[:, 5:]).max(-1) > 1e-3).all()


def test_t5_sees_all_of_the_source_and_what_comes_before_in_the_target(tmp_path):
    _, settings, params = opened("t5", tmp_path)
    made = encoder_decoder.EncoderDecoderSettings(**settings)
    logits = encoder_decoder.logits(made, params, TOKENS, TOKENS)
    later = np.asarray(encoder_decoder.logits(made, params, TOKENS, TOKENS.at[:, 5].add(1)))
    np.testing.assert_allclose(later[:, :5], logits[:, :5], rtol=1e-5, atol=1e-5)
    other = np.asarray(encoder_decoder.logits(made, params, TOKENS.at[:, 9].add(1), TOKENS))
    assert (np.abs(other - logits).max(-1) > 1e-5).all()


def test_buckets_of_relative_positions():
    settings = encoder_decoder.EncoderDecoderSettings(max_distance=16)
    table = jnp.arange(8, dtype=jnp.float32)[:, None]
    both = encoder_decoder.relative_bias(settings, table, 24, causal=False)[0]
    np.testing.assert_array_equal(both[12, 10:15], [2, 1, 0, 5, 6])
    assert both[20, 0] == 3
    assert both[0, 20] == 7
    before = encoder_decoder.relative_bias(settings, table, 24, causal=True)[0]
    np.testing.assert_array_equal(before[12, 9:13], [3, 2, 1, 0])
    assert before[23, 0] == 7
    assert before[0, 1] < -1e30


def test_vit_reads_every_patch(tmp_path):
    _, settings, params = opened("vit", tmp_path)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 3)), jnp.float32)
    made = vision.VisionSettings(**settings)
    logits = vision.logits(made, params, images)
    assert logits.shape == (2, 7)
    for at in ((0, 0), (1, 3), (3, 3)):
        changed = vision.logits(made, params, images.at[:, at[0], at[1], 1].add(1.0))
        assert (np.abs(np.asarray(changed - logits)).max(-1) > 1e-4).all()


def test_qwen2_vl_reads_images_where_they_stand_and_each_alone(tmp_path):
    _, settings, params = opened("qwen2_vl", tmp_path)
    made = vision_language.VisionLanguageSettings(**settings)
    image, grid = V - 1, [(1, 4, 4), (1, 2, 2)]
    tokens = np.array([[1, image, image, image, image, 2, image, 3]])
    positions = vision_language.token_positions(made, tokens, grid)
    np.testing.assert_array_equal(positions[:, 0, :6], [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    places, frames = vision_language.patch_places(grid, 2)
    np.testing.assert_array_equal(places[:6], [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]])
    np.testing.assert_array_equal(frames, [0] * 16 + [1] * 4)
    patches = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2, 2, 2, 3)), jnp.float32)
    first = vision_language.encoded(made, params["vision"], patches, grid)
    other = vision_language.encoded(made, params["vision"], patches.at[3].add(1.0), grid)
    assert first.shape == (5, D)
    assert (np.abs(np.asarray(first - other)).max(-1) > 1e-4).tolist() == [True] * 4 + [False]
    logits = vision_language.logits(made, params, jnp.asarray(tokens), jnp.asarray(positions), patches, grid)
    changed = vision_language.logits(
        made, params, jnp.asarray(tokens), jnp.asarray(positions), patches.at[17].add(1.0), grid
    )
    moved = np.abs(np.asarray(changed - logits)).max(-1)[0] > 1e-4
    assert moved.tolist() == [False] * 6 + [True] * 2


def test_qwen2_vl_reads_equal_images_by_row(tmp_path):
    _, settings, params = opened("qwen2_vl", tmp_path)
    made, grid = vision_language.VisionLanguageSettings(**settings), (1, 4, 4)
    tokens = np.array([[V - 1] * 4 + [1, 2], [1] + [V - 1] * 4 + [3]])
    positions = jnp.asarray(vision_language.token_positions(made, tokens, [grid, grid]))
    patches = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 2, 2, 2, 3)), jnp.float32)
    together = vision_language.logits(
        made, params, jnp.asarray(tokens), positions, patches.reshape(32, 2, 2, 2, 3), [grid] * 2
    )
    by_row = vision_language.logits_of_equal_images(
        made, params, jnp.asarray(tokens), positions.swapaxes(0, 1), patches, grid
    )
    np.testing.assert_allclose(by_row, together, rtol=1e-5, atol=1e-5)
