"""Copies of a layer's values to the host's memory and back, so that XLA for TPU runs them beside a layer's products.

XLA sends a value in the iteration after the one that makes it, and fetches it in the one before that reads it. In
between it is in the loop's carry, where only one iteration's fits: the product that makes the next one waits until it
has been sent, and the next one is not fetched until nothing reads it (libtpu 0.0.50.1: 0.3 of 9.3 ms of products beside
what a loop of two of them sent, 9.3 from a place of its own). So what is sent is a copy, and so is what is read. XLA
removes a copy that it sees: here it cannot know that the condition of a choice holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autoshard import jaxpr as jx


def beside_products(eqn: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    """The equations that copy an operand to another memory as ``eqn`` does, by way of a place of its own on the
    device."""
    space = jx.aval(eqn.outvars[0]).memory_space

    def send(x: jax.Array) -> jax.Array:
        return jax.device_put(_copy(x), space)

    def fetch(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(_copy(jax.device_put(x, space)))

    return jx.splice(send if space == jax.memory.Space.Host else fetch, eqn, eqn.invars)


def _copy(x: jax.Array) -> jax.Array:
    x, always = jax.lax.optimization_barrier((x, jnp.bool_(True)))
    return jax.lax.select_n(always, jnp.zeros_like(x), x)
