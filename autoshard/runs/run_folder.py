"""The folder of a training run, with its log of events: one line of JSON each.

    RUN/lock             held by the process that writes to the folder; says which that is
    RUN/run.json         the entries of the configuration that the state depends on
    RUN/log.jsonl        phases, steps and evaluations, in order, and how the run ended
    RUN/events.out.tfevents.*  the same metrics for TensorBoard; one file a start
    RUN/metrics.csv      the metrics of steps, and of evaluations under names that begin with ``eval_``
    RUN/plan-0.json      the plan of each phase
    RUN/plan-0.html      the same drawn
    RUN/checkpoints/     see `autoshard.checkpoint`
    RUN/plugins/         steps that were recorded for xprof
    RUN/wandb.json       the run at Weights & Biases, and what its package writes in RUN/wandb/
    RUN/report.json      the report, once the run is finished

An event is written before the checkpoint that follows it (`autoshard.runs.run_log`), so the log up to a checkpoint is
complete whenever the checkpoint is. Events after the last checkpoint of a killed run are dropped when it is resumed.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import re
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from autoshard.errors import CheckpointError, ConfigError
from autoshard.runs.event_file import first_events, scalar_event
from autoshard.runs.report import EVENTS, EndEvent, Event, HeldOutEvent, Report, StepEvent
from autoshard.shared_folder import held, is_held
from autoshard.strict_files import cut, parse_json, read_text, shortened

_LOCK = "lock"
_RUN_FILES = re.compile(
    r"run\.json|log\.jsonl|metrics\.csv|events\.out\.tfevents\.[^/]*|plan-\d+\.(json|html)|report\.json|checkpoints|plugins|wandb|wandb\.json|[^/]*\.partial"
)
_MAX_BYTES = 2**22
"""Of run.json, of report.json, and of a line of the log."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    root: epath.Path

    @property
    def checkpoints(self) -> epath.Path:
        """The folder of the checkpoints, one folder for each saved step."""
        return self.root / "checkpoints"

    @functools.cached_property  # a path of etils takes longer to make than a line to write
    def log(self) -> epath.Path:
        """The file of the events, one JSON object per line."""
        return self.root / "log.jsonl"

    @functools.cached_property
    def table(self) -> epath.Path:
        """The file of the metrics, a row for each step and each evaluation."""
        return self.root / "metrics.csv"

    @property
    def report(self) -> epath.Path:
        """The file of the report of a finished run."""
        return self.root / "report.json"

    def plan(self, phase: int) -> epath.Path:
        """The file of the plan of a phase, counted from 0."""
        return self.root / f"plan-{phase}.json"

    def page(self, phase: int) -> epath.Path:
        """The page that draws the plan of a phase, counted from 0."""
        return self.root / f"plan-{phase}.html"

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keeps the folder for this process, and creates it; the lock ends with the process, however that ends.

        A folder on a file system without locks is not locked.

        Raises:
          CheckpointError: another process has it; names the process.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with held(self.root / _LOCK, "trains", "choose another checkpoint.dir"):
            yield

    def is_held(self) -> bool:
        """Whether a process has the folder: a run is going on."""
        return is_held(self.root / _LOCK)

    def clear(self) -> list[str]:
        """Deletes the run's files and returns their names.

        Raises:
          CheckpointError: the folder has a file that no run writes; nothing is deleted.
        """
        names = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
        names = [name for name in names if name != _LOCK]
        foreign = [name for name in names if not _RUN_FILES.fullmatch(name)]
        if foreign:
            raise CheckpointError(
                f"{self.root} has {', '.join(foreign[:5])}, which no training run writes; nothing was deleted. "
                "Move it away, or choose another checkpoint.dir"
            )
        for name in names:
            path = self.root / name
            path.rmtree() if path.is_dir() else path.unlink()
        return names

    def settings(self) -> dict[str, Any] | None:
        """What ``run.json`` says; None where the folder has no checkpoint yet, so that nothing depends on it.

        Raises:
          CheckpointError: the folder has checkpoints, and no run.json or a damaged one.
        """
        if not (self.checkpoints.is_dir() and any(path.name.isdigit() for path in self.checkpoints.iterdir())):
            return None
        try:
            saved = parse_json(read_text(self.root / "run.json", _MAX_BYTES))
            if not isinstance(saved, dict):
                raise ValueError("it has no entries")
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.root} has checkpoints but no run.json, so the run that they belong to is unknown; "
                "choose another checkpoint.dir, or start over with --fresh"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.root / 'run.json'} is damaged ({error}), so the run that the checkpoints beside it belong to "
                "is unknown; put a copy of the file in its place, choose another checkpoint.dir, or start over with "
                "--fresh"
            ) from None
        return saved

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Writes ``run.json``, or, where the folder has checkpoints, checks that it is equal.

        Args:
          settings: configuration entries by dotted key; see `autoshard.train.config.TrainConfig.state_settings`.

        Raises:
          ConfigError: the run in the folder was begun with another model, data, optimizer, batch or seed.
          CheckpointError: as `settings`.
        """
        saved = self.settings()
        if saved is None:
            write_json(self.root / "run.json", settings)
            return
        given = json.loads(json.dumps(settings))
        for key in sorted(saved | given):
            before, after = saved.get(key), given.get(key)
            if before != after:
                raise ConfigError(
                    f"{cut(key)} is {after!r}, and the run in {self.root} was begun with {shortened(before)}; set it "
                    "back, choose another checkpoint.dir, or start over with --fresh"
                )

    def events(self) -> list[Event]:
        """The log's events in order, without lines that are damaged."""
        return self._read_log()[0]

    def _read_log(self) -> tuple[list[Event], int]:
        """The log's events, and the number of damaged lines; one that was not written to its end is not counted."""
        events: list[Event] = []
        damaged = 0
        if not self.log.exists():
            return events, damaged
        with self.log.open("rb") as file:
            for line in iter(lambda: file.readline(_MAX_BYTES), b""):
                if not line.endswith(b"\n") and len(line) < _MAX_BYTES:
                    break
                try:
                    parse_json(text := line.decode())
                    events.append(EVENTS.validate_json(text, strict=True))
                except ValueError:
                    damaged += 1
        return events, damaged

    def drop_events_after(self, step: int) -> int:
        """Drops the events after ``step``, how the run ended, and damaged lines, whose number it returns; begins a new
        event file.
        """
        events, damaged = self._read_log()
        partial = self.root / "log.jsonl.partial"
        kept = [event for event in events if event.step <= step and not isinstance(event, EndEvent)]
        partial.write_text("".join(map(_line, kept)))
        partial.replace(self.log)
        self._write_table()
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}"
        (self.root / name).write_bytes(first_events(time.time(), step + 1))
        return damaged

    def append(self, events: Sequence[Event], times: Sequence[float] | None = None) -> None:
        """Adds events to the log, and their metrics to the table and to the newest event file.

        Args:
          times: when each came, in seconds since 1970; now if absent.
        """
        with self.log.open("a") as file:
            file.write("".join(map(_line, events)))
        times = times or [time.time()] * len(events)
        timed = [(when, row) for when, event in zip(times, events, strict=True) if (row := metrics_row(event))]
        rows = [row for _, row in timed]
        if files := sorted(self.root.glob("events.out.tfevents.*")):
            with files[-1].open("ab") as file:
                for when, row in timed:
                    metrics = {name: value for name, value in row.items() if name != "step"}
                    file.write(scalar_event(when, int(row["step"]), metrics))
        with self.table.open() if self.table.exists() else io.StringIO() as file:
            columns = next(csv.reader(file), [])
        if all(row.keys() <= set(columns) for row in rows):
            with self.table.open("a") as file:
                csv.DictWriter(file, columns, lineterminator="\n").writerows(rows)
        else:
            self._write_table()

    def _write_table(self) -> None:
        """Writes the table anew from the log: with a column for each metric in it."""
        rows = [row for event in self.events() if (row := metrics_row(event))]
        partial = self.root / "metrics.csv.partial"
        with partial.open("w") as file:
            table = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        partial.replace(self.table)

    def finished(self, steps: int) -> Report | None:
        """The report of the run, if it was finished with ``steps`` steps and the report can be read."""
        try:
            parse_json(text := read_text(self.report, _MAX_BYTES))
            report = Report.model_validate_json(text, strict=True)
        except (OSError, ValueError):
            return None
        return report if report.steps == steps else None


def _line(event: Event) -> str:
    return event.model_dump_json(exclude_none=True) + "\n"


def metrics_row(event: Event) -> dict[str, float]:
    """The columns of an event in the table; none of one without metrics."""
    if not isinstance(event, StepEvent | HeldOutEvent):
        return {}
    prefix = "eval_" if isinstance(event, HeldOutEvent) else ""
    return {"step": event.step, **{f"{prefix}{name}": value for name, value in event.metrics.items()}}


def write_json(path: epath.Path, value: Any) -> None:
    """Writes ``value`` atomically: a killed process leaves the complete file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / (path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
