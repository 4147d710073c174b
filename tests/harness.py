"""Runs the corpus of programs that JAX ships through `autoshard.jit`, sharded, against plain `jax.jit`.

    python -m tests.harness [--part I/N] [--only TEXT] [--workers N] [--markdown FILE]

`tests.corpus` says what is done with each program. Worker processes do it; one that dies or stalls has its program
counted as failed, and another goes on. Prints a table by group and exits with 1 unless every program that plain JAX
runs is equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import jax

import autoshard
from tests.corpus import MESHES, STATUSES, TOLERANCE, Outcome, harnesses, mesh_name, run

STALL = 300
"""Seconds without a word from a worker after which it counts as hung."""


def worker() -> None:
    """Runs the programs that standard input names by number, one JSON outcome a line."""
    corpus = harnesses()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs themselves may print is no answer
    for count, line in enumerate(sys.stdin):
        for outcome in run(int(line), corpus[int(line)]):
            print(json.dumps(asdict(outcome)), file=answers, flush=True)
        if count % 100 == 99:
            jax.clear_caches()


def drive(corpus: Sequence[Any], indices: Sequence[int], workers: int) -> Iterator[Outcome]:
    """Outcomes of the programs ``indices``, from ``workers`` processes that are replaced when they die or stall."""
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    for i in (*indices, *[None] * workers):
        todo.put(i)

    def serve() -> None:
        with tempfile.TemporaryFile() as errors:
            process = None
            while (index := todo.get()) is not None:
                process = process or start(errors)
                found = list(ask(process, index))
                for outcome in found:
                    done.put(outcome)
                if len(found) < len(MESHES):
                    stop(process)
                    process, harness, mesh = None, corpus[index], mesh_name(MESHES[len(found)])
                    note = f"the process died or stalled: {last_line(errors)}"
                    done.put(Outcome(index, harness.group_name, harness.fullname, mesh, "failed", note, math.inf))
            if process:
                stop(process)
        done.put(None)

    for _ in range(workers):
        threading.Thread(target=serve, daemon=True).start()
    left = workers
    while left:
        item = done.get()
        if item is None:
            left -= 1
        else:
            yield item


def start(errors: IO[bytes]) -> subprocess.Popen[str]:
    """A worker, whose standard error goes to the file ``errors``."""
    errors.seek(0)
    errors.truncate()
    command = [sys.executable, "-m", "tests.harness", "--worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a worker."""
    process.kill()
    process.communicate()


def ask(process: subprocess.Popen[str], index: int) -> Iterator[Outcome]:
    """What a worker says of one program: fewer outcomes than there are meshes when it dies or stalls."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(STALL, process.kill)
    timer.start()
    try:
        process.stdin.write(f"{index}\n")
        process.stdin.flush()
        for line in itertools.takewhile(bool, (process.stdout.readline() for _ in MESHES)):
            yield Outcome(**json.loads(line))
    except BrokenPipeError:
        return
    finally:
        timer.cancel()


def last_line(written: IO[bytes]) -> str:
    """The end of what a worker had to say."""
    written.seek(0)
    return written.read().decode(errors="replace").strip().rpartition("\n")[2][:200]


def counts(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The table by group: programs, then runs, one for each mesh, by what became of them."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        groups[o.group].append(o)

    def row(name: str, of: Sequence[Outcome]) -> tuple[str, ...]:
        by = Counter(o.status for o in of)
        off = max((o.off for o in of), default=0.0)
        sums = (len({o.index for o in of}), by["sharded"] + by["whole"], *(by[s] for s in STATUSES))
        return name, *map(str, sums), f"{off:.0e}" if off else "0"

    head = ("group", "programs", "equal", *STATUSES, "off")
    return [head, *(row(name, of) for name, of in sorted(groups.items())), row("all", outcomes)]


def reasons(outcomes: Sequence[Outcome], status: str) -> list[tuple[str, ...]]:
    """How many runs of which group are whole, or skipped, and why."""
    found = Counter((o.group, o.note) for o in outcomes if o.status == status)
    return [("group", "runs", "why"), *((group, str(n), note) for (group, note), n in sorted(found.items()))]


def text(table: Sequence[Sequence[str]]) -> str:
    """A table in columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*table, strict=True)]
    cells = [[c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)] for row in table]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    if not table[1:]:
        return "None."
    numbers = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*table, strict=True)]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in table]
    lines.insert(1, " | ".join("--:" if n else "---" for n in numbers))
    return "\n".join(f"| {line} |" for line in lines)


def report(outcomes: Sequence[Outcome], command: str, seconds: float) -> str:
    """The whole run as a page."""
    versions = [f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy")]
    made = ", ".join([f"autoshard {autoshard.__version__}", *versions, f"Python {platform.python_version()}"])
    why = {s: reasons(outcomes, s) for s in ("whole", "skipped")}
    failures = [f"- {o.name} on {o.mesh}: {o.note}" for o in outcomes if o.status == "failed"]
    return "\n".join(
        [
            "# The programs that JAX ships, sharded",
            "",
            f"`{command}` on {datetime.now(UTC):%Y-%m-%d}: {made}; eight CPU devices, {seconds:.0f} seconds of "
            "processor time.",
            "",
            f"Each program runs on {len(MESHES)} meshes, {' and '.join(str(tuple(m.values())) for m in MESHES)}. "
            "*equal*: the results of plain `jax.jit`, in structure, type, shape and entries. Of these, *sharded*: "
            "arrays were pinned, and the executable and its results hold every one of them in parts; *whole*: no array "
            "can be split, why stands below. *off*: the largest difference, as a share of the result's largest entry; "
            f"{TOLERANCE:g} is allowed in float32, four steps of the resolution of narrower types, none of integers. "
            "*skipped*: plain JAX on CPU does not run it.",
            "",
            markdown(counts(outcomes)),
            *(line for s, found in why.items() for line in ("", f"## {s}", "", markdown(found))),
            "",
            "## failed",
            "",
            *(failures or ["None."]),
            "",
        ]
    )


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description="Runs JAX's corpus of programs sharded, against plain JAX.")
    parser.add_argument("--part", default="0/1", help="I/N: only programs I, I+N, ...")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    corpus = harnesses()
    start, of = map(int, options.part.split("/"))
    indices = [i for i, h in enumerate(corpus) if i % of == start and options.only in h.fullname]
    began, outcomes = time.monotonic(), []
    for o in drive(corpus, indices, options.workers):
        outcomes.append(o)
        if len(outcomes) % 200 == 0:
            print(f"{len(outcomes)} of {len(indices) * len(MESHES)}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    outcomes.sort(key=lambda o: (o.index, o.mesh))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(text(counts(outcomes)))
    for status in ("whole", "skipped"):
        print(f"\n{status}\n{text(reasons(outcomes, status))}")
    failures = [o for o in outcomes if o.status == "failed"]
    print(f"\n{len(failures)} failed, {seconds:.0f} s of processor time, jax {jax.__version__}")
    for o in failures:
        print(f"  {o.name} on {o.mesh}: {o.note}")
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(report(outcomes, f"python -m tests.harness {' '.join(sys.argv[1:])}", seconds))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
