"""The predicted step over time: a lane for compute, and one for each mesh axis that collectives run over."""

from __future__ import annotations

from autoshard.cost.profile import Span, StepProfile
from autoshard.pages.memory_over_time import LEFT, RIGHT, time_axis
from autoshard.pages.picture import WIDTH, Picture, axis_color, box, line, shown, words
from autoshard.plan.document import plural, short_source
from autoshard.plan.record import PlanRecord
from autoshard.units import time_text

_LANE, _TOP, _COLUMNS = 32, 8, 72
BLOCKING = (
    "One follows another: a collective is drawn for as long as the cost model has a device wait for it, without what "
    "runs beside products. What a compiler hides more makes a call faster than this."
)


def span_text(span: Span) -> str:
    """What a span is: ``all-gather over data: 1.20 ms, for dot_general at model.py:12``."""
    over = f" over {'+'.join(span.axes)}" if span.axes else ""
    where = f" at {short_source(span.source)}" if span.source else ""
    many = f", {plural(span.count, 'operation')}" if span.kind == "compute" else f", {span.count} in a row"
    mostly = "mostly " if span.kind == "compute" and span.count > 1 else ""
    return f"{span.kind}{over}: {time_text(span.seconds)}{many if span.count > 1 else ''}, {mostly}{span.op}{where}"


def timeline(plan: PlanRecord, profile: StepProfile) -> Picture:
    """What runs when; a collective over several axes is in the lane of each."""
    end, axes = plan.cost.seconds or 1.0, plan.mesh.axis_names
    lanes = ["compute", *[a for a in axes if any(a in s.axes for s in profile.spans)]]
    wide, bottom = WIDTH - LEFT - RIGHT, _TOP + _LANE * len(lanes)
    sums = dict.fromkeys(lanes, 0.0)
    letters = {lane: [" "] * _COLUMNS for lane in lanes}
    parts: list[str] = []
    for i in range(len(lanes) + 1):
        parts.append(line(LEFT, _TOP + _LANE * i, WIDTH - RIGHT, _TOP + _LANE * i, "grid"))
    start = 0.0
    for s in profile.spans:
        x, width = LEFT + wide * start / end, max(0.4, wide * s.seconds / end)
        for lane in ["compute"] if s.kind == "compute" else [a for a in s.axes if a in lanes]:
            sums[lane] += s.seconds
            color = "c0" if lane == "compute" else axis_color(lane, axes)
            more = f' data-kind="{s.kind}" data-seconds="{s.seconds!r}"'
            parts.append(box(x, _TOP + _LANE * lanes.index(lane) + 4, width, _LANE - 8, color, span_text(s), more))
            first, last = int(_COLUMNS * start / end), int(_COLUMNS * (start + s.seconds) / end)
            for c in range(first, min(_COLUMNS, max(last, first + 1))):
                letters[lane][c] = "#" if last > first or letters[lane][c] == "#" else "."
        start += s.seconds
    for i, lane in enumerate(lanes):
        y = _TOP + _LANE * i
        parts += [words(LEFT - 8, y + 14, shown(lane, 12), "strong", "end")]
        parts += [words(LEFT - 8, y + 28, time_text(sums[lane]), "soft", "end")]
    parts += time_axis(end, bottom)
    title = f"the predicted step of {plan.name} over time"
    each = ", ".join(f"{lane} {time_text(sums[lane])}" for lane in lanes)
    rows = [f"{shown(lane, 14):>14} |{''.join(letters[lane])}| {time_text(sums[lane])}" for lane in lanes]
    text = "\n".join(
        [
            f"One call over time: {time_text(plan.cost.seconds)}, of collectives what is waited for; "
            "# is busy, . is busy for less.",
            *rows,
        ]
    )
    return Picture(title, WIDTH, bottom + 28, "".join(parts), text, f"{title}: {each}.")
