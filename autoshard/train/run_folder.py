"""The folder of a training run, with its log of events: one line of JSON each.

    RUN/run.json         the entries of the configuration that the state depends on
    RUN/log.jsonl        phases, steps and evaluations, in order
    RUN/plan-0.json      the plan of each phase
    RUN/checkpoints/     see `autoshard.checkpoint`
    RUN/report.json      the report, once the run is finished

An event is written before the checkpoint that follows it, so the log up to a checkpoint is complete whenever the
checkpoint is. Events after the last checkpoint of a killed run are dropped when it is resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from autoshard.errors import CheckpointError, ConfigError

type Record = dict[str, Any]

_RUN_FILES = re.compile(r"run\.json|log\.jsonl|plan-\d+\.json|report\.json|checkpoints|[^/]*\.partial")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    root: epath.Path

    @property
    def checkpoints(self) -> epath.Path:
        """The folder of the checkpoints, one folder for each saved step."""
        return self.root / "checkpoints"

    @property
    def log(self) -> epath.Path:
        """The file of the events, one JSON object per line."""
        return self.root / "log.jsonl"

    @property
    def report(self) -> epath.Path:
        """The file of the report of a finished run."""
        return self.root / "report.json"

    def plan(self, phase: int) -> epath.Path:
        """The file of the plan of a phase, counted from 0."""
        return self.root / f"plan-{phase}.json"

    def clear(self) -> list[str]:
        """Deletes the run's files and returns their names.

        Raises:
          CheckpointError: the folder has a file that no run writes; nothing is deleted.
        """
        names = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
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

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Writes ``run.json``, or checks that the folder's is equal.

        Args:
          settings: configuration entries by dotted key; see `autoshard.train.config.TrainConfig.state_settings`.

        Raises:
          ConfigError: the run in the folder was begun with another model, data, optimizer, batch or seed.
          CheckpointError: the folder has checkpoints and no run.json.
        """
        path = self.root / "run.json"
        if not path.exists():
            if self.checkpoints.exists():
                raise CheckpointError(
                    f"{self.root} has checkpoints but no run.json, so the run that they belong to is unknown; "
                    "choose another checkpoint.dir"
                )
            write_json(path, settings)
            return
        saved = json.loads(path.read_text())
        given = json.loads(json.dumps(settings))
        for key in sorted(saved | given):
            before, after = saved.get(key), given.get(key)
            if before != after:
                raise ConfigError(
                    f"{key} is {after!r}, and the run in {self.root} was begun with {before!r}; set it back, choose "
                    "another checkpoint.dir, or start over with --fresh"
                )

    def records(self) -> Iterator[Record]:
        """The log's events in order, without an incomplete last line."""
        if not self.log.exists():
            return
        for line in self.log.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def drop_events_after(self, step: int) -> None:
        """Drops the events after ``step``."""
        kept = [record for record in self.records() if record["step"] <= step]
        partial = self.root / "log.jsonl.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(self.log)

    def append(self, records: Iterable[Record]) -> None:
        """Adds events to the log."""
        with self.log.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


def write_json(path: epath.Path, value: Any) -> None:
    """Writes ``value`` atomically: a killed process leaves the complete file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / (path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
