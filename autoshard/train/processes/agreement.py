"""What the first of several processes does for all, and what all agree on.

Where there is one process nothing is exchanged. Otherwise every process must call these functions, in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.errors import AutoshardError, ConfigError
from autoshard.shared_folder import of_all
from autoshard.strict_files import shortened


def is_first() -> bool:
    """Whether this process is the one that writes the run's files and prints."""
    return jax.process_index() == 0


def from_first[T](call: Callable[[], T]) -> T:
    """What ``call`` returns in the first process, which alone calls it; what it raises there is raised in all."""
    if jax.process_count() == 1:
        return call()
    outcome, raised = _outcome(call) if is_first() else (b"", None)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(outcome))))
    sent = np.frombuffer(outcome or bytes(size), np.uint8)
    result, error = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8).tobytes())
    if raised is not None or error is not None:
        raise raised or error
    return result


def _outcome(call: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """What to send of ``call``: its result and what it raised, that also as it is. What cannot be sent is an error."""
    result = raised = None
    try:
        result = call()
    except BaseException as error:  # an interrupt too: the others wait
        raised = error
    try:
        return pickle.dumps((result, raised)), raised
    except Exception as error:
        raised = raised or error
        return pickle.dumps((None, AutoshardError(f"{type(raised).__name__} in process 0: {raised}"))), raised


def in_any(flag: bool) -> bool:
    """Whether ``flag`` is set in a process."""
    return bool(of_all(np.asarray(flag)).any())


def same_in_all(digest: int) -> bool:
    """Whether ``digest``, below 2^32, is the same in every process."""
    return len(set(of_all(np.asarray(digest, np.uint32)).tolist())) == 1


def same_entries(own: dict[str, Any], what: str) -> None:
    """Compares the entries that every process has of ``what`` by name.

    Raises:
      ConfigError: in every process, if they differ; in that where they do, with the name of the first.
    """
    first = from_first(lambda: own)
    name = next((name for name in sorted(own | first) if own.get(name) != first.get(name)), None)
    different = np.flatnonzero(of_all(np.asarray(name is not None)))
    if name is not None:
        raise ConfigError(
            f"{name} is {shortened(own.get(name))} in process {jax.process_index()}, and {shortened(first.get(name))} "
            "in process 0: all take the same steps"
        )
    if different.size:
        raise ConfigError(f"process {different[0]} has another {what}; its error says in what")
