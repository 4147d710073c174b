"""A run's metrics at Weights & Biases, where the configuration asks for it: `wandb` is imported for that alone.

RUN/wandb.json  which run that is: the same one goes on when a training run is resumed
RUN/wandb/      what the package itself writes
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from typing import Any

from autoshard.errors import ConfigError
from autoshard.runs.report import Event
from autoshard.runs.run_folder import RunFolder, metrics_row, write_json
from autoshard.strict_files import cut, parse_json, read_text

_MAX_BYTES = 2**12
"""Of wandb.json."""


class WandbRun:
    """The run at Weights & Biases that goes with a folder; nothing is sent before `begin`.

    Args:
      entries: ``project``, ``name``, ``entity`` and ``mode`` of `wandb.init`; None: there is no such run.
      config: what is shown of the configuration.
    """

    def __init__(self, folder: RunFolder, entries: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
        self._folder, self._entries, self._config = folder, entries, config
        self._run: Any = None

    def begin(self) -> None:
        """Begins the run, or goes on with it.

        Raises:
          ConfigError: the package is not installed, or refuses.
        """
        if self._entries is None:
            return
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(
                "wandb: the package is not installed: `pip install wandb`, or leave the entry out"
            ) from None
        try:
            self._run = wandb.init(
                **self._entries, id=self._id(), resume="allow", dir=str(self._folder.root), config=dict(self._config)
            )
        except Exception as error:  # of many kinds: no login, no network, a project of others
            raise ConfigError(f"wandb: {type(error).__name__}: {cut((str(error).splitlines() or [''])[0])}") from None

    def append(self, event: Event) -> None:
        """Sends the metrics of an event, if it has some."""
        if self._run is not None and (row := metrics_row(event)):
            self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        """Waits until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _id(self) -> str:
        path = self._folder.root / "wandb.json"
        try:
            if isinstance(stored := parse_json(read_text(path, _MAX_BYTES)), dict) and isinstance(stored["id"], str):
                return stored["id"]
        except (OSError, ValueError, KeyError):
            pass  # none yet, or damaged: a new run
        new = secrets.token_hex(8)
        write_json(path, {"id": new})
        return new
