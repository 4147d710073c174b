"""Several processes that train together: what the first one does for all, and what all agree on.

Where there is one process nothing is exchanged. Otherwise every process must call these functions, in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that writes the run's files and prints."""
    return jax.process_index() == 0


def from_first[T](call: Callable[[], T]) -> T:
    """What ``call`` returns in the first process, which alone calls it; what it raises there is raised in all."""
    if jax.process_count() == 1:
        return call()
    outcome = b""
    if is_first():
        try:
            outcome = pickle.dumps((call(), None))
        except Exception as error:
            outcome = pickle.dumps((None, error))
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(outcome))))
    sent = np.frombuffer(outcome or bytes(size), np.uint8)
    result, error = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8).tobytes())
    if error is not None:
        raise error
    return result


def in_any(flag: bool) -> bool:
    """Whether ``flag`` is set in a process."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def same_in_all(digest: int) -> bool:
    """Whether ``digest``, below 2^32, is the same in every process."""
    if jax.process_count() == 1:
        return True
    return len(set(multihost_utils.process_allgather(np.uint32(digest)).tolist())) == 1
