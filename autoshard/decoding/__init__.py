"""decoding: from a prompt to further tokens, with a cache that stays where it is.

Input: a step that takes parameters, a cache and tokens; or a training configuration or a published model, from which
it is made. Output: tokens, and the two planned steps that make them, of the prompt and of one token, which share the
layout of parameters and cache.

May import: api, train, weights, and what they may.
"""

from autoshard.decoding.generator import Generator as Generator
from autoshard.decoding.generator import generate as generate
