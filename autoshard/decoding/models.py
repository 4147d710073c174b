"""Models that decode with a cache: those of training configurations, and published ones."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.decoding.generator import CachedStep, NewCache
from autoshard.errors import ConfigError
from autoshard.train.models.decoder import Decoder, ModelConfig
from autoshard.train.models.own_model import Model
from autoshard.train.precision import Precision
from autoshard.train.sources import Tree
from autoshard.weights.models import decoder, mla
from autoshard.weights.pretrained import Pretrained

_PUBLISHED: dict[str, tuple[ModuleType, Any]] = {
    "decoder": (decoder, decoder.DecoderSettings),
    "mla": (mla, mla.MLASettings),
}
"""What computes with the weights of a family, by `Family.model`, and its settings."""


class CachedModel(NamedTuple):
    """What `autoshard.generate` takes."""

    step: CachedStep
    new_cache: NewCache


def of_config(config: ModelConfig) -> CachedModel:
    """The decoder of a training configuration; its parameters are what the state of a run has as ``params``."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))

    def step(params: Tree, cache: Tree, tokens: jax.Array, position: Any) -> tuple[jax.Array, Tree]:
        state = nnx.clone(abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state).step(tokens, cache, position)

    def new_cache(params: Tree, rows: int, length: int) -> Tree:
        shape = (config.layers, rows, length, config.key_heads, config.head_width)
        return {name: jnp.zeros(shape, config.dtype) for name in ("key", "value")}

    return CachedModel(step, new_cache)


def of_own(model: Model, precision: Precision) -> CachedModel:
    """A model of one's own; its parameters are a dict of what a run's state has as ``params`` and ``rest``.

    One without a step that has a cache has the tokens for a cache, and reads all of them anew for each: what follows a
    position must not change what is before it, as nothing does in a causal model.

    Raises:
      ConfigError: it does not give logits for tokens; when it is traced.
    """

    def step(params: Tree, cache: Tree, tokens: jax.Array, position: Any) -> tuple[jax.Array, Tree]:
        held = precision.cast(params["params"])
        if model.cached is not None:
            return model.cached[0](held, cache, tokens, position)
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens, position, 1)
        logits = model.apply(held, params["rest"], {"inputs": cache}, None)[0]
        if not hasattr(logits, "shape") or logits.shape[:-1] != cache.shape:
            raise ConfigError(
                f"for tokens {list(cache.shape)} the model gives {jax.tree.map(jnp.shape, logits)}, and what makes "
                "tokens gives logits [rows, positions, vocabulary]"
            )
        return jax.lax.dynamic_index_in_dim(logits, position + tokens.shape[1] - 1, 1, keepdims=False), cache

    def new_cache(params: Tree, rows: int, length: int) -> Tree:
        if model.cached is not None:
            return model.cached[1](precision.cast(params["params"]), rows, length)
        return jnp.zeros((rows, length), jnp.int32)

    return CachedModel(step, new_cache)


def vocabulary(model: CachedModel, params: Tree) -> int:
    """How many tokens a model knows.

    Raises:
      ConfigError: it gives no logits for tokens.
    """

    def logits(params: Tree) -> jax.Array:
        return model.step(params, model.new_cache(params, 1, 1), jnp.zeros((1, 1), jnp.int32), 0)[0]

    return jax.eval_shape(logits, params).shape[-1]


def of_pretrained(model: Pretrained) -> CachedModel:
    """A published model; its parameters are what `Pretrained.read` gives.

    Raises:
      ConfigError: of a family that does not make tokens one after the other, or whose config asks for what is not done.
    """
    if model.family.model not in _PUBLISHED:
        raise ConfigError(
            f"models of type {model.family.model_type} do not decode with a cache here; those do that "
            f"autoshard.weights.models.{' and .'.join(_PUBLISHED)} compute"
        )
    module, settings_of = _PUBLISHED[model.family.model]
    settings = settings_of(**model.settings)

    def step(params: Tree, cache: Tree, tokens: jax.Array, position: Any) -> tuple[jax.Array, Tree]:
        return module.step(settings, params, cache, tokens, position)

    def new_cache(params: Tree, rows: int, length: int) -> Tree:
        return module.new_cache(settings, params, rows, length)

    return CachedModel(step, new_cache)
