"""Kills one of several processes that train together, resumes them as another number: nothing is lost or seen twice.

    python -m benchmarks.kills_together [--trials 30] [--seed 0]

A trial is a run on numbered rows by two or four processes that `autoshard launch` starts, on one mesh of four devices.
After a step that is drawn, one of them is killed with SIGKILL or gets SIGTERM. The launch has to end within
`LIMIT_SECONDS`, with the exit code and the line that say which it was and from where the next start goes on. One, two
or four processes resume the run. In the end every row has to have been seen once, the log to have each step once, and
the losses to be those of one process that nothing disturbed, bit for bit: they are of sums that are exact in any order.
The table, written anew after each trial, is `benchmarks/results/kills_together.md`; `make kills` runs these trials too.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from autoshard import checkpoint
from autoshard.train import Rows
from benchmarks.kills import main

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "kills_together.md"
ROWS, BATCH, LAST, DEVICES = 96, 8, 12, 4
LIMIT_SECONDS = 60
"""From the signal to the end of the launch: the heartbeat, by which the last of them notices."""
CODES = {signal.SIGKILL: 137, signal.SIGTERM: 143}
SAID = {
    signal.SIGKILL: r"process \d of \d was ended by SIGKILL, and the others with it; (step \d+|nothing) is saved",
    signal.SIGTERM: r"stopped; step \d+ is saved, and the same command resumes from there",
}


class Slow:
    """Numbered rows, a batch at a time, not too fast to be killed between two."""

    def __init__(self) -> None:
        self._rows = Rows({"row": np.arange(ROWS)}, BATCH, seed=0)

    def __next__(self) -> Any:
        time.sleep(0.1)
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


@dataclass
class Tally:
    """What was counted over all trials."""

    trials: Counter[str] = field(default_factory=Counter[str])
    resumed: Counter[str] = field(default_factory=Counter[str])
    seconds: list[float] = field(default_factory=list[float])
    """From the signal to the end of the launch."""
    different: list[str] = field(default_factory=list[str])


def config(folder: Path) -> Path:
    entries = {
        "step": {"call": "benchmarks.kills_together:histogram"},
        "data": {"call": "benchmarks.kills_together:Slow"},
        "batch": BATCH,
        "mesh": {"axes": {"data": DEVICES}, "hardware": "cpu"},
        "strategy": "dp",
        "steps": LAST,
        "checkpoint": {"dir": str(folder / "run"), "every": 2},
        "log_every": 1,
        "platform": "cpu",
    }
    folder.mkdir(exist_ok=True)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def start(path: Path, processes: int) -> subprocess.Popen[str]:
    """Starts the run in so many processes."""
    launch = ["launch", "--processes", str(processes), "--"] if processes > 1 else []
    command = [sys.executable, "-m", "autoshard", *launch, "train", str(path)]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe)


def losses(folder: Path) -> list[tuple[int, float]]:
    """The steps of the log, in its order, with their losses."""
    log = folder / "run/log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def child(parent: int, number: int) -> int | None:
    """The identifier of process ``number`` of a launch."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # ended meanwhile
        if int(status[1]) == parent and re.search(rf"--id {number}\b", words):
            return int(folder.name)
    return None


def trial(folder: Path, whole: list[tuple[int, float]], draw: random.Random, tally: Tally) -> str:
    """One run, disturbed and resumed; what was wrong with it, or nothing."""
    path = config(folder)
    processes, number = draw.choice((2, 4)), draw.choice((signal.SIGKILL, signal.SIGTERM))
    victim, step, then = draw.randrange(processes), draw.randint(1, LAST - 3), draw.choice((1, 2, 4))
    tally.trials[f"{number.name} to one of {processes}"] += 1
    tally.resumed[f"as {then}"] += 1
    running = start(path, processes)
    try:
        until = time.monotonic() + 300
        while running.poll() is None and not any(n >= step for n, _ in losses(folder)):
            if time.monotonic() > until:
                return "the step never came"
            time.sleep(0.01)
        if (process := child(running.pid, victim)) is None:
            return f"ended before it was killed: {running.communicate()[1]}"
        struck = time.monotonic()
        os.kill(process, number)
        _, said = running.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_SECONDS} seconds of {number.name}"
    finally:
        running.kill()
        running.wait()
    tally.seconds.append(time.monotonic() - struck)
    if running.returncode != CODES[number] or not re.search(SAID[number], said) or "Traceback" in said:
        return f"{number.name} to {victim} of {processes}: exit code {running.returncode}, and said: {said}"
    again = start(path, then)
    try:
        _, said = again.communicate(timeout=300)
    finally:
        again.kill()
        again.wait()
    if again.returncode:
        return f"resumed as {then}: exit code {again.returncode}, and said: {said}"
    seen = checkpoint.restore(folder / "run/checkpoints", LAST)["seen"]
    if not (np.asarray(seen) == 1).all():
        return f"rows were lost or repeated: {np.flatnonzero(np.asarray(seen) != 1).tolist()}"
    return "" if losses(folder) == whole else f"other losses: {losses(folder)}"


def run(trials: int, seed: int, result: Path) -> Tally:
    """Runs the trials; writes the page of results to ``result`` after each."""
    tally, draw, begun = Tally(), random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        alone = start(config(base / "whole"), 1)
        _, said = alone.communicate(timeout=300)
        assert alone.returncode == 0, said
        whole = losses(base / "whole")
        for n in range(trials):
            if wrong := trial(base / str(n), whole, draw, tally):
                tally.different.append(f"trial {n}: {wrong}")
            minutes = (time.perf_counter() - begun) / 60
            command = f"python -m benchmarks.kills_together --trials {n + 1} --seed {seed}"
            result.write_text(page(tally, minutes, command))
            print(f"{n + 1}/{trials}: {len(tally.different)} different", flush=True)
    return tally


def page(tally: Tally, minutes: float, command: str) -> str:
    """The page of results."""
    count = tally.trials.total()
    lines = [
        f"`{command}`, {date.today()}, jax {jax.__version__}, {os.cpu_count()} cores, {minutes:.0f} minutes.",
        "",
        f"{count} runs of {LAST} steps by two or four processes on {DEVICES} devices, one process of each disturbed,",
        f"resumed as one, two or four. **{count - len(tally.different)} of {count} ended with every row seen once and",
        "the losses of one process, bit for bit.** The launch ended at most",
        f"{max(tally.seconds, default=0):.1f} s after the signal.",
    ]
    for head, counts in (("disturbed", tally.trials), ("resumed", tally.resumed)):
        lines += ["", f"| {head} | times |", "|---|--:|", *(f"| {name} | {n} |" for name, n in sorted(counts.items()))]
    wrong = ["", *tally.different] if tally.different else []
    return "\n".join(["# Kills among several processes", "", *lines, *wrong, ""])


if __name__ == "__main__":
    sys.exit(main(__doc__, run, 30, RESULT))
