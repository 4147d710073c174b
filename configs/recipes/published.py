"""Decoders of published families with new weights, un-annotated: GPT-2 and Llama 3.

`autoshard.weights` has the names and shapes of a family's weights and the functions that compute with them. Sizes are
those of a ``config.json``, or of what of it matters here.
"""

import math

import jax
import jax.numpy as jnp

from autoshard.weights.family import family_of
from autoshard.weights.models.decoder import DecoderSettings, logits


def settings_of(config):
    """What the functions of `autoshard.weights.models.decoder` take as their settings."""
    return DecoderSettings(**family_of(config).model_settings(config))


def make(*, config, sizes=None):
    """``init(key)`` -> weights, ``apply(weights, tokens)`` -> logits.

    Args:
      config: as a ``config.json``.
      sizes: of dimensions that it does not say, by their letters in ``configs/weights/``.
    """
    family, settings = family_of(config), settings_of(config)
    letters = family.known_sizes(config) | (sizes or {})

    def init(key):
        weights = {}
        for number, row in enumerate(family.rows):
            if row.leaf == "head" and settings.tied:
                continue
            *parents, last = row.leaf.split("/")
            at = weights
            for parent in parents:
                at = at.setdefault(parent, {})
            shape, groups = [letters[c] for c in row.layout.leaf], row.layout.tensor
            if len(groups) == 1:  # a norm's scale or a bias
                at[last] = jnp.full(shape, float(last in ("scale", "q_norm", "k_norm")))
            else:
                inputs = groups[:1] if family.inputs_first else groups[1:]
                fan = math.prod(letters[c] for group in inputs for c in group)
                at[last] = jax.random.normal(jax.random.fold_in(key, number), shape) * fan**-0.5
        return weights

    return init, lambda weights, tokens: logits(settings, weights, tokens)
