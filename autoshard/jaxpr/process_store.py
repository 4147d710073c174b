"""The store of keys and values that the processes of a run share."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
from jax._src import distributed

_reached = itertools.count()


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


def all_reach(place: str, seconds: float) -> bool:
    """Whether all processes call this within so many seconds, each as often and with the same ``place``."""
    store = process_store()
    if store.processes == 1:
        return True
    try:
        store.client.wait_at_barrier(f"autoshard/{place}/{next(_reached)}", round(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True
