"""Compiles the recipes at full size, for a TPU slice and for H100s, and says whether each fits in memory.

    python -m benchmarks.recipes [tpu|gpu] [WORD]

Needs the extra ``tpu`` or ``gpu``, and neither chip. Each of ``configs/recipes/*-full.yaml`` (with WORD, of those that
have it in their name) goes through `autoshard compile` in a process of its own. The table is
`benchmarks/results/recipes.md`; of recipes that are not compiled now it keeps the row that is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "configs/recipes"
RESULT = Path(__file__).parent / "results" / "recipes.md"
MESHES = {"tpu": [], "gpu": ["--mesh", "h100-16"]}
"""What follows the configuration: those have a TPU slice."""
LIMIT_SECONDS, GIB = 3600, 2**30
INTRODUCTION = """`python -m benchmarks.recipes tpu` and `... gpu`: `autoshard compile` of `configs/recipes/*-full.yaml`
on their TPU slice and with `--mesh h100-16`. Memory is that of a device. The time of a step is the estimate of what was
compiled, where all is hidden that can be."""
HEAD = "| recipe | mesh | planned GiB | compiled GiB | of | fits | audit | step (ms) | seconds | date |"


def compiled(recipe: Path, platform: str) -> str:
    """The row of a recipe."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "autoshard", "compile", str(recipe), "--json", *MESHES[platform]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_SECONDS, check=False)
    seconds, name = time.perf_counter() - begun, recipe.stem.removesuffix("-full")
    if done.returncode == 2 or not done.stdout:
        said = (done.stderr.strip().splitlines() or [""])[-1][:300].replace("|", "/")
        return f"| {name} | {platform} | - | - | - | NO: {said} | - | - | {seconds:.0f} | {date.today()} |"
    (found,) = json.loads(done.stdout)["phases"]
    memory, estimate = found["memory"], found["estimate"]
    return (
        f"| {name} | {found['mesh']} | {_peak(memory['planned'])} | {_peak(memory['compiled'])} "
        f"| {found['has'] / GIB:.1f} | {'yes' if found['fits'] else 'NO'} "
        f"| {'clean' if found['audit'] and found['audit']['clean'] else 'NO'} "
        f"| {1e3 * estimate['bound'] if estimate else float('nan'):,.0f} | {seconds:.0f} | {date.today()} |"
    )


def _peak(memory: Any) -> str:
    return "-" if memory is None else f"{memory['peak'] / GIB:.1f}"


def rows() -> dict[tuple[str, str], str]:
    """The rows of the table as it is, by recipe and platform."""
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    found = [line for line in lines if line.startswith("| ") and line != HEAD]
    return {
        (line.split("|")[1].strip(), "tpu" if "TPU" in line or "| tpu |" in line else "gpu"): line for line in found
    }


def main() -> None:
    platform = sys.argv[1] if sys.argv[1:] and sys.argv[1] in MESHES else "tpu"
    words = " ".join(sys.argv[1:]).removeprefix(platform).strip()
    for recipe in sorted(RECIPES.glob("*-full.yaml")):
        name = recipe.stem.removesuffix("-full")
        if words in name:
            row = compiled(recipe, platform)
            print(row, flush=True)
            kept = {**rows(), (name, platform): row}
            lines = [HEAD, "|---|---|--:|--:|--:|---|---|--:|--:|---|", *(kept[key] for key in sorted(kept))]
            table = "\n".join(lines)
            RESULT.write_text(f"# Recipes at full size\n\n{INTRODUCTION}\n\n{table}\n")


if __name__ == "__main__":
    main()
