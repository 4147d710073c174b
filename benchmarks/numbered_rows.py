"""Runs on numbered rows, by one process or by several that `autoshard launch` starts: no row is to be lost or repeated.

The state counts how often each row was seen, and the loss of a step depends on all steps before it. Of `histogram`,
losses are of sums that are exact in any order, so that they are equal, bit for bit, however many processes and devices
took part; of `decoder` they are so however many processes were launched, on one mesh.
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
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from autoshard.train.processes.launch import GRACE_SECONDS
from autoshard.train.processes.peers import BEAT_SECONDS

ROWS, BATCH, LAST = 96, 8, 12
"""Of the data set, of a batch, and the last step, after which each row was seen once."""
SEQ = 8
"""Tokens of a row."""
SAVE_SECONDS = 10.0
"""For a save and the end of the interpreter, which take one or two on a machine without other work."""


def end_seconds(heartbeat: float) -> float:
    """Seconds from a signal to one of several processes until all must have ended, on a machine without other work.

    The longest way is that of a process that is halted. The others hear of it for the last time at the signal, and
    count it as lost a ``heartbeat`` later. They look once a beat, after a word of their own that the store may take as
    long for: two beats. Process 0 then stays until the others have left, for two more, and a launch gives all of
    them `GRACE_SECONDS` to end by themselves. A save may have begun at the signal, or be what it asks for:
    `SAVE_SECONDS`. To save after a request takes a meeting or a step more, a second, and no heartbeat.
    """
    return heartbeat + 4 * BEAT_SECONDS + GRACE_SECONDS + SAVE_SECONDS


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


def decoder() -> Any:
    """A step that counts the rows it has seen, and trains a float32 decoder of two layers on tokens that are made of
    their numbers."""
    model = ModelConfig(layers=2, d_model=16, heads=2, seq=SEQ, vocab=ROWS)
    steps = make_steps(model, OptimizerConfig(learning_rate=1e-2), LAST)

    def init(key: Any) -> Any:
        return {"seen": jnp.zeros(ROWS, jnp.int32), "decoder": steps.init(key)}

    def step(state: Any, batch: Mapping[str, Any]) -> Any:
        tokens = (batch["row"][:, None] + 1) * jnp.arange(1, SEQ + 2) % ROWS
        trained, metrics = steps.train(state["decoder"], {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        return {"seen": state["seen"].at[batch["row"]].add(1), "decoder": trained}, {"loss": metrics["loss"]}

    return init, step


def training_config(folder: Path, run: str, devices: int, step: str = "histogram") -> Path:
    """The file of a run in ``folder / run``, on so many devices, of `histogram` or `decoder`."""
    path = folder / f"{run}.yaml"
    entries = {
        "step": {"call": f"benchmarks.numbered_rows:{step}"},
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
