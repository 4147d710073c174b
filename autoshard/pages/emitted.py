"""The part of a page that sets a compiled step beside its plan: time, memory and collectives, planned and emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax.stages import Compiled

from autoshard.backend.audit import audit
from autoshard.backend.compilation import memory_usage
from autoshard.backend.estimate import estimate
from autoshard.pages.html import Part, bar, paragraph, rows_of
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text


@dataclass(frozen=True)
class Beside:
    """One figure as planned and as the compiled step has it."""

    what: str
    planned: float
    emitted: float
    text: Callable[[float], str]
    """Of a figure."""
    verdict: str


def figures_beside(plan: PlanRecord, compiled: Compiled) -> list[Beside]:
    """Seconds of a call, bytes per device, then bytes of each kind of collective over each set of axes."""
    made, usage, found = estimate(compiled, plan.mesh), memory_usage(compiled, plan.mesh), audit(compiled, plan)
    rows = [
        Beside("compute", plan.cost.compute, made.compute, time_text, _ratio(plan.cost.compute, made.compute)),
        Beside("communication", plan.cost.sent, made.transfers, time_text, ""),
    ]
    if usage is not None:
        rows.append(Beside("memory", plan.memory.peak, usage.peak, size_text, _ratio(plan.memory.peak, usage.peak)))
    for row in found.rows:
        axes = "unknown groups" if row.axes is None else "+".join(row.axes) or "no axis"
        planned, emitted = (sum(c.total_bytes for c in part) for part in (row.planned, row.emitted))
        rows.append(Beside(f"{row.kind} over {axes}", planned, emitted, size_text, row.verdict))
    return rows


def emitted_part(plan: PlanRecord, compiled: Compiled) -> Part:
    """The part of the page."""
    found = figures_beside(plan, compiled)
    cells: list[tuple[str, ...]] = []
    for x in found:
        most = max(max(y.planned, y.emitted) for y in found if y.text is x.text) or 1.0
        bars = f"{bar(x.planned / most)}<br>{bar(x.emitted / most, 'sent')}"
        cells.append((x.what, x.text(x.planned), bars, x.text(x.emitted), x.verdict))
    text = paragraph(
        "Per device, of one call; blue is planned, orange is what the compiler made: its time as estimated from its "
        "code, without overlap, its memory as it reports it, its collectives as they stand in its program."
    )
    head = ("", "planned", "", "emitted", "")
    return Part("emitted", "Planned and emitted", text + rows_of(head, cells, {1: "n", 3: "n"}, raw=frozenset({2})))


def _ratio(planned: float, emitted: float) -> str:
    return f"{emitted / planned:.2f} of planned" if planned else ""
