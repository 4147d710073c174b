"""The profile of a layout: one walk over what the cost model charges and over the buffers of the memory model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cost.cost import Charge
from autoshard.cost.live_ranges import IntArray
from autoshard.cost.memory import Buffers, MemoryModel, sum_over_ranges
from autoshard.cost.profile import (
    MAX_LINES,
    MAX_LIVE,
    MAX_MOMENTS,
    MAX_MOVES,
    MAX_NAMES,
    MAX_ROWS,
    MAX_SPANS,
    BufferRole,
    LineCost,
    LiveGroup,
    Moment,
    Move,
    Span,
    StepProfile,
    ValueRow,
)
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Spec, replicated


def profile_step(model: MemoryModel, layout: Layout, *, all_gather_fusion_disabled: bool = False) -> StepProfile:
    """What one call of the step under ``layout`` does when, as the models predict it."""
    graph, cost_model = model.graph, model.cost_model
    names = argument_of(graph)
    buffers = model.buffers(layout, all_gather_fusion_disabled=all_gather_fusion_disabled)
    total, on_chip = model.usage_of(buffers)
    peak = int((total - on_chip).argmax())
    before, after = cost_model.input_write_seconds(layout), cost_model.output_transfer_seconds(layout)
    charges = list(cost_model.charges(layout))
    values, left_out = _values(graph, layout)
    moments, at = _moments(model, buffers, total - on_chip, charges, before)
    return StepProfile(
        moments=moments,
        peak=at,
        on_chip=int(on_chip[peak]),
        spans=_spans(graph, charges, before, after),
        lines=_lines(graph, charges, buffers, peak, before + after),
        moves=_moves(graph, charges, names),
        live=_live(model, layout, buffers, peak, names),
        values=values,
        values_left_out=left_out,
    )


def argument_of(graph: Graph) -> dict[int, str]:
    """For each value that is an argument, or a view, slice or cast of one, the path of that argument; for what replaces
    an argument, that after ``new``."""
    found = {v: leaf.path for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if v}
    for n in graph.nodes:
        traits = n.kind.traits
        if (n.tie or traits.view or traits.casts or traits.moves_data) and n.operands and len(n.results) == 1:
            path = found.get(n.operands[0])
            if path is not None and not any(found.get(v, path) != path for v in n.operands):
                found.setdefault(n.results[0], path)
    for i, o in graph.program.carries:
        found.setdefault(graph.outputs[o], f"new {graph.program.inputs[i].path}")
    return found


def _moments(
    model: MemoryModel, buffers: Buffers, usage: IntArray, charges: Sequence[Charge], before: float
) -> tuple[tuple[Moment, ...], int]:
    """The moments of the step, and the index of that of the peak."""
    nodes, rows = len(model.graph.nodes), model.live_ranges.residuals
    saved = sum_over_ranges(nodes, buffers.first[rows], buffers.last[rows], buffers.bytes[rows])
    seconds = np.zeros(nodes + 2)
    for c in charges:
        seconds[c.node] += c.compute + sum(t.seconds for t in c.transfers)
    starts = before + np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
    parts = np.array_split(np.arange(nodes + 1), min(nodes + 1, MAX_MOMENTS))
    chosen = [int(part[usage[part].argmax()]) for part in parts]
    found = [
        Moment(float(starts[n]), kept := int(min(saved[n], usage[n])), max(0, int(usage[n]) - kept)) for n in chosen
    ]
    return tuple(found), int(np.argmax([usage[n] for n in chosen]))


def _spans(graph: Graph, charges: Iterable[Charge], before: float, after: float) -> tuple[Span, ...]:
    found: list[Span] = []
    seconds, count, longest, of = before, int(before > 0), before, ("arguments written to memory", "")
    for c in charges:
        node = graph.nodes[c.node] if c.node < len(graph.nodes) else None
        if c.compute:
            seconds, count = seconds + c.compute, count + 1
            if c.compute > longest and node:
                longest, of = c.compute, (node.kind.op, node.source)
        if c.transfers and count:
            found.append(Span(seconds, "compute", (), *of, count))
            seconds, count, longest, of = 0.0, 0, 0.0, ("", "")
        op = node.kind.op if node else "result"
        found += [
            Span(t.seconds, t.collective.kind, t.collective.axes or (), op, t.collective.source, 1) for t in c.transfers
        ]
    if after:
        seconds, count = seconds + after, count + 1
        of = ("results moved to their memory", "") if after > longest else of
    if count:
        found.append(Span(seconds, "compute", (), *of, count))
    if len(found) <= MAX_SPANS:
        return tuple(found)
    kinds = len({(s.kind, s.axes) for s in found})
    parts = np.array_split(np.arange(len(found)), max(1, MAX_SPANS // kinds))
    return tuple(s for part in parts for s in _joined([found[i] for i in part]))


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Those of one kind over the same axes as one, which names the longest."""
    groups: dict[object, list[Span]] = {}
    for s in spans:
        groups.setdefault((s.kind, s.axes), []).append(s)
    return [
        replace(max(g, key=lambda s: s.seconds), seconds=sum(s.seconds for s in g), count=sum(s.count for s in g))
        for g in groups.values()
    ]


def _lines(
    graph: Graph, charges: Iterable[Charge], buffers: Buffers, peak: int, elsewhere: float
) -> tuple[LineCost, ...]:
    compute, transfers, held = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, int](int),
    )
    compute[""] = elsewhere
    for c in charges:
        source = graph.nodes[c.node].source if c.node < len(graph.nodes) else ""
        compute[source] += c.compute
        transfers[source] += sum(t.seconds for t in c.transfers)
    nodes = len(graph.nodes)
    for i in np.flatnonzero((buffers.first <= peak) & (peak <= buffers.last)):
        held[graph.nodes[min(int(buffers.first[i]), nodes - 1)].source if nodes else ""] += int(buffers.bytes[i])
    found = [LineCost(s, compute[s], transfers[s], held[s]) for s in {**compute, **transfers, **held}]
    found.sort(key=lambda x: (-x.compute - x.transfers, -x.peak_bytes, x.source))
    named = [x for x in found if x.source][: MAX_LINES - 1]
    kept = {x.source for x in named}
    rest = [x for x in found if x.source not in kept]
    other = LineCost("", sum(x.compute for x in rest), sum(x.transfers for x in rest), sum(x.peak_bytes for x in rest))
    return (*named, other) if other.compute or other.transfers or other.peak_bytes else tuple(named)


@dataclass
class _Group:
    """One row, being counted."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0
    names: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, name: str | None, count: int = 1, seconds: float = 0.0, size: int = 0) -> None:
        self.count, self.seconds, self.bytes = self.count + count, self.seconds + seconds, self.bytes + size
        if name is not None:
            self.names[name] = None

    @property
    def first_names(self) -> tuple[str, ...]:
        """Those that the row has."""
        return tuple(self.names)[:MAX_NAMES]


def _moves(graph: Graph, charges: Iterable[Charge], names: dict[int, str]) -> tuple[Move, ...]:
    groups: dict[Move, _Group] = defaultdict(_Group)
    for charge in charges:
        node = graph.nodes[charge.node] if charge.node < len(graph.nodes) else None
        op, phase = (node.kind.op, node.phase) if node else ("", "plain")
        for t in charge.transfers:
            c, shape = t.collective, graph.values[t.value].shape
            like = Move(
                c.kind, c.axes or (), c.bytes, 0, 0.0, op, phase, c.source, (), 0, shape, t.before, t.after, t.of_result
            )
            groups[like].add(names.get(t.value), c.count, t.seconds)
    found = [
        replace(m, count=g.count, seconds=g.seconds, names=g.first_names, arrays=len(g.names))
        for m, g in groups.items()
    ]
    return tuple(sorted(found, key=lambda m: -m.seconds)[:MAX_MOVES])


def _live(
    model: MemoryModel, layout: Layout, buffers: Buffers, peak: int, names: dict[int, str]
) -> tuple[LiveGroup, ...]:
    graph, groups = model.graph, dict[LiveGroup, _Group]()
    residuals, own = set(map(int, model.live_ranges.residuals)), len(model.live_ranges.values)
    for i in map(int, np.flatnonzero((buffers.first <= peak) & (peak <= buffers.last) & (buffers.bytes > 0))):
        v, n = int(buffers.values[i]), min(int(buffers.first[i]), len(graph.nodes) - 1)
        node, value = graph.nodes[n], graph.values[v]
        role: BufferRole = "residual" if i in residuals else "temporary" if i < own else "copy" if v else "inside"
        spec = layout.specs[v] if v else replicated(0)
        dtype = value.dtype if v else ""
        like = LiveGroup(role, node.kind.op, node.source, (), value.shape, dtype, spec, 0, 0)
        groups.setdefault(like, _Group()).add(names.get(v), size=int(buffers.bytes[i]))
    found = [replace(k, count=g.count, bytes=g.bytes, names=g.first_names) for k, g in groups.items()]
    return tuple(sorted(found, key=lambda x: -x.bytes)[:MAX_LIVE])


def _values(graph: Graph, layout: Layout) -> tuple[tuple[ValueRow, ...], int]:
    counts = Counter[tuple[OpKind, int, Spec, str, str]]()
    first: dict[tuple[OpKind, int, Spec, str, str], int] = {}
    for n in graph.nodes:
        for i, v in enumerate(n.results if not n.tie else ()):
            key = n.kind, i, layout.specs[v], n.phase, n.source
            counts[key] += 1
            first.setdefault(key, v)
    rows, sizes = Counter[ValueRow](), graph.program.mesh.shape
    for key, count in counts.items():  # kinds that differ in their parameters alone make one row
        kind, _, spec, phase, source = key
        value = graph.values[first[key]]
        size = -(-value.bytes // spec.num_shards(sizes))
        rows[ValueRow(kind.op, phase, source, value.shape, value.dtype, spec, 0, size)] += count
    found = sorted((replace(row, count=n) for row, n in rows.items()), key=lambda r: -r.bytes * r.count)
    return tuple(found[:MAX_ROWS]), sum(r.count for r in found[MAX_ROWS:])
