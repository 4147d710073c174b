"""The user's own lines, with what each costs beside it."""

from __future__ import annotations

import linecache
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost.profile import LineCost, StepProfile
from autoshard.plan.document import is_library, short_source

MAX_FILE_BYTES = 2**22
"""A larger file is not read."""
MAX_SHOWN = 600
"""Most lines of text that are shown, over all files."""
_AROUND = 2


@dataclass(frozen=True)
class SourceLine:
    """One line of text; ``cost`` where the step has operations of it."""

    number: int
    text: str
    cost: LineCost | None


@dataclass(frozen=True)
class SourceFile:
    """Lines of one file in order; a gap in their numbers is what was left out."""

    path: str
    """As a person writes it: `short_source`."""
    lines: tuple[SourceLine, ...]
    library: bool
    """Whether it is installed, and so hardly the reader's own."""


def source_files(profile: StepProfile) -> list[SourceFile]:
    """The files with the costliest lines first: those lines, and what is around them."""
    by_file: dict[str, dict[int, LineCost]] = defaultdict(dict)
    for x in profile.lines:
        file, _, number = x.source.rpartition(":")
        if file and number.isdigit():
            by_file[file][int(number)] = x
    files: list[SourceFile] = []
    room = MAX_SHOWN
    for file, costs in sorted(
        by_file.items(), key=lambda item: -sum(x.compute + x.transfers for x in item[1].values())
    ):
        text = _text_of(file)
        near = {n + k for n in costs for k in range(-_AROUND, _AROUND + 1) if 0 < n + k <= len(text)}
        near = {n for n in near if text[n - 1].strip()}
        numbers = sorted(near | set(costs))[:room]
        room -= len(numbers)
        path = short_source(f"{file}:0").removesuffix(":0")
        lines = [SourceLine(n, text[n - 1] if n <= len(text) else "", costs.get(n)) for n in numbers]
        if lines:
            files.append(SourceFile(path, tuple(lines), is_library(file)))
    return files


def line_text(source: str) -> str:
    """The text of ``file:line``, or nothing where it cannot be read."""
    file, _, number = source.rpartition(":")
    text = _text_of(file) if file and number.isdigit() else ()
    return text[int(number) - 1].strip() if number.isdigit() and 0 < int(number) <= len(text) else ""


def _text_of(file: str) -> Sequence[str]:
    """The lines of a Python file or of a notebook's cell; none of anything else: a stored plan may name any file."""
    if file not in linecache.cache:
        try:
            if not file.endswith(".py") or not os.path.isfile(file) or os.path.getsize(file) > MAX_FILE_BYTES:
                return ()
        except (OSError, ValueError):
            return ()
    return [line.rstrip("\n") for line in linecache.getlines(file)]
