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

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)

import jax
import numpy as np

from autoshard import checkpoint
from benchmarks.kills import main
from benchmarks.numbered_rows import LAST, launched_process, losses, training_config

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "kills_together.md"
DEVICES = 4
LIMIT_SECONDS = 60
"""From the signal to the end of the launch: the heartbeat, by which the last of them notices."""
CODES = {signal.SIGKILL: 137, signal.SIGTERM: 143}
SAID = {
    signal.SIGKILL: r"process \d of \d was ended by SIGKILL, and the others with it; (step \d+|nothing) is saved",
    signal.SIGTERM: r"stopped; step \d+ is saved, and the same command resumes from there",
}


@dataclass
class Tally:
    """What was counted over all trials."""

    trials: Counter[str] = field(default_factory=Counter[str])
    resumed: Counter[str] = field(default_factory=Counter[str])
    seconds: list[float] = field(default_factory=list[float])
    """From the signal to the end of the launch."""
    different: list[str] = field(default_factory=list[str])


def start(path: Path, processes: int) -> subprocess.Popen[str]:
    """Starts the run in so many processes."""
    launch = ["launch", "--processes", str(processes), "--"] if processes > 1 else []
    command = [sys.executable, "-m", "autoshard", *launch, "train", str(path)]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe)


def trial(folder: Path, whole: list[tuple[int, float]], draw: random.Random, tally: Tally) -> str:
    """One run, disturbed and resumed; what was wrong with it, or nothing."""
    folder.mkdir()
    (folder / "slow").touch()
    path = training_config(folder, "run", DEVICES)
    processes, number = draw.choice((2, 4)), draw.choice((signal.SIGKILL, signal.SIGTERM))
    victim, step, then = draw.randrange(processes), draw.randint(1, LAST - 3), draw.choice((1, 2, 4))
    tally.trials[f"{number.name} to one of {processes}"] += 1
    tally.resumed[f"as {then}"] += 1
    running = start(path, processes)
    try:
        until = time.monotonic() + 300
        while running.poll() is None and not any(n >= step for n, _ in losses(folder / "run")):
            if time.monotonic() > until:
                return "the step never came"
            time.sleep(0.01)
        if (process := launched_process(running.pid, victim)) is None:
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
    (folder / "slow").unlink()
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
    found = losses(folder / "run")
    return "" if found == whole else f"other losses: {found}"


def run(trials: int, seed: int, result: Path) -> Tally:
    """Runs the trials; writes the page of results to ``result`` after each."""
    tally, draw, begun = Tally(), random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        alone = start(training_config(base, "whole", DEVICES), 1)
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
