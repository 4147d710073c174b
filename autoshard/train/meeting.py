"""What several processes tell one another every few steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autoshard.batches.prefetch import Prefetched
from autoshard.errors import ConfigError
from autoshard.runs.report import Cause, SlowDevicesEvent, StragglerEvent
from autoshard.runs.stragglers import Lateness, slow_devices, straggler
from autoshard.shared_folder import of_all
from autoshard.train.device_probe import device_seconds
from autoshard.train.host_times import HostTimes
from autoshard.train.stop_signals import StopSignals

PROBE_SECONDS = 60.0
"""Between two moments at which the devices are measured."""
AGAIN = 2
"""How often in a row devices are found slower than those of others before it is said."""


class Meeting:
    """What several processes tell one another every few steps: whether to stop, whether their batches are the same, and
    who keeps the others waiting.

    Args:
      stop: whether this process was asked to.
      ready: this process's batches.
      host: how late this process's host was.
      every: steps between two meetings.
      last: the last step, after which all meet too.
      tell: called in all processes with what was found about one.
      probe: seconds that this process's devices take for a product.
    """

    def __init__(
        self,
        stop: StopSignals,
        ready: Prefetched,
        host: HostTimes,
        every: int,
        last: int,
        tell: Callable[[StragglerEvent | SlowDevicesEvent], None],
        probe: Callable[[], float] = device_seconds,
    ) -> None:
        self._stop, self._ready, self._host, self._every, self._last = stop, ready, host, every, last
        self._tell, self._probe = tell, probe
        self._since = self._probed = time.perf_counter()
        self._measured = 0.0
        self._found = Findings()

    def __call__(self, number: int) -> bool:
        """Whether to stop after step ``number``; all processes say the same.

        Raises:
          ConfigError: in every process, if the batches that they placed differ.
        """
        if jax.process_count() == 1:
            return self._stop.requested
        if number % self._every and number != self._last:
            return False
        now = time.perf_counter()
        flags = [int(self._stop.requested), int(now - self._probed >= PROBE_SECONDS), self._ready.digest]
        batches, host = (_latest(number, times) for times in (self._ready.take_waits(), self._host.take()))
        table = of_all(as_row(flags, batches, host, now - self._since, self._measured))
        if len(set(table[:, 2].tolist())) != 1:
            raise ConfigError(
                f"the batches up to step {number} are not the same in all {jax.process_count()} processes: give each "
                "the same, such as by a fixed seed, or, with a plan, the rows that plan.local_rows names"
            )
        for event in self._found(number, table[:, 3:]):
            self._tell(event)
        self._measured = 0.0
        if table[0, 1]:  # all at once, now that their devices have nothing to do
            self._probed, self._measured = now, self._probe()
        self._since = time.perf_counter()
        return bool(table[:, 0].any())


def _latest(number: int, late: Sequence[float]) -> tuple[int, float, float]:
    """Before which step, up to ``number``, the process was latest; all seconds that it was, and those before that."""
    late = late or [0.0]
    return number + 1 - len(late) + late.index(max(late)), sum(late), max(late)


def as_row(
    flags: Sequence[int],
    batches: tuple[int, float, float],
    host: tuple[int, float, float],
    passed: float,
    measured: float,
) -> np.ndarray:
    """What one process tells: uint32 [11], seconds as microseconds."""
    seconds = [*batches[1:], *host[1:], passed, measured]
    told = [min(round(each * 1e6), 2**32 - 1) for each in seconds]
    return np.asarray([*flags, batches[0], *told[:2], host[0], *told[2:]], np.uint32)


@dataclass
class Findings:
    """Who is found to keep the others waiting, and was not at the meeting before."""

    late: frozenset[tuple[Cause, int]] = frozenset()
    slow: tuple[int, int] = (-1, 0)
    """The process with the slowest devices, and how often in a row they were measured as that."""

    def __call__(self, number: int, told: np.ndarray) -> list[StragglerEvent | SlowDevicesEvent]:
        """What is new after step ``number``.

        Args:
          told: of each process what `as_row` gives after the flags.
        """
        late: list[StragglerEvent] = []
        for cause, first in (("batches", 0), ("host", 3)):
            parts = [Lateness(int(row[first]), *(row[[first + 1, first + 2, 6]] / 1e6).tolist()) for row in told]
            late += [found] if (found := straggler(cause, parts)) else []
        new: list[StragglerEvent | SlowDevicesEvent] = [e for e in late if (e.cause, e.process) not in self.late]
        self.late = frozenset((e.cause, e.process) for e in late)
        if told[:, 7].all():
            found = slow_devices(number, (told[:, 7] / 1e6).tolist())
            process = -1 if found is None else found.process
            self.slow = process, self.slow[1] + 1 if process == self.slow[0] else 1
            new += [found] if found is not None and self.slow[1] == AGAIN else []
        return new
