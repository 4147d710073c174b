"""A schedule as numbers: what each stage does at each tick, and in which slots it keeps what it received or made."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation

IDLE, FORWARD, BACKWARD, WEIGHTS = range(4)
"""What a stage does at a tick: nothing, a forward, a backward (where it is split, its first part), the second part."""
type Table = npt.NDArray[np.int32]
type Pairs = tuple[tuple[int, int], ...]
type Exchange = tuple[Pairs, ...]
"""Of each route, activations before gradients, the stages that take part: from, to."""


@dataclass(frozen=True)
class Route:
    """Values that go from a stage to another at the end of a tick."""

    pairs: Pairs
    """The stages: from, to; empty where a stage keeps its own."""
    slot: Table
    """[tick, stage]: the slot in which the receiving stage keeps it; -1 where nothing arrives."""
    sent: tuple[Pairs, ...]
    """By tick, those of ``pairs`` that send something then."""


@dataclass(frozen=True)
class TickTables:
    """Each table is [tick, stage]; -1 where there is nothing."""

    operation: Table
    chunk: Table
    microbatch: Table
    part: Table
    """Of the model, counted from its input."""
    activation: Table
    """Slot of a forward's input, among the activations received."""
    gradient: Table
    """Slot of a backward's input, among the gradients received."""
    residual: Table
    """Slot of what a forward leaves for its backward."""
    kept: Table
    """Slot of what the first part of a backward leaves for the second."""
    final: Table
    """Slot of the last part's activation, from its forward to its backward."""
    activations: tuple[Route, ...]
    gradients: tuple[Route, ...]
    slots: tuple[int, ...]
    """Number of slots on a stage, the most of any: of activations, gradients, residuals, kept values and finals."""

    @functools.cached_property
    def anywhere(self) -> npt.NDArray[np.bool_]:
        """[tick, operation]: whether a stage has it."""
        return np.stack([(self.operation == n).any(1) for n in range(WEIGHTS + 1)], 1)

    @functools.cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What goes from stage to stage after a tick, of all ticks that differ in it.

        Who sends and who receives wait for each other. If all did at each tick, it would take as long as its busiest
        stage: of ``1f1b``, in which neighbours run forwards and backwards by turns, as long as a backward.
        """
        return tuple(dict.fromkeys(self._exchanges))

    @functools.cached_property
    def exchange(self) -> Table:
        """[tick]: which of `exchanges`."""
        return np.array([self.exchanges.index(found) for found in self._exchanges], np.int32)

    @functools.cached_property
    def _exchanges(self) -> list[Exchange]:
        """By tick. One that sends a part of what another sends is as that, and sends nothing in the others' place."""
        routes = (*self.activations, *self.gradients)
        sent = [frozenset((r, *pair) for r, route in enumerate(routes) for pair in route.sent[t]) for t in self.ticks]
        largest = [s for s in dict.fromkeys(sent) if not any(s < other for other in sent)]
        whole = [s and min((l for l in largest if s <= l), key=lambda l: (len(l), sorted(l))) for s in sent]
        return [tuple(tuple(sorted((a, b) for q, a, b in s if q == r)) for r in range(len(routes))) for s in whole]

    @property
    def ticks(self) -> range:
        return range(len(self.operation))


def tick_tables(schedule: Schedule) -> TickTables:
    """The tables of a schedule."""
    ticks, stages = len(schedule.table), schedule.stages
    last = stages * schedule.chunks - 1
    stage_of = {part: stage for row in schedule.placement for stage, part in enumerate(row)}
    at = {
        (slot.operation, schedule.placement[slot.chunk][stage], slot.microbatch): tick
        for tick, stage, slot in schedule.slots()
    }
    f, b, w = Operation.FORWARD, Operation.BACKWARD, Operation.BACKWARD
    if schedule.splits_backward:
        b, w = Operation.INPUT_GRADIENT, Operation.WEIGHT_GRADIENT
    codes = {f: FORWARD, w: WEIGHTS, b: BACKWARD}
    columns = {
        name: np.full((ticks, stages), -1, np.int32)
        for name in ("chunk", "microbatch", "part", "activation", "gradient", "residual", "kept", "final")
    }
    operation = np.full((ticks, stages), IDLE, np.int32)
    for tick, stage, slot in schedule.slots():
        operation[tick, stage] = codes[slot.operation]
        columns["chunk"][tick, stage], columns["microbatch"][tick, stage] = slot.chunk, slot.microbatch
        columns["part"][tick, stage] = schedule.placement[slot.chunk][stage]

    def allocate(name: str, spans: Iterable[tuple[int, int, int, tuple[int, ...]]]) -> tuple[list[int], int]:
        """Slots for (stage, from tick, to tick, ticks to note it at), and how many the fullest stage has."""
        free_at: list[list[int]] = [[] for _ in range(stages)]
        found: dict[int, int] = {}
        for n, (stage, begin, end, noted) in sorted(enumerate(spans), key=lambda s: s[1][1:3]):
            ends = free_at[stage]
            slot = next((i for i, e in enumerate(ends) if e <= begin), len(ends))
            ends[slot:] = [end, *ends[slot + 1 :]]
            found[n] = slot
            for tick in noted:
                columns[name][tick, stage] = slot
        return [found[n] for n in sorted(found)], max(map(len, free_at), default=0)

    def routes(name: str, sent: list[tuple[int, int, int, int]]) -> tuple[tuple[Route, ...], int]:
        """Routes of (from stage, to stage, tick of sending, tick of use)."""
        slots, most = allocate(name, [(to, tick, use, (use,)) for _, to, tick, use in sent])
        found: dict[int, tuple[list[set[tuple[int, int]]], Table]] = {}
        for (source, to, tick, _), slot in zip(sent, slots, strict=True):
            if (to - source) % stages not in found:
                found[(to - source) % stages] = [set() for _ in range(ticks)], np.full((ticks, stages), -1, np.int32)
            at_tick, table = found[(to - source) % stages]
            if to != source:
                at_tick[tick].add((source, to))
            table[tick, to] = slot
        made = [
            Route(tuple(sorted(set().union(*at_tick))), table, tuple(tuple(sorted(pairs)) for pairs in at_tick))
            for at_tick, table in found.values()
        ]
        return tuple(made), most

    parts, microbatches = range(last + 1), range(schedule.microbatches)
    returning = microbatches if schedule.has_backward else range(0)
    activations, n_activations = routes(
        "activation",
        [(stage_of[p], stage_of[p + 1], at[f, p, m], at[f, p + 1, m]) for p in parts[:-1] for m in microbatches],
    )
    gradients, n_gradients = routes(
        "gradient",
        [(stage_of[p], stage_of[p - 1], at[b, p, m], at[b, p - 1, m]) for p in parts[1:] for m in returning],
    )
    places = [(p, stage_of[p], m) for p in parts for m in returning]
    whole = [(s, at[f, p, m], at[w, p, m], (at[f, p, m], at[b, p, m], at[w, p, m])) for p, s, m in places]
    between = [(s, at[b, p, m], at[w, p, m], (at[b, p, m], at[w, p, m])) for p, s, m in places if b is not w]
    ends = [(s, at[f, p, m], at[b, p, m], (at[f, p, m], at[b, p, m])) for p, s, m in places if p == last]
    spans = {"residual": whole, "kept": between, "final": ends}
    slots = n_activations, n_gradients, *(allocate(name, found)[1] for name, found in spans.items())
    return TickTables(operation, **columns, activations=activations, gradients=gradients, slots=slots)
