"""How long stages wait for each other, against the published closed forms."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autoshard.pipelining.exchange import seconds_of_ticks
from autoshard.pipelining.tick_tables import tick_tables
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation

F, B, I, W = Operation.FORWARD, Operation.BACKWARD, Operation.INPUT_GRADIENT, Operation.WEIGHT_GRADIENT
WHOLE, SPLIT = {F: 1.0, B: 2.0}, {F: 1.0, I: 1.0, W: 1.0}


def seconds_of(name: str, stages: int, microbatches: int, seconds: Mapping[Operation, float], sending: float) -> float:
    schedule = Schedule.named(name, stages=stages, microbatches=microbatches)
    ticks = [[seconds[slot.operation] if slot else 0.0 for slot in row] for row in schedule.table]
    tables = tick_tables(schedule)
    return seconds_of_ticks(tables, ticks, [sending] * len((*tables.activations, *tables.gradients)))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_where_sending_takes_no_time_a_pipeline_takes_what_is_published(stages: int) -> None:
    for m in sorted({1, max(1, stages - 1), stages, stages + 1, 2 * stages, 3 * stages + 1}):
        for name in ("gpipe", "1f1b"):
            assert seconds_of(name, stages, m, WHOLE, 0) == (m + stages - 1) * 3
        longest = Schedule.named("zb-v", stages=stages, microbatches=m).seconds(SPLIT)
        assert seconds_of("zb-v", stages, m, SPLIT, 0) == longest
        if m >= stages:  # a third of the bubble
            assert seconds_of("zb-h1", stages, m, SPLIT, 0) == 3 * m + stages - 1


def test_neighbours_alone_wait_for_each_other() -> None:
    """Of one that sends at each tick each waits for all, and a tick takes as long as a backward."""
    schedule = Schedule.named("1f1b", stages=8, microbatches=64)
    busiest = sum(max(WHOLE[slot.operation] if slot else 0.0 for slot in row) for row in schedule.table)
    assert (seconds_of("1f1b", 8, 64, WHOLE, 0), busiest) == (213, 276)


def test_stages_wait_for_what_is_sent() -> None:
    assert seconds_of("gpipe", 2, 1, WHOLE, 0.25) == 6.5  # an activation, and a gradient
    assert seconds_of("gpipe", 2, 4, WHOLE, 0.25) == 15 + 8 * 0.25
    assert seconds_of("gpipe", 1, 4, WHOLE, 0.25) == 12
