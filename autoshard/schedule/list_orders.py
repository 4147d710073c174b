"""Orders of operations found by list scheduling: under a memory limit, from the seconds that each operation takes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from autoshard.errors import ScheduleError
from autoshard.schedule.slots import Key, Operation, Placement, Slot, needs

_PRIORITY = (Operation.INPUT_GRADIENT, Operation.BACKWARD, Operation.FORWARD, Operation.WEIGHT_GRADIENT)
"""What other stages wait for goes first, and frees memory before it takes more."""


def list_orders(
    placement: Placement, microbatches: int, seconds: Mapping[Operation, float], limit: int
) -> Sequence[Sequence[Slot]]:
    """Of each stage its operations in the order in which a stage that is free takes the most urgent one it can.

    Args:
      placement: ``placement[chunk][stage]``: which part of the model, counted from its input.
      seconds: of each operation on one chunk. Backwards are split where it has `WEIGHT_GRADIENT`.
      limit: micro-batches, counted once a chunk, whose residuals a stage may hold at a time; at least the chunks.

    Raises:
      ScheduleError: ``limit`` is below the number of chunks.
    """
    chunks, stages = len(placement), len(placement[0])
    if limit < chunks:
        raise ScheduleError(f"a limit of {limit} does not hold one micro-batch on each of {chunks} chunks of a stage")
    last = Operation.WEIGHT_GRADIENT if Operation.WEIGHT_GRADIENT in seconds else Operation.BACKWARD
    upcoming = [{chunk: dict.fromkeys(seconds, 0) for chunk in range(chunks)} for _ in range(stages)]
    orders: list[list[Slot]] = [[] for _ in range(stages)]
    live, done = [0] * stages, set[Key]()
    running: list[tuple[float, int, Slot]] = []
    free, now, left = set(range(stages)), 0.0, len(seconds) * chunks * stages * microbatches

    def urgent(stage: int) -> Slot | None:
        found: list[tuple[int, int, Slot]] = []
        for chunk, counts in upcoming[stage].items():
            for operation, microbatch in counts.items():
                slot = Slot(operation, chunk, microbatch)
                # A forward leaves room for the chunks that come after it, without which nothing would be released.
                full = operation is Operation.FORWARD and live[stage] + chunks - chunk > limit
                if microbatch < microbatches and not full and done.issuperset(needs(slot, stage, placement)):
                    found.append((_PRIORITY.index(operation), -chunk, slot))
        return min(found)[2] if found else None

    while left:
        for stage in sorted(free):
            slot = urgent(stage)
            if slot:
                free.remove(stage)
                live[stage] += slot.operation is Operation.FORWARD
                upcoming[stage][slot.chunk][slot.operation] += 1
                orders[stage].append(slot)
                heapq.heappush(running, (now + seconds[slot.operation], stage, slot))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, stage, slot = heapq.heappop(running)
            done.add((slot.operation, placement[slot.chunk][stage], slot.microbatch))
            live[stage] -= slot.operation is last
            free.add(stage)
            left -= 1
    return orders
