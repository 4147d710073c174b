"""Batches that a thread reads and puts on the devices while the step before them is being computed."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self

AHEAD = 2
"""Batches on the devices beside the one that is computed."""
MAX_WAITS = 1000
"""Batches of which the seconds that they were waited for are kept."""
_POLL_SECONDS = 0.1


class Positioned(Protocol):
    """What batches are taken from."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any:
        """The position, after the batches taken so far."""
        ...


class Placer(Protocol):
    """Puts batches on the devices."""

    @property
    def digest(self) -> int:
        """Of all batches placed so far."""
        ...

    @property
    def parted(self) -> bool:
        """Whether a process has brought only rows of its own."""
        ...

    def knows(self, batch: Any) -> bool:
        """Whether a batch can be placed by any thread; one of new sizes is left to the caller's."""
        ...

    def __call__(self, batch: Any) -> Any:
        """The batch on the devices."""
        ...


class Prefetched:
    """``count`` batches of ``source`` on the devices, read ahead by a thread; a context manager, which ends the thread.

    No more than ``count`` are taken, so that whoever goes on with the source misses none. What the source or the placer
    raises is raised where the batch is asked for.
    """

    def __init__(self, source: Positioned, place: Placer, count: int) -> None:
        self._source, self._place, self._left = source, place, count
        self._ready: queue.Queue[tuple[Any, Any, int, BaseException | None]] = queue.Queue(AHEAD)
        self._ended, self._known = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._position = source.get_state()
        self.digest = 0
        """Of the batches given out so far."""
        self._given, self._waits = 0, deque[float](maxlen=MAX_WAITS)

    @property
    def parted(self) -> bool:
        """Whether this process brings only rows of its own."""
        return self._place.parted

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(None if kind is None and not self._left else 1.0)

    def __next__(self) -> Any:
        """The next batch on the devices.

        Raises:
          StopIteration: the source has no more.
        """
        begun = time.perf_counter()
        batch, position, digest, error = self._ready.get()
        if self._given:  # before the first, all start
            self._waits.append(time.perf_counter() - begun)
        self._given += 1
        if error is not None:
            raise error
        if digest < 0:  # of new sizes: the thread waits until they are known
            batch, digest = self._place(batch), self._place.digest
            self._known.set()
        self._position, self.digest = position, digest
        return batch

    def get_state(self) -> Any:
        """The position after the batches given out so far."""
        return self._position

    def take_waits(self) -> list[float]:
        """Seconds that each of the last batches was waited for, since this was asked before; none of the first."""
        waits = [*self._waits]
        self._waits.clear()
        return waits

    def _read(self) -> None:
        while self._left and not self._ended.is_set():
            self._left -= 1
            try:
                batch = next(self._source)
                position = self._source.get_state()
                if known := self._place.knows(batch):
                    batch = self._place(batch)
            except BaseException as error:
                self._put((None, None, 0, error))
                return
            self._known.clear()
            self._put((batch, position, self._place.digest if known else -1, None))
            while not (known or self._ended.is_set() or self._known.wait(_POLL_SECONDS)):
                pass

    def _put(self, item: tuple[Any, Any, int, BaseException | None]) -> None:
        while not self._ended.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
