"""The progress line of a training run: redrawn on a terminal, printed at intervals elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autoshard.units import size_text, time_text

_RATE_STEPS = 20
"""Steps over which the rate is measured."""


class ProgressLine:
    """Shows loss, tokens or examples per second, the time of a step, what share of the chips' peak it uses (MFU), the
    device's memory, and the time left; a context manager.

    Args:
      total: the run's last step.
      amount: of ``unit`` per step; None shows no rate.
      every: steps between two lines if ``console`` is not a terminal.
    """

    def __init__(self, console: Console, total: int, amount: int | None, unit: str, every: int):
        self._console = console
        self._total = total
        self._amount = amount
        self._unit = unit
        self._peak_seconds: float | None = None
        self._every = every
        self._times: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS + 1)
        bar = BarColumn(bar_width=24)
        self._bar = Progress(TextColumn("{task.description}"), bar, console=console, transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def restart(self) -> None:
        """Restarts the measurement of the rate, after an evaluation or a change of the mesh."""
        self._times.clear()

    def measure_against(self, peak_seconds: float | None) -> None:
        """Compares from now on with the seconds that a step's products would take at the chips' peak; None: not."""
        self._peak_seconds = peak_seconds

    def step(self, step: int, loss: float | None) -> None:
        """Reports that step ``step`` is done."""
        self._times.append((step, time.perf_counter()))
        printed = step % self._every == 0 or step == self._total
        if not (self._console.is_terminal or printed):
            return
        (first, since), (_, now) = self._times[0], self._times[-1]
        line = f"step {step:>{len(str(self._total))}}/{self._total}"
        line += "" if loss is None else f"  loss {loss:.4f}"
        if step > first and now > since:
            rate = (step - first) / (now - since)
            line += "" if self._amount is None else f"  {rate * self._amount:,.0f} {self._unit}/s"
            line += f"  {time_text(1 / rate)}/step"
            line += "" if self._peak_seconds is None else f"  MFU {self._peak_seconds * rate:.1%}"
            line += _memory_text()
            line += f"  {_duration_text((self._total - step) / rate)} left"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description=line)
            self._bar.start()  # not before the first step: there is nothing to show
        else:
            self._console.print(line)


def _memory_text() -> str:
    """The most memory that this process's first device had in use, where the platform says so."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return ""
    limit = f" of {size_text(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
    return f"  {size_text(stats['peak_bytes_in_use'])}{limit}"


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
