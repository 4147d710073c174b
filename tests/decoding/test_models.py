"""Cached decoding on eight devices makes the tokens that a model without a cache makes on one, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard import weights
from autoshard.decoding import models
from autoshard.errors import ArgumentError, ConfigError
from autoshard.train.models.decoder import Decoder, ModelConfig
from autoshard.weights.models import decoder, mla
from tests.weights.published import V, publish, tensors_of

COUNT = 64
ROWS, SIZE = 2, 6
FACTOR = 4
"""Of weights, so that what comes before a token matters, and no row has one token again and again."""
SIZES: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "d_ff": 32, "vocab": 40, "seq": 8}
OURS: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped": {"kv_heads": 2, "tied": True},
    "unrolled": {"scan": False, "mlp": "gelu"},
}
PUBLISHED = {"sliding window": "mixtral", "mla": "deepseek_v3", "gemma": "gemma"}
MESHES = {"grouped": {"data": 2, "model": 4}, "sliding window": {"data": 2, "model": 4}}


def ours(name: str) -> tuple[models.CachedModel, Any, Callable[[Any], Any]]:
    """The model with its cache, parameters, and without a cache: tokens [B, S] -> logits [B, S, V]."""
    config = ModelConfig(**{**SIZES, **OURS[name]})
    module = Decoder(config, nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module))
    params = {
        key: value if key == "embed" else jax.tree.map(lambda x: FACTOR * x, value) for key, value in params.items()
    }
    nnx.update(module, params)
    return models.of_config(config), params, module


def published(name: str, folder: Path) -> tuple[models.CachedModel, Any, Callable[[Any], Any]]:
    """The same of a published model; one that has a window has it of 5."""
    said = {"sliding_window": 5} if name == "sliding window" else {}
    tensors = {key: FACTOR * value for key, value in tensors_of(PUBLISHED[name]).items()}
    found = weights.open_pretrained(publish(folder, PUBLISHED[name], tensors, **said))
    params, of = found.read(), found.settings
    if found.family.model == "mla":
        return models.of_pretrained(found), params, lambda tokens: mla.logits(mla.MLASettings(**of), params, tokens)
    settings = decoder.DecoderSettings(**of)
    return models.of_pretrained(found), params, lambda tokens: decoder.logits(settings, params, tokens)


def one_after_the_other(logits: Callable[[Any], Any], prompt: np.ndarray) -> np.ndarray:
    """The best tokens, from all those before each; what follows a token changes nothing, so that one shape does."""
    tokens = np.pad(prompt, ((0, 0), (0, COUNT)))
    run = jax.jit(logits)
    for at in range(prompt.shape[1], tokens.shape[1]):
        tokens[:, at] = np.asarray(run(tokens)[:, at - 1]).argmax(-1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", [*OURS, *PUBLISHED])
def test_64_tokens(name: str, tmp_path: Path) -> None:
    model, params, logits = ours(name) if name in OURS else published(name, tmp_path / "model")
    prompt = np.random.default_rng(0).integers(0, V, (ROWS, SIZE))
    generator = autoshard.generate(*model, mesh=MESHES.get(name, {"model": 8}))
    want = one_after_the_other(logits, prompt)
    assert min(len(np.unique(row)) for row in want) > 8
    np.testing.assert_array_equal(generator(params, prompt, COUNT), want)
    prepared = generator.prepare(params, prompt, COUNT)
    slots = {x.shape[2] for x in jax.tree.leaves(prepared.decode_plan.in_avals[1])}
    assert slots == {5 if name == "sliding window" else SIZE + COUNT}
    assert prepared.prefill_plan.in_specs[0] == prepared.decode_plan.in_specs[0]


def test_positions_are_as_many_as_were_learned(tmp_path: Path) -> None:
    found = weights.open_pretrained(publish(tmp_path / "gpt2", "gpt2"))
    step, new_cache = models.of_pretrained(found)
    params = found.read()
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, V, (1, 3)))
    full = decoder.logits(decoder.DecoderSettings(**found.settings), params, jnp.pad(prompt, ((0, 0), (0, 1))))
    got, cache = step(params, new_cache(params, 1, 12), prompt, 0)
    np.testing.assert_allclose(got, full[:, 2], rtol=1e-5, atol=1e-5)
    got, _ = step(params, cache, jnp.zeros((1, 1), jnp.int32), jnp.int32(3))
    np.testing.assert_allclose(got, full[:, 3], rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="13 tokens are asked for, and the model has 12 positions"):
        autoshard.generate(step, new_cache, mesh={"data": 8}).prepare(params, prompt, 10)


def test_a_prompt_of_experts_and_a_token_of_them() -> None:
    """With room for all, as a token by itself has."""
    config = ModelConfig(**{**SIZES, "experts": 4, "shared": 1, "capacity_factor": 8.0})
    module = Decoder(config, nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)))
    step, new_cache = models.of_config(config)
    params = nnx.to_pure_dict(nnx.state(module))
    got, cache = step(params, new_cache(params, 2, 6), tokens[:, :5], 0)
    np.testing.assert_allclose(got, module(tokens)[:, 4], rtol=1e-4, atol=1e-5)
    got, _ = step(params, cache, tokens[:, 5:], jnp.int32(5))
    np.testing.assert_allclose(got, module(tokens)[:, 5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_a_family_without_a_cache(kind: str, tmp_path: Path) -> None:
    found = weights.open_pretrained(publish(tmp_path / kind, kind))
    with pytest.raises(ConfigError, match=f"models of type {kind} do not decode with a cache here"):
        models.of_pretrained(found)
