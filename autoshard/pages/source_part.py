"""The part of a page with the user's code: the costliest lines, and every file's lines with what each costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoshard.cost.profile import LineCost, StepProfile
from autoshard.pages.html import bar, folded, paragraph, rows_of
from autoshard.pages.picture import escaped
from autoshard.pages.source_lines import SourceFile, line_text, source_files
from autoshard.plan.document import short_source
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

_COSTLIEST = 10


def source_part(plan: PlanRecord, f: StepProfile) -> str:
    """The part as HTML."""
    sent: dict[str, Counter[str]] = {}
    for c in plan.cost.collectives:
        sent.setdefault(c.source, Counter())[f"{c.kind} over {'+'.join(c.axes or ())}"] += c.count
    costliest = [
        (
            time_text(x.compute + x.transfers),
            _bars(x, plan),
            short_place(x.source) or "the rest",
            line_text(x.source),
            _collectives(sent.get(x.source)),
            size_text(x.peak_bytes) if x.peak_bytes else "",
        )
        for x in sorted(f.lines, key=lambda x: -x.compute - x.transfers)[:_COSTLIEST]
    ]
    head = ("total", "", "line", "code", "collectives", "at the peak")
    kinds = {0: "n", 2: "place", 3: "path long", 4: "what", 5: "n"}
    text = paragraph(
        "Seconds of one call, all iterations of loops included: blue is compute, orange communication. Backward "
        "operations count for the line that they are the gradient of. At the peak: bytes of buffers made there. "
        "The text is that of the files as they are now."
    )
    sources = source_files(f)
    own = "".join(_excerpt(file, sent, plan) for file in sources if not file.library)
    libraries = "".join(_excerpt(file, sent, plan) for file in sources if file.library)
    return (
        f"{text}<h3>The costliest lines</h3>{rows_of(head, costliest, kinds, raw=frozenset({1}))}{own}"
        f"{folded('Libraries', libraries) if libraries else ''}"
    )


def short_place(source: str) -> str:
    """``file:line`` with the file's name alone."""
    return short_source(source).replace("\\", "/").rpartition("/")[2]


def _excerpt(file: SourceFile, sent: Mapping[str, Counter[str]], plan: PlanRecord) -> str:
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
            cells = time_text(cost.compute + cost.transfers), _bars(cost, plan), held, collectives
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


def _bars(x: LineCost, plan: PlanRecord) -> str:
    whole = plan.cost.seconds or 1.0
    return bar(x.compute / whole) + bar(x.transfers / whole, "sent")


def _collectives(found: Counter[str] | None) -> str:
    return ", ".join(f"{n} {what}" for what, n in (found or Counter[str]()).most_common(3))
