"""What a model keeps of the tokens that it has read, so that the next costs one token's work.

A cache is a tree of arrays [L, B, T, ...]: layers, batch, slots. The entry of position p is in slot p modulo T, so that
where attention has a window, as many slots as it sees are enough. Letters in shapes: S tokens of a call, C entries that
they see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

type Tree = Any
"""A pytree."""
type Position = int | jax.Array
"""Of the first token of a call. The integer 0 says that nothing is in the cache."""


class Recalled(NamedTuple):
    """What the tokens of a call see of one layer."""

    cache: Tree
    """With their own entries."""
    entries: Tree
    """Arrays [B, C, ...]."""
    seen: jax.Array
    """Which entries each token sees. bool [S, C]."""


def recalled(cache: Tree, layer: int | jax.Array, position: Position, new: Tree, window: int | None = None) -> Recalled:
    """What tokens see whose own entries are ``new``, and the cache with these.

    Args:
      new: arrays [B, S, ...]. Where the cache has a window's slots and no more, and is not empty, S is 1.
      window: how many positions a token sees, its own among them; None means all.
    """
    slots, size = (jax.tree.leaves(tree)[0].shape[axis] for tree, axis in ((cache, 2), (new, 1)))
    asking = position + jnp.arange(size)
    if isinstance(position, int) and position == 0:
        kept = jax.tree.map(lambda x: jnp.roll(x[:, -slots:], size % slots if size > slots else 0, 1), new)
        cache, entries, at = _written(cache, layer, 0, kept), new, jnp.arange(size)
    else:
        cache = _written(cache, layer, position % slots, new)
        entries = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), cache)
        last = position + size - 1
        at = last - (last - jnp.arange(slots)) % slots
    seen = (at >= 0) & (at <= asking[:, None])
    return Recalled(cache, entries, seen if window is None else seen & (at > asking[:, None] - window))


def _written(cache: Tree, layer: int | jax.Array, slot: int | jax.Array, new: Tree) -> Tree:
    """The cache with ``new``, arrays [B, S, ...], in the slots from ``slot`` on."""

    def written(old: jax.Array, x: jax.Array) -> jax.Array:
        start = (layer, 0, slot, *(0 for _ in old.shape[3:]))
        return jax.lax.dynamic_update_slice(old, x[None].astype(old.dtype), start)

    return jax.tree.map(written, cache, new)
