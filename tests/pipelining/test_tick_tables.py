"""Slots of stages: nothing is overwritten that is still to be read, and there are as many as theory says."""

from __future__ import annotations

import pytest

from autoshard.pipelining.tick_tables import TickTables, tick_tables
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation

F = Operation.FORWARD


def tables_of(name: str, stages: int, microbatches: int) -> tuple[Schedule, TickTables]:
    schedule = Schedule.named(name, stages=stages, microbatches=microbatches)
    return schedule, tick_tables(schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 2), (4, 4), (4, 5), (4, 13)])
def test_each_operation_finds_what_it_reads(name: str, stages: int, microbatches: int) -> None:
    """Runs the tables with names in place of arrays."""
    schedule, tables = tables_of(name, stages, microbatches)
    last = stages * schedule.chunks - 1
    held: list[dict[tuple[str, int], tuple[str, int, int]]] = [{} for _ in range(stages)]
    for tick, row in enumerate(schedule.table):
        sent: dict[tuple[str, int], tuple[str, int, int]] = {}
        for stage, slot in enumerate(row):
            if slot is None:
                continue
            part, m = schedule.placement[slot.chunk][stage], slot.microbatch
            assert (tables.part[tick, stage], tables.microbatch[tick, stage]) == (part, m)

            def at(kind: str, stage: int = stage, tick: int = tick) -> tuple[str, int]:
                return kind, int(getattr(tables, kind)[tick, stage])

            if slot.operation is F:
                assert part == 0 or held[stage][at("activation")] == ("a", part, m)
                held[stage][at("residual")] = ("residual", part, m)
                if part == last:
                    held[stage][at("final")] = ("final", part, m)
                sent["a", stage] = ("a", part + 1, m)
                continue
            assert held[stage][at("residual")] == ("residual", part, m)
            if slot.operation is Operation.WEIGHT_GRADIENT:
                assert held[stage][at("kept")] == ("kept", part, m)
                continue
            assert held[stage][at("final")] == ("final", part, m) if part == last else True
            assert part == last or held[stage][at("gradient")] == ("g", part, m)
            if schedule.splits_backward:
                held[stage][at("kept")] = ("kept", part, m)
            sent["g", stage] = ("g", part - 1, m)
        exchange = iter(tables.exchanges[tables.exchange[tick]])
        for kind, name_of, routes in (("a", "activation", tables.activations), ("g", "gradient", tables.gradients)):
            for route in routes:
                sources = {to: source for source, to in next(exchange)}
                for stage in range(stages):
                    if (slot_at := int(route.slot[tick, stage])) >= 0:
                        held[stage][name_of, slot_at] = sent[kind, sources.get(stage, stage)]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_slots_are_as_many_as_micro_batches_in_flight(stages: int) -> None:
    for name, expected in (("1f1b", stages), ("gpipe", 3 * stages)):
        schedule, tables = tables_of(name, stages, 3 * stages)
        assert tables.slots[2] == max(schedule.live) == expected
        assert tables.slots[3] == 0
