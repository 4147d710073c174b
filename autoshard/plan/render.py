"""Renders a report as plain text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator

from autoshard.plan.document import Section, Table
from autoshard.plan.record import PlanRecord
from autoshard.plan.review import review

WIDTH = 120
_COLUMN = 64


def explain(plan: PlanRecord) -> str:
    """The review of ``plan`` as plain text."""
    return as_text(review(plan))


def as_text(sections: Iterable[Section]) -> str:
    """Sections as plain text, at most 120 columns wide; the first is the heading."""
    lines: list[str] = []
    for n, section in enumerate(sections):
        indent = "  " if n else ""
        lines += ["", section.title] if n else _wrapped(section.title, "", "")
        for sentence in section.sentences:
            lines += _wrapped(sentence, indent, indent)
        if section.table:
            lines += [f"{indent}{line}".rstrip() for line in _table_lines(section.table, WIDTH - len(indent))]
        for remark in section.remarks:
            lines += _wrapped(remark, f"{indent}- ", f"{indent}  ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def _table_lines(table: Table, width: int) -> Iterator[str]:
    """``table`` in lines of at most ``width`` characters; the widest columns are narrowed and their cells wrapped."""
    rows = [table.head, *table.rows]
    wide = [min(_COLUMN, max(len(r[c]) for r in rows)) for c in range(len(table.head))]
    while sum(wide) + 2 * (len(wide) - 1) > width:
        wide[wide.index(max(wide))] -= 1
    for row in rows:
        cells = [textwrap.wrap(cell, w, break_on_hyphens=False) or [""] for cell, w in zip(row, wide, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = [
                p.rjust(w) if c in table.numbers else p.ljust(w)
                for c, (p, w) in enumerate(zip(parts, wide, strict=True))
            ]
            yield "  ".join(padded).rstrip()
