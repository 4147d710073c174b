"""Runs on numbered rows, by one process or by several that `autoshard launch` starts: no row is to be lost or repeated.

The state counts how often each row was seen, and the loss of a step depends on all steps before it. Losses are of sums
that are exact in any order, so that they are equal, bit for bit, however many processes and devices took part.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import yaml

from autoshard.train import Rows

ROWS, BATCH, LAST = 96, 8, 12
"""Of the data set, of a batch, and the last step, after which each row was seen once."""


class SlowRows:
    """Numbered rows, a batch at a time; not too fast to be killed between two, where the folder has a file ``slow``."""

    def __init__(self, folder: str) -> None:
        self._rows, self._slow = Rows({"row": np.arange(ROWS)}, BATCH, seed=0), Path(folder) / "slow"

    def __next__(self) -> Any:
        if self._slow.exists():
            time.sleep(0.2)
        return next(self._rows)

    def get_state(self) -> Any:
        return self._rows.get_state()

    def set_state(self, state: Any) -> None:
        self._rows.set_state(state)


def histogram() -> Any:
    """A step that counts the rows it has seen, and whose loss depends on all before it."""

    def init(_: Any) -> Any:
        return {"seen": jnp.zeros(ROWS, jnp.int32), "sum": jnp.zeros(())}

    def step(state: Any, batch: Mapping[str, Any]) -> Any:
        loss = jnp.sin(state["sum"]) + batch["row"].sum() / BATCH
        return {"seen": state["seen"].at[batch["row"]].add(1), "sum": state["sum"] + loss}, {"loss": loss}

    return init, step


def training_config(folder: Path, run: str, devices: int) -> Path:
    """The file of a run in ``folder / run``, on so many devices."""
    path = folder / f"{run}.yaml"
    entries = {
        "step": {"call": "benchmarks.numbered_rows:histogram"},
        "data": {"call": "benchmarks.numbered_rows:SlowRows", "with": {"folder": str(folder)}},
        "batch": BATCH,
        "mesh": {"axes": {"data": devices}, "hardware": "cpu"},
        "strategy": "dp",
        "steps": LAST,
        "checkpoint": {"dir": str(folder / run), "every": 2},
        "log_every": 1,
        "platform": "cpu",
    }
    path.write_text(yaml.safe_dump(entries))
    return path


def losses(run: Path) -> list[tuple[int, float]]:
    """The steps in the log of a run's folder, in its order, with their losses."""
    log = run / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def launched_process(launch: int, number: int) -> int | None:
    """The identifier of process ``number`` of a launch, by the launch's; None where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # ended meanwhile
        if int(status[1]) == launch and re.search(rf"--id {number}\b", words):
            return int(folder.name)
    return None
