"""The report of what a plan costs: memory, seconds by collective, the ticks of a pipeline, and layouts that lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoshard.machine.collective import CollectiveKind, collective_seconds
from autoshard.plan.decisions import Alternative, HeldValue, PipelinePlan, Trial
from autoshard.plan.document import Section, Table, plural, short_source
from autoshard.plan.grouping import bytes_per_device
from autoshard.plan.record import PlanRecord
from autoshard.schedule.slots import label
from autoshard.units import size_text, time_text

MAX_COLLECTIVES = 24
"""Most rows of the table of collectives; what is left out is summed up beneath it."""

MAX_RESIDUALS = 24
"""Most rows of the table of what is held and what is made again."""

MAX_TICKS = 48
"""Most ticks of a stage that its row has."""


def memory(plan: PlanRecord) -> Section:
    """Predicted bytes per device by class, and the budget."""
    m, budget = plan.memory, plan.memory_budget
    sentence = f"{size_text(m.peak)} per device at the peak; no budget was set."
    if budget is not None:
        own = " (the chip's memory)" if budget == plan.mesh.hardware.memory else ""
        rest = f"leaves {size_text(budget - m.peak)}" if budget >= m.peak else f"lacks {size_text(m.peak - budget)}"
        sentence = f"{size_text(m.peak)} per device at the peak; the budget of {size_text(budget)}{own} {rest}."
    sentence += " The classes need not add up to it: they are not all live at once."
    rows = [(n, size_text(b), f"{b / m.peak:.0%}" if m.peak and n != "host" else "") for n, b in m.items()]
    return Section("Memory", (sentence,), Table(("class", "per device", "of the peak"), tuple(rows), frozenset({1, 2})))


def residuals(plan: PlanRecord) -> Section:
    """What the backward part reads as it was made, from where, what it makes again, and at what price."""
    held, host = sum(r.held * r.bytes for r in plan.residuals), sum(r.on_host * r.bytes for r in plan.residuals)
    again = sum(r.again * r.seconds for r in plan.residuals)
    there = f"{size_text(host)} are on the host, " if host else ""
    sentence = (
        f"For the backward part {size_text(held)} per device of what is below are held, {there}and {time_text(again)} "
        "a call are spent to make values again. Bytes and seconds are of one layer."
    )
    order = sorted(plan.residuals, key=lambda r: -max(r.held, r.on_host, r.again) * r.bytes)
    rows = [
        (r.name, _what_becomes(r), str(r.layers), size_text(r.bytes), time_text(r.seconds), short_source(r.source))
        for r in order[:MAX_RESIDUALS]
    ]
    left = len(order) - MAX_RESIDUALS
    remarks = (f"{plural(left, 'smaller value')} left out: plan.residuals has each.",) if left > 0 else ()
    head = ("value", "is", "layers", "bytes", "to make again", "at")
    return Section("Held and made again", (sentence,), Table(head, tuple(rows), frozenset({2, 3, 4})), remarks)


def _what_becomes(r: HeldValue) -> str:
    """Whether a value is held, on the host or made again, and in how many of its layers where they differ."""
    each = [("held", r.held), ("on the host", r.on_host), ("made again", r.again)]
    found = [name if n == r.layers else f"{name} in {n}" for name, n in each if n]
    return ", ".join(found) or "not needed"


def cost(plan: PlanRecord) -> Section:
    """Predicted seconds of compute and of each collective, the most expensive first."""
    seconds, loading = plan.cost.seconds, (*_host_transfers(plan), *_loading(plan))
    if not plan.cost.collectives:
        alone = f"{time_text(seconds)} a call, all of it compute: there is no communication."
        return Section("Cost", (alone, *loading))
    counts = Counter[tuple[CollectiveKind, tuple[str, ...], int, str]]()
    for c in plan.cost.collectives:
        counts[c.kind, c.axes or (), c.bytes, short_source(c.source)] += c.count
    each = {k: collective_seconds(k[0], k[1], k[2], plan.mesh) * n for k, n in counts.items()}
    order = sorted(counts, key=lambda k: (-each[k], k))
    rows = [
        (time_text(each[k]), k[0], "+".join(k[1]) or "none", size_text(k[2]), str(counts[k]), k[3] or "unknown")
        for k in order[:MAX_COLLECTIVES]
    ]
    rest = order[MAX_COLLECTIVES:]
    share = f"{plan.cost.transfers / seconds:.0%}" if seconds else "none"
    sent = size_text(sum(c.bytes * c.count for c in plan.cost.collectives))
    sentence = (
        f"{time_text(seconds)} a call: {time_text(plan.cost.compute)} of compute and {time_text(plan.cost.transfers)} "
        f"({share}) of communication: {plural(sum(counts.values()), 'collective')}, {sent} per device."
    )
    left_out = time_text(sum(each[k] for k in rest))
    remark = f"{plural(len(rest), 'smaller row')} left out, {left_out} in total: plan.cost.collectives has each."
    head = ("total", "collective", "axes", "bytes", "runs", "for")
    table = Table(head, tuple(rows), frozenset({0, 3, 4}))
    beside = f"{time_text(plan.cost.hidden)} more of it run beside products, and are no part of this."
    hidden = (beside,) if plan.cost.hidden else ()
    if early := len({c.value for c in plan.intermediates if c.ahead}):
        hidden += (f"Loops over layers gather {plural(early, 'array')} of weights one layer ahead of what reads them.",)
    return Section("Cost", (sentence, *hidden, *loading), table, (remark,) if rest else ())


def _host_transfers(plan: PlanRecord) -> tuple[str, ...]:
    """What goes between the memories of the host and of the device within a call, and what stays on the host."""
    if not plan.cost.host:
        return ()
    kept = [p for p in plan.inputs if p.offloaded]
    size = size_text(bytes_per_device(kept, plan.mesh.shape))
    whose = f", where {plural(len(kept), 'array')}, {size} per device, are between calls" if kept else ""
    return (f"{time_text(plan.cost.host)} of the compute are transfers from and to the host's memory{whose}.",)


def _loading(plan: PlanRecord) -> tuple[str, ...]:
    """What a call's arguments take to load, beside the step."""
    if not plan.loaded or not plan.loading:
        return ()
    size = size_text(bytes_per_device(plan.loaded, plan.mesh.shape))
    return (
        f"Loading {plural(len(plan.loaded), 'array')} of the batch, {size} per device, takes {time_text(plan.loading)} "
        "over the host's link, and is not part of this: with the next call's loaded ahead, a call takes the longer of "
        "the two.",
    )


def alternatives(plan: PlanRecord) -> Section:
    """The best layouts that were priced and not chosen."""
    if not plan.alternatives:
        none = "No other layout differs in cost or memory."
        if plan.considered <= 1:
            none = "No layout takes less by the cost model." if plan.bound else "The strategy leaves no other."
        return Section("Alternatives", (none,))
    rows = [(a.text, time_text(a.seconds), size_text(a.peak), drawback(a, plan)) for a in plan.alternatives]
    return Section("Alternatives", (), Table(("layout", "seconds", "peak", "why not"), tuple(rows), frozenset({1, 2})))


def drawback(a: Alternative, plan: PlanRecord) -> str:
    """Why this layout lost against the chosen one of ``plan``."""
    if plan.memory_budget is not None and a.peak > plan.memory_budget:
        return f"over the budget by {size_text(a.peak - plan.memory_budget)}"
    more = a.seconds - plan.cost.seconds
    if abs(more) > 1e-9 * plan.cost.seconds:
        part = f" ({abs(more) / plan.cost.seconds:.1%})" if plan.cost.seconds else ""
        how = ("slower by", "") if more > 0 else ("faster by", ", but for loading")
        return f"{how[0]} {time_text(abs(more))}{part}{how[1]}"
    return f"as fast, {size_text(abs(a.peak - plan.memory.peak))} {'more' if a.peak > plan.memory.peak else 'less'}"


def compiled_layouts(trials: Sequence[Trial]) -> Section:
    """The layouts that were compiled to choose from: predicted, reported by the compiler, and why each won or lost."""
    best = next(t for t in trials if t.chosen)
    sentence = (
        f"{plural(len(trials), 'layout')} compiled, the predicted best first. What fits in memory as compiled wins; "
        "then the fastest as it was scheduled; then the fastest with no collective beside compute."
    )
    rows: list[tuple[str, ...]] = []
    for t in trials:
        more = "" if t.exact else " or more"
        times = ["" if x is None else time_text(x) + more for x in (t.seconds, t.serial)]
        needed = size_text(t.needed_bytes) if t.needed_bytes else ""
        rows.append((t.text, time_text(t.predicted), *times, needed, _outcome(t, best)))
    head = ("layout", "predicted", "compiled", "nothing hidden", "memory", "")
    return Section("Compiled to choose from", (sentence,), Table(head, tuple(rows), frozenset({1, 2, 3, 4})))


def _outcome(t: Trial, best: Trial) -> str:
    """Why a compiled layout won or lost."""
    if t.refusal:
        return f"refused: {t.refusal}"
    over = "" if t.fits else f"over by {size_text(t.needed_bytes - t.available_bytes, 2)}"
    if t.chosen:
        return f"chosen: {over}, the least" if over else "chosen: the fastest that fits"
    if over or t.seconds is None or best.seconds is None or t.serial is None or best.serial is None:
        return over or "the compiler estimates no time"
    if t.seconds > best.seconds:
        return f"slower by {t.seconds / best.seconds - 1:.1%}"
    if t.serial > best.serial:
        return f"as fast, slower by {t.serial / best.serial - 1:.1%} with nothing hidden"
    return "as fast"


def pipeline(plan: PipelinePlan) -> Section:
    """What the stages do, when, and for how long."""
    schedule = plan.schedule
    chunks = f", {schedule.chunks} chunks of layers on each" if schedule.chunks > 1 else ""
    sentences = (
        f"The layers run on {plural(plan.stages, 'stage')} along {plan.axis}{chunks}, in "
        f"{plan.microbatches} micro-batches and {plural(len(schedule.table), 'tick')}"
        + (f", by {plan.order}." if plan.order else ", by the schedule given."),
        f"A stage is idle for {plan.bubble:.0%} of the step, on average; of stages with equal parts that send in no "
        f"time it would be {plan.ideal_bubble:.0%}.",
        *(() if plan.stored else ("Each layer has arguments of its own: every stage stores all.",)),
        "What comes before the layers runs on the first stage, what comes after them on the last.",
    )
    rows: list[tuple[str, ...]] = []
    for stage in range(plan.stages):
        layers = "+".join(str(plan.layers[row[stage]]) for row in schedule.placement)
        ticks = [label(row[stage], schedule.chunks) for row in schedule.table]
        text = " ".join(ticks[:MAX_TICKS]) + (" ..." if len(ticks) > MAX_TICKS else "")
        rows.append((str(stage), layers, time_text(plan.seconds[stage]), size_text(plan.bytes[stage]), text))
    head = ("stage", "layers", "busy", "per device", "F forward, B backward, of which micro-batch; a dot is idle")
    remarks = ("print(plan.pipeline.schedule) has all ticks.",) if len(schedule.table) > MAX_TICKS else ()
    return Section("Pipeline", sentences, Table(head, tuple(rows), frozenset({0, 1, 2, 3})), remarks)
