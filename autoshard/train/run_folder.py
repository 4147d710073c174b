"""What a training run leaves behind beside its checkpoints: one folder, and one line of JSON for each event.

    RUN/run.json         the entries of the configuration that the state depends on
    RUN/log.jsonl        phases, steps and evaluations, in order
    RUN/plan-0.json      the plan of each phase
    RUN/checkpoints/     see `autoshard.checkpoint`
    RUN/report.json      the report, when the run is over

A line is on its way to disk before the checkpoint that follows it, so the log up to a checkpoint is whole
whenever the checkpoint is. What a killed run wrote beyond its last checkpoint is cut off when it is resumed.
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
        """Where the states lie, one folder for each saved step."""
        return self.root / "checkpoints"

    @property
    def log(self) -> epath.Path:
        """The events, one JSON object a line."""
        return self.root / "log.jsonl"

    @property
    def report(self) -> epath.Path:
        """The report of a finished run."""
        return self.root / "report.json"

    def plan(self, phase: int) -> epath.Path:
        """The plan of a phase, counted from 0."""
        return self.root / f"plan-{phase}.json"

    def clear(self) -> list[str]:
        """Deletes the run and returns the names of what it deleted.

        Raises:
          CheckpointError: the folder holds something that no run put there; nothing is deleted.
        """
        names = sorted(path.name for path in self.root.iterdir()) if self.root.is_dir() else []
        foreign = [name for name in names if not _RUN_FILES.fullmatch(name)]
        if foreign:
            raise CheckpointError(
                f"{self.root} holds {', '.join(foreign[:5])}, which no training run wrote; nothing was deleted. "
                "Move it away, or choose another checkpoint.dir"
            )
        for name in names:
            path = self.root / name
            path.rmtree() if path.is_dir() else path.unlink()
        return names

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Makes the folder this run's, or checks that it is already.

        Args:
          identity: configuration entries by dotted key; see `autoshard.train.config.TrainConfig.identity`.

        Raises:
          ConfigError: the folder's run was begun with another model, data, optimizer, batch or seed.
          CheckpointError: the folder holds checkpoints and no run.json.
        """
        path = self.root / "run.json"
        if not path.exists():
            if self.checkpoints.exists():
                raise CheckpointError(
                    f"{self.root} holds checkpoints but no run.json, so what they belong to is unknown; "
                    "choose another checkpoint.dir"
                )
            write_json(path, identity)
            return
        began = json.loads(path.read_text())
        now = json.loads(json.dumps(identity))
        for key in sorted(began | now):
            before, after = began.get(key), now.get(key)
            if before != after:
                raise ConfigError(
                    f"{key} is {after!r} and the run in {self.root} was begun with {before!r}; set it back, choose "
                    "another checkpoint.dir, or start over with --fresh"
                )

    def records(self) -> Iterator[Record]:
        """The log's events in order; a last line that was cut short is left out."""
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
    """Writes ``value`` so that a killed process leaves the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / (path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
