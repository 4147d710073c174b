"""What the devices of one process take for a product that no other process takes part in."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

ROUNDS, TRIES = 16, 5
"""Products one after the other, and how often they are timed."""


def device_seconds() -> float:
    """Seconds that the slowest device of this process takes for a few products, the least of five times: some
    milliseconds. The devices should have nothing else to do.
    """
    program, start = _program()
    program(start).block_until_ready()
    times: list[float] = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        program(start).block_until_ready()
        times.append(time.perf_counter() - begun)
    return min(times)


@functools.cache
def _program() -> tuple[Callable[[Any], jax.Array], np.ndarray]:
    """The products on every device of this process at once, and what they are called with."""
    devices = jax.local_devices()
    size, dtype = (128, jnp.float32) if devices[0].platform == "cpu" else (2048, jnp.bfloat16)

    def products(start: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(start.astype(dtype), (size, size))
        return jax.lax.fori_loop(0, ROUNDS, lambda _, y: y @ x / size, x)[0, :1]

    mesh = Mesh(np.asarray(devices, dtype=object), ("device",))
    program = jax.jit(jax.shard_map(products, mesh=mesh, in_specs=P("device"), out_specs=P("device")))
    return program, np.ones(len(devices), np.float32)
