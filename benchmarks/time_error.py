"""Predicted step times against those read from what was compiled: how far off, and in which order plans come.

    python -m benchmarks.time_error v5e|v5p|v6e|h100 [--cache DIR] [--kept] [WORD]
    python -m benchmarks.time_error table

Needs the extra ``tpu`` or ``gpu``, and none of the chips. Of each case of a machine (`benchmarks.target_cases`; with
WORD, those that have it in their name) the seconds that the plan predicts, and those that
`autoshard.backend.estimate` reads: the TPU compiler's cycles times trip counts, or the roofline of what the GPU
compiler made, and its collectives on the link model, with nothing hidden on both sides. They are kept in
``benchmarks/results/time_error.json``.

``table`` prints all that is kept, and of autoshard's own plans in the bench (`benchmarks.figures`) the sums; then, by
chip and together, the median and the worst error, and Kendall's tau over all pairs of plans of one program on one
machine of which the compiled times differ by more than 10 %, below which estimates are noise. The bench has one plan
of each.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
        return f"| {where} | {ms[0]} | {ms[1]} | {self.error:+.0%} | {self.date} |"


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
                yield Times(cell.row, chip, cell.column.partition(":")[2] or cell.column, "auto", *times, line.date)


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


def summary(name: str, times: Sequence[Times]) -> str:
    """A row: how many cases, the median and the worst error, and Kendall's tau of those that have several plans."""
    off, several = [abs(t.error) for t in times], [t for t in times if t.predicted[1:]]
    return f"| {name} | {len(off)} | {statistics.median(off):.1%} | {max(off):.1%} | {tau(several)} |"


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
        )
        print(made, flush=True)
        rows = sorted({**{t.key: t for t in kept()}, made.key: made}.values(), key=lambda t: t.key)
        KEPT.write_text(json.dumps([asdict(t) for t in rows], indent=1) + "\n")


def table() -> None:
    """Prints what is kept."""
    rows, by_chip = [*kept(), *of_bench()], defaultdict[str, list[Times]](list)
    print("| program | on | strategy | predicted: compute, ms | collectives | sum | compiled | | | off | date |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|")
    for t in rows:
        print(t)
        by_chip[t.chip].append(t)
    print("\n| chip | cases | median error | worst | Kendall's tau, pairs |\n|---|--:|--:|--:|--:|")
    for chip, times in (*sorted(by_chip.items()), ("all", rows)):
        print(summary(chip, times))


if __name__ == "__main__":
    table() if sys.argv[1:] == ["table"] else measure()
