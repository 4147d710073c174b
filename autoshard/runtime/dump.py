"""Writes what each stage made of a step to a folder, one text file a stage, where ``AUTOSHARD_DUMP_TO`` names one."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from autoshard.backend.executable import Executable
from autoshard.errors import AutoshardError
from autoshard.ir.graph import graph_lines
from autoshard.ir.program import Program
from autoshard.runtime.plan import Plan

DUMP_VARIABLE = "AUTOSHARD_DUMP_TO"
"""Environment variable: the folder. Each planned step gets a folder of its own in it, ``0001-train``."""


def dump_stages(traced: Program, executable: Executable[Plan]) -> None:
    """Dumps a planned step if the environment asks for it.

    Raises:
      OSError: the folder cannot be written.
    """
    if root := os.environ.get(DUMP_VARIABLE):
        folder = _new_folder(Path(root).expanduser(), executable.program.name)
        for number, (stage, text) in enumerate(_stages(traced, executable), 1):
            (folder / f"{number}-{stage}.txt").write_text(text.rstrip("\n") + "\n")


def _stages(traced: Program, executable: Executable[Plan]) -> Iterator[tuple[str, str]]:
    yield "traced", _program_text(traced)
    reports = "".join(f"pass {report}\n" for report in executable.plan.passes)
    yield "passes", f"{reports}{_program_text(executable.program)}"
    yield "graph", "\n".join(graph_lines(executable.graph))
    yield "plan", executable.plan.explain()
    try:
        yield "constrained", str(executable.jaxpr)
    except AutoshardError as error:  # a mesh without devices here, nor a compiler for it
        yield "constrained", f"not lowered: {error}"


def _program_text(program: Program) -> str:
    return f"{program}\n\n{program.jaxpr}"


def _new_folder(root: Path, name: str) -> Path:
    """A new folder ``NUMBER-NAME`` with the first free number; several processes may share ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name)
    used = [int(path.name.split("-")[0]) for path in root.glob("[0-9]*-*") if path.name.split("-")[0].isdigit()]
    for number in itertools.count(max(used, default=0) + 1):
        try:
            (folder := root / f"{number:04}-{name}").mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError
