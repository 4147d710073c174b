"""Predicted step times against those read from what was compiled: how far off, and in which order plans come.

    python -m benchmarks.time_error v5e|v5p|v6e|h100 [--cache DIR] [--kept] [WORD]
    python -m benchmarks.time_error table

Needs the extra ``tpu`` or ``gpu``, and none of the chips. Of each case of a machine (`benchmarks.target_cases`; with
WORD, those that have it in their name) the seconds that the plan predicts, and those that
`autoshard.backend.estimate` reads: the TPU compiler's cycles times trip counts, or the roofline of what the GPU
compiler made, and its collectives on the link model, with nothing hidden on both sides; and the seconds of a step by
which the plan was chosen, beside those of the program as the compiler scheduled it, with what each hides. They are kept
in ``benchmarks/results/time_error.json``.

``table`` prints all that is kept, and of autoshard's own plans in the bench (`benchmarks.figures`) the sums; then, by
chip and together, the median and the worst error, and Kendall's tau over all pairs of plans of one program on one
machine of which the compiled times differ by more than 10 %, below which estimates are noise; then the same of steps as
scheduled. To the bench's cells, which have one plan of each, rates of the hardware were fitted: they are also counted
apart.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from autoshard.backend.estimate import estimate
from benchmarks.cells import CELLS
from benchmarks.figures import Kept
from benchmarks.target_cases import answers, options

KEPT = Path(__file__).parent / "results" / "time_error.json"
NOISE = 0.1


@dataclass(frozen=True)
class Times:
    """Seconds of one step: of compute, and of collectives; or of both in one figure."""

    program: str
    chip: str
    mesh: str
    strategy: str
    predicted: tuple[float, ...]
    read: tuple[float, ...]
    date: str
    step: tuple[float, float] | None = None
    """Seconds of the step, what is hidden counted as hidden: predicted, and as scheduled; None of older lines."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.chip, self.program, self.mesh, self.strategy

    @property
    def error(self) -> float:
        """The share by which the sum is predicted too long."""
        return sum(self.predicted) / sum(self.read) - 1

    def __str__(self) -> str:
        ms = [
            " | ".join(f"{x * 1e3:,.2f}" for x in (*times, sum(times))) if times[1:] else f"| | {times[0] * 1e3:,.2f}"
            for times in (self.predicted, self.read)
        ]
        where = f"{self.program} | {self.chip}, {self.mesh} | {self.strategy}"
        step = "| |"
        if self.step is not None:
            step = f"{self.step[0] * 1e3:,.2f} | {self.step[1] * 1e3:,.2f} | {self.step[0] / self.step[1] - 1:+.0%}"
        return f"| {where} | {ms[0]} | {ms[1]} | {self.error:+.0%} | {step} | {self.date} |"

    @property
    def scheduled(self) -> Times | None:
        """The same with the seconds of the step in place of the sums; None where they were not kept."""
        predicted_and_read = {"predicted": self.step[:1], "read": self.step[1:]} if self.step else {}
        return replace(self, **predicted_and_read) if self.step else None


def kept() -> list[Times]:
    """All that was measured here, in the order of chips and programs."""
    return [Times(**row) for row in json.loads(KEPT.read_text())] if KEPT.exists() else []


def of_bench() -> Iterator[Times]:
    """What `benchmarks.bench` has predicted and read of autoshard's own plans."""
    of_platforms = [Kept.of_platform(platform) for platform in ("tpu", "gpu")]
    for cell in CELLS:
        chip = "h100" if cell.column.endswith("H100") else cell.column.partition(":")[0]
        for line in (line for lines in of_platforms for line in lines.of(cell) if line.ours):
            if line.fits and line.sum and line.predicted_seconds:
                times = (line.predicted_seconds,), (line.sum,)
                step = (line.predicted_step, line.scheduled) if line.predicted_step and line.scheduled else None
                mesh = cell.column.partition(":")[2] or cell.column
                yield Times(cell.row, chip, mesh, "auto", *times, line.date, step)


def tau(times: Sequence[Times]) -> str:
    """Kendall's tau over pairs of plans of one program, and how many there are: 1 where all come in the same order, -1
    where none does."""
    plans = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    for t in times:
        program = t.program.split()[0]  # without what is recomputed
        plans[t.chip, program].append((sum(t.predicted), sum(t.read)))
    agree = [
        (a > c) - (a < c) == (b > d) - (b < d)
        for pairs in plans.values()
        for (a, b), (c, d) in itertools.combinations(pairs, 2)
        if max(b, d) > (1 + NOISE) * min(b, d)
    ]
    return f"{2 * sum(agree) / len(agree) - 1:.2f} of {len(agree)}" if agree else "-"


def summary(name: str, times: Sequence[Times], several: Container[tuple[str, ...]]) -> str:
    """A row: how many cases, the median and the worst error, and Kendall's tau of those that have several plans."""
    off, compared = [abs(t.error) for t in times], [t for t in times if t.key in several]
    return f"| {name} | {len(off)} | {statistics.median(off):.1%} | {max(off):.1%} | {tau(compared)} |"


def summaries(fitted_to: Sequence[Times], others: Sequence[Times]) -> Iterator[str]:
    """A row a chip, one of each part, and one of all."""
    rows, several = [*others, *fitted_to], {t.key for t in others}
    parts = {chip: [t for t in rows if t.chip == chip] for chip in sorted({t.chip for t in rows})}
    parts |= {"fitted to nothing": [*others], "the bench": [*fitted_to], "all": rows}
    yield from (summary(name, times, several) for name, times in parts.items() if times)


def measure() -> None:
    """Measures the cases that the command line names, and prints and keeps each."""
    chosen = options()
    for case, plan, said, _ in answers(chosen):
        cost, read = plan.cost, estimate(said, plan.mesh)
        if not read.exact:
            print(f"{case} on {case.mesh}, {case.strategy}: trip counts unknown, not kept", flush=True)
            continue
        made = Times(
            program=str(case),
            chip=case.machine,
            mesh=case.mesh,
            strategy=case.strategy,
            predicted=(cost.compute, cost.sent),
            read=(read.compute, read.transfers),
            date=str(date.today()),
            step=(cost.seconds, read.scheduled),
        )
        print(made, flush=True)
        rows = sorted({**{t.key: t for t in kept()}, made.key: made}.values(), key=lambda t: t.key)
        KEPT.write_text(json.dumps([asdict(t) for t in rows], indent=1) + "\n")


def table() -> None:
    """Prints what is kept."""
    others, fitted_to = kept(), [*of_bench()]
    sides = "predicted: compute, ms | collectives | sum | compiled | | | off | step, predicted | scheduled | off"
    print(f"| program | on | strategy | {sides} | date |\n|---|---|---|{'--:|' * 10}---|")
    print(*others, *fitted_to, sep="\n")
    of_steps = [[step for t in times if (step := t.scheduled)] for times in (fitted_to, others)]
    for what, parts in {"sums": (fitted_to, others), "steps as scheduled": of_steps}.items():
        print(f"\n| {what} | cases | median error | worst | Kendall's tau, pairs |\n|---|--:|--:|--:|--:|")
        print(*summaries(*parts), sep="\n")


if __name__ == "__main__":
    table() if sys.argv[1:] == ["table"] else measure()
