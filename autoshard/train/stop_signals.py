"""SIGINT and SIGTERM as requests to stop: the first ends a run with its state saved, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Any, Self

from autoshard.errors import AutoshardError
from autoshard.train.processes.peers import SUPERVISED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers send before they take a machine away."""
REPEAT_SECONDS = 1.0
"""In which a signal to a process that is supervised may come twice: to itself, and passed on."""
RETRY_SECONDS = 0.01
"""After an interrupt that was raised where Python ignores exceptions, as in the garbage collector's callbacks."""


class StopSignals:
    """The signals that ask this process to stop; a context manager, to be entered in the main thread.

    Until it is entered no signal is handled, and `requested` is False. The first signal raises KeyboardInterrupt, but
    within `deferred` it only sets `requested`. The second ends the process, whatever it does: what is on disk by then
    stays, and a checkpoint is there whole or not at all. After a signal handlers stay to the end of the process, but
    those of a SIGINT where the process may go on, such as a notebook's.

    Args:
      ends_process: whether the process ends with what is inside, whichever signal it was.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self.signal: signal.Signals | None = None
        """The first signal received."""
        self.interrupted = False
        """Whether it was raised as KeyboardInterrupt: any error from then on may be of that."""
        self._at = 0.0
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}
        self._unraisable_before = sys.unraisablehook

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._receive) for each in SIGNALS}
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._interrupt)
        self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        goes_on = self.signal is signal.SIGINT and not self._ends_process
        if self.signal is None or goes_on:  # else a second signal still ends the process at once
            signal.setitimer(signal.ITIMER_REAL, 0)
            for each, handler in self._before.items():
                signal.signal(each, handler)
            sys.unraisablehook = self._unraisable_before

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    def turned_into(self, error: Exception) -> bool:
        """Whether ``error`` may be what other code, such as a hash that JAX calls, has made of the interrupt."""
        return self.interrupted and not isinstance(error, AutoshardError | OSError)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a signal ended, as shells give it: 130 for SIGINT, 143 for SIGTERM, and for
        one that another process received."""
        return 128 + (self.signal or signal.SIGTERM)

    @contextlib.contextmanager
    def deferred(self) -> Generator[None]:
        """Lets what is inside look at `requested` when it is ready to stop; may be within another."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal == number and SUPERVISED in os.environ and time.monotonic() - self._at < REPEAT_SECONDS:
            return
        if self.signal is not None:
            write_error("stopped at once: what was not saved is lost\n")
            os._exit(self.exit_code)
        self.signal, self._at = signal.Signals(number), time.monotonic()
        self._interrupt()
        write_error(f"{self.signal.name}: stopping; the next signal stops at once\n")

    def _interrupt(self, *_: Any) -> None:
        if not self._deferred:
            self.interrupted = True
            raise KeyboardInterrupt

    def _unraisable(self, ignored: sys.UnraisableHookArgs) -> None:
        if self.requested and ignored.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
        else:
            self._unraisable_before(ignored)


def write_error(text: str) -> None:
    """Writes to standard error past Python's buffers, which a signal may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
