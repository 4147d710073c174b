"""The store of keys and values that the processes of a run share."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax._src import distributed


class ProcessStore(NamedTuple):
    """What `jax.distributed.initialize` made; to read it starts no backend."""

    client: Any
    """JAX's client of the store in process 0."""
    process: int
    processes: int


def process_store() -> ProcessStore:
    """The store, and which of how many processes this is; after `jax.distributed.initialize`."""
    state = distributed.global_state
    return ProcessStore(state.client, int(state.process_id), int(state.num_processes or 1))
