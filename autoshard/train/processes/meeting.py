"""What several processes exchange every few steps, or every second."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from autoshard.batches.prefetch import Prefetched
from autoshard.errors import ConfigError
from autoshard.runs.device_probe import device_seconds
from autoshard.runs.host_times import HostTimes
from autoshard.runs.report import SlowDevicesEvent, StragglerEvent
from autoshard.runs.stragglers import PASSED, Findings, as_row, latest
from autoshard.shared_folder import of_all
from autoshard.train.stop_signals import StopSignals

PROBE_SECONDS = 60.0
"""Between two moments at which the devices are measured."""
MEET_SECONDS = 1.0
"""After which, or after each longer step, processes meet: a request to stop waits no longer."""


class Meeting:
    """What several processes exchange every few steps: whether to stop, whether their batches are the same, and
    who keeps the others waiting.

    Args:
      stop: whether this process was asked to.
      ready: this process's batches.
      host: how late this process's host was.
      every: steps between two meetings, at most.
      last: the last step, after which all meet too.
      report: called in all processes with what was found about one.
      probe: seconds that this process's devices take for a product.
    """

    def __init__(
        self,
        stop: StopSignals,
        ready: Prefetched,
        host: HostTimes,
        every: int,
        last: int,
        report: Callable[[StragglerEvent | SlowDevicesEvent], None],
        probe: Callable[[], float] = device_seconds,
    ) -> None:
        self._stop, self._ready, self._host, self._every, self._last = stop, ready, host, every, last
        self._report, self._probe = report, probe
        self._since = self._probed = time.perf_counter()
        self._measured = 0.0
        self._steps = 0
        """Taken since the last meeting."""
        self._between = 1
        """Steps from the last meeting to the next."""
        self._found = Findings()

    def __call__(self, number: int) -> bool:
        """Whether to stop after step ``number``; all processes say the same.

        Raises:
          ConfigError: in every process, if the batches that they placed differ.
        """
        if jax.process_count() == 1:
            return self._stop.requested
        self._steps += 1
        if self._steps < self._between and number != self._last:
            return False
        now = time.perf_counter()
        flags = [int(self._stop.requested), int(now - self._probed >= PROBE_SECONDS), self._ready.digest]
        batches, host = (latest(number, times) for times in (self._ready.take_waits(), self._host.take()))
        table = of_all(as_row(flags, batches, host, now - self._since, self._measured))
        if len(set(table[:, 2].tolist())) != 1:
            raise ConfigError(
                f"the batches up to step {number} are not the same in all {jax.process_count()} processes: give each "
                "the same, such as by a fixed seed, or, with a plan, the rows that plan.local_rows names"
            )
        for event in self._found(number, table[:, 3:]):
            self._report(event)
        # From what passed in any process, so that all say the same.
        seconds = max(float(table[:, PASSED].max()) / 1e6 / self._steps, 1e-6)
        self._between, self._steps = max(1, min(self._every, int(MEET_SECONDS / seconds))), 0
        self._measured = 0.0
        if table[0, 1]:  # all at once, now that their devices have nothing to do
            self._probed, self._measured = now, self._probe()
        self._since = time.perf_counter()
        return bool(table[:, 0].any())
