"""What `benchmarks.bench` has measured, kept under ``benchmarks/results``, and the table that is made of it."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cells import CELLS, Cell

GIB = 2**30
MAX_WIRE = 2.0
"""A step that sends so many times what was planned is not clean, whatever rewrites explain it."""


@dataclass(frozen=True)
class Line:
    """One plan of a cell; times in seconds, sizes in bytes on each device."""

    plan: str
    ours: bool
    """Whether it is autoshard's; the others are by hand."""
    needs: int
    has: int
    sum: float | None
    """Compute and collectives one after the other; None where the compiler refused the program."""
    bound: float | None
    """The longer of the two."""
    sent: int | None
    compile_seconds: float
    plan_seconds: float | None = None
    predicted: int | None = None
    """Peak bytes that autoshard predicted."""
    differences: tuple[str, ...] | None = None
    """What of the audit is not explained; None where none was made."""
    date: str = ""
    predicted_seconds: float | None = None
    """What autoshard predicted of ``sum``."""
    scheduled: float | None = None
    """As the compiler ordered the program; None of lines that are older."""
    predicted_step: float | None = None
    """What autoshard predicted of ``scheduled``, by which it chose; None of lines that are older."""
    wire: float | None = None
    """Bytes that a device sends as compiled, rewrites of the compiler included, over those of the plan; None of lines
    that are older, and where neither sends any."""

    @property
    def fits(self) -> bool:
        return self.sum is not None and self.needs <= self.has

    @property
    def seconds(self) -> float:
        """As scheduled, or else the sum; infinite where it does not fit."""
        return (self.scheduled or self.sum or math.inf) if self.fits else math.inf

    @property
    def audited(self) -> str:
        """Whether the audit explains all, and how many times the planned bytes are sent: not `MAX_WIRE` times."""
        if self.differences is None:
            return "-"
        clean = "not clean" if self.differences or (self.wire or 0.0) >= MAX_WIRE else "clean"
        return clean if self.wire is None else f"{clean}, {self.wire:.2f}"

    def __str__(self) -> str:
        def number(value: float | None, unit: float, digits: int) -> str:
            return "-" if value is None else f"{value / unit:,.{digits}f}"

        words = [self.plan, "yes" if self.fits else "**no**", number(self.needs, GIB, 2)]
        words += [number(x, 1e-3, 1) for x in (self.sum, self.scheduled, self.bound)] + [number(self.sent, GIB, 2)]
        words += [number(self.compile_seconds, 1, 0), number(self.plan_seconds, 1, 1).replace("-", ""), self.date]
        return " | ".join(words)


@dataclass
class Kept:
    """Lines under the digests of all that the compiler was given, and of every cell those that were asked for last."""

    path: Path
    lines: dict[str, Line]
    cells: dict[str, list[str]]
    floors: dict[str, float]
    """Of each cell, seconds."""

    @classmethod
    def of_platform(cls, platform: str) -> Kept:
        """Of ``tpu`` or ``gpu``."""
        return cls.read(Path(__file__).parent / "results" / f"bench-{platform}.json")

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Nothing where there is no such file."""
        if not path.exists():
            return cls(path, {}, {}, {})
        said = json.loads(path.read_text())
        lines = {digest: _line(line) for digest, line in said["lines"].items()}
        return cls(path, lines, said["cells"], said["floors"])

    def write(self) -> None:
        used = {digest for digests in self.cells.values() for digest in digests}
        lines = {digest: asdict(line) for digest, line in sorted(self.lines.items()) if digest in used}
        said = {"cells": self.cells, "floors": self.floors, "lines": lines}
        self.path.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")

    def of(self, cell: Cell) -> list[Line]:
        return [self.lines[digest] for digest in self.cells.get(str(cell), ())]


def _line(said: Mapping[str, object]) -> Line:
    differences = said["differences"]
    return Line(**{**said, "differences": None if differences is None else tuple(differences)})  # type: ignore[arg-type]


def summary(every: Sequence[Kept], *, scheduled: bool | None = None) -> Iterator[str]:
    """A line a cell, then the geometric mean.

    Args:
      scheduled: only cells whose ratio is of times as scheduled, or only the others; None: all.
    """
    cells = 0
    yield "| cell | floor, ms | predicted, ms | sum, ms | scheduled, ms | of peak | best by hand, ms | ratio | audit |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    ratios: list[float] = []
    errors: dict[str, list[float]] = {"sums": [], "steps as scheduled": []}
    for kept, cell in itertools.product(every, CELLS):
        lines = kept.of(cell)
        ours = next((line for line in lines if line.ours), None)
        rest = min((line for line in lines if line.fits and not line.ours), key=lambda line: line.seconds, default=None)
        is_scheduled = bool(rest and rest.scheduled and ours and ours.scheduled)
        if ours is None or scheduled not in (None, is_scheduled):
            continue
        cells += 1
        floor = kept.floors[str(cell)]
        words = [str(cell), *map(_milliseconds, (floor, ours.predicted_seconds, ours.sum))]
        words += [
            _milliseconds(ours.scheduled) + ("" if ours.fits else ", does not fit"),
            f"{floor / ours.seconds:.0%}",
        ]
        words.append(f"{_milliseconds(rest.seconds)} ({rest.plan})" if rest else "none fits")
        found = _ratio(ours, rest) if rest and ours.fits else None
        words.append(f"{found:.2f}" if found else "-")
        words.append(ours.audited)
        for of, predicted, read in zip(
            errors.values(), (ours.predicted_seconds, ours.predicted_step), (ours.sum, ours.scheduled), strict=True
        ):
            of += [abs(predicted / read - 1)] if predicted and read else []
        ratios += [found] if found else []
        yield "| " + " | ".join(words) + " |"
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        over = f"Over {len(ratios)} of {cells} cells"
        yield f"\n{over}: geometric mean {mean:.2f} of the best by hand, worst {max(ratios):.3f}."
    for what, of in errors.items():
        if of:
            median = f"{statistics.median(of):.0%} (median of {len(of)})"
            yield f"\nPredicted {what} are off by {median}, at most {max(of):.0%}."


def _ratio(ours: Line, other: Line) -> float | None:
    """Of the times as scheduled; of the sums where either was not read so."""
    if ours.scheduled and other.scheduled:
        return ours.scheduled / other.scheduled
    return ours.sum / other.sum if ours.sum and other.sum else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.{0 if seconds >= 0.1 else 1 if seconds >= 1e-3 else 3}f}"


def details(kept: Kept, cell: Cell) -> Iterator[str]:
    """All plans of a cell."""
    yield f"## {cell}: {cell.says}\n"
    yield "| plan | fits | peak, GiB | sum, ms | as scheduled, ms | bound | sent, GiB | compile, s | plan, s | date |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
    for line in kept.of(cell):
        yield f"| {line} |"
    for line in kept.of(cell):
        if line.predicted is not None:
            yield f"\nPredicted: {_milliseconds(line.predicted_seconds)} ms, {line.predicted / GIB:,.2f} GiB."
        if line.differences:
            yield "\nNot explained by the audit:\n"
            yield from (f"- {text}" for text in line.differences)
