"""How the next token is chosen from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autoshard.errors import ArgumentError


@dataclass(frozen=True)
class Sampling:
    """The best token, or one drawn from those that the options leave.

    Raises:
      ArgumentError: an option out of its range.
    """

    temperature: float = 0.0
    """What logits are divided by; 0 takes the best token."""
    top_k: int | None = None
    """How many tokens are left, the best ones; those as good as the last of them stay too."""
    top_p: float | None = None
    """The probability of the tokens that are left: as few of the best as have it together, after ``top_k``."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(f"temperature={self.temperature}: must be 0, which takes the best token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"top_k={self.top_k}: must be 1 or more, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p={self.top_p}: must be above 0 and at most 1, or None for all tokens")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ArgumentError("top_k and top_p are of tokens that are drawn: give a temperature above 0 with them")

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """A token for each row. logits: float [B, V], key: a random key -> int32 [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = jnp.where(logits < jax.lax.top_k(logits, self.top_k)[0][:, -1:], -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            share = jax.nn.softmax(ordered, axis=-1)
            better = jnp.cumsum(share, axis=-1) - share  # of the better ones together; the best has 0 and stays
            least = jnp.min(jnp.where(better < self.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)
