"""The list of the runs in a folder, and the curves of one, drawn for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from etils import epath
from rich.table import Table

from autoshard.errors import ConfigError, nearest
from autoshard.runs.report import EndEvent, Event, HeldOutEvent, StepEvent
from autoshard.runs.run_folder import RunFolder

DEPTH = 3
"""Folders below each other in which runs are looked for."""
WIDTH, HEIGHT = 72, 10
"""Characters of a curve."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character's dots, by row and column."""

type Curve = Sequence[tuple[int, float]]
"""Steps and values."""


@dataclass(frozen=True)
class RunSummary:
    """One run of a list."""

    name: str
    state: str
    """``running``, ``finished``, ``failed`` by an error, or ``stopped``."""
    steps: int
    loss: float | None
    held_out: float | None
    changed: datetime
    """When its log was last written to."""


def runs_in(folder: epath.Path) -> list[RunSummary]:
    """The runs below ``folder``, the last changed first."""
    logs = [log for depth in range(1, DEPTH + 1) for log in folder.glob(f"{'*/' * depth}log.jsonl")]
    logs += [log] if (log := folder / "log.jsonl").exists() else []
    found = [_summary(RunFolder(log.parent), folder) for log in logs]
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _summary(run: RunFolder, folder: epath.Path) -> RunSummary:
    events = run.events()
    last = {name: curve[-1] for name, curve in _curves(events).items()}
    end = events[-1] if events else None
    state = "running" if run.is_held() else end.how if isinstance(end, EndEvent) else "stopped"
    return RunSummary(
        name="." if run.root == folder else str(run.root.relative_to(folder)),
        state=state,
        steps=max((step for step, _ in last.values()), default=0),
        loss=last.get("loss", (0, None))[1],
        held_out=last.get("eval_loss", (0, None))[1],
        changed=datetime.fromtimestamp(run.log.stat().mtime, UTC),
    )


def run_table(runs: Sequence[RunSummary]) -> Table:
    """The runs, a line each."""
    table = Table("run", "state", "steps", "loss", "held out", "changed (UTC)", box=None)
    for run in runs:
        losses = ("-" if value is None else f"{value:.4f}" for value in (run.loss, run.held_out))
        table.add_row(run.name, run.state, f"{run.steps:,}", *losses, run.changed.strftime("%Y-%m-%d %H:%M:%S"))
    return table


def find_run(name: str, folder: epath.Path) -> RunFolder:
    """The run of this path, or of this name in the list of ``folder``.

    Raises:
      ConfigError: there is none; names the nearest.
    """
    for root in (epath.Path(name), folder / name):
        if (root / "log.jsonl").exists():
            return RunFolder(root)
    known = [run.name for run in runs_in(folder)] if folder.is_dir() else []
    raise ConfigError(f"no run is called {name!r} in {folder}{nearest(name, known)}")


def curves_of(run: RunFolder) -> Mapping[str, Curve]:
    """The metrics of a run by name; of evaluations the names begin with ``eval_``."""
    return _curves(run.events())


def failure_of(run: RunFolder) -> str | None:
    """Where and by what error a run failed, in a line; None of one that did not, or that goes on."""
    end = next(reversed(run.events()), None)
    if not isinstance(end, EndEvent) or end.how != "failed" or run.is_held():
        return None
    where = f"after step {end.step:,}" if end.step else "before its first step"
    return f"failed {where}{f': {end.error}' if end.error else ''}"


def _curves(events: Iterable[Event]) -> Mapping[str, Curve]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        match event:
            case StepEvent() | HeldOutEvent():
                prefix = "eval_" if isinstance(event, HeldOutEvent) else ""
                for name, value in event.metrics.items():
                    curves.setdefault(prefix + name, []).append((event.step, value))
            case _:
                pass
    return curves


def drawn(name: str, curve: Curve) -> str:
    """A curve in braille dots, its least and its largest value at its side, its first and last step below.

    Values that are not finite are left out; each column of dots has the mean of its steps.
    """
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    left_out = len(curve) - len(finite)
    title = f"{name}{f', without {left_out} values that are not finite' if left_out else ''}"
    if not finite:
        return title
    first, last = finite[0][0], finite[-1][0]
    columns: dict[int, list[float]] = {}
    for step, value in finite:
        columns.setdefault((step - first) * (2 * WIDTH - 1) // max(last - first, 1), []).append(value)
    means = {x: math.fsum(values) / len(values) for x, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    cells = [[0] * WIDTH for _ in range(HEIGHT)]
    for x, value in means.items():
        y = round((high - value) / (high - low) * (4 * HEIGHT - 1)) if high > low else 2 * HEIGHT
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    side = max(map(len, labels))
    rows = [
        f"{label:>{side}} │{''.join(chr(0x2800 + cell) for cell in row)}".rstrip("\u2800")
        for label, row in zip(labels, cells, strict=True)
    ]
    steps = f"{first:,}{f'{last:,}':>{WIDTH - len(f'{first:,}')}}"
    return "\n".join([title, *rows, f"{'':>{side}} └{'─' * WIDTH}", f"{'':>{side}}  {steps}"])
