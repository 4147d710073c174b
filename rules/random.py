"""Rules of random bits and PRNG keys.

The bits of a counter-based generator depend on the key and on the element's position only, so that every dimension of
its result is a free factor: each device generates its own shard. Generators whose state runs through the array, as
RBG's, are kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import build, dim_labels, elementwise, table


def per_key(results: int = 1) -> RuleFn:
    """The rule of an operation on each key, or each word, by itself."""

    def rule(*avals: Aval, **_: Any) -> Rule:
        return elementwise(avals, results)

    return rule


def draws(keys: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """``shape`` draws from each key: these dimensions are free, except those of RBG generators."""
    labels = dim_labels(keys.shape, "key")
    new = dim_labels(shape)
    return build([labels], [[*labels, *new]], dict.fromkeys(new, "whole") if "rbg" in str(keys.dtype) else {})


def iota_2x32_shape(*, shape: Sequence[int], **_: Any) -> Rule:
    """Results: the high and low words of each element's linear index."""
    return build([], [dim_labels(shape)] * 2)


def random_gamma(keys: Aval, a: Aval, **_: Any) -> Rule:
    """Dimensions of the keys are parallel. Further ones are kept whole: a key is split by the linear index in them."""
    labels = dim_labels(a.shape)
    below = dict.fromkeys(labels[len(keys.shape) :], "whole")
    return build([labels[: len(keys.shape)], labels], [labels], below)


def random_unwrap(keys: Aval, **_: Any) -> Rule:
    """The words of a key are kept whole."""
    labels = dim_labels(keys.shape)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), keys.dtype)).ndim
    return build([labels], [[*labels, *[None] * words]])


def random_wrap(words: Aval, *, impl: Any, **_: Any) -> Rule:
    """The words of a key are kept whole."""
    kept = dim_labels(words.shape[: len(words.shape) - len(impl.key_shape)])
    return build([[*kept, *[None] * len(impl.key_shape)]], [kept])


def rng_bit_generator(key: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """Results: the next state and the bits. The generator's counter runs through the whole array."""
    none = [None] * len(key.shape)
    return build(
        [none],
        [none, [None] * len(shape)],
        reason="its bits depend on the whole shape; draw with jax.random, whose bits do not",
    )


def rng_uniform(low: Aval, high: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """It draws from a hidden state of the device."""
    return build([[], []], [[None] * len(shape)], reason="it draws from a hidden state of the device")


RULES: dict[str, RuleFn] = {
    "iota_2x32_shape": iota_2x32_shape,
    "philox2x32": per_key(2),
    "philox4x32": per_key(4),
    "random_bits": draws,
    "random_clone": per_key(),
    "random_fold_in": per_key(),
    "random_gamma": random_gamma,
    "random_seed": per_key(),
    "random_split": draws,
    "random_unwrap": random_unwrap,
    "random_wrap": random_wrap,
    "rng_bit_generator": rng_bit_generator,
    "rng_uniform": rng_uniform,
    "threefry2x32": per_key(2),
    "threefry4x32": per_key(4),
}
TABLE = table(RULES)
