"""review: what there is to say about a plan, as a colleague would: sections of sentences and tables.

`autoshard.plan.render` sets them as text and as HTML.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autoshard.machine.collective import ALL_REDUCE, CollectiveKind, collective_seconds
from autoshard.plan.decisions import Alternative, Constraint, Place, Trial
from autoshard.plan.document import Section, Table, plural, shorten_paths
from autoshard.plan.grouping import ArrayGroup, bytes_per_device, report_rows
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

TRANSFERS, PINS = 24, 12
"""Rows that a table of these has at most; what is left out is summed up beneath."""


_REDUCES = (ALL_REDUCE,)
_REPLACES = ", which it replaces"
_BRINGS = ("brought there", "needed so", "pinned")


def review(plan: PlanRecord) -> Iterator[Section]:
    """What there is to say about ``plan``, in reading order; the first section is the heading."""
    yield _heading(plan)
    yield _dimensions(plan)
    yield _state(plan)
    yield _arguments(plan)
    yield _results(plan)
    yield _memory(plan)
    yield _cost(plan)
    if plan.refined:
        yield trials(plan.refined)
    yield _runners_up(plan)
    yield _pins(plan)
    yield Section(
        "Diagnostics",
        () if plan.diagnostics else ("None: nothing was kept whole and no wish was dropped.",),
        remarks=tuple(map(shorten_paths, plan.diagnostics)),
    )


def _heading(plan: PlanRecord) -> Section:
    sure = f"the best of {plan.considered} layouts" if plan.considered > 1 else "the only layout considered"
    where = f"each of {plan.mesh.size} devices" if plan.mesh.size > 1 else "one device"
    if plan.bound:
        gap = max(0.0, 1 - plan.bound / plan.cost.seconds)
        sure += f", proven to be within {gap:.1%} of the best" if gap >= 0.0005 else ", proven to be the best"
    words = [
        f"One call is predicted to take {time_text(plan.cost.seconds)}, and {size_text(plan.memory.peak)} on {where}."
    ]
    if plan.passes:
        words.append(f"Passes run before planning: {'; '.join(plan.passes)}.")
    if plan.compiler_options:
        words.append(f"Compiler options: {', '.join(f'{k}={v!r}' for k, v in plan.compiler_options)}.")
    words.append(f"Fingerprint {plan.fingerprint}.")
    if plan.refined:
        sure = f"of {plural(len(plan.refined), 'layout')} that were compiled the one that the compiler likes best"
    title = f"Plan of {plan.name} on the mesh {plan.mesh}: strategy {plan.strategy}, {sure}"
    return Section(title, tuple(words))


def _dimensions(plan: PlanRecord) -> Section:
    if not plan.dim_splits:
        return Section("Dimensions", ("No argument has a dimension that could be split.",))
    words = [
        "Dimensions that are split alike wherever they meet, heaviest first. Size is their greatest common divisor.",
        "Over is what the search chose; pins and stored state come on top, as the specs of the arguments show.",
    ]
    example = next((n for n, _, _ in plan.dim_splits if re.search(r"\.\d+$", n)), None)
    if example:
        leaf, dim = example.rsplit(".", 1)
        words.append(f"Names come from the largest argument: {example} is dimension {dim} of {leaf}, counted from 0.")
    rows = [
        (name, str(size), "+".join(axes) or "none, whole", str(size // plan.mesh.axes_size(axes)))
        for name, size, axes in plan.dim_splits
    ]
    split = {a for _, _, axes in plan.dim_splits for a in axes} | set(plan.storage)
    used = {a for p in (*plan.inputs, *plan.outputs, *plan.intermediates) for a in p.spec.axes} | split
    idle = [(a, n) for a, n in plan.mesh.shape.items() if n > 1 and a not in used]
    remarks = [f"Nothing is split over {a}: all {n} devices along it do the same work." for a, n in idle]
    return Section(
        "Dimensions",
        tuple(words),
        Table(("class", "size", "over", "a device"), tuple(rows), frozenset({1, 3})),
        tuple(remarks),
    )


def _state(plan: PlanRecord) -> Section:
    replaced = _replaced(plan)
    state = [p for p in plan.inputs if p.donated or p.path in replaced]
    if not state:
        return Section("State", ("The step carries no state from call to call.",))
    kinds: dict[tuple[str, ...], list[Place]] = {}
    for p in state:
        kinds.setdefault(tuple(a for a in plan.mesh.axis_names if a in p.spec.axes), []).append(p)
    once = dict.fromkeys(plan.mesh.axis_names, 1)
    order = sorted(kinds, key=lambda axes: (-bytes_per_device(kinds[axes], once), axes))
    rows = [
        (
            "+".join(axes) or "none, whole",
            str(plan.mesh.axes_size(axes)),
            str(len(kinds[axes])),
            size_text(bytes_per_device(kinds[axes], once)),
            size_text(bytes_per_device(kinds[axes], plan.mesh.shape)),
        )
        for axes in order
    ]
    whole, part = (size_text(bytes_per_device(state, sizes)) for sizes in (once, plan.mesh.shape))
    words = f"What is carried from call to call: {plural(len(state), 'array')}, {whole}, of which a device holds {part}."
    table = Table(("split over", "parts", "arrays", "in all", "a device"), tuple(rows), frozenset({1, 2, 3, 4}))
    split = {a for axes in kinds for a in axes if plan.mesh.shape[a] > 1}
    return Section("State", (words,), table, (_moved(plan, split),) if split else ())


def _moved(plan: PlanRecord, axes: set[str]) -> str:
    """What moves between the devices along ``axes`` but the terms of sums."""
    found = [c for c in plan.cost.collectives if c.kind not in _REDUCES and axes & set(c.axes or ())]
    if not found:
        return "Nothing is gathered along these axes: operations work on the parts as they lie."
    runs = Counter[str]()
    for c in found:
        runs[c.kind] += c.count
    what = " and ".join(plural(n, kind) for kind, n in runs.most_common())
    return (
        f"Along these axes a call runs {what}, {size_text(sum(c.total for c in found))} a device: what an operation "
        "needs otherwise than it lies is brought there for it. Cost has each."
    )


def _replaced(plan: PlanRecord) -> set[str]:
    """The paths of the arguments that a result replaces."""
    return {p.why.removeprefix("as ").removesuffix(_REPLACES) for p in plan.outputs if p.why.endswith(_REPLACES)}


def _arguments(plan: PlanRecord) -> Section:
    total = size_text(bytes_per_device(plan.inputs, plan.mesh.shape))
    donated = _roots(p for p in plan.inputs if p.donated)
    words = [
        f"{plural(len(plan.inputs), 'array')}, {total} on each device. A spec has the mesh axes that split each "
        "dimension, _ where none does."
    ]
    if donated:
        words.append(f"Donated, so that results take their room: {', '.join(donated)}.")
    replaced = _replaced(plan)
    twice = [p for p in plan.inputs if p.path in replaced and not p.donated]
    size = size_text(bytes_per_device(twice, plan.mesh.shape))
    remark = f"Replaced by a result and not donated, so that {size} are there twice: {', '.join(_roots(twice))}."
    return Section("Arguments", tuple(words), _places(plan.inputs, plan), (remark,) if twice else ())


def _roots(places: Iterable[Place]) -> list[str]:
    """The arguments that hold ``places``, by name."""
    return list(dict.fromkeys(re.split(r"[\[.]", p.path, maxsplit=1)[0] for p in places))


def _results(plan: PlanRecord) -> Section:
    others = [p for p in plan.outputs if not p.why.endswith(_REPLACES)]
    carried = len(plan.outputs) - len(others)
    words: list[str] = []
    if carried:
        each = "replaces its argument and lies as it does" if carried == 1 else "replace arguments and lie as those do"
        words.append(f"{plural(carried, 'array')} {each}.")
    if not plan.outputs:
        words.append("The step returns nothing.")
    return Section("Results", tuple(words), _places(others, plan) if others else None)


def _places(places: Sequence[Place], plan: PlanRecord) -> Table:
    rows: list[tuple[str, ...]] = []
    for entry in report_rows(places):
        size = size_text(bytes_per_device(entry.places, plan.mesh.shape))
        n = len(entry.places)
        if isinstance(entry, ArrayGroup):
            p = entry.first
            array = f"{p.dtype}[{','.join(map(str, p.shape))}]"
            kind, note = array if n == 1 else f"{n} x {array}", "pinned" if p.why == "pinned" else ""
            rows.append((entry.path, kind, str(p.spec), size, note))
        else:
            kinds = dict.fromkeys(p.dtype for p in entry.places)
            rows.append((entry.path, f"{n} x {'/'.join(kinds)}", f"as {entry.leader}", size, ""))
    head = ("array", "type", "spec", "a device", "")
    if not any(r[-1] for r in rows):
        head, rows = head[:-1], [r[:-1] for r in rows]
    return Table(head, tuple(rows), frozenset({3}))


def _memory(plan: PlanRecord) -> Section:
    m, budget = plan.memory, plan.memory_budget
    words = f"At the peak {size_text(m.peak)} on each device; no budget was set."
    if budget is not None:
        own = " (the chip's memory)" if budget == plan.mesh.hardware.memory else ""
        rest = f"leaves {size_text(budget - m.peak)}" if budget >= m.peak else f"lacks {size_text(m.peak - budget)}"
        words = f"At the peak {size_text(m.peak)} on each device; the budget of {size_text(budget)}{own} {rest}."
    words += " Classes need not add up to the peak: not all is alive at once."
    rows = [(n, size_text(b), f"{b / m.peak:.0%}" if m.peak else "") for n, b in m.items()]
    return Section("Memory", (words,), Table(("class", "a device", "of the peak"), tuple(rows), frozenset({1, 2})))


def _cost(plan: PlanRecord) -> Section:
    cost = plan.cost
    if not cost.collectives:
        return Section(
            "Cost", (f"{time_text(cost.seconds)} a call, all of it compute: nothing is sent between devices.",)
        )
    alike = Counter[tuple[CollectiveKind, tuple[str, ...], int, str]]()
    for c in cost.collectives:
        alike[c.kind, c.axes or (), c.bytes, shorten_paths(c.source)] += c.count
    seconds = {k: collective_seconds(k[0], k[1], k[2], plan.mesh) * n for k, n in alike.items()}
    order = sorted(alike, key=lambda k: (-seconds[k], k))
    rows = [
        (time_text(seconds[k]), k[0], "+".join(k[1]) or "no axis", size_text(k[2]), str(alike[k]), k[3] or "unknown")
        for k in order[:TRANSFERS]
    ]
    rest = order[TRANSFERS:]
    less = f"{time_text(sum(seconds[k] for k in rest))} in all: plan.cost.collectives has each"
    share = f"{cost.transfers / cost.seconds:.0%}" if cost.seconds else "none"
    sent = size_text(sum(c.total for c in cost.collectives))
    words = (
        f"{time_text(cost.seconds)} a call: {time_text(cost.compute)} of compute, then {time_text(cost.transfers)} "
        f"({share}) of transfers: {sum(alike.values())} of them, {sent} a device."
    )
    remarks = (f"{plural(len(rest), 'smaller row')} left out, {less}.",) if rest else ()
    head = ("in all", "collective", "over", "each", "runs", "for")
    return Section("Cost", (words,), Table(head, tuple(rows), frozenset({0, 3, 4})), remarks)


def _runners_up(plan: PlanRecord) -> Section:
    if not plan.alternatives:
        why = "Nothing else was weighed." if plan.considered <= 1 else "No other layout differs in cost or memory."
        return Section("Runners-up", (why,))
    rows = [(a.text, time_text(a.seconds), size_text(a.peak), _lost(a, plan)) for a in plan.alternatives]
    return Section("Runners-up", (), Table(("layout", "seconds", "peak", "why not"), tuple(rows), frozenset({1, 2})))


def _lost(a: Alternative, plan: PlanRecord) -> str:
    if plan.memory_budget is not None and a.peak > plan.memory_budget:
        return f"over the budget by {size_text(a.peak - plan.memory_budget)}"
    more = a.seconds - plan.cost.seconds
    if abs(more) > 1e-9 * plan.cost.seconds:
        part = f" ({abs(more) / plan.cost.seconds:.1%})" if plan.cost.seconds else ""
        return f"{'slower' if more > 0 else 'faster'} by {time_text(abs(more))}{part}"
    return f"as fast, {size_text(abs(a.peak - plan.memory.peak))} {'more' if a.peak > plan.memory.peak else 'less'}"


def _pins(plan: PlanRecord) -> Section:
    pins = plan.intermediates
    if not pins:
        return Section("Pinned inside the step", ("Nothing: arguments and results settle it.",))
    first = Counter(_reason(p) for p in pins)
    words = f"{plural(len(pins), 'value')}: {', '.join(f'{n} {reason}' for reason, n in first.most_common())}."
    shown = Counter((p.op, p.shape, str(p.spec), p.why, shorten_paths(p.source)) for p in pins if p.why.startswith(_BRINGS))
    order = sorted(shown, key=lambda k: (not k[3].startswith("pinned"), k[4], k))
    rows = [
        (op, str(list(shape)), spec, shorten_paths(why) + (f" (x{shown[k]})" if shown[k] > 1 else ""), source)
        for k in order[:PINS]
        for op, shape, spec, why, source in (k,)
    ]
    rest = [f"{len(order) - PINS} more rows: plan.intermediates has each."] if len(order) > PINS else []
    table = Table(("operation", "shape", "spec", "why", "for"), tuple(rows)) if rows else None
    return Section("Pinned inside the step", (words,), table, tuple(rest))


def _reason(pin: Constraint) -> str:
    """The kind of reason, without what is particular to one pin."""
    kinds = {
        "brought there": "brought there by transfers",
        "needed so": "read otherwise than lying",
        "lies so": "lying otherwise than read",
        "carried": "carried into or out of regions",
        "result of": "made by products",
        "pinned": "pinned by the step itself",
    }
    return next((text for start, text in kinds.items() if pin.why.startswith(start)), pin.why or "for no stated reason")


def trials(found: Sequence[Trial]) -> Section:
    """What was predicted of each, what its compiler said, and why it won or lost."""
    best = next(t for t in found if t.chosen)
    words = (
        f"{plural(len(found), 'layout')} compiled, the one that predictions choose first. What fits by the compiler's "
        "account goes before what does not; then the fewest seconds win, with nothing hidden; of as fast ones, the "
        "fewest with all hidden that can be."
    )
    rows: list[tuple[str, ...]] = []
    for t in found:
        more = "" if t.exact else " or more"
        said = ["" if x is None else time_text(x) + more for x in (t.seconds, t.overlapped)]
        rows.append((t.text, time_text(t.predicted), *said, size_text(t.required) if t.required else "", verdict(t, best)))
    head = ("layout", "predicted", "compiled", "all hidden", "needs", "")
    return Section("Compiled to choose from", (words,), Table(head, tuple(rows), frozenset({1, 2, 3, 4})))


def verdict(t: Trial, best: Trial) -> str:
    """Why a layout won or lost."""
    if t.reason:
        return f"refused: {t.reason}"
    over = "" if t.fits else f"over by {size_text(t.required - t.available, 2)}"
    if t.chosen:
        return f"chosen: {over}, the least" if over else "chosen: the fastest that fits"
    if over or t.seconds is None or best.seconds is None or t.overlapped is None or best.overlapped is None:
        return over or "its compiler estimates no time"
    if t.seconds > best.seconds:
        return f"slower by {t.seconds / best.seconds - 1:.1%}"
    return f"as fast, with all hidden slower by {t.overlapped / best.overlapped - 1:.1%}" if t.overlapped > best.overlapped else "as fast"
