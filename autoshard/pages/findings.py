"""What a reader asks of a plan, answered from its numbers: why an array moves, what would save memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.cost.profile import Move
from autoshard.machine.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from autoshard.plan.decisions import Place
from autoshard.plan.document import plural, short_source
from autoshard.plan.grouping import bytes_per_device, group_arrays
from autoshard.plan.reasons import place_reason
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

MAX_SAVINGS = 12
_SMALLER = "set memory_budget= below the present peak"
_LEAST = 1000
"""What saves less than one of so many parts of the peak is not named."""


@dataclass(frozen=True)
class Saving:
    """Something that would take fewer bytes per device at the peak, if it is live there."""

    bytes: int
    what: str
    price: str
    """What it takes in exchange, as far as it is known."""
    how: str
    """How to ask for it."""


def why_moved(move: Move, plan: PlanRecord) -> str:
    """Why the plan has this collective: what is stored how, what reads it how, and what storing it so would take."""
    reader = f"{move.op or 'the result'}" + (f" at {short_source(move.source)}" if move.source else "")
    if move.before is None or move.after is None:
        return f"a collective of {reader} itself, which computes on parts: neighbours' edges, or a sum over parts"
    axes = "+".join(move.axes)
    what = _names(move) or f"the array{list(move.shape)}"
    if move.kind in (ALL_REDUCE, REDUCE_SCATTER):
        kept = "each keeps its part" if move.kind == REDUCE_SCATTER else "all need the whole"
        return f"{reader} leaves a term on each device along {axes}, as what it sums over is split; {kept} of the sum"
    if move.of_result:
        return f"{reader} computes {what} as {move.before}, and it is kept as {move.after}"
    if move.kind == ALL_TO_ALL:
        return (
            f"{what} is split as {move.before}, and {reader} works on it as {move.after}: the split changes dimension"
        )
    if move.kind != ALL_GATHER:
        return f"{what} goes from {move.before} to {move.after} for {reader}: parts change devices"
    text = f"{reader} reads {what} as {move.after}; it is stored as {move.before}"
    places = [p for p in plan.inputs if p.path in move.names]
    if not places:
        return f"{text}, as what made it computes it so"
    each = bytes_per_device(places, plan.mesh.shape) / len(places)
    saved = round(each * move.arrays) * (plan.mesh.axes_size(move.axes) - 1)
    asked = places[0].reason in ("pinned", "first_plan", "shared", "placed", "loading")
    reason = f" ({place_reason(places[0])})" if asked else ""
    what = "it" if move.arrays == 1 else f"these {move.arrays} arrays"
    return f"{text}{reason}. Stored as it is read, {what} would take {size_text(saved)} more on each device"


def _names(move: Move) -> str:
    """The arrays that move: all of a few, or the first two and how many others."""
    if move.arrays < 4:
        return " or ".join(move.names)
    return f"{', '.join(move.names[:2])} and {move.arrays - 2} others like them"


def savings(plan: PlanRecord) -> list[Saving]:
    """What would take less memory, the largest first."""
    found = [*_other_layouts(plan), *_finer_splits(plan), *_residuals(plan), *_twice(plan), *_host(plan)]
    found.sort(key=lambda s: -s.bytes)
    return [s for s in found if s.bytes * _LEAST > plan.memory.peak][:MAX_SAVINGS]


def _other_layouts(plan: PlanRecord) -> Iterator[Saving]:
    for a in plan.alternatives:
        if a.peak < plan.memory.peak:
            more = a.seconds - plan.cost.seconds
            price = f"{time_text(abs(more))} a call {'more' if more >= 0 else 'less'}"
            yield Saving(plan.memory.peak - a.peak, f"the layout: {a.text}", price, f"{_SMALLER}, or pin so")


def _finer_splits(plan: PlanRecord) -> Iterator[Saving]:
    sizes, stages = plan.mesh.shape, plan.pipeline.axis if plan.pipeline else None
    axes = [a for a in plan.mesh.nontrivial_axes if a != stages]
    for g in group_arrays(plan.inputs):
        p, size = g.first, bytes_per_device(g.places, sizes)
        if p.memory_kind is not None:
            continue
        for a in axes:
            dim = _divisible(p, a, plan)
            if a not in p.spec.axes and dim is not None:
                entries = [*p.spec.dims[:dim], (*p.spec.dims[dim], a), *p.spec.dims[dim + 1 :]]
                spec = "[" + ", ".join("+".join(d) or "_" for d in entries) + "]"
                saved = size - -(-size // sizes[a])
                yield Saving(
                    saved, f"split {g.path} over {a} too: {spec}", "gathers where it is read", _ask(g.first.path)
                )


def _divisible(p: Place, axis: str, plan: PlanRecord) -> int | None:
    """The largest dimension of ``p`` that ``axis`` can split further."""
    n = plan.mesh.shape[axis]
    fits = [
        (size // parts, d)
        for d, (size, axes) in enumerate(zip(p.stored_shape, p.spec.dims, strict=True))
        if size % ((parts := plan.mesh.axes_size(axes)) * n) == 0 and size
    ]
    return max(fits)[1] if fits else None


def _ask(path: str) -> str:
    return f"plan.what_if({{{path!r}: P(...)}}) prices it"


def _residuals(plan: PlanRecord) -> Iterator[Saving]:
    live = plan.profile.live if plan.profile else ()
    done = {p.name for p in plan.passes}
    saved = [x for x in live if x.role == "residual"]
    if saved and "recompute" not in done:
        most = f"{saved[0].op}{f' at {short_source(saved[0].source)}' if saved[0].source else ''}"
        what = f"recompute what is saved for the backward pass, most of it by {most} ({size_text(saved[0].bytes)})"
        yield Saving(sum(x.bytes for x in saved), what, "a second forward pass", _SMALLER)
    of_batch = {a for d in plan.dim_splits if d.name == "batch" for a in d.axes}
    grows = sum(x.bytes for x in live if x.role in ("residual", "temporary") and of_batch & set(x.spec.axes))
    if grows and "microbatch" not in done:
        what = "two micro-batches a call: half of what is live at the peak and split as the batch is"
        yield Saving(grows // 2, what, "weights are read twice", "microbatches=2")


def _twice(plan: PlanRecord) -> Iterator[Saving]:
    replaced = {p.replaces for p in plan.outputs}
    kept = [p for p in plan.inputs if p.path in replaced and not p.donated]
    if kept:
        size = bytes_per_device(kept, plan.mesh.shape)
        yield Saving(size, f"donate {plural(len(kept), 'array')} that a result replaces", "nothing", "donate_argnums=")


def _host(plan: PlanRecord) -> Iterator[Saving]:
    bandwidth = plan.mesh.hardware.host_bandwidth
    if plan.memory.optimizer and bandwidth:
        price = f"{time_text(2 * plan.memory.optimizer / bandwidth)} a call, there and back"
        yield Saving(
            plan.memory.optimizer,
            "keep the optimizer's state in the host's memory",
            price,
            'strategy="offload:optimizer"',
        )
