"""Whether two versions of autoshard make the same plans: the cells of the bench and the programs of the memory table.

    python -m benchmarks.plan_snapshot write FOLDER [WORD]
    python -m benchmarks.plan_snapshot compare BEFORE AFTER [OLD=NEW ...]

``write`` plans every cell of `benchmarks.cells` and every case of `benchmarks.target_cases` for TPUs (with WORD, those
that have it in their name), with no accelerator and no compiler, and stores each plan's JSON. ``compare`` reads two
such folders: exit status 1 and one line a difference where anything but fingerprints, the JSON's version and
explanations differs; how many explanations differ is printed. OLD=NEW renames a field (``leaves=reduced_specs``) or a
value of the older plans before they are compared.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import autoshard
from benchmarks.baselines import abstract
from benchmarks.cells import CELLS, COLUMNS
from benchmarks.target_cases import cases, decorated

IGNORED = frozenset({"autoshard_plan", "fingerprint"})
EXPLANATIONS = frozenset(
    {"diagnostics", "passes", "reason", "replaces", "resharded_from", "source", "sources", "text", "why"}
)
"""Fields that say why something was decided, or how it is worded: another version may have others."""

EntryKeys = tuple[str | int, ...]
"""Of entries, from the plan's JSON down."""


def plans(word: str) -> Iterator[tuple[str, Any]]:
    """Name and JSON of each plan."""
    for cell in CELLS:
        if word in str(cell):
            model = cell.build()
            step = autoshard.jit(model.step(), mesh=COLUMNS[cell.column].mesh(), donate_argnums=0)
            yield f"cell {cell}", step.plan(*abstract(model)).to_json()
    for case in cases("v5e"):
        name = f"case {case} {case.mesh} {case.strategy}"
        if word in name:
            step, *shapes = decorated(case)
            yield name, step.plan(*shapes).to_json()


def differences(
    before: Any, after: Any, renamed: Mapping[str, str], at: EntryKeys = ()
) -> Iterator[tuple[EntryKeys, Any, Any]]:
    """Keys, old and new value of everything that differs. A record equals a row of the same values in older plans."""
    if isinstance(before, dict) and isinstance(after, dict):
        before = {renamed.get(k, k): v for k, v in before.items()}
        for key in sorted({*before, *after} - IGNORED):
            if key not in after:
                yield (*at, key), before[key], "(absent)"
            elif key in before:  # fields that the older plans lack are not compared
                yield from differences(before[key], after[key], renamed, (*at, key))
    elif isinstance(before, list) and isinstance(after, dict) and len(before) == len(after):
        yield from differences(before, list(after.values()), renamed, at)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, renamed, (*at, i))
    elif (renamed.get(before, before) if isinstance(before, str) else before) != after:
        yield at, before, after


def is_explanation(keys: EntryKeys) -> bool:
    """Whether ``keys`` lead into a field that explains a decision and is none itself."""
    return not EXPLANATIONS.isdisjoint(keys)


def write(folder: Path, word: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for name, plan in plans(word):
        (folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json").write_text(json.dumps(plan, indent=1))
        print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)


def compare(before: Path, after: Path, renamed: Mapping[str, str]) -> int:
    """The number of plans that differ in their decisions."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.json")})
    changed, explanations = 0, 0
    for name in names:
        if not all((folder / name).exists() for folder in (before, after)):
            print(f"{name}: only in one folder")
            changed += 1
            continue
        old, new = (json.loads((folder / name).read_text()) for folder in (before, after))
        found = list(differences(old, new, renamed))
        decided = [d for d in found if not is_explanation(d[0])]
        explanations += len(found) - len(decided)
        changed += bool(decided)
        for keys, a, b in decided[:5]:
            print(f"{name}: {'.'.join(map(str, keys))}: {str(a)[:80]} -> {str(b)[:80]}")
    print(f"{len(names)} plans, {changed} differ; {explanations} explanations do")
    return changed


def main() -> None:
    command, *words = sys.argv[1:]
    if command == "write":
        write(Path(words[0]), " ".join(words[1:]))
    else:
        sys.exit(bool(compare(Path(words[0]), Path(words[1]), dict(w.split("=", 1) for w in words[2:]))))


if __name__ == "__main__":
    main()
