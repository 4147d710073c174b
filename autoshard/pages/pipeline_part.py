"""The part of a page about a pipeline: its schedule drawn, its stages, and what they send to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autoshard.machine.collective import ALL_GATHER, COLLECTIVE_PERMUTE, CollectiveKind, collective_seconds
from autoshard.pages.html import bar, paragraph, rows_of
from autoshard.pages.picture import Picture
from autoshard.plan.decisions import PipelinePlan
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord
from autoshard.schedule.picture import blocks
from autoshard.units import size_text, time_text

MAX_TICKS_DRAWN = 128
"""Ticks of a pipeline's schedule that are drawn."""
_SENT: Mapping[CollectiveKind, str] = {
    COLLECTIVE_PERMUTE: "a stage hands what it computed to the next, forwards, and gradients back",
    ALL_GATHER: "weights, or their gradients, of layers that one stage keeps and another runs",
}


def schedule_drawn(plan: PlanRecord, pipeline: PipelinePlan) -> Picture:
    """A row for each stage, a column for each tick; later chunks are paler."""
    schedule = pipeline.schedule
    shapes, width, height = blocks(schedule.table[:MAX_TICKS_DRAWN], schedule.chunks)
    title = f"the pipeline of {plan.name}: {plural(pipeline.stages, 'stage')}, {len(schedule.table)} ticks"
    label = f"{title}; a stage is idle for {pipeline.bubble:.0%} of the step, on average."
    return Picture(title, width, height, shapes, f"{title}\n{schedule}", label)


def schedule_scrolled(plan: PlanRecord, pipeline: PipelinePlan) -> str:
    """The schedule as HTML, in its own size."""
    picture = schedule_drawn(plan, pipeline)
    drawn = f'<div style="width:{picture.width}px">{picture.element}</div>'
    return f'<div class="schedule" style="overflow-x:auto" tabindex="0">{drawn}</div>'


def pipeline_part(plan: PlanRecord, pipeline: PipelinePlan) -> str:
    """The schedule, what each stage does and holds, and what stages send, as HTML."""
    most = max(pipeline.seconds, default=0.0) or 1.0
    rows = [
        (
            str(stage),
            "+".join(str(pipeline.layers[chunk[stage]]) for chunk in pipeline.schedule.placement),
            time_text(pipeline.seconds[stage]),
            bar(pipeline.seconds[stage] / most),
            size_text(pipeline.bytes[stage]),
        )
        for stage in range(pipeline.stages)
    ]
    ticks = pipeline.schedule.table
    first = f", the first {MAX_TICKS_DRAWN} drawn" if len(ticks) > MAX_TICKS_DRAWN else ""
    text = (
        f"{plural(pipeline.stages, 'stage')} along {pipeline.axis}, {pipeline.microbatches} micro-batches, "
        f"{len(ticks)} ticks{first}. "
        f"A stage is idle for {pipeline.bubble:.0%} of the step, on average. Blue is forward, other colours are "
        "backward, the number is the micro-batch; point at a block to see what it is."
    )
    table = rows_of(("stage", "layers", "busy", "", "per device"), rows, {0: "n", 2: "n", 4: "n"}, raw=frozenset({3}))
    sent = [*_sent(plan, pipeline)]
    kinds = {0: "n", 1: "what", 2: "wide"}
    between = f"<h3>What stages send</h3>{rows_of(('total', 'collective', 'why'), sent, kinds)}" if sent else ""
    return f"{paragraph(text)}{schedule_scrolled(plan, pipeline)}{table}{between}"


def _sent(plan: PlanRecord, pipeline: PipelinePlan) -> Iterator[tuple[str, str, str]]:
    """Rows of the collectives along the axis of the stages: seconds, what, why."""
    axes, runs = (pipeline.axis,), Counter[tuple[CollectiveKind, int]]()
    for c in plan.cost.collectives:
        if c.axes == axes:
            runs[c.kind, c.bytes] += c.count
    for (kind, size), count in runs.items():
        seconds = collective_seconds(kind, axes, size, plan.mesh) * count
        what = f"{kind} over {pipeline.axis}, {count} x {size_text(size)}"
        yield time_text(seconds), what, _SENT.get(kind, "sums and results that one stage alone has")
