"""Schedules: the published ones against their closed forms, and tables with a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import autoshard
from autoshard.errors import ScheduleError
from autoshard.schedule.list_orders import list_orders
from autoshard.schedule.orders import orders_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.slots import Operation, Slot, looped, v_shaped

F, B, I, W = Operation.FORWARD, Operation.BACKWARD, Operation.INPUT_GRADIENT, Operation.WEIGHT_GRADIENT
NAMES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-v")
SECONDS: Mapping[Operation, float] = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
STAGES = (1, 2, 3, 4, 5, 8)


def counts(stages: int) -> list[int]:
    """Numbers of micro-batches: one, fewer than stages, as many, more, and no multiple."""
    return sorted({1, max(1, stages - 1), stages, stages + 1, 2 * stages, 3 * stages + 1})


@pytest.mark.parametrize("name", NAMES)
def test_every_named_schedule_is_valid_for_any_number_of_micro_batches(name: str) -> None:
    for stages in STAGES:
        for microbatches in counts(stages):
            schedule = Schedule.named(name, stages=stages, microbatches=microbatches)
            schedule.check()
            assert (schedule.stages, schedule.microbatches) == (stages, microbatches)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved:2", 2), ("zb-v", 2)])
def test_forwards_alone_take_each_part_once_and_hold_nothing(name: str, chunks: int) -> None:
    schedule = Schedule.named(name, stages=4, microbatches=8).forward_only()
    schedule.check()
    assert sorted(slot for _, _, slot in schedule.slots()) == sorted(
        Slot(F, c, m) for c in range(chunks) for m in range(8) for _ in range(4)
    )
    assert (schedule.has_backward, schedule.live, schedule.forward_only()) == (False, (0,) * 4, schedule)
    assert schedule.seconds(SECONDS) <= (8 + 4 * chunks - 1) * chunks


@pytest.mark.parametrize("stages", STAGES)
def test_gpipe_and_1f1b_take_the_published_time_and_memory(stages: int) -> None:
    for microbatches in counts(stages):
        gpipe = Schedule.named("gpipe", stages=stages, microbatches=microbatches)
        ours = Schedule.named("1f1b", stages=stages, microbatches=microbatches)
        assert len(gpipe.table) == len(ours.table) == 2 * (microbatches + stages - 1)
        assert gpipe.seconds(SECONDS) == ours.seconds(SECONDS) == (microbatches + stages - 1) * 3
        assert gpipe.live == (microbatches,) * stages
        assert ours.live == tuple(min(microbatches, stages - stage) for stage in range(stages))
        bubble = (stages - 1) / (microbatches + stages - 1)
        assert ours.bubble(SECONDS) == pytest.approx(bubble)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_shortens_the_bubble_by_the_chunks(stages: int, chunks: int) -> None:
    for microbatches in (stages, 2 * stages, 5 * stages):
        schedule = Schedule.named(f"interleaved:{chunks}", stages=stages, microbatches=microbatches)
        assert len(schedule.table) == 2 * (microbatches * chunks + stages - 1)
        of_a_chunk = {F: 1.0 / chunks, B: 2.0 / chunks}
        assert schedule.seconds(of_a_chunk) == pytest.approx(3 * microbatches + 3 * (stages - 1) / chunks)


@pytest.mark.parametrize("stages", STAGES)
def test_zero_bubble_h1_has_a_third_of_the_bubble_at_the_same_memory(stages: int) -> None:
    for microbatches in range(stages, 3 * stages + 2):
        ours = Schedule.named("zb-h1", stages=stages, microbatches=microbatches)
        plain = Schedule.named("1f1b", stages=stages, microbatches=microbatches)
        assert len(ours.table) == 3 * microbatches + stages - 1
        idle = ours.seconds(SECONDS) - 3 * microbatches
        assert 3 * idle == plain.seconds(SECONDS) - 3 * microbatches
        assert max(ours.live) == max(plain.live)


@pytest.mark.parametrize("stages", STAGES[1:])
def test_more_micro_batches_in_flight_help_where_operations_take_unequal_times(stages: int) -> None:
    unequal = {F: 1.0, I: 1.3, W: 0.9}
    for microbatches in (2 * stages, 3 * stages + 1):
        h1 = Schedule.named("zb-h1", stages=stages, microbatches=microbatches)
        more = Schedule.named(f"zb:{2 * stages - 1}", stages=stages, microbatches=microbatches)
        assert max(h1.live) < max(more.live) <= 2 * stages - 1
        assert more.seconds(unequal) < h1.seconds(unequal)
        assert more.seconds(SECONDS) == h1.seconds(SECONDS)  # where they take equal times nothing is left to gain


@pytest.mark.parametrize("name", ["zb:0", "zb:", "zb:two"])
def test_a_number_in_flight_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"no schedule is called {name!r}; did you mean 'zb:7'"):
        Schedule.named(name, stages=4, microbatches=8)


@pytest.mark.parametrize("stages", STAGES)
def test_zero_bubble_v_is_never_idle_in_its_steady_state(stages: int) -> None:
    for microbatches in (2 * stages, 3 * stages + 1, 6 * stages):
        schedule = Schedule.named("zb-v", stages=stages, microbatches=microbatches)
        assert max(schedule.live) <= 2 * stages  # chunks of half the size: the memory of 1f1b
        steady = range(4 * stages, 6 * microbatches - 3 * stages)
        assert all(all(schedule.table[tick]) for tick in steady)
        plain = Schedule.named("1f1b", stages=stages, microbatches=microbatches)
        assert schedule.seconds({F: 0.5, I: 0.5, W: 0.5}) <= plain.seconds(SECONDS)


@pytest.mark.parametrize("placement", [looped(4, 1), looped(3, 2), looped(2, 4), v_shaped(4)])
@pytest.mark.parametrize("seconds", [{F: 1.0, B: 2.0}, {F: 1.0, I: 1.2, W: 0.7}, {F: 3.0, I: 1.0, W: 1.0}])
def test_scheduling_from_times_keeps_the_memory_limit(placement, seconds: Mapping[Operation, float]) -> None:
    chunks = len(placement)
    longest = []
    for limit in range(chunks, 4 * chunks + 1):
        schedule = Schedule.from_orders(list_orders(placement, 7, seconds, limit), placement)
        assert max(schedule.live) <= limit
        longest.append(schedule.seconds(seconds))
    assert longest[-1] < longest[0]  # memory buys time


def test_a_limit_below_the_chunks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a limit of 1 does not hold one micro-batch on each of 2 chunks"):
        list_orders(looped(2, 2), 4, {F: 1.0, B: 2.0}, 1)


def test_orders_that_deadlock_say_what_waits_for_what() -> None:
    orders, placement = orders_of("1f1b", 2, 2)
    swapped = [orders[0], [Slot(F, 0, 1), *[slot for slot in orders[1] if slot != Slot(F, 0, 1)]]]
    backward_first = [[Slot(B, 0, 0), Slot(F, 0, 0)], [Slot(F, 0, 0), Slot(B, 0, 0)]]
    assert Schedule.from_orders(swapped, placement).microbatches == 2  # another order, and a valid one
    with pytest.raises(
        ScheduleError, match="deadlock at tick 0: B0 of stage 0 waits for F0 of stage 0; F0 of stage 1 waits"
    ):
        Schedule.from_orders(backward_first, placement)


@pytest.mark.parametrize("name", NAMES)
def test_every_planted_fault_in_a_table_is_found(name: str) -> None:
    schedule = Schedule.named(name, stages=3, microbatches=4)
    idle = (None,) * 3
    for tick, stage, slot in schedule.slots():

        def with_slot(slot: Slot | None, tick: int = tick, stage: int = stage) -> Schedule:
            row = schedule.table[tick]
            changed = (*row[:stage], slot, *row[stage + 1 :])
            return replace(schedule, table=(*schedule.table[:tick], changed, *schedule.table[tick + 1 :]))

        with pytest.raises(ScheduleError, match="missing|earlier tick"):
            with_slot(None).check()
        with pytest.raises(ScheduleError, match="missing|earlier tick|already"):
            with_slot(slot._replace(microbatch=(slot.microbatch + 1) % 4)).check()
        again = replace(schedule, table=(*schedule.table, (*idle[:stage], slot, *idle[stage + 1 :])))
        with pytest.raises(ScheduleError, match="already"):
            again.check()
    with pytest.raises(ScheduleError, match="needs .* at an earlier tick"):
        replace(schedule, table=schedule.table[::-1]).check()


def test_a_table_of_another_shape_is_refused() -> None:
    schedule = Schedule.named("1f1b", stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match="tick 0 has 1 entries, and others 2"):
        Schedule((schedule.table[0][:1], *schedule.table[1:])).check()
    with pytest.raises(ScheduleError, match="the table has 2 stages and the placement 1"):
        replace(schedule, placement=((0,),)).check()
    with pytest.raises(ScheduleError, match="the table has no operation"):
        Schedule(((None, None),)).check()
    with pytest.raises(ScheduleError, match="does not give each chunk"):
        replace(schedule, placement=((0, 0),)).check()
    with pytest.raises(ScheduleError, match="of a chunk beyond the last, 0"):
        replace(schedule, table=((Slot(F, 1, 0), None),)).check()
    whole, split = Slot(B, 0, 0), (Slot(I, 0, 1), Slot(W, 0, 1))
    mixed = [Slot(F, 0, 0), Slot(F, 0, 1), whole, *split]
    with pytest.raises(ScheduleError, match="I0 of stage 0 is missing"):
        Schedule(tuple((slot,) for slot in mixed), ((0,),)).check()


@pytest.mark.parametrize(("name", "most"), [("gpipe", 6), ("1f1b", 3), ("zb-h1", 3), ("zb:2", 2)])
def test_a_bound_of_what_stages_hold_is_proven(name: str, most: int) -> None:
    schedule = Schedule.named(name, stages=3, microbatches=6)
    schedule.check(most)
    with pytest.raises(ScheduleError, match=rf"stage 0 holds the residuals of {most} micro-batches at a time, of"):
        schedule.check(most - 1)


def test_a_table_may_be_of_plain_tuples() -> None:
    named = Schedule.named("interleaved:2", stages=2, microbatches=3)
    rows = [[(str(slot[0]), slot[1], slot[2]) if slot else None for slot in row] for row in named.table]
    assert Schedule(tuple(map(tuple, rows))) == named
    for wrong in (("X", 0, 0), ("F", 0), ("F", 0, -1), ("F", 0, 0.5), "F00", 3):
        with pytest.raises(ScheduleError, match="tick 0, stage 1: .* is not"):
            Schedule(((None, wrong),))


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called '1f2b'; did you mean '1f1b'"):
        Schedule.named("1f2b", stages=2, microbatches=2)
    with pytest.raises(ScheduleError, match="0 stages and 2 micro-batches"):
        Schedule.named("gpipe", stages=0, microbatches=2)


def test_text_and_picture_show_every_slot() -> None:
    schedule = autoshard.Schedule.named("interleaved:2", stages=2, microbatches=3)
    lines = str(schedule).splitlines()
    assert [line.split()[2:] for line in lines] == [
        [f"{s.operation}{s.microbatch}.{s.chunk}" if s else "." for s in (row[stage] for row in schedule.table)]
        for stage in range(2)
    ]
    drawn = ElementTree.fromstring(schedule._repr_html_())
    texts = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert sorted(texts[2:]) == sorted(word for line in lines for word in line.split()[2:] if word != ".")
    assert repr(schedule) == f"Schedule(2 stages, 2 chunks, 3 micro-batches, {len(schedule.table)} ticks)"
