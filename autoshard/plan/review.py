"""The report of what a plan decides: how dimensions, state, arguments, results and intermediates are sharded, and why.

`autoshard.plan.review_cost` reports what that costs; `autoshard.plan.render` renders both as text, and
`autoshard.pages.html` as HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autoshard.ir.graph import Diagnostic
from autoshard.jaxpr.paths import argument_name
from autoshard.machine.collective import ALL_REDUCE
from autoshard.plan.decisions import Place
from autoshard.plan.document import Section, Table, plural, short_source
from autoshard.plan.grouping import ArrayGroup, bytes_per_device, note_of, report_rows
from autoshard.plan.reasons import constraint_group, constraint_reason
from autoshard.plan.record import PlanRecord
from autoshard.plan.review_cost import alternatives, compiled_layouts, cost, memory, pipeline, residuals
from autoshard.units import size_text, time_text

MAX_CONSTRAINTS = 12
"""Most rows of the table of constraints; how many are left out is said beneath it."""


def review(plan: PlanRecord) -> Iterator[Section]:
    """The report of ``plan``; the first section is the heading."""
    yield _heading(plan)
    yield _dimensions(plan)
    if plan.pipeline is not None:
        yield pipeline(plan.pipeline)
    yield _state(plan)
    yield _arguments(plan)
    yield _results(plan)
    yield memory(plan)
    if plan.residuals:
        yield residuals(plan)
    yield cost(plan)
    if plan.refined:
        yield compiled_layouts(plan.refined)
    yield alternatives(plan)
    yield _constraints(plan)
    yield diagnostics(plan)


def diagnostics(plan: PlanRecord) -> Section:
    """What a user of the plan should know: what is kept whole, not split, or not as requested."""
    none = () if plan.diagnostics else ("None: every operation has a rule, and every requested spec was applied.",)
    return Section("Diagnostics", none, remarks=tuple(map(_diagnostic, plan.diagnostics)))


def _diagnostic(d: Diagnostic) -> str:
    return str(replace(d, source=short_source(d.source)))


def _heading(plan: PlanRecord) -> Section:
    rank = f", the best of {plan.considered} layouts" if plan.considered > 1 else ""
    if plan.bound:
        excess = plan.cost.seconds / plan.bound - 1
        rank += f", within {excess:.1%} of the least possible" if excess >= 0.0005 else ", none can take less"
        rank += " by the cost model"
    if plan.refined:
        rank = f", the best of {plural(len(plan.refined), 'compiled layout')} by the compiler's estimate"
    where = f"each of {plan.mesh.size} devices" if plan.mesh.size > 1 else "one device"
    sentences = [
        f"One call is predicted to take {time_text(plan.cost.seconds)}, and {size_text(plan.memory.peak)} on {where}."
    ]
    if plan.passes:
        sentences.append(f"Passes run before planning: {'; '.join(map(str, plan.passes))}.")
    if plan.compiler_options:
        sentences.append(f"Compiler options: {', '.join(f'{k}={v!r}' for k, v in plan.compiler_options)}.")
    sentences.append(f"Fingerprint {plan.fingerprint}.")
    title = f"Plan of {plan.name} on the mesh {plan.mesh}: strategy {plan.strategy}{rank}"
    return Section(title, tuple(sentences))


def _dimensions(plan: PlanRecord) -> Section:
    if not plan.dim_splits:
        return Section("Dimensions", ("No argument has a dimension that could be split.",))
    by_dim = {d: ", ".join(b.path for b in plan.batch if b.dim == d) for d in sorted({b.dim for b in plan.batch})}
    batch = "; ".join(f"dimension {d} of {paths}" for d, paths in by_dim.items())
    sentences = (
        "Dimensions that are always split the same way form a class, whose size is their greatest common divisor.",
        "Axes are those that the search chose; the arguments' specs also show pins and how state is stored.",
        "A class is named batch, or after its largest argument and a dimension of that, counted from 0.",
        f"Taken for the batch: {batch}." if batch else "No dimension of an argument qualifies as the batch.",
    )
    rows = [
        (d.name, str(d.size), "+".join(d.axes) or "none", str(d.size // plan.mesh.axes_size(d.axes)))
        for d in plan.dim_splits
    ]
    split = {a for d in plan.dim_splits for a in d.axes} | set(plan.storage_axes)
    used = {a for p in (*plan.inputs, *plan.outputs, *plan.intermediates) for a in p.spec.axes} | split
    unused = [(a, n) for a, n in plan.mesh.shape.items() if n > 1 and a not in used]
    remarks = [f"Nothing is split over {a}: all {n} devices along it do the same work." for a, n in unused]
    table = Table(("class", "size", "axes", "per device"), tuple(rows), frozenset({1, 3}))
    return Section("Dimensions", sentences, table, tuple(remarks))


def _state(plan: PlanRecord) -> Section:
    replaced = _replaced(plan)
    state = [p for p in plan.inputs if p.donated or p.path in replaced]
    if not state:
        return Section("State", ("The step carries no state from call to call.",))
    by_axes: dict[tuple[str, ...], list[Place]] = {}
    for p in state:
        by_axes.setdefault(tuple(a for a in plan.mesh.axis_names if a in p.spec.axes), []).append(p)
    unsplit = dict.fromkeys(plan.mesh.axis_names, 1)
    order = sorted(by_axes, key=lambda axes: (-bytes_per_device(by_axes[axes], unsplit), axes))
    rows = [
        (
            "+".join(axes) or "none",
            str(plan.mesh.axes_size(axes)),
            str(len(by_axes[axes])),
            size_text(bytes_per_device(by_axes[axes], unsplit)),
            size_text(bytes_per_device(by_axes[axes], plan.mesh.shape)),
        )
        for axes in order
    ]
    total, local = (size_text(bytes_per_device(state, sizes)) for sizes in (unsplit, plan.mesh.shape))
    sentence = f"Carried from call to call: {plural(len(state), 'array')}, {total} in total, {local} per device."
    table = Table(("split over", "parts", "arrays", "total", "per device"), tuple(rows), frozenset({1, 2, 3, 4}))
    split = {a for axes in by_axes for a in axes if plan.mesh.shape[a] > 1}
    return Section("State", (sentence,), table, (_resharding(plan, split),) if split else ())


def _resharding(plan: PlanRecord, axes: set[str]) -> str:
    """What is sent along ``axes`` other than all-reduces."""
    found = [c for c in plan.cost.collectives if c.kind != ALL_REDUCE and axes & set(c.axes or ())]
    if not found:
        return "Nothing is gathered along these axes: operations compute on the shards as they are."
    counts = Counter[str]()
    for c in found:
        counts[c.kind] += c.count
    what = " and ".join(plural(n, kind) for kind, n in counts.most_common())
    sent = size_text(sum(c.total_bytes for c in found))
    return f"Along these axes a call runs {what}, {sent} per device, to reshard operands and results; Cost lists each."


def _replaced(plan: PlanRecord) -> set[str]:
    """The paths of the arguments that a result replaces."""
    return {p.replaces for p in plan.outputs if p.replaces is not None}


def _arguments(plan: PlanRecord) -> Section:
    total = size_text(bytes_per_device(plan.inputs, plan.mesh.shape))
    donated = _names(p for p in plan.inputs if p.donated)
    sentences = [
        f"{plural(len(plan.inputs), 'array')}, {total} per device. A spec names the mesh axes that split each "
        "dimension, _ where none does."
    ]
    if donated:
        sentences.append(f"Donated, so that results reuse their memory: {', '.join(donated)}.")
    shared = [p for p in plan.inputs if p.reason == "shared"]
    if shared:
        verb = "has its spec" if len(shared) == 1 else "have their specs"
        sentences.append(
            f"{plural(len(shared), 'array')} {verb} in the plan given as like=: {', '.join(_names(shared))}."
        )
    replaced = _replaced(plan)
    kept = [p for p in plan.inputs if p.path in replaced and not p.donated]
    size = size_text(bytes_per_device(kept, plan.mesh.shape))
    remark = f"Replaced by a result and not donated, so that {size} are in memory twice: {', '.join(_names(kept))}."
    return Section("Arguments", tuple(sentences), _places(plan.inputs, plan), (remark,) if kept else ())


def _names(places: Iterable[Place]) -> list[str]:
    """The names of the arguments that ``places`` are part of."""
    return list(dict.fromkeys(argument_name(p.path) for p in places))


def _results(plan: PlanRecord) -> Section:
    specs = {p.path: p.where for p in plan.inputs}
    carried = [p for p in plan.outputs if p.replaces is not None]
    moved = [p for p in carried if specs.get(p.replaces or "") != p.where]
    same = len(carried) - len(moved)
    sentences: list[str] = []
    if same:
        verb = "replaces its argument and has its spec" if same == 1 else "replace arguments and have their specs"
        sentences.append(f"{plural(same, 'array')} {verb}.")
    if moved:
        verb = "replaces its argument and has another spec" if len(moved) == 1 else "replace arguments of other specs"
        sentences.append(f"{plural(len(moved), 'array')} {verb}: the next call has to reshard.")
    if not plan.outputs:
        sentences.append("The step returns nothing.")
    others = [p for p in plan.outputs if specs.get(p.replaces or "") != p.where]
    return Section("Results", tuple(sentences), _places(others, plan) if others else None)


def _places(places: Sequence[Place], plan: PlanRecord) -> Table:
    rows: list[tuple[str, ...]] = []
    for row in report_rows(places):
        size = size_text(bytes_per_device(row.places, plan.mesh.shape))
        n = len(row.places)
        if isinstance(row, ArrayGroup):
            p = row.first
            array = f"{p.dtype}[{','.join(map(str, p.shape))}]"
            kind, note = array if n == 1 else f"{n} x {array}", note_of(p)
            rows.append((row.path, kind, p.where, size, note))
        else:
            kinds = dict.fromkeys(p.dtype for p in row.places)
            rows.append((row.path, f"{n} x {'/'.join(kinds)}", f"as {row.reference}", size, ""))
    head = ("array", "type", "spec", "per device", "")
    if not any(r[-1] for r in rows):
        head, rows = head[:-1], [r[:-1] for r in rows]
    return Table(head, tuple(rows), frozenset({3}))


def _constraints(plan: PlanRecord) -> Section:
    title, found = "Sharding constraints inside the step", plan.intermediates
    if not found:
        return Section(title, ("None: the specs of arguments and results determine the rest.",))
    counts = Counter(constraint_group(c.reason) for c in found)
    sentence = f"{plural(len(found), 'constraint')}: {', '.join(f'{n} {group}' for group, n in counts.most_common())}."
    shown = Counter(
        (c.reason != "pinned", short_source(c.source), c.op, str(list(c.shape)), str(c.spec), constraint_reason(c))
        for c in found
        if c.reason in ("pinned", "resharded", "operand")
    )
    order = sorted(shown)
    rows = [
        (op, shape, spec, why + (f" (x{n})" if n > 1 else ""), source)
        for key in order[:MAX_CONSTRAINTS]
        for (_, source, op, shape, spec, why), n in ((key, shown[key]),)
    ]
    rest = len(order) - MAX_CONSTRAINTS
    remarks = (f"{plural(rest, 'more row')}: plan.intermediates has each.",) if rest > 0 else ()
    table = Table(("operation", "shape", "spec", "reason", "for"), tuple(rows)) if rows else None
    return Section(title, (sentence,), table, remarks)
