"""A folder that one program has for itself, in however many processes it runs, and what these do there together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from autoshard.errors import CheckpointError
from autoshard.strict_files import cut


@contextlib.contextmanager
def held(lock: epath.Path, does: str, remedy: str) -> Generator[None]:
    """Keeps a folder for this process; it is free again in the end, and when the process ends, however that ends.

    A folder on a file system without locks is not kept.

    Args:
      lock: a file in the folder, which is there; it says which process has it. A folder may have several, for several
        purposes.
      does: what one process at a time does there, for the message: ``trains``.
      remedy: what to do instead, beside to wait.

    Raises:
      CheckpointError: another process has it; names the process.
    """
    if "://" in os.fspath(lock):
        yield
        return
    with Path(lock).open("a+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = cut(file.read(500).strip()) or "another process"
            raise CheckpointError(
                f"{lock.parent} is in use by {holder}: one process at a time {does} there. Wait for it or stop it, or "
                f"{remedy}"
            ) from None
        except OSError:
            pass  # without locks
        file.truncate(0)
        since = datetime.now(UTC).isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a process that was forked from this one has the file too
                fcntl.flock(file, fcntl.LOCK_UN)


def is_held(lock: epath.Path) -> bool:
    """Whether a process has the folder, by this file."""
    if "://" in os.fspath(lock) or not lock.exists():
        return False
    with Path(lock).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def in_first(call: Callable[[], object], failed: str) -> None:
    """Calls in the first process alone; what fails there fails in all, as `in_all` says."""
    in_all(call if jax.process_index() == 0 else lambda: None, failed)


def in_all(call: Callable[[], object], failed: str) -> None:
    """Calls in every process, and waits for all; fails in all where one fails.

    Raises:
      CheckpointError: the call failed in another process; the message begins with ``failed`` and has the process.
    """
    own: Exception | None = None
    try:
        call()
    except Exception as error:  # the others wait below
        own = error
    where = np.flatnonzero(of_all(np.asarray(own is not None)))
    if own is not None:
        raise own
    if where.size:
        raise CheckpointError(f"{failed} by process {where[0]}; its error says why")


def of_all(values: np.ndarray) -> np.ndarray:
    """``values`` of every process, of one shape and dtype in all of them. [...] -> [processes, ...]."""
    return np.asarray(multihost_utils.process_allgather(values)) if jax.process_count() > 1 else values[None]
