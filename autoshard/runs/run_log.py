"""The log of a run that is going on: its events gathered, and written to the folder about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from autoshard.runs.report import Event, StepEvent
from autoshard.runs.run_folder import RunFolder

SECONDS = 1.0
"""Between two writes: opening the files takes longer than a line, and a step may be short."""


class RunLog:
    """Adds events to a folder; a context manager, which writes the last ones.

    Those of steps are written with the first event that comes a second or more after the last write, any other event at
    once. `flush` comes before a checkpoint, so that the log up to it is complete whenever it is.
    """

    def __init__(self, folder: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._events: list[tuple[float, Event]] = []
        self._written = clock()

    def append(self, event: Event) -> None:
        """Adds ``event``."""
        now = self._clock()
        self._events.append((now, event))
        if not isinstance(event, StepEvent) or not 0 <= now - self._written < SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what is not yet written."""
        if self._events:
            events, self._events = self._events, []
            self._folder.append([event for _, event in events], [when for when, _ in events])
        self._written = self._clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
