"""Models of published families with new weights, un-annotated: GPT-2, Llama 3, Qwen 3, T5, ViT and Qwen2-VL.

`autoshard.weights` has the names and shapes of a family's weights and the functions that compute with them. Sizes are
those of a ``config.json``, or of what of it matters here.
"""

import fnmatch
import math
from functools import partial

import jax
import jax.numpy as jnp

from autoshard.weights.family import family_of
from autoshard.weights.models import decoder, encoder_decoder, vision, vision_language

FUNCTIONS = {
    "decoder": (decoder.DecoderSettings, decoder.logits),
    "encoder_decoder": (encoder_decoder.EncoderDecoderSettings, encoder_decoder.logits),
    "vision": (vision.VisionSettings, vision.logits),
    "vision_language": (vision_language.VisionLanguageSettings, vision_language.logits_of_equal_images),
}


def settings_of(config):
    """The settings of the family's functions."""
    family = family_of(config)
    return FUNCTIONS[family.model][0](**family.model_settings(config))


def make(*, config, sizes=None, without=(), grid=None):
    """``init(key)`` -> weights, ``apply(weights, inputs)`` -> logits. Inputs of several arrays are a dictionary.

    Decoders also have a step with a cache and what makes one, for ``autoshard generate``.

    Args:
      config: as a ``config.json``.
      sizes: of dimensions that it does not say, by their letters in ``configs/weights/``.
      without: weights that the model does not have, as globs.
      grid: frames, rows and columns of patches of each image, for Qwen2-VL.
    """
    family, settings = family_of(config), settings_of(config)
    letters, logits = family.known_sizes(config) | (sizes or {}), FUNCTIONS[family.model][1]
    absent = (*without, "head") if getattr(settings, "tied", False) else without

    def init(key):
        weights = {}
        for number, row in enumerate(family.rows):
            if any(fnmatch.fnmatch(row.leaf, each) for each in absent):
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
                if family.model == "encoder_decoder" and last == "wq":
                    fan *= letters["e"]  # its scores are not scaled
                at[last] = jax.random.normal(jax.random.fold_in(key, number), shape) * fan**-0.5
        return weights

    def apply(weights, inputs):
        given = {} if grid is None else {"grid": tuple(grid)}
        if isinstance(inputs, dict):
            return logits(settings, weights, **inputs, **given)
        return logits(settings, weights, inputs)

    if family.model == "decoder":
        return init, apply, partial(decoder.step, settings), partial(decoder.new_cache, settings)
    return init, apply
