"""Kills training runs at random moments, resumes them, and sees that each ends as one that nothing disturbed.

    python -m benchmarks.kills [--trials 100] [--seed 0]

A trial is a run of a tiny model whose mesh changes half-way. Its process is killed with SIGKILL: one in two at a moment
drawn from the time that an undisturbed run takes, most of which is planning; the others shortly after a step that is
drawn, where steps are taken and saved. The run is resumed, killed again with a chance of one in five, and in the end
finishes. Its last state, its log of steps and its report then have to be those of the
undisturbed run, bit for bit. Each process is forked from one that has imported the program and started no backend.
The table, written anew after each trial, is `benchmarks/results/kills.md`. `benchmarks/kills_together.py` does so with
one of several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)

import jax
import numpy as np

from autoshard import checkpoint, cli

RESULT = Path(__file__).parent / "results" / "kills.md"
STEPS = (6, 12)
CONFIG = f"""
model: {{layers: 1, d_model: 16, heads: 2, seq: 16, mlp: gelu}}
data: {{source: text, holdout: 4}}
optimizer: {{learning_rate: 1.0e-2, warmup: 2}}
batch: 8
strategy: fsdp
phases:
  - {{mesh: {{axes: {{data: 2, model: 2}}, hardware: cpu}}, until: {STEPS[0]}}}
  - {{mesh: {{axes: {{data: 4}}, hardware: cpu}}, until: {STEPS[1]}}}
eval: {{every: 6, batches: 2, final_batches: 4}}
checkpoint: {{dir: run, every: 2}}
platform: cpu
"""


@dataclass
class Tally:
    """What was counted over all trials."""

    killed: Counter[str] = field(default_factory=Counter[str])
    """Kills by where they struck."""
    resumed: Counter[str] = field(default_factory=Counter[str])
    """Resumed runs by where they began again."""
    different: list[str] = field(default_factory=list[str])
    trials: int = 0

    @property
    def kills(self) -> int:
        return sum(self.killed.values())


def forked(act: Callable[[], object], output: Path) -> int:
    """Runs ``act`` in a child, and returns its process id; what it prints goes to ``output``."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        act()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(folder: Path) -> None:
    """``autoshard train`` in ``folder``, as the command line runs it."""
    os.chdir(folder)
    sys.argv = ["autoshard", "train", "train.yaml"]
    cli.main()


def write_end(folder: Path) -> None:
    """Writes the last state, the steps of the log and the report of a finished run, as JSON."""
    state = checkpoint.restore(folder / "run/checkpoints", STEPS[-1])
    arrays = {path: [str(x.dtype), list(x.shape), np.asarray(x).tobytes().hex()] for path, x in state.items()}
    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    report = json.loads((folder / "run/report.json").read_text())
    steps = [event for event in log if event["event"] == "step"]
    (folder / "end.json").write_text(json.dumps({"state": arrays, "steps": steps, "report": report}))


def ended(folder: Path) -> Any:
    """What `write_end` writes, made in a process of its own; the message of a failure otherwise."""
    output = folder / "end.txt"
    if os.waitpid(forked(lambda: write_end(folder), output), 0)[1]:
        return output.read_text()
    return json.loads((folder / "end.json").read_text())


def steps_taken(folder: Path) -> int:
    log = folder / "run/log.jsonl"
    return log.read_bytes().count(b'"event":"step"') if log.exists() else 0


def place(folder: Path) -> str:
    """Where a process was killed, as its folder shows it."""
    saving = any((folder / "run/checkpoints").glob("*tmp*"))
    steps = steps_taken(folder)
    if saving:
        return "while a checkpoint was written"
    if not steps:
        return "before the first step"
    if (folder / "run/report.json").exists():
        return "after the report"
    if steps == STEPS[-1]:
        return "after the last step"
    return "where the mesh changes" if steps in STEPS else "between two steps"


def newest(folder: Path) -> int:
    """The newest step with a checkpoint, or 0."""
    names = [path.parent.name for path in folder.glob("run/checkpoints/*/inventory.json")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _resumes_from(step: int) -> str:
    if not step:
        return "from the start"
    return "on the first mesh" if step < STEPS[0] else "on the second mesh" if step > STEPS[0] else "on another mesh"


def wait_for_moment(child: int, folder: Path, before: int, seconds: float, draw: random.Random) -> None:
    """Waits until the process ``child``, which resumed from step ``before``, is to be killed, or has ended."""
    if draw.random() < 1 / 2 or before == STEPS[-1]:
        time.sleep(draw.uniform(0, seconds * (1 - before / STEPS[-1])))
        return
    step = draw.randint(before + 1, STEPS[-1])
    while steps_taken(folder) < step and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.1))


def trial(number: int, base: Path, seconds: float, whole: Any, draw: random.Random, tally: Tally) -> None:
    """One run with one kill or more, compared with the undisturbed run ``whole``."""
    folder = base / f"trial-{number}"
    folder.mkdir()
    shutil.copytree(base / "text", folder / "text")
    (folder / "train.yaml").write_text(CONFIG)
    kills = 0
    while True:
        before = newest(folder)
        child = forked(lambda: train(folder), folder / "output.txt")
        if kills == 0 or draw.random() < 1 / 5:
            wait_for_moment(child, folder, before, seconds, draw)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGKILL:
            kills += 1
            tally.killed[place(folder)] += 1
            tally.resumed[_resumes_from(newest(folder))] += 1
            continue
        if code or kills:
            break
        shutil.rmtree(folder / "run")  # it ended before the kill: the trial begins again
    found = ended(folder) if not code else (folder / "output.txt").read_text()
    tally.trials += 1
    if found != whole:
        tally.different.append(f"trial {number}: {found if isinstance(found, str) else 'another end'}")
    else:
        shutil.rmtree(folder)


def run(trials: int, seed: int, result: Path) -> Tally:
    """Runs the trials; writes the page of results to ``result`` after each."""
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        (base / "text").mkdir()
        for n in range(30):
            (base / f"text/{n}.txt").write_text(f"{n} devices, {n * n} shards, no waste. " * 12)
        # The programs are compiled once: a killed process must not leave half of an entry to others.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(base / "cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        whole, seconds = None, 0.0
        for name in ("first", "second"):  # the first fills the cache, the second is timed
            folder = base / name
            folder.mkdir()
            shutil.copytree(base / "text", folder / "text")
            (folder / "train.yaml").write_text(CONFIG)
            start = time.perf_counter()
            code = os.waitpid(forked(lambda folder=folder: train(folder), folder / "output.txt"), 0)[1]
            seconds = time.perf_counter() - start
            assert code == 0, (folder / "output.txt").read_text()
            assert steps_taken(folder) == STEPS[-1]
            before, whole = whole, ended(folder)
            assert before in (None, whole), "two undisturbed runs end differently"
        tally, draw = Tally(), random.Random(seed)
        start = time.perf_counter()
        for number in range(trials):
            trial(number, base, seconds, whole, draw, tally)
            minutes = (time.perf_counter() - start) / 60
            result.write_text(
                page(tally, seconds, minutes, f"python -m benchmarks.kills --trials {trials} --seed {seed}")
            )
            print(f"{number + 1}/{trials}: {tally.kills} kills, {len(tally.different)} different", flush=True)
    return tally


def page(tally: Tally, seconds: float, minutes: float, command: str) -> str:
    """The page of results."""
    ran = f"`{command}`, {date.today()}, jax {jax.__version__}, {os.cpu_count()} cores, {minutes:.0f} minutes."
    equal = tally.trials - len(tally.different)
    lines = [
        f"{tally.trials} runs of {STEPS[-1]} steps, on another mesh after {STEPS[0]}, saved every second step,",
        f"killed {tally.kills} times with SIGKILL at random moments and resumed. **{equal} of {tally.trials} ended bit",
        f"for bit as the undisturbed run** (last state, log of steps, report), which takes {seconds:.1f} s.",
    ]
    tables = (("killed", tally.killed), ("resumed", tally.resumed))
    for head, counts in tables:
        lines += ["", f"| {head} | times |", "|---|--:|", *(f"| {name} | {n} |" for name, n in counts.most_common())]
    return "\n".join(["# Kills", "", ran, "", *lines, *([""] if tally.different else []), *tally.different, ""])


class Differences(Protocol):
    """A tally, as far as the exit status needs it."""

    different: list[str]


def main(doc: str | None, run: Callable[[int, int, Path], Differences], trials: int, result: Path) -> int:
    """A command line for ``run``: its exit status is 1 where some run ended differently."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, default=result)
    given = parser.parse_args()
    tally = run(given.trials, given.seed, given.result)
    print(given.result.read_text())
    return 1 if tally.different else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, run, 100, RESULT))
