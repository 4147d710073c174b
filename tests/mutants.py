"""Mutation check: plants the faults of `mutants.yaml` one at a time in a copy of the tree; the tests near each run.

A fault is caught when one of its tests fails that passes without it. The exit status is 1 when fewer than 95 % are
caught, when a test that failed does so without any fault, when a fault breaks the import of the code rather than what
it does, or when a source no longer has the text that a fault replaces.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "mutants.yaml"
REPORT = ROOT / "benchmarks" / "results" / "mutants.md"
COPIED = ("autoshard", "benchmarks", "configs", "docs", "passes", "rules", "tests", "pyproject.toml")
SHARE = 0.95
"""Of the faults that have to be caught."""
LIMIT = 900
"""Seconds after which a run counts as caught: a fault can make a loop endless."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--durations=0")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One fault: ``new`` in the place of ``old``, which ``file`` has exactly once."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or ids of the tests near it, the likeliest to fail first."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a mutant."""

    status: str
    """``caught``, ``survived`` or ``broken``."""
    by: str
    """The first test that failed; or what the run ended with."""
    seconds: float


def mutants() -> list[Mutant]:
    """The table, in its own order."""
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in yaml.safe_load(TABLE.read_text())]


def planted(mutant: Mutant, source: str) -> str:
    """``source`` with the fault.

    Raises:
      ValueError: the text that it replaces is not there exactly once.
    """
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {count} times, not once ({mutant.what})")
    return source.replace(mutant.old, mutant.new)


def copy(to: Path) -> Path:
    """A tree of its own, with the byte code of what stays as it is."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("results"))
        else:
            shutil.copy2(source, to / name)
    return to


def run(tree: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """The exit status of pytest with ``options``, and what it printed."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *PYTEST, *options, *tests],
            cwd=tree,
            env=environment,
            timeout=LIMIT,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {LIMIT} s"
    return done.returncode, done.stdout + done.stderr


def outcome(tree: Path, mutant: Mutant) -> Outcome:
    """Plants ``mutant`` in ``tree``, runs its tests, and takes it out again."""
    path, began = tree / mutant.file, time.monotonic()
    source, stat = path.read_text(), path.stat()
    path.write_text(planted(mutant, source))
    try:
        status, text = run(tree, mutant.tests, "-x")
    finally:
        path.write_text(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the byte code of the source fits it again
    seconds = time.monotonic() - began
    failed = FAILED.search(text)
    word = {0: "survived", 1: "caught"}.get(status, "broken")
    return Outcome(word, failed[1] if failed else text.strip().splitlines()[-1], seconds)


def outcomes(chosen: Sequence[Mutant], workers: int) -> Iterator[tuple[Mutant, Outcome]]:
    """What becomes of each mutant, in the order of the table, in so many trees at once."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return outcome(tree, mutant)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(workers) as pool:
        for i in range(workers):
            trees.put(copy(Path(folder, str(i))))
        yield from zip(chosen, pool.map(one, chosen), strict=True)


def without_false_alarms(found: Sequence[tuple[Mutant, Outcome]]) -> list[tuple[Mutant, Outcome]]:
    """``found``, where a test that fails without any fault, too, has caught nothing: the mutant's outcome is broken."""
    tests = dict.fromkeys(o.by for _, o in found if o.status == "caught" and "::" in o.by)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        text = run(copy(Path(folder, "0")), tests)[1] if tests else ""
    failed = set(FAILED.findall(text))
    return [(m, replace(o, status="broken") if o.by in failed else o) for m, o in found]


def report(found: Sequence[tuple[Mutant, Outcome]], command: str) -> str:
    """The results as a page."""
    caught = sum(o.status == "caught" for _, o in found)
    rows = [
        f"| {i} | {m.what} | `{m.file}` | {o.status} | `{o.by}` | {o.seconds:.0f} |"
        for i, (m, o) in enumerate(found, 1)
    ]
    return "\n".join(
        [
            "# Mutation check",
            "",
            f"`{command}`, {date.today():%Y-%m-%d}: {caught} of {len(found)} faults caught.",
            "",
            "Each fault is planted alone in a copy of the tree, and the tests near it are run until one fails",
            "(`tests/mutants.yaml` has the faults, `tests/mutants.py` plants them).",
            "",
            "| | fault | file | outcome | first test to fail | s |",
            "|--:|---|---|---|---|--:|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Plants the mutants whose description or file contains a word, by default all, and writes the report of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose description or file contains this")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in m.what or options.only in m.file]
    for m in chosen:
        planted(m, (ROOT / m.file).read_text())
    found: list[tuple[Mutant, Outcome]] = []
    for m, o in outcomes(chosen, options.workers):
        found.append((m, o))
        print(f"{o.status:8} {o.seconds:5.1f} s  {m.what} ({m.file}): {o.by}", flush=True)
    found = without_false_alarms(found)
    caught = sum(o.status == "caught" for _, o in found)
    for m, o in found:
        if o.status == "broken":
            print(f"broken: {m.what} ({m.file}): {o.by}")
    print(f"{caught} of {len(found)} caught")
    if not options.only:
        REPORT.write_text(report(found, "make mutants"))
    return int(caught < SHARE * len(found) or any(o.status == "broken" for _, o in found))


if __name__ == "__main__":
    sys.exit(main())
