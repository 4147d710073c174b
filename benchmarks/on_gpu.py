"""Plans on a GPU that is here: seconds by the clock and bytes by the allocator beside what was predicted, and numbers
beside those of plain `jax.jit`.

    python -m benchmarks.on_gpu [--folder DIR] [WORD]

Each case (`benchmarks.on_gpu_cases`; with WORD, those that have it in their name) runs on the first device, in a
process of its own, which takes all of its memory. What was found goes into ``DIR/on_gpu.jsonl``, a line a row, as soon
as it is; the page is made from these lines, and cases that are there are not run again. Where there is no GPU the CPU
takes its place, which tries the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CASE_SECONDS = 150
"""After which a case is given up."""
TITLES = {
    "rates": "What the chip gives",
    "attention": "Attention, forward and backward",
    "steps": "Training steps",
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "rates": ("what", "hardware table", "measured", "ratio"),
    "attention": (
        "batch, length, heads, width, mask",
        "kernel",
        "ms",
        "predicted",
        "ratio",
        "share of peak",
        "XLA's (ms)",
        "error",
        "XLA's",
    ),
    "steps": (
        "step",
        "ms",
        "predicted",
        "ratio",
        "read from HLO",
        "ratio",
        "plain `jax.jit` (ms)",
        "ratio",
        "GiB",
        "predicted",
        "ratio",
        "compiler's",
        "plain",
        "loss differs by",
        "gradients by",
        "passes that changed it",
    ),
}


def run(case: str, folder: Path) -> None:
    """One case in a process of its own; a line for each of its rows, or one that says why there is none."""
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--folder", str(folder), "--case", case]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS, check=False)
        failed, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        failed, said = 1, f"no end after {CASE_SECONDS} s"
    if failed:
        record(folder, {"case": case, "kind": "failed", "row": said[-1500:]})
    print(f"{case}: {'FAILED ' + said[-300:] if failed else 'done'} in {time.perf_counter() - begun:.0f} s", flush=True)


def record(folder: Path, found: Mapping[str, Any]) -> None:
    """Adds a line to what was found."""
    with (folder / "on_gpu.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was found until now."""
    file = folder / "on_gpu.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def page(folder: Path) -> str:
    """The lines that were found, as tables; of a case that was run twice, the later."""
    newest = {(x["kind"], x["case"], x.get("part", "")): x for x in lines(folder)}
    devices = sorted({x["device"] for x in newest.values() if "device" in x})
    parts = ["# On a GPU", f"`python -m benchmarks.on_gpu`, {', '.join(devices)}, {date.today()}."]
    for kind, title in TITLES.items():
        rows = [x["row"] for (k, *_), x in newest.items() if k == kind]
        if rows:
            head = COLUMNS[kind]
            table = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
            table += [f"| {' | '.join(row)} |" for row in rows]
            parts += [f"## {title}", "\n".join(table)]
    done = {case for k, case, _ in newest if k != "failed"}
    failed = [
        f"{case}: `{x['row'].strip().splitlines()[-1]}`"
        for (k, case, _), x in newest.items()
        if k == "failed" and case not in done
    ]
    if failed:
        parts += ["## Failed", "\n".join(f"- {line}" for line in failed)]
    return "\n\n".join(parts) + "\n"


def one(case: str, folder: Path) -> None:
    """Runs a case in this process."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    from benchmarks import on_gpu_cases  # noqa: PLC0415 - imports JAX, for which the environment is set first

    for kind, part, row in on_gpu_cases.CASES[case]():
        device = on_gpu_cases.device_text()
        record(folder, {"case": case, "part": part, "kind": kind, "row": row, "device": device})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--case", default="")
    parser.add_argument("word", nargs="?", default="")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.case:
        one(chosen.case, chosen.folder)
        return
    from benchmarks.on_gpu_cases import CASES  # noqa: PLC0415 - only the names: no device is asked for

    there = {x["case"] for x in lines(chosen.folder) if x["kind"] != "failed"}
    for case in CASES:
        if chosen.word in case and case not in there:
            run(case, chosen.folder)
            (chosen.folder / "on_gpu.md").write_text(page(chosen.folder))


if __name__ == "__main__":
    main()
