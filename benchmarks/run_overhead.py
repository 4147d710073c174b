"""What a run costs beside its steps: logging, batches, checkpoints. Interleaved with bare steps, in one run.

    python -m benchmarks.run_overhead [--rounds 6] [--steps 100]

`autoshard.train.fit` trains with everything on: shuffled rows of a memory map that a thread reads and places, a log
with its table and event file, a checkpoint each block of steps. Between two blocks, as many bare steps of the same
program are taken on one batch that stays where it is. A step computes for so long, on one core and apart from the
program, as a device does: one that waits in a callback of Python holds up the program, whose work beside a step then
counts in full. The second row has no log and no checkpoints: the input alone, at a step a fifth as long. The table is
`benchmarks/results/run_overhead.md`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.train import Rows, fit

RESULT = Path(__file__).parent / "results" / "run_overhead.md"
ROWS, BATCH, WIDTH = 4096, 64, 4096
"""Of the data set and of a batch, float32 [rows, WIDTH]: a megabyte a step."""
ALLOWED = {"everything": 0.03, "input": 0.02}


def computed(rounds: int, x: Any) -> Any:
    """Nearly ``x``, after so many rounds of work on one core."""
    return x + 1e-9 * jax.lax.fori_loop(0, rounds, lambda _, y: 1.01 * jnp.sin(y), jnp.full(4096, x)).mean()


def rounds_of(seconds: float) -> int:
    """How many rounds take so long."""
    some, times = jax.jit(lambda x: computed(2000, x)), list[float]()
    for _ in range(6):
        start = time.perf_counter()
        some(jnp.float32(1)).block_until_ready()
        times.append(time.perf_counter() - start)
    return round(2000 * seconds / min(times))


def make_step(seconds: float) -> Any:
    """A step that takes so long, over a state of 32 MiB."""
    rounds = rounds_of(seconds)

    def step(state: Any, batch: Any) -> Any:
        loss = computed(rounds, jnp.mean(batch["x"]))
        return {**state, "w0": state["w0"].at[0].add(loss)}, {"loss": loss, "norm": 2 * loss}

    return autoshard.jit(step, mesh={"data": 1}, donate_argnums=0)


def make_state() -> Any:
    return {f"w{n}": jnp.zeros((1024, 1024)) for n in range(8)}


@dataclass
class Blocks:
    """Takes bare steps wherever the run evaluates, and times these and what the run did in between."""

    step: Any
    batch: Any
    steps: int
    state: Any = None
    since: tuple[float, float] | None = None
    bare: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Seconds a step, by the clock and of this process's processor time."""
    run: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def __call__(self, _: Any) -> Any:
        if self.since is not None:
            self.run.append(self._since(self.since))
        self.state = make_state() if self.state is None else self.state
        start, before = _now(), None
        for _ in range(self.steps):
            self.state, metrics = self.step(self.state, self.batch)
            if before is not None:
                float(before["loss"])  # one behind, as the run
            before = metrics
        jax.block_until_ready((self.state, before))
        self.bare.append(self._since(start))
        self.since = _now()
        return {}

    def _since(self, start: tuple[float, float]) -> tuple[float, float]:
        clock, cpu = _now()
        return (clock - start[0]) / self.steps, (cpu - start[1]) / self.steps

    def more(self) -> list[float]:
        """What a step of the run takes beyond a bare one, as a share of it, by round; sorted."""
        return sorted(run / bare - 1 for (run, _), (bare, _) in zip(self.run, self.bare[1:], strict=True))

    def more_cpu(self) -> float:
        """Processor seconds of a step of the run beyond those of a bare one, the median over the rounds."""
        return statistics.median(run - bare for (_, run), (_, bare) in zip(self.run, self.bare[1:], strict=True))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(folder: Path, seconds: float, steps: int, rounds: int, everything: bool) -> Blocks:
    """One run of so many rounds of blocks of steps."""
    table = np.memmap(folder / "rows", np.float32, "r", shape=(ROWS, WIDTH))
    step = make_step(seconds)
    plan = step.plan(make_state(), {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)})
    blocks = Blocks(step, plan.put(make_state(), {"x": np.asarray(table[:BATCH])})[1], steps)
    where = {"checkpoints": folder / "run/checkpoints", "log": folder / "run"} if everything else {}
    options: dict[str, Any] = {"steps": (rounds + 1) * steps, "every": steps, "evaluate": blocks, **where}
    fit(step, make_state(), Rows({"x": table}, BATCH, seed=0), **options)
    return blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    cases = (("everything", 0.1, given.steps), ("input", 0.02, 2 * given.steps))
    lines, kept = [], True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32).tofile(folder / "rows")
        for name, seconds, steps in cases:
            found = measure(folder, seconds, steps, given.rounds, name == "everything")
            more, bare = found.more(), statistics.median(clock for clock, _ in found.bare)
            median = statistics.median(more)
            kept = kept and median <= ALLOWED[name]
            lines.append(
                f"| {name} | {bare * 1e3:.2f} | {median:+.2%} | {more[0]:+.2%} to {more[-1]:+.2%} | "
                f"{found.more_cpu() * 1e3:.2f} | {ALLOWED[name]:.0%} |"
            )
    command = f"python -m benchmarks.run_overhead --rounds {given.rounds} --steps {given.steps}"
    ran = f"`{command}`, {date.today()}, jax {jax.__version__}, {os.cpu_count()} cores."
    text = (
        "Median over the rounds of what a step of a run takes beyond a bare step, in blocks that alternate within one\n"
        f"process, of {given.steps} steps or twice as many. A megabyte of shuffled rows a step, 32 MiB of state saved\n"
        "a block, each step logged. Beside it the processor time of all threads that this is."
    )
    head = ["| | bare step (ms) | more | least and most | processor (ms) | allowed |", "|---|--:|--:|--:|--:|--:|"]
    given.result.write_text(
        "\n".join(["# What a run costs beside its steps", "", ran, "", text, "", *head, *lines, ""])
    )
    print(given.result.read_text())
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
