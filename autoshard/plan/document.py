"""The document model of reports: sections of sentences and tables, with short source paths and plurals."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_LIBRARY = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_CELL = re.compile(r".*[/\\](?:ipykernel_\d+[/\\]\d+\.py|<ipython-input[^>]*>)$")


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; the columns ``numbers`` are right-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """A title, some sentences, a table, and remarks beneath it."""

    title: str
    sentences: tuple[str, ...] = ()
    table: Table | None = None
    remarks: tuple[str, ...] = ()


def short_source(source: str) -> str:
    """``file:line`` with the file relative to the working directory or to site-packages, or as a notebook's cell."""
    file, _, line = source.rpartition(":")
    return f"{_short_file(file)}:{line}" if file else source


def is_library(file: str) -> bool:
    """Whether the file is in site-packages."""
    return _LIBRARY.match(file) is not None


def plural(n: int, noun: str) -> str:
    """``n`` and the noun, in the plural unless ``n`` is 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _short_file(path: str) -> str:
    if _CELL.match(path):
        return "cell"
    if _LIBRARY.match(path):
        return _LIBRARY.sub("", path)
    return path.removeprefix(os.path.join(os.path.realpath(os.curdir), ""))
