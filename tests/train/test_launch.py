"""Several processes of one run on this machine: killed, stopped, resumed on another number; every row is seen once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console

from autoshard import checkpoint, cli
from autoshard.errors import ConfigError
from autoshard.train.config import named_config
from autoshard.train.loop import train
from autoshard.train.sources import Rows

ROOT = Path(__file__).parents[2]
ME = "tests.train.test_launch"
ROWS, BATCH, LAST = 96, 8, 12


class Slow:
    """Numbered rows, a batch at a time; slow where the folder has a file that says so."""

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
        loss = jnp.sin(state["sum"]) + batch["row"].mean()
        return {"seen": state["seen"].at[batch["row"]].add(1), "sum": state["sum"] + loss}, {"loss": loss}

    return init, step


def config(folder: Path, run: str, mesh: Mapping[str, int]) -> Path:
    path = folder / f"{run}.yaml"
    entries = {
        "step": {"call": f"{ME}:histogram"},
        "data": {"call": f"{ME}:Slow", "with": {"folder": str(folder)}},
        "batch": BATCH,
        "mesh": {"axes": dict(mesh), "hardware": "cpu"},
        "strategy": "dp",
        "steps": LAST,
        "checkpoint": {"dir": str(folder / run), "every": 2},
        "log_every": 1,
    }
    path.write_text(yaml.safe_dump(entries))
    return path


def losses(folder: Path) -> dict[int, float]:
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def child(parent: int, number: int) -> int:
    """The identifier of process ``number`` of a launch."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue  # ended meanwhile
        if int(status[1]) == parent and f"--id {number}" in " ".join(words):
            return int(folder.name)
    raise AssertionError(f"no process {number}")


def launched(path: Path, moment: Callable[[], bool], number: signal.Signals) -> subprocess.CompletedProcess[str]:
    """Runs two processes, and sends the second one a signal at a moment."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard", "launch", "--processes", "2", "--", "train", str(path)],
        env=inherited | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until = time.monotonic() + 120
        while process.poll() is None and not moment():
            assert time.monotonic() < until, "the moment never came"
            time.sleep(0.02)
        os.kill(child(process.pid, 1), number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_killed_stopped_and_resumed_on_other_processes_no_row_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    train(named_config(config(tmp_path, "whole", {"data": 4})), console=Console(quiet=True))
    path, run = config(tmp_path, "run", {"data": 4}), tmp_path / "run"
    (tmp_path / "slow").touch()

    killed = launched(path, lambda: 3 in losses(run), signal.SIGKILL)
    assert killed.returncode == 128 + signal.SIGKILL
    saved = checkpoint.latest(run / "checkpoints")
    assert f"process 1 of 2 was ended by SIGKILL, and the others with it; step {saved} is saved" in killed.stderr
    assert "Traceback" not in killed.stderr

    stopped = launched(path, lambda: 7 in losses(run), signal.SIGTERM)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None
    assert saved >= 7
    assert f"stopped; step {saved} is saved, and the same command resumes from there" in stopped.stderr
    assert max(losses(run)) == saved

    (tmp_path / "slow").unlink()
    train(named_config(config(tmp_path, "run", {"data": 2})), console=Console(quiet=True))  # in one process
    np.testing.assert_array_equal(checkpoint.restore(run / "checkpoints")["seen"], np.ones(ROWS))
    found, wanted = losses(run), losses(tmp_path / "whole")
    assert sorted(found) == sorted(wanted) == list(range(1, LAST + 1))
    np.testing.assert_allclose([found[n] for n in wanted], [*wanted.values()], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--processes", "2", "--", "plan", "x.yaml"], "launch runs `train CONFIG`"),
        (["launch", "--processes", "2", "--", "train"], "launch runs `train CONFIG`"),
        (["train", "x.yaml", "--id", "0"], "belong together: give all three"),
        (["train", "x.yaml", "--coordinator", "here", "--processes", "2", "--id", "0"], "give a host and a port"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        cli.app(arguments, standalone_mode=False)


def test_peers_that_never_come_are_one_line(tmp_path: Path):
    arguments = ["--coordinator", "127.0.0.1:9", "--processes", "2", "--id", "1", "--wait", "1"]
    command = [sys.executable, "-m", "autoshard", "train", str(config(tmp_path, "run", {"data": 2})), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, check=False, text=True, capture_output=True, env=environment)
    assert ended.returncode == 75
    assert ended.stderr == "error: not all 2 processes came to 127.0.0.1:9 within 1 seconds\n"
