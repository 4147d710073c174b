"""A schedule as numbers: what each stage does at each tick, and in which slots it keeps what it received or made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation

IDLE, FORWARD, BACKWARD, WEIGHTS = range(4)
"""What a stage does at a tick: nothing, a forward, a backward (where it is split, its first part), the second part."""
type Table = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Route:
    """Values that go from a stage to another at the end of a tick."""

    pairs: tuple[tuple[int, int], ...]
    """The stages: from, to; empty where a stage keeps its own."""
    slot: Table
    """[tick, stage]: the slot in which the receiving stage keeps it; -1 where nothing arrives."""


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
        found: dict[int, tuple[set[tuple[int, int]], Table]] = {}
        for (source, to, tick, _), slot in zip(sent, slots, strict=True):
            empty = set[tuple[int, int]](), np.full((ticks, stages), -1, np.int32)
            pairs, table = found.setdefault((to - source) % stages, empty)
            if to != source:
                pairs.add((source, to))
            table[tick, to] = slot
        return tuple(Route(tuple(sorted(pairs)), table) for pairs, table in found.values()), most

    parts, microbatches = range(last + 1), range(schedule.microbatches)
    activations, n_activations = routes(
        "activation",
        [(stage_of[p], stage_of[p + 1], at[f, p, m], at[f, p + 1, m]) for p in parts[:-1] for m in microbatches],
    )
    gradients, n_gradients = routes(
        "gradient",
        [(stage_of[p], stage_of[p - 1], at[b, p, m], at[b, p - 1, m]) for p in parts[1:] for m in microbatches],
    )
    places = [(p, stage_of[p], m) for p in parts for m in microbatches]
    whole = [(s, at[f, p, m], at[w, p, m], (at[f, p, m], at[b, p, m], at[w, p, m])) for p, s, m in places]
    between = [(s, at[b, p, m], at[w, p, m], (at[b, p, m], at[w, p, m])) for p, s, m in places if b is not w]
    ends = [(s, at[f, p, m], at[b, p, m], (at[f, p, m], at[b, p, m])) for p, s, m in places if p == last]
    spans = {"residual": whole, "kept": between, "final": ends}
    slots = n_activations, n_gradients, *(allocate(name, found)[1] for name, found in spans.items())
    return TickTables(operation, **columns, activations=activations, gradients=gradients, slots=slots)
