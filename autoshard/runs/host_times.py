"""How long the host of a process worked between steps, where its devices had to wait for it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import jax

MAX_STEPS = 1000
"""That are kept until they are asked for."""


class HostTimes:
    """Seconds that this process's host was late for each step: what passed since it started the one before, but for
    what it did together with others. Where its devices still computed when it came, it was not late.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._late = deque[float](maxlen=MAX_STEPS)
        self._since: float | None = None
        self._aside = 0.0

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """What is inside is no work of the host between steps: it waits, or all processes do it together."""
        begun = self._clock()
        try:
            yield
        finally:
            self._aside += self._clock() - begun

    @contextlib.contextmanager
    def starting(self, results: Any) -> Generator[None]:
        """A step is started inside.

        Args:
          results: arrays of the step before; as long as one is not ready, the devices compute.
        """
        begun, late = self._clock(), 0.0
        if self._since is not None and _ready(results):
            late = max(begun - self._since - self._aside, 0.0)
        self._late.append(late)
        try:
            yield
        finally:
            self._since, self._aside = self._clock(), 0.0

    def take(self) -> list[float]:
        """Seconds for each of the last steps that were started since this was asked before."""
        late = [*self._late]
        self._late.clear()
        return late


def _ready(results: Any) -> bool:
    arrays: list[Any] = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]
    return all(x.is_ready() for x in arrays)
