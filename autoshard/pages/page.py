"""The page of a plan: what it decides, drawn and in words, with the user's own lines and a table of all values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jax.stages import Compiled

from autoshard.cost.memory import Memory
from autoshard.cost.profile import BufferRole, StepProfile
from autoshard.pages import html
from autoshard.pages.candidates_drawn import candidates_drawn, weighed
from autoshard.pages.emitted import emitted_part
from autoshard.pages.findings import Saving, savings, why_moved
from autoshard.pages.html import Part, bar, figure, folded, paragraph, rows_of, sections_html
from autoshard.pages.memory_over_time import memory_over_time
from autoshard.pages.picture import escaped
from autoshard.pages.pipeline_part import pipeline_part, schedule_scrolled
from autoshard.pages.shards import MAX_CARDS, largest_groups, shards
from autoshard.pages.source_lines import STAGES_SHARE, line_text, short_place, source_part
from autoshard.pages.timeline import BLOCKING, timeline
from autoshard.plan.decisions import PipelinePlan
from autoshard.plan.document import plural, short_source
from autoshard.plan.grouping import bytes_per_device, group_arrays
from autoshard.plan.reasons import place_reason
from autoshard.plan.record import PlanRecord
from autoshard.plan.render import as_text
from autoshard.plan.review import diagnostics, review
from autoshard.units import size_text, time_text

MAX_ARRAYS = 1500
"""Most rows of arguments and results in the table of all values."""


def page(plan: PlanRecord, compiled: Compiled | None = None) -> str:
    """The page of ``plan`` as HTML, which needs no network; with a compiled step, it beside the plan."""
    f, work, found = plan.profile, plan.work, savings(plan)
    parts = [
        *([] if compiled is None else [emitted_part(plan, compiled)]),
        Part("arrays", "How arrays are sharded", _arrays(plan)),
        *([Part("pipeline", "The pipeline", pipeline_part(plan, plan.pipeline))] if plan.pipeline else []),
        Part("memory", "Memory over the step", _memory(plan, f, found)),
        *([Part("time", "Time and communication", _time(plan, work))] if work else []),
        Part("layouts", "Layouts that were weighed", _layouts(plan)),
        *([Part("source", "Your code, line by line", source_part(plan, work))] if work else []),
        Part("values", "All values", _values(plan, work), open=False),
        Part("report", "The whole report", sections_html(review(plan)), open=False),
    ]
    return html.document(f"autoshard: plan of {plan.name}", _head(plan, work, found), parts)


def short_page(plan: PlanRecord) -> str:
    """What a notebook shows of a plan: its figures, memory and timeline, or its schedule."""
    pictures = [memory_over_time(plan, plan.profile), timeline(plan, plan.profile)] if plan.profile else []
    drawn = "".join(map(figure, pictures)) + (schedule_scrolled(plan, plan.pipeline) if plan.pipeline else "")
    rest = paragraph("plan.show() writes the whole page: arrays, layouts, source lines and values.", "soft")
    return (
        f'<div class="autoshard autoshard-plan"><style>{html.FIGURES_STYLE}</style>{_figures(plan)}{drawn}{rest}</div>'
    )


def brief(plan: PlanRecord) -> str:
    """A plan in a few lines of text: what it decides, what one call does over time, and its diagnostics."""
    first = next(review(plan))
    found = [as_text([replace(first, sentences=first.sentences[:1])])]
    found += [timeline(plan, plan.profile).text] if plan.profile else []
    found += [as_text([diagnostics(plan)])] if plan.diagnostics else []
    return "\n".join(found)


def _figures(plan: PlanRecord) -> str:
    share = f" ({plan.cost.transfers / plan.cost.seconds:.0%})" if plan.cost.seconds else ""
    budget = "no budget" if plan.memory_budget is None else f"of {size_text(plan.memory_budget)}"
    title = f"<h1>{escaped(plan.name, 120)} <span class=soft>on</span> {escaped(str(plan.mesh), 160)}</h1>"
    return title + html.tiles(
        [
            (time_text(plan.cost.seconds), "predicted for one call"),
            (time_text(plan.cost.compute), "compute"),
            (time_text(plan.cost.transfers), f"communication{share}"),
            (size_text(plan.memory.peak), f"at the peak per device, {budget}"),
            (str(plan.mesh.size), "device" if plan.mesh.size == 1 else "devices"),
            (plan.strategy if len(plan.strategy) < 24 else "pinned", "strategy"),
        ]
    )


def _head(plan: PlanRecord, f: StepProfile | None, found: Sequence[Saving]) -> str:
    answers = _of_profile(plan, f) if f else []
    if found:
        says = "; ".join(f"{size_text(s.bytes)}: {s.what}" for s in found[:3])
        answers.append(("What would save memory?", f"Up to {says}.", "savings"))
    answers += _of_stages(plan.pipeline) if plan.pipeline else []
    boxes = "".join(
        f'<div><b>{escaped(q)}</b>{escaped(says, 700)} <a href="#{at}">more</a></div>' for q, says, at in answers
    )
    return f'{_figures(plan)}<div class="asked">{boxes}</div>'


def _of_stages(plan: PipelinePlan) -> list[tuple[str, str, str]]:
    """Questions of a pipeline with their answers, and where there is more."""
    most = max(range(plan.stages), key=lambda stage: plan.seconds[stage])
    says = f"Stage {most}, busy for {time_text(plan.seconds[most])} of a call. The others wait for it."
    idle = f"A stage is idle for {plan.bubble:.0%} of the step, on average: more micro-batches make it less."
    return [("Which stage costs most?", says, "pipeline"), ("How much is lost to waiting?", idle, "pipeline")]


def _of_profile(plan: PlanRecord, f: StepProfile) -> list[tuple[str, str, str]]:
    """Questions of a step with their answers, and where there is more."""
    answers: list[tuple[str, str, str]] = []
    best = max((x for x in f.lines if x.source), key=lambda x: x.compute + x.transfers, default=None)
    if best is not None and f.seconds:
        seconds = best.compute + best.transfers
        of = "a call" if plan.pipeline is None else "what all stages compute and send"
        says = (
            f"{short_source(best.source)} takes {time_text(seconds)}, {seconds / f.seconds:.0%} of {of}: "
            f"{line_text(best.source)}"
        )
        answers.append(("Which line costs most?", says, "source"))
    gather = next((m for m in f.moves if m.kind == "all-gather"), None)
    if gather is not None:
        says = f"The costliest gather takes {time_text(gather.seconds)} a call: {why_moved(gather, plan)}."
        answers.append(("Why is an array gathered?", says, "moves"))
    else:
        answers.append(("Is anything gathered?", "Nothing: operations compute on the parts as they are.", "time"))
    return answers


def _arrays(plan: PlanRecord) -> str:
    groups, matching = largest_groups(plan)
    names = [a for a in plan.mesh.axis_names if plan.mesh.shape[a] > 1]
    keys = "".join(
        f'<span class="key" style="background:var(--c{plan.mesh.axis_names.index(a) % 8 + 1})"></span>'
        f"{escaped(a, 40)} {plan.mesh.shape[a]}"
        for a in names
    )
    text = paragraph(
        "Left, the devices of the mesh, the first axis downwards; cells that look the same hold the same part. Right, "
        "the array's dimensions, cut where they are split. Each colour is a mesh axis."
    )
    cards = "".join(f"<div>{shards(g, plan.mesh).element}</div>" for g in groups[:MAX_CARDS])
    rest = len(groups) - MAX_CARDS
    more = paragraph(f"{plural(rest, 'smaller group')} of arrays: see All values.", "soft") if rest > 0 else ""
    more += "".join(
        paragraph(f"{m.path}: {plural(len(m.places), 'array')} sharded as those of {m.reference}.", "soft")
        for m in matching
    )
    return f'{text}<p aria-label="Colours of mesh axes">{keys}</p><div class="cards">{cards}</div>{more}'


_SHOWN = 20
"""Rows of a table before what folds."""
_ROLES: Mapping[BufferRole, str] = {
    "residual": "saved for the backward pass",
    "temporary": "temporary",
    "copy": "copy in another spec",
    "inside": "inside an operation",
}
_NO_PROFILE = paragraph("This plan holds no profile of memory over time, as that of a pipeline does not.")


def _memory(plan: PlanRecord, f: StepProfile | None, found: Sequence[Saving]) -> str:
    m, peak = plan.memory, max(1, plan.memory.peak)
    if f is None:
        made = ((_ROLES["residual"], m.residuals), (_ROLES["temporary"], m.temporaries))
        rows = [(size_text(n), bar(n / peak, "held"), role) for role, n in (*_arguments(m), *made) if n]
        table = rows_of(("bytes", "", "role"), rows, {0: "n", 2: "wide"}, raw=frozenset({1}))
        return f"{_NO_PROFILE}<h3>What is live at the peak, per device</h3>{table}{_savings(found)}"
    live = [
        (size_text(n), bar(n / peak, "held"), role, "all, through the whole call", "", "")
        for role, n in _arguments(m)
        if n
    ]
    live += [
        (
            size_text(x.bytes),
            bar(x.bytes / peak, "held"),
            _ROLES[x.role],
            " or ".join(x.names) or x.op,
            f"{f'{x.count} x ' if x.count > 1 else ''}{x.dtype}{list(x.shape)} as {x.spec}" if x.dtype else "",
            short_place(x.source),
        )
        for x in f.live[:_SHOWN]
    ]
    rest = f.live[_SHOWN:]
    if rest:
        size = sum(x.bytes for x in rest)
        live.append((size_text(size), bar(size / peak, "held"), "", plural(len(rest), "smaller group"), "", ""))
    chip = f" {size_text(f.on_chip)} of these are kept in on-chip memory, and not counted." if f.on_chip else ""
    over_time = figure(
        memory_over_time(plan, f), "Bytes per device over one call. What is returned and not donated counts too."
    )
    return over_time + _at_the_peak(live, chip) + _savings(found)


def _arguments(m: Memory) -> tuple[tuple[str, int], ...]:
    return ("parameters", m.parameters), ("optimizer state", m.optimizer), ("inputs", m.inputs)


def _at_the_peak(rows: Sequence[Sequence[str]], more: str) -> str:
    kinds = {0: "n", 2: "key-of", 3: "path", 4: "path", 5: "place"}
    head = ("bytes", "", "role", "what", "type and spec", "line")
    table = rows_of(head, rows, kinds, raw=frozenset({1}))
    return f"<h3>What is live at the peak</h3>{paragraph('Per device.' + more)}{table}"


def _savings(found: Sequence[Saving]) -> str:
    options = [(size_text(s.bytes), s.what, s.price, s.how) for s in found]
    table = rows_of(("saves", "what", "price", "how"), options, {0: "n", 1: "wide", 3: "path"}) if options else ""
    text = paragraph("By size. Not all of it is live at the peak, and each is priced only when it is planned.")
    return f'<h3 id="savings">What would take less</h3>{text}{table}'


def _time(plan: PlanRecord, f: StepProfile) -> str:
    sent = sum(x.transfers for x in f.lines) or 1.0
    rows = [
        (
            time_text(m.seconds),
            bar(m.seconds / sent, "sent"),
            f"{m.kind} over {'+'.join(m.axes) or 'no axis'}, {m.count} x {size_text(m.bytes)}"
            + (f", {m.phase}" if m.phase != "plain" else ""),
            why_moved(m, plan),
        )
        for m in f.moves
    ]
    head = ("total", "", "collective", "why")
    kinds = {0: "n", 2: "what", 3: "wide"}
    table = rows_of(head, rows[:_SHOWN], kinds, raw=frozenset({1})) if rows else ""
    if rows[_SHOWN:]:
        table += folded(f"{len(rows) - _SHOWN} more", rows_of(head, rows[_SHOWN:], kinds, raw=frozenset({1})))
    none = "" if rows else paragraph("There is no communication.")
    if plan.pipeline is None:
        drawn = figure(timeline(plan, f), f"Point at a block to see what it is. {BLOCKING}")
    else:
        drawn = paragraph(f"When stages run and what they send is above. {STAGES_SHARE}")
    return drawn + f'<h3 id="moves">What moves between devices, and why</h3>{none}{table}'


def _layouts(plan: PlanRecord) -> str:
    rows = [
        (str(p.number) if p.number else "✓", p.text, time_text(p.seconds), size_text(p.peak), p.why)
        for p in weighed(plan)
    ]
    bound = ""
    if plan.bound:
        excess = max(0.0, plan.cost.seconds / plan.bound - 1)
        bound = (
            f" No layout can take less than {time_text(plan.bound)} by the cost model: this one is {excess:.1%} above."
        )
    text = f"{plural(plan.considered, 'layout')} priced.{bound} Lower and further left is better."
    table = rows_of(("", "layout", "seconds", "peak", "why"), rows, {1: "wide", 2: "n", 3: "n"}, best=0)
    return paragraph(text) + figure(candidates_drawn(plan)) + table


def _values(plan: PlanRecord, f: StepProfile | None) -> str:
    rows = [*itertools.islice(_places(plan), MAX_ARRAYS)]
    left_out = 0
    if f is not None:
        rows += [
            (
                f"{v.op}" + (f" ({v.phase})" if v.phase != "plain" else "") + (f" x {v.count}" if v.count > 1 else ""),
                f"{v.dtype}[{', '.join(map(str, v.shape))}]",
                str(v.spec),
                size_text(v.bytes),
                "",
                short_place(v.source),
            )
            for v in f.values
        ]
        left_out = f.values_left_out
    head = ("value", "type", "spec", "per device", "why", "line")
    field = (
        '<p><label>Search <input type="search" data-table="all-values" data-count="found" '
        'placeholder="name, type, axis, line"></label> <span id="found" aria-live="polite"></span></p>'
    )
    rest = paragraph(f"{plural(left_out, 'smaller value')} of the step left out.", "soft") if left_out else ""
    text = paragraph("Arguments, results, and what the step computes. Equal types in equal specs are one row.")
    kinds = {0: "path", 1: "path", 2: "path", 3: "n", 4: "wide", 5: "place"}
    return text + field + rows_of(head, rows, kinds, anchor="all-values") + rest


def _places(plan: PlanRecord) -> Iterator[tuple[str, ...]]:
    for what, places in (("", plan.inputs), ("result ", plan.outputs)):
        for g in group_arrays(places):
            p, n = g.first, len(g.places)
            kind = f"{p.dtype}[{', '.join(map(str, p.shape))}]" + (f" x {n}" if n > 1 else "")
            size = size_text(bytes_per_device(g.places, plan.mesh.shape))
            yield f"{what if not p.path.startswith('result') else ''}{g.path}", kind, p.where, size, place_reason(p), ""
