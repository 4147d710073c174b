"""Slots of a cache: what a token sees of those before it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.weights.models.cache import recalled


def entries(start: int, size: int) -> dict[str, jnp.ndarray]:
    """One row; the entry of each position is its number."""
    return {"key": jnp.arange(start, start + size, dtype=jnp.float32)[None, :, None]}


@pytest.mark.parametrize(("slots", "window"), [(12, None), (12, 4), (4, 4), (3, 3)])
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 7])
def test_each_token_sees_what_attention_without_a_cache_sees(slots, window, prompt):
    cache = {"key": jnp.full((2, 1, slots, 1), -1.0)}
    position = 0
    for size in (prompt, *([1] * (12 - prompt))):
        at = position if position == 0 else jnp.int32(position)
        cache, found, seen = recalled(cache, 1, at, entries(position, size), window)
        for n in range(size):
            own = position + n
            want = np.arange(0 if window is None else max(0, own - window + 1), own + 1)
            np.testing.assert_array_equal(np.sort(np.asarray(found["key"])[0, np.asarray(seen[n]), 0]), want)
        position += size
    assert (np.asarray(cache["key"][0]) == -1).all()  # of another layer


def test_a_prompt_in_pieces():
    cache = {"key": jnp.zeros((1, 1, 8, 1))}
    for start in (0, 3, 6):
        cache, found, seen = recalled(cache, 0, jnp.int32(start) if start else 0, entries(start, 2 + (start < 6)))
    np.testing.assert_array_equal(np.asarray(found["key"])[0, :, 0], np.arange(8))
    np.testing.assert_array_equal(seen, np.arange(8) <= np.array([[6], [7]]))
