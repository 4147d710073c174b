"""Disturbs one of several processes that train together, resumes them as another number: nothing is lost or seen twice.

    python -m benchmarks.kills_together [--trials 30] [--seed 0]

First the demo, cut to a few steps on each of its meshes, is trained by one, two and four processes: its losses have to
be equal, bit for bit.

A trial is a run on numbered rows by two or four processes that `autoshard launch` starts, on one mesh of four devices.
After a step that is drawn, one of them is killed with SIGKILL, halted with SIGSTOP or gets SIGTERM; or each is started
by itself, as on hosts, and one gets such a signal or never comes: each of these once, in an order that is drawn, before
any comes again. All have to end, with the exit code and the line that
say which it was and from where the next start goes on, or for whom they waited, and none may be left
`END_SECONDS` after the signal, of which `benchmarks.numbered_rows.end_seconds` has the account; where processes that
got no signal compute nothing for `IDLE_SECONDS`, they hang. One, two or four processes resume the run. In the end every
row has to have been seen once, the log to have each step once, and the losses to be those of one launched process that
nothing disturbed, bit for bit. They are of sums that are exact in any order, or, in one trial of two, of a float32
decoder. The table, written anew after each trial, is `benchmarks/results/kills_together.md`; `make kills` runs these
trials too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)

import jax
import numpy as np
import yaml

from autoshard import checkpoint
from autoshard.train.processes.peers import LOST_CODE
from benchmarks.kills import main
from benchmarks.numbered_rows import LAST, end_seconds, launched_process, losses, training_config

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "kills_together.md"
DEVICES = 4
IDLE_SECONDS = 60
"""For which processes that got no signal may compute nothing. By the clock alone a hang looks like a machine with other
work, which takes long to start processes and to compile."""
WORK_SECONDS = 0.5
"""Of processor time, in which a process did more than look whether to go on."""
HEARTBEAT_SECONDS = 10
"""After which a halted process counts as lost."""
END_SECONDS = end_seconds(HEARTBEAT_SECONDS)
"""From the signal until all processes must have ended."""
WAIT_SECONDS = 5
"""That processes wait for one that never comes."""
WHAT = {"histogram": "sums that are exact in any order", "decoder": "a float32 decoder of two layers"}
"""The steps of `benchmarks.numbered_rows`."""
PROCESSES = (2, 4)
KINDS: Sequence[tuple[int, signal.Signals | None, bool]] = [
    *itertools.product(PROCESSES, (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), (False, True)),
    *((processes, None, True) for processes in PROCESSES),
]
"""How many processes, the signal that one gets, or None where it never comes, and whether each is started by itself."""
DEMO = ROOT / "configs/train/demo.yaml"
DEMO_STEPS = (6, 12)
"""Up to which the demo is trained on each of its meshes."""
CODES = {signal.SIGKILL: 137, signal.SIGSTOP: LOST_CODE, signal.SIGTERM: 143}
SAID = {
    signal.SIGSTOP: r"error: process \d of \d is lost; (step \d+|nothing) is saved",
    signal.SIGKILL: r"process \d of \d was ended by SIGKILL, and the others with it; (step \d+|nothing) is saved",
    signal.SIGTERM: r"stopped; step \d+ is saved, and the same command resumes from there",
}


@dataclass
class Tally:
    """What was counted over all trials."""

    trials: Counter[str] = field(default_factory=Counter[str])
    resumed: Counter[str] = field(default_factory=Counter[str])
    trained: Counter[str] = field(default_factory=Counter[str])
    seconds: list[float] = field(default_factory=list[float])
    """From the signal to the end of all processes."""
    different: list[str] = field(default_factory=list[str])


def start(path: Path, *more: str, processes: int | None = None) -> subprocess.Popen[str]:
    """Starts the run in so many processes, or one of them by itself, with further options of ``train``."""
    launch = [] if processes is None else ["launch", "--processes", str(processes), "--"]
    command = [sys.executable, "-m", "autoshard", *launch, "train", str(path), *more]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe)


def end(launch: subprocess.Popen[str], processes: int) -> None:
    """Ends a launch that does not end, and its processes, which would go on."""
    for process in [launched_process(launch.pid, n) for n in range(processes)]:
        if process is not None:
            os.kill(process, signal.SIGKILL)
    launch.kill()
    launch.wait()


@dataclass
class Watch:
    """Sees whether a command, and of a launch its ``processes``, still compute."""

    running: subprocess.Popen[str]
    processes: int = 0
    used: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises `TimeoutError` where they computed nothing for `IDLE_SECONDS`."""
        own = [self.running.pid, *(launched_process(self.running.pid, n) for n in range(self.processes))]
        ticks = 0
        for process in own:
            with contextlib.suppress(OSError):  # ended, or not yet started
                ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
        now = ticks / os.sysconf("SC_CLK_TCK")
        if abs(now - self.used) > WORK_SECONDS:
            self.used, self.since = now, time.monotonic()
        elif time.monotonic() - self.since > IDLE_SECONDS:
            raise TimeoutError(f"nothing was computed for {IDLE_SECONDS} seconds")

    def said(self, struck: float | None = None) -> str:
        """What the command wrote to standard error, once it has ended.

        Args:
          struck: when a signal was sent, by `time.monotonic`.

        Raises:
          TimeoutError: it did not end within `END_SECONDS` of the signal; without one, as `check`.
        """
        while True:
            try:
                return self.running.communicate(timeout=0.5)[1]
            except subprocess.TimeoutExpired:
                if struck is None:
                    self.check()
                elif time.monotonic() - struck > END_SECONDS:
                    raise TimeoutError(f"not ended {END_SECONDS:.0f} seconds after the signal") from None


def left(processes: Sequence[int | None]) -> list[int]:
    """Which of these processes, by their identifiers, are still there."""
    return [process for process in processes if process is not None and Path(f"/proc/{process}").exists()]


def disturbed(path: Path, number: signal.Signals, processes: int, draw: random.Random, tally: Tally) -> str:
    """A launch of which one process gets a signal after a step; what was wrong with it, or nothing."""
    victim, step = draw.randrange(processes), draw.randint(1, LAST - 3)
    running = start(path, "--heartbeat", str(HEARTBEAT_SECONDS), processes=processes)
    try:
        watch = Watch(running, processes)
        while running.poll() is None and not any(n >= step for n, _ in losses(path.with_suffix(""))):
            watch.check()
            time.sleep(0.02)
        own = [launched_process(running.pid, n) for n in range(processes)]
        if (process := own[victim]) is None:
            return f"ended before it was killed: {running.communicate()[1]}"
        struck = time.monotonic()
        os.kill(process, number)
        said = watch.said(struck)
    except TimeoutError as error:
        return f"{number.name} to {victim} of {processes}: {error}"
    finally:
        end(running, processes)
    tally.seconds.append(time.monotonic() - struck)
    if left(own):
        return f"{number.name} to {victim} of {processes}: {left(own)} were left"
    if running.returncode != CODES[number] or not re.search(SAID[number], said) or "Traceback" in said:
        return f"{number.name} to {victim} of {processes}: exit code {running.returncode}, and said: {said}"
    return ""


def apart(path: Path, number: signal.Signals | None, processes: int, draw: random.Random, tally: Tally) -> str:
    """Processes that are each started by itself, of which one gets a signal after a step, or never comes; what was
    wrong, or nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    victim, step = draw.randrange(processes), draw.randint(1, LAST - 3)
    more = ["--coordinator", address, "--processes", str(processes), "--heartbeat", str(HEARTBEAT_SECONDS)]
    more += ["--wait", str(WAIT_SECONDS), "--id"] if number is None else ["--id"]
    come = {n: start(path, *more, str(n)) for n in range(processes) if n != victim or number is not None}
    what, struck = f"{number.name if number else 'nothing'} to {victim} of {processes}, apart", None
    try:
        if number is not None:
            while not any(n >= step for n, _ in losses(path.with_suffix(""))):
                if any(each.poll() is not None for each in come.values()):
                    return f"{what}: ended before: {[each.communicate()[1] for each in come.values()]}"
                time.sleep(0.02)
            process = launched_process(come[victim].pid, victim)
            assert process is not None
            struck = time.monotonic()
            os.kill(process, number)
            if number is not signal.SIGTERM:
                gone = come.pop(victim)
        said = {n: Watch(each).said(struck) for n, each in come.items()}
        if struck is not None:
            tally.seconds.append(time.monotonic() - struck)
    except TimeoutError as error:
        return f"{what}: {error}"
    finally:
        for n, each in come.items():
            end(each, n + 1)
        if number is not None and number is not signal.SIGTERM:
            end(gone, victim + 1)
    lost = "process 0, which keeps the processes together," if victim == 0 else f"process {victim} of {processes}"
    expected = {
        None: rf"error: not all {processes} processes came to {address} within {WAIT_SECONDS} seconds\n",
        signal.SIGTERM: rf"({signal.SIGTERM.name}: [^\n]*\n)?stopped; step \d+ is saved, and [^\n]*\n",
    }.get(number, rf"error: {lost} is lost; (step \d+|nothing) is saved[^\n]*\n")
    code = 143 if number is signal.SIGTERM else LOST_CODE
    wrong = [n for n, each in come.items() if each.returncode != code or not re.fullmatch(expected, said[n])]
    return f"{what}: exit codes {[each.returncode for each in come.values()]}, and said: {said}" if wrong else ""


def demo_losses(folder: Path, processes: int) -> list[tuple[int, float]]:
    """Of the demo, cut to `DEMO_STEPS`, trained by so many processes."""
    entries = yaml.safe_load(DEMO.read_text())
    entries["model"] = str((DEMO.parent / entries["model"]).resolve())
    for phase, until in zip(entries["phases"], DEMO_STEPS, strict=True):
        phase["until"] = until
    run = folder / f"demo-{processes}"
    entries |= {"checkpoint": {"dir": str(run), "every": DEMO_STEPS[0]}, "log_every": 1}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(entries))
    training = start(path, processes=processes)
    said = Watch(training, processes).said()
    assert training.returncode == 0, said
    return losses(run)


def trial(
    folder: Path,
    kind: tuple[int, signal.Signals | None, bool],
    whole: Mapping[str, list[tuple[int, float]]],
    draw: random.Random,
    tally: Tally,
) -> str:
    """One run, disturbed in one of `KINDS` and resumed; what was wrong with it, or nothing."""
    folder.mkdir()
    (folder / "slow").touch()
    step = draw.choice(list(whole))
    path = training_config(folder, "run", DEVICES, step)
    (processes, number, alone), then = kind, draw.choice((1, *PROCESSES))
    what = "never comes" if number is None else f"gets {number.name}"
    tally.trials[f"one of {processes}{', each started by itself,' if alone else ''} {what}"] += 1
    tally.resumed[f"as {then}"] += 1
    tally.trained[WHAT[step]] += 1
    if number is None or alone:
        wrong = apart(path, number, processes, draw, tally)
    else:
        wrong = disturbed(path, number, processes, draw, tally)
    if wrong:
        return wrong
    (folder / "slow").unlink()
    again = start(path, processes=then)
    try:
        said = Watch(again, then).said()
    except TimeoutError as error:
        return f"resumed as {then}: {error}"
    finally:
        end(again, then)
    if again.returncode:
        return f"resumed as {then}: exit code {again.returncode}, and said: {said}"
    seen = checkpoint.restore(folder / "run/checkpoints", LAST)["seen"]
    if not (np.asarray(seen) == 1).all():
        return f"rows were lost or repeated: {np.flatnonzero(np.asarray(seen) != 1).tolist()}"
    found = losses(folder / "run")
    return "" if found == whole[step] else f"other losses of {step}: {found}"


def run(trials: int, seed: int, result: Path) -> Tally:
    """Runs the trials; writes the page of results to ``result`` after each."""
    tally, draw, begun = Tally(), random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        whole: dict[str, list[tuple[int, float]]] = {}
        for step in WHAT:
            alone = start(training_config(base, step, DEVICES, step), processes=1)
            said = Watch(alone, 1).said()
            assert alone.returncode == 0, said
            whole[step] = losses(base / step)
        of_demo = demo_losses(base, 1)
        assert [step for step, _ in of_demo] == [*range(1, DEMO_STEPS[-1] + 1)], of_demo
        for processes in PROCESSES:
            found = demo_losses(base, processes)
            assert found == of_demo, f"the demo in {processes} processes: {found}, and in one {of_demo}"
        kinds = list[tuple[int, signal.Signals | None, bool]]()
        for n in range(trials):
            kinds = kinds or draw.sample(KINDS, len(KINDS))
            if wrong := trial(base / str(n), kinds.pop(), whole, draw, tally):
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
        "the losses of one launched process, bit for bit.** All processes ended at most",
        f"{max(tally.seconds, default=0):.1f} s after the signal, in the median "
        f"{statistics.median(tally.seconds or [0]):.1f} s; they may take {END_SECONDS:.0f} s.",
        "",
        f"Before them, {DEMO_STEPS[-1]} steps of the demo over both of its meshes had the losses of one process in two",
        "and in four, bit for bit.",
    ]
    for head, counts in (("disturbed", tally.trials), ("resumed", tally.resumed), ("trained", tally.trained)):
        lines += ["", f"| {head} | times |", "|---|--:|", *(f"| {name} | {n} |" for name, n in sorted(counts.items()))]
    wrong = ["", *tally.different] if tally.different else []
    return "\n".join(["# Kills among several processes", "", *lines, *wrong, ""])


if __name__ == "__main__":
    sys.exit(main(__doc__, run, 30, RESULT))
