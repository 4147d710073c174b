"""The user's own lines, with what each costs beside it: the costliest, then every file's."""

from __future__ import annotations

import linecache
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost.profile import LineCost, StepProfile
from autoshard.pages.html import bar, folded, paragraph, rows_of
from autoshard.pages.picture import escaped
from autoshard.plan.document import is_library, short_source
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

MAX_FILE_BYTES = 2**22
"""A larger file is not read."""
MAX_SHOWN = 600
"""Most lines of text that are shown, over all files."""
_AROUND, _COSTLIEST = 2, 10
STAGES_SHARE = (
    "These are figures of one stage's devices if they ran all layers, one micro-batch at a time: the stages share them."
)
"""What is said of the profile of a pipeline."""


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


def source_part(plan: PlanRecord, f: StepProfile) -> str:
    """The part as HTML; of a pipeline, ``f`` is the profile of one stage's devices that run all layers."""
    sent: dict[str, Counter[str]] = {}
    for c in plan.cost.collectives if plan.pipeline is None else f.moves:
        sent.setdefault(c.source, Counter())[f"{c.kind} over {'+'.join(c.axes or ())}"] += c.count
    whole = f.seconds or 1.0
    costliest = [
        (
            time_text(x.compute + x.transfers),
            _bars(x, whole),
            short_place(x.source) or "the rest",
            line_text(x.source),
            _collectives(sent.get(x.source)),
            size_text(x.peak_bytes) if x.peak_bytes else "",
        )
        for x in sorted(f.lines, key=lambda x: -x.compute - x.transfers)[:_COSTLIEST]
    ]
    head = ("total", "", "line", "code", "collectives", "at the peak")
    kinds = {0: "n", 2: "place", 3: "path long", 4: "what", 5: "n"}
    shared = "" if plan.pipeline is None else f"{STAGES_SHARE} "
    text = paragraph(
        f"{shared}Seconds of one call, all iterations of loops included: blue is compute, orange communication. "
        "Backward operations count for the line that they are the gradient of. At the peak: bytes of buffers made "
        "there. The text is that of the files as they are now."
    )
    sources = source_files(f)
    own = "".join(_excerpt(file, sent, whole) for file in sources if not file.library)
    libraries = "".join(_excerpt(file, sent, whole) for file in sources if file.library)
    return (
        f"{text}<h3>The costliest lines</h3>{rows_of(head, costliest, kinds, raw=frozenset({1}))}{own}"
        f"{folded('Libraries', libraries) if libraries else ''}"
    )


def short_place(source: str) -> str:
    """``file:line`` with the file's name alone."""
    return short_source(source).replace("\\", "/").rpartition("/")[2]


def _excerpt(file: SourceFile, sent: Mapping[str, Counter[str]], whole: float) -> str:
    """The lines of one file, with what they cost."""
    rows: list[str] = []
    before = file.lines[0].number - 1
    for x in file.lines:
        if x.number > before + 3:
            rows.append('<tr class="gap"><td colspan=6>⋮</td></tr>')
        before, cost = x.number, x.cost
        cells = ("", "", "", "")
        if cost:
            held = size_text(cost.peak_bytes) if cost.peak_bytes else ""
            collectives = escaped(_collectives(sent.get(cost.source)), 80)
            cells = time_text(cost.compute + cost.transfers), _bars(cost, whole), held, collectives
        rows.append(
            f'<tr{" class=hot" if cost else ""}><td class="n">{cells[0]}</td><td>{cells[1]}</td>'
            f'<td class="n soft">{x.number}</td><td class="code">{escaped(x.text.expandtabs(4), 160)}</td>'
            f'<td class="n">{cells[2]}</td><td>{cells[3]}</td></tr>'
        )
    names = "".join(f'<th scope="col">{n}</th>' for n in ("total", "", "", "code", "at the peak", "collectives"))
    return (
        f'<h3>{escaped(file.path, 200)}</h3><div class="scroll" tabindex="0"><table class="source"><thead><tr>'
        f"{names}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _bars(x: LineCost, whole: float) -> str:
    return bar(x.compute / whole) + bar(x.transfers / whole, "sent")


def _collectives(found: Counter[str] | None) -> str:
    return ", ".join(f"{n} {what}" for what, n in (found or Counter[str]()).most_common(3))
