"""Errors of JAX where another process cannot be reached, and what is logged of them.

Orbax saves in threads of its own, and logs, with a stack trace, what fails there. Where that is for a process that is
lost, a line says so, and nothing else is shown.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque

import jax

from autoshard.errors import CheckpointError

_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|[Hh]eartbeat|Connection (reset|closed|refused)")
"""In what JAX says where another process cannot be reached; it has no class or code of its own for that."""
_LOST_VALUE = re.compile(r"[A-Z_]+: Gloo ")
"""The same where it raises a ValueError, as when an earlier collective has failed by the time it runs one."""
_LOGGER = logging.getLogger("absl")
"""Orbax's."""


def may_be_of_peer(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, may be that another process cannot be reached."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError | CheckpointError) and _LOST.search(str(error)):
            return True
        if isinstance(error, ValueError) and _LOST_VALUE.match(str(error)):
            return True
        error = error.__cause__
    return False


class HeldLog(logging.Filter):
    """Holds back what is logged of errors that a lost process may explain, until it is clear that none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._held: deque[tuple[float, logging.LogRecord]] = deque()
        self._showing = threading.Lock()
        _LOGGER.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it at once."""
        if not may_be_of_peer(record.exc_info[1] if record.exc_info else None):
            return True
        self._held.append((time.monotonic(), record))
        return False

    def show(self, until: float = math.inf) -> None:
        """Shows what was held back before ``until``, in seconds of `time.monotonic`."""
        with self._showing:
            while self._held and self._held[0][0] < until:
                _LOGGER.callHandlers(self._held.popleft()[1])

    def end(self) -> None:
        """Shows what was held back, and holds back no more."""
        _LOGGER.removeFilter(self)
        self.show()
