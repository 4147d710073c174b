"""Random bits and keys.

A counter-based generator's bits depend on the key and on the position alone, so every dimension of its
result is free, and a part makes its own bits. Generators whose state runs through the array stay whole; the
RBG generators are of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import build, elementwise, rows, table


def pointwise(results: int = 1) -> RuleFn:
    """Key by key, or word by word."""

    def rule(*avals: Aval, **_: Any) -> Rule:
        return elementwise(avals, results)

    return rule


def drawn(keys: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """Each key is drawn from ``shape`` times. Those dimensions are free, but for the RBG generators."""
    labels = rows(keys.shape, "key")
    new = rows(shape)
    return build([labels], [[*labels, *new]], dict.fromkeys(new, "whole") if "rbg" in str(keys.dtype) else {})


def iota_2x32_shape(*, shape: Sequence[int], **_: Any) -> Rule:
    """The high and low words of each element's position."""
    return build([], [rows(shape)] * 2)


def random_gamma(keys: Aval, a: Aval, **_: Any) -> Rule:
    """Dimensions with a key each pass. Below them a key is split by the flat position, and they stay whole."""
    labels = rows(a.shape)
    below = dict.fromkeys(labels[len(keys.shape) :], "whole")
    return build([labels[: len(keys.shape)], labels], [labels], below)


def random_unwrap(keys: Aval, **_: Any) -> Rule:
    """A key's words are whole."""
    labels = rows(keys.shape)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), keys.dtype)).ndim
    return build([labels], [[*labels, *[None] * words]])


def random_wrap(words: Aval, *, impl: Any, **_: Any) -> Rule:
    """A key's words are whole."""
    kept = rows(words.shape[: len(words.shape) - len(impl.key_shape)])
    return build([[*kept, *[None] * len(impl.key_shape)]], [kept])


def rng_bit_generator(key: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """The generator's counter runs through the array, and it returns its next state."""
    none = [None] * len(key.shape)
    return build(
        [none],
        [none, [None] * len(shape)],
        reason="its bits depend on the whole shape; those of jax.random's functions do not",
    )


def rng_uniform(low: Aval, high: Aval, *, shape: Sequence[int], **_: Any) -> Rule:
    """A hidden state of the device."""
    return build([[], []], [[None] * len(shape)], reason="it draws from a hidden state of the device")


RULES: dict[str, RuleFn] = {
    "iota_2x32_shape": iota_2x32_shape,
    "philox2x32": pointwise(2),
    "philox4x32": pointwise(4),
    "random_bits": drawn,
    "random_clone": pointwise(),
    "random_fold_in": pointwise(),
    "random_gamma": random_gamma,
    "random_seed": pointwise(),
    "random_split": drawn,
    "random_unwrap": random_unwrap,
    "random_wrap": random_wrap,
    "rng_bit_generator": rng_bit_generator,
    "rng_uniform": rng_uniform,
    "threefry2x32": pointwise(2),
    "threefry4x32": pointwise(4),
}
TABLE = table(RULES)
