"""The line that shows how a run goes: redrawn on a terminal, printed now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_RATE_STEPS = 20
"""Steps over which the rate is measured."""


class ProgressLine:
    """Loss, tokens a second and time left, as a context manager.

    Args:
      console: where to write.
      total: the run's last step.
      tokens: tokens in a step.
      every: steps between two lines where ``console`` is no terminal.
    """

    def __init__(self, console: Console, total: int, tokens: int, every: int):
        self._console = console
        self._total = total
        self._tokens = tokens
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
        """Forgets the rate: what comes next is compiled anew, or runs on another mesh."""
        self._times.clear()

    def step(self, step: int, loss: float) -> None:
        """Step ``step`` is done; ``loss`` in nats a token."""
        self._times.append((step, time.perf_counter()))
        (first, since), (_, now) = self._times[0], self._times[-1]
        line = f"step {step:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}"
        if step > first and now > since:
            rate = (step - first) / (now - since)
            line += f"  {rate * self._tokens:,.0f} tokens/s  {_duration_text((self._total - step) / rate)} left"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description=line)
            self._bar.start()  # from the first step on: nothing to show before
        elif step % self._every == 0 or step == self._total:
            self._console.print(line)


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
