"""Samples of random bits and PRNG keys."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample, bind


def samples(d: RandomArrays) -> Iterator[Sample]:
    keys = jax.random.split(jax.random.key(3), (4, 6))
    yield Sample("random_bits", bind("random_bits", bit_width=32, shape=(2, 3)), (keys,))
    yield Sample("random_bits", lambda k: jax.random.bits(k, (2, 3)), (jax.random.key(1, impl="rbg"),))
    yield Sample("random_split", bind("random_split", shape=(2,)), (keys,))
    yield Sample("random_clone", jax.random.clone, (keys,))
    yield Sample("random_fold_in", bind("random_fold_in"), (keys, d.bits(4, 6)))
    yield Sample("random_gamma", bind("random_gamma", log_space=True), (keys[:2, 0], d.positive(2, 3)))
    yield Sample("random_seed", jax.vmap(jax.vmap(jax.random.key)), (d.integer(4, 6),))
    yield Sample("random_unwrap", bind("random_unwrap"), (keys,))
    yield Sample("random_wrap", jax.random.wrap_key_data, (d.bits(4, 6, 2),))
    yield Sample("threefry2x32", bind("threefry2x32"), tuple(d.bits(4, 6) for _ in range(4)))
    yield Sample("threefry4x32", bind("threefry4x32"), tuple(d.bits(4, 6) for _ in range(8)))
    yield Sample("philox2x32", bind("philox2x32"), tuple(d.bits(4, 6) for _ in range(3)))
    yield Sample("philox4x32", bind("philox4x32"), tuple(d.bits(4, 6) for _ in range(6)))
    yield Sample("iota_2x32_shape", bind("iota_2x32_shape", shape=(4, 6)), ())
    yield Sample("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 6)), (d.bits(2).astype(np.uint64),))
    yield Sample("rng_uniform", lambda a, b: lax.rng_uniform(a, b, (4, 6)), (np.float64(0), np.float64(1)))
