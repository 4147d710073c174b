"""`Schedule`: which operation each stage of a pipeline runs at each tick."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import ScheduleError
from autoshard.schedule.orders import orders_of
from autoshard.schedule.picture import svg
from autoshard.schedule.slots import Key, Operation, Placement, Slot, describe, label, looped, needs


@dataclass(frozen=True)
class Schedule:
    """A table of ticks: what each stage of a pipeline runs, and when.

    An operation takes one tick; what it sends to the next part of the model is there at the next one. Every backward
    is a `BACKWARD`, or split into `INPUT_GRADIENT` and `WEIGHT_GRADIENT`; a step that takes no gradients has none.

    Example:
      >>> import autoshard
      >>> print(autoshard.Schedule.named("1f1b", stages=2, microbatches=3))
      stage 0  F0  F1  .   B0  F2  B1  .   B2
      stage 1  .   F0  B0  F1  B1  F2  B2  .
      >>> schedule = autoshard.Schedule.named("gpipe", stages=2, microbatches=3)
      >>> schedule.stages, schedule.chunks, schedule.microbatches, schedule.has_backward, schedule.splits_backward
      (2, 1, 3, True, False)
      >>> each = {operation: 1.0 for _, _, (operation, _, _) in schedule.slots()}
      >>> schedule.seconds(each), schedule.bubble(each), schedule.live
      (8.0, 0.25, (3, 3))
      >>> print(schedule.forward_only())
      stage 0  F0  F1  F2  .
      stage 1  .   F0  F1  F2
      >>> orders = [[slot for _, at, slot in schedule.slots() if at == stage] for stage in range(2)]
      >>> schedule.from_orders(orders, schedule.placement) == schedule
      True
      >>> schedule.check()
    """

    table: tuple[tuple[Slot | None, ...], ...]
    """``table[tick][stage]``, of (operation, chunk, micro-batch); None where a stage is idle."""
    placement: Placement = ()
    """``placement[chunk][stage]``: which part of the model, counted from its input. Left out, the model goes round all
    stages, as often as there are chunks."""

    def __post_init__(self) -> None:
        """Takes plain tuples for slots.

        Raises:
          ScheduleError: an entry is neither None nor an operation, a chunk and a micro-batch.
        """
        table = tuple(
            tuple(_slot(entry, f"tick {tick}, stage {stage}") for stage, entry in enumerate(row))
            for tick, row in enumerate(self.table)
        )
        object.__setattr__(self, "table", table)
        if not self.placement:
            chunks = 1 + max((slot.chunk for row in table for slot in row if slot), default=0)
            object.__setattr__(self, "placement", looped(len(table[0]) if table else 1, chunks))

    @classmethod
    def named(cls, name: str, *, stages: int, microbatches: int) -> Schedule:
        """One of the published schedules.

        Args:
          name: ``gpipe`` (all forwards, then all backwards), ``1f1b`` (at most as many micro-batches in flight as there
            are stages), ``interleaved:N`` (``1f1b`` with N chunks a stage: a bubble N times shorter), ``zb-h1``
            (backwards split, a third of the bubble of ``1f1b``, its memory), ``zb:N`` (backwards split, residuals of at
            most N micro-batches on a stage; with more than there are stages, up to twice as many less one, a shorter
            bubble than ``zb-h1`` where operations take unequal times) or ``zb-v`` (two chunks a stage, placed as a V,
            no bubble between its beginning and its end).
          stages: number of stages, at least 1.
          microbatches: number of micro-batches, at least 1; any relation to ``stages``.

        Raises:
          ScheduleError: the name is unknown, or a number is below 1.
        """
        return cls.from_orders(*orders_of(name, stages, microbatches))

    @classmethod
    def from_orders(cls, orders: Sequence[Sequence[Slot]], placement: Placement) -> Schedule:
        """The table in which each stage runs its operations in the given order, each as early as it can.

        Args:
          orders: the operations of each stage.
          placement: ``placement[chunk][stage]``: which part of the model, counted from its input.

        Raises:
          ScheduleError: a deadlock: every stage waits for an operation that comes later; names what each waits for.
        """
        position, done, table = [0] * len(orders), set[Key](), list[tuple[Slot | None, ...]]()
        while any(at < len(order) for at, order in zip(position, orders, strict=True)):
            waiting = [order[at] if at < len(order) else None for at, order in zip(position, orders, strict=True)]
            row = tuple(
                slot if slot and done.issuperset(needs(slot, stage, placement)) else None
                for stage, slot in enumerate(waiting)
            )
            if not any(row):
                stuck = [
                    f"{describe((slot.operation, placement[slot.chunk][stage], slot.microbatch), placement)} waits for "
                    + next(describe(need, placement) for need in needs(slot, stage, placement) if need not in done)
                    for stage, slot in enumerate(waiting)
                    if slot
                ]
                raise ScheduleError(f"the orders deadlock at tick {len(table)}: {'; '.join(stuck)}")
            for stage, slot in enumerate(row):
                if slot:
                    done.add((slot.operation, placement[slot.chunk][stage], slot.microbatch))
                    position[stage] += 1
            table.append(row)
        schedule = cls(tuple(table), placement)
        schedule.check()
        return schedule

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement[0])

    @property
    def chunks(self) -> int:
        """Number of parts of the model on each stage."""
        return len(self.placement)

    @functools.cached_property
    def microbatches(self) -> int:
        """Number of micro-batches."""
        return 1 + max((slot.microbatch for _, _, slot in self.slots()), default=-1)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether backwards are two operations."""
        return any(slot.operation is Operation.WEIGHT_GRADIENT for _, _, slot in self.slots())

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether there are backwards: a step that takes no gradients has none."""
        return any(slot.operation is not Operation.FORWARD for _, _, slot in self.slots())

    def forward_only(self) -> Schedule:
        """The forwards alone, in the order of each stage and each as early as it can: of a step without gradients."""
        orders = [[row[s] for row in self.table] for s in range(self.stages)]
        forwards = [[slot for slot in order if slot and slot.operation is Operation.FORWARD] for order in orders]
        return Schedule.from_orders(forwards, self.placement)

    def slots(self) -> Iterator[tuple[int, int, Slot]]:
        """Tick, stage and operation, of all."""
        for tick, row in enumerate(self.table):
            yield from ((tick, stage, slot) for stage, slot in enumerate(row) if slot)

    @functools.cached_property
    def live(self) -> tuple[int, ...]:
        """Of each stage the most micro-batches, counted once a chunk, whose residuals it holds at a time: from the
        forward to the end of the backward; none where there is no backward."""
        if not self.has_backward:
            return (0,) * self.stages
        last = Operation.WEIGHT_GRADIENT if self.splits_backward else Operation.BACKWARD
        now, most = [0] * self.stages, [0] * self.stages
        for _, stage, slot in self.slots():
            now[stage] += (slot.operation is Operation.FORWARD) - (slot.operation is last)
            most[stage] = max(most[stage], now[stage])
        return tuple(most)

    def seconds(self, seconds: Mapping[Operation, float]) -> float:
        """Seconds from the first operation's beginning to the last one's end, where each begins as soon as its stage is
        free and its operands are there; sending takes no time.

        Args:
          seconds: of each operation on one chunk.
        """
        ends: dict[Key, float] = {}
        free = [0.0] * self.stages
        for _, stage, slot in self.slots():
            begin = max([free[stage], *(ends[need] for need in needs(slot, stage, self.placement))])
            free[stage] = begin + seconds[slot.operation]
            ends[slot.operation, self.placement[slot.chunk][stage], slot.microbatch] = free[stage]
        return max(free, default=0.0)

    def bubble(self, seconds: Mapping[Operation, float]) -> float:
        """The share of all stages' time in which they are idle, from 0 to 1; see `seconds`."""
        busy = sum(seconds[slot.operation] for _, _, slot in self.slots())
        total = self.stages * self.seconds(seconds)
        return 1 - busy / total if total else 0.0

    def check(self, most: int | None = None) -> None:
        """Proves the table: every operation of every micro-batch once, on the stage that holds the part of the model,
        after what it needs; and so that no stage waits for ever.

        Args:
          most: the residuals of how many micro-batches, counted once a chunk, a stage may hold at a time; None: any.

        Raises:
          ScheduleError: names the tick, the stage and the operation that is wrong, missing or too early, or the stage
            that holds more.
        """
        self._check_shape()
        at: dict[Key, int] = {}
        for tick, stage, slot in self.slots():
            where = f"tick {tick}, stage {stage}: {label(slot, self.chunks)}"
            key = slot.operation, self.placement[slot.chunk][stage], slot.microbatch
            if key in at:
                raise ScheduleError(f"{where} ran at tick {at[key]} already")
            missing = [need for need in needs(slot, stage, self.placement) if at.get(need, tick) >= tick]
            if missing:
                raise ScheduleError(f"{where} needs {describe(missing[0], self.placement)} at an earlier tick")
            at[key] = tick
        backward = (Operation.BACKWARD,) * self.has_backward
        if self.splits_backward:
            backward = (Operation.INPUT_GRADIENT, Operation.WEIGHT_GRADIENT)
        parts, microbatches = range(self.stages * self.chunks), range(self.microbatches)
        for key in itertools.product((Operation.FORWARD, *backward), parts, microbatches):
            if key not in at:
                raise ScheduleError(f"{describe(key, self.placement)} is missing")
        if len(at) != (1 + len(backward)) * len(parts) * len(microbatches):
            raise ScheduleError("some backwards are whole and others split; every one is B, or every one I and W")
        for stage, live in enumerate(self.live):
            if most is not None and live > most:
                raise ScheduleError(f"stage {stage} holds the residuals of {live} micro-batches at a time, of {most}")

    def _check_shape(self) -> None:
        if not any(any(row) for row in self.table):
            raise ScheduleError("the table has no operation")
        parts = sorted(itertools.chain(*self.placement))
        if not parts or len({len(row) for row in self.placement}) > 1 or parts != list(range(len(parts))):
            raise ScheduleError(
                f"placement {self.placement} does not give each chunk of each stage one of the model's parts 0, 1, ..."
            )
        of_stages, _ = Counter(map(len, self.table)).most_common(1)[0]
        for tick, row in enumerate(self.table):
            if len(row) != of_stages:
                raise ScheduleError(f"tick {tick} has {len(row)} entries, and others {of_stages}: one for each stage")
        if of_stages != self.stages:
            raise ScheduleError(f"the table has {of_stages} stages and the placement {self.stages}")
        for tick, stage, slot in self.slots():
            if slot.chunk >= self.chunks:
                raise ScheduleError(
                    f"tick {tick}, stage {stage}: {slot} is of a chunk beyond the last, {self.chunks - 1}"
                )

    def __str__(self) -> str:
        cells = [[label(row[s], self.chunks) for row in self.table] for s in range(self.stages)]
        width = max((len(cell) for row in cells for cell in row), default=0)
        name = len(f"stage {self.stages - 1}")
        lines = (
            f"{f'stage {s}':<{name}}  {'  '.join(f'{cell:<{width}}' for cell in row)}" for s, row in enumerate(cells)
        )
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        shape = (
            f"{self.stages} stages, {self.chunks} chunks, {self.microbatches} micro-batches, {len(self.table)} ticks"
        )
        return f"Schedule({shape})"

    def _repr_html_(self) -> str:
        return svg(self.table, self.chunks)


def _slot(entry: Any, where: str) -> Slot | None:
    if entry is None or isinstance(entry, Slot):
        return entry
    try:
        operation, chunk, microbatch = entry
        slot = Slot(Operation(operation), operator.index(chunk), operator.index(microbatch))
    except (TypeError, ValueError):
        slot = None
    if slot is None or min(slot.chunk, slot.microbatch) < 0:
        raise ScheduleError(
            f"{where}: {entry!r} is not (operation, chunk, micro-batch): one of F, B, I, W, and two from 0"
        )
    return slot
