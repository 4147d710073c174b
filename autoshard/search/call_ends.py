"""The ends of a call: specs of arguments and results as what happens between the calls of a step asks for.

The search prices the step alone. Two things happen beside it, and are decided once the rest is:

*Loading.* An array of the batch (`autoshard.ir.batch`) that is not carried comes from the host at each call. Its
bytes per device take their time over the host's link, and where several hosts share the mesh, each reads what its
devices hold. A call and its loading take the sum of both, or, with the next call's arrays loaded ahead, the longer of
the two. So such an array is split over further axes than the step reads it, along its dimensions of the batch, where
the gather inside the step takes less time than loading saves, and the longer of the two hardly grows (`MAX_SLOWER`); or
where the step is equally fast (`EQUALLY_FAST`): then the hosts read less. Where the hardware table knows no such link,
it is split where the step gets no slower.

*Returning.* An argument that is not carried may still be a result of the call before: the token of a decode loop. The
n-th argument and the n-th result of one shape and dtype may be that, if there are as many of both. They get one spec
where the step is equally fast. A step that carries other state is called in a loop, where a reshard between two calls
takes the host `DISPATCH` more than one inside: there they get one spec where that takes no longer, and integers, which
are tokens or positions, where it takes no longer than both.

Only `auto` decides so: presets split what their names say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoshard.cost.overlap.node_reshards import hideable
from autoshard.cost.overlap.seconds_waited import seconds_waited
from autoshard.cost.reshard import reshard_seconds
from autoshard.ir.graph import Graph, Value
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Spec
from autoshard.search.candidates import Candidate, Search

EQUALLY_FAST = 1e-3
"""Share of a step's predicted seconds within which layouts count as equally fast: far less than the cost model's
errors."""
MAX_SLOWER = 1e-2
"""Share of a call's seconds, with the next one's arrays loaded ahead, that it may get slower where it gets faster
without."""
DISPATCH = 2e-5
"""Least seconds on the host to move an array between two calls."""
ROUNDING = 1e-12
"""Share of a step's predicted seconds that sums in another order may differ by."""


def revise_ends(s: Search, best: Candidate) -> Candidate:
    """``best`` with the specs of arguments and results revised for what happens between the calls.

    Among all that was tried, it takes the place of those with the layout of ``best``.
    """
    revision = _Revision(s, best)
    revision.split_loaded()
    revision.join_returned()
    found = revision.candidate()
    if found is not best:
        for choice, c in [*s.tried.items()]:
            if (c.layout.specs, c.layout.strategies) == (best.layout.specs, best.layout.strategies):
                del s.tried[choice]
        s.tried[found.choice] = found
    return found


def loaded_dims(s: Search) -> Mapping[int, list[int]]:
    """By value, the dimensions of the batch of every argument that is loaded at each call: those that are not carried,
    nor in the host's memory."""
    carried = {s.graph.inputs[i] for i, _ in s.graph.program.carries}
    found: dict[int, list[int]] = defaultdict(list)
    for c in s.classes:
        for v, d in c.inputs if c.is_batch else ():
            if v not in carried and not s.graph.values[v].host:
                found[v].append(d)
    return found


def returned_pairs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Flat positions of each argument and of the result that may come back as it in the next call."""
    program = graph.program
    carried, replacing = ({pair[side] for pair in program.carries} for side in (0, 1))
    sides: list[dict[Any, list[int]]] = []
    for leaves, taken in ((program.inputs, carried), (program.outputs, replacing)):
        found: dict[Any, list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            if i not in taken and leaf.aval.shape:
                found[leaf.aval.shape, leaf.aval.dtype, leaf.memory_kind].append(i)
        sides.append(found)
    arguments, results = sides
    for kind, positions in arguments.items():
        if len(results.get(kind, ())) == len(positions):
            yield from zip(positions, results[kind], strict=True)


@dataclass(frozen=True)
class _Change:
    """Another spec for the value of an argument or a result."""

    value: int
    spec: Spec
    origin: Literal["loading", "returned"]
    step: float
    """Seconds that it adds to the step."""
    loading: float
    """Seconds that it adds to loading."""

    @property
    def seconds(self) -> float:
        """What it adds to both."""
        return self.step + self.loading


class _Revision:
    """Changes to the layout of one candidate, one after the other, each priced by the nodes that it touches."""

    def __init__(self, s: Search, best: Candidate) -> None:
        self.s, self.graph, self.best, self.layout = s, s.graph, best, best.layout
        self.values, self.mesh, self.loaded = s.graph.values, s.graph.program.mesh, loaded_dims(s)
        self.changes: list[_Change] = []
        self.seconds, bandwidth = best.cost.seconds, self.mesh.hardware.host_bandwidth
        local = sum(self.values[v].bytes / self.layout.specs[v].num_shards(self.mesh.shape) for v in self.loaded)
        self.loading = local / bandwidth if bandwidth else 0.0
        self.longest = (1 + MAX_SLOWER) * max(self.seconds, self.loading)
        """Most seconds that the longer of the step and loading may take."""
        self.allowance = EQUALLY_FAST * best.cost.seconds
        """Seconds by which a layout may be slower and count as equally fast."""

    def split_loaded(self) -> None:
        """Splits the arrays of the batch over further axes, the largest array first."""
        left = self.allowance if self.mesh.hardware.host_bandwidth else 0.0
        for v in sorted(self.loaded, key=lambda v: (-self.values[v].bytes, v)):
            while v not in self.graph.pins:
                options = [c for c in self._finer(v) if self._saves(c) or c.step <= left]
                if not options:
                    break
                change = min(options, key=lambda c: c.seconds)
                left -= 0.0 if self._saves(change) else max(0.0, change.step)
                self._apply(change)

    def join_returned(self) -> None:
        """Gives each argument and the result that may come back as it one spec."""
        for i, o in returned_pairs(self.graph):
            v, out, pin = self.graph.inputs[i], self.graph.outputs[o], self.graph.program.outputs[o].pin
            if not out or out in self.graph.inputs or self.graph.outputs.count(out) > 1:
                continue
            here, there = self.layout.specs[v], self.layout.specs[out] if pin is None else pin
            free = [(u, spec) for u, spec in ((out, here), (v, there)) if u not in self.graph.pins and here != there]
            limit = max(self.allowance, self._seconds_between(self.values[v], there, here))
            options = [c for u, spec in free if (c := self._change(u, spec, "returned")).step <= limit]
            if options and (best := min(options, key=lambda c: c.seconds)).seconds <= limit:
                self._apply(best)

    def _seconds_between(self, value: Value, before: Spec, after: Spec) -> float:
        """Seconds that moving a value between two calls takes, of those that are certain to be saved."""
        if not self.graph.program.carries:
            return 0.0
        known = value.dtype.startswith(("int", "uint"))
        return DISPATCH + (reshard_seconds(before, after, value.shape, value.bits, self.mesh) if known else 0.0)

    def candidate(self) -> Candidate:
        """The candidate with the changes: as many of the first as keep the memory budget and cost what they were priced
        at, beside what is equally fast."""
        changes, memory = self.changes, max(self.s.budget, self.best.memory.peak)
        arguments = {v: i for i, v in enumerate(self.graph.inputs)}
        while changes:
            specs, origins = list(self.best.layout.specs), dict(self.best.layout.origins)
            for c in changes:
                specs[c.value] = c.spec
                origins |= {(c.value, d): c.origin for d, axes in enumerate(c.spec.dims) if axes}
            layout = replace(self.best.layout, specs=tuple(specs), origins=origins)
            decided = dict(self.best.choice.argument_specs)
            decided |= {arguments[c.value]: c.spec for c in changes if c.value in arguments}
            choice = replace(self.best.choice, argument_specs=tuple(decided.items()))
            found = self.s.candidate(choice, layout)
            priced = self.best.cost.seconds + sum(c.step for c in changes) + self.allowance
            if found.memory.peak <= memory and found.cost.seconds <= priced:
                return found
            changes = changes[: len(changes) // 2]
        return self.best

    def _saves(self, change: _Change) -> bool:
        """Whether a call gets faster, or no slower, and with the next one's arrays loaded ahead hardly slower."""
        longest = max(self.seconds + change.step, self.loading + change.loading)
        return change.seconds <= ROUNDING * self.seconds and longest <= self.longest

    def _finer(self, v: int) -> Iterator[_Change]:
        """A dimension of the batch of ``v`` split over one axis more, or over all that are left."""
        spec = self.layout.specs[v]
        idle = tuple(a for a in self.s.axes if a not in spec.axes)
        for d in self.loaded[v]:
            for axes in dict.fromkeys((idle, *((a,) for a in idle))) if idle else ():
                finer = (*spec.dims[d], *axes)
                if self.values[v].shape[d] % self.mesh.axes_size(finer) == 0:
                    yield self._change(v, spec.with_dim(d, finer), "loading")

    def _change(self, v: int, spec: Spec, origin: Literal["loading", "returned"]) -> _Change:
        before, hardware = self.layout.specs[v], self.mesh.hardware
        parts = [1 / each.num_shards(self.mesh.shape) for each in (spec, before)]
        added = self.values[v].bytes * (parts[0] - parts[1])
        step = self._seconds_around(v, spec) - self._seconds_around(v, before)
        step += added / hardware.memory_rate if v in self.s.cost_model.per_call_inputs else 0.0
        loading = added / hardware.host_bandwidth if v in self.loaded and hardware.host_bandwidth else 0.0
        return _Change(v, spec, origin, step, loading)

    def _seconds_around(self, v: int, spec: Spec) -> float:
        """Seconds of all nodes that have the value ``v``, with this spec; each of its reshards counts once."""
        layout, value = _with_spec(self.layout, v, spec), self.values[v]
        seconds, charged = 0.0, set[Spec]()
        for n in self.graph.uses[v]:
            node, run = self.graph.nodes[n], self.s.cost_model.node_cost(n, layout)
            seconds += node.trip_count * run.seconds
            for i, (u, required) in enumerate(zip(node.operands, run.in_specs, strict=True)):
                if u == v and required in charged:
                    moved = reshard_seconds(spec, required, value.shape, node.kind.sent_bits[i], self.mesh)
                    part = hideable(node.kind, i, spec, required, self.mesh)
                    seconds -= node.trip_count * seconds_waited(moved, node.kind, i, self.mesh, part)
                elif u == v and required != spec:
                    charged.add(required)
        return seconds

    def _apply(self, change: _Change) -> None:
        self.layout = _with_spec(self.layout, change.value, change.spec)
        self.seconds, self.loading = self.seconds + change.step, self.loading + change.loading
        self.changes = [*(c for c in self.changes if c.value != change.value), change]


def _with_spec(layout: Layout, v: int, spec: Spec) -> Layout:
    return replace(layout, specs=(*layout.specs[:v], spec, *layout.specs[v + 1 :]))
