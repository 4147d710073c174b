"""Batches read ahead by a thread: in order, no more than asked for, with their positions, and errors in their place."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from autoshard.batches.prefetch import AHEAD, Prefetched


class Counting:
    """Counts up; says how far it was read, and fails at a number."""

    def __init__(self, fails_at: int = 0, ends_at: int = 0) -> None:
        self.taken, self._fails_at, self._ends_at = 0, fails_at, ends_at

    def __next__(self) -> int:
        if self.taken + 1 == self._fails_at:
            raise ValueError("the third is broken")
        if self._ends_at and self.taken == self._ends_at:
            raise StopIteration
        self.taken += 1
        return self.taken

    def get_state(self) -> Any:
        return {"taken": self.taken}


class Placing:
    """Doubles a batch, and knows what thread it was in; odd ones are new until they were placed once."""

    def __init__(self, new: tuple[int, ...] = ()) -> None:
        self.digest, self.new, self.threads = 0, set(new), {}

    def knows(self, batch: int) -> bool:
        return batch not in self.new

    def __call__(self, batch: int) -> int:
        self.digest += batch
        self.threads[batch] = threading.current_thread().name
        return 2 * batch


def test_batches_come_in_order_with_the_position_after_each():
    source, place = Counting(), Placing()
    with Prefetched(source, place, 5) as ready:
        assert ready.get_state() == {"taken": 0}
        for n in range(1, 6):
            assert next(ready) == 2 * n
            assert ready.get_state() == {"taken": n}
            assert ready.digest == n * (n + 1) // 2
    assert source.taken == 5  # whoever goes on with the source misses none
    assert set(place.threads.values()) == {"prefetch"}


def test_they_are_read_before_they_are_asked_for_and_not_many():
    source = Counting()
    with Prefetched(source, Placing(), 100) as ready:
        next(ready)
        until = time.monotonic() + 30
        while source.taken < AHEAD + 2 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert source.taken == AHEAD + 2  # one given out, those that wait, and one in the thread's hand
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_a_batch_of_new_sizes_is_placed_by_who_asks_for_it():
    place = Placing(new=(2, 4))
    with Prefetched(Counting(), place, 5) as ready:
        assert [next(ready) for _ in range(5)] == [2, 4, 6, 8, 10]
        assert ready.digest == 15
    assert [place.threads[n] for n in range(1, 6)] == ["prefetch", "MainThread", "prefetch", "MainThread", "prefetch"]


def test_what_the_source_raises_is_raised_where_the_batch_is_asked_for():
    with Prefetched(Counting(fails_at=3), Placing(), 5) as ready:
        assert [next(ready), next(ready)] == [2, 4]
        with pytest.raises(ValueError, match="the third is broken"):
            next(ready)
        assert ready.get_state() == {"taken": 2}
    with Prefetched(Counting(ends_at=2), Placing(), 5) as ready:
        assert [next(ready), next(ready)] == [2, 4]
        with pytest.raises(StopIteration):
            next(ready)


def test_what_each_batch_was_waited_for_is_kept_but_of_the_first():
    with Prefetched(Counting(), Placing(), 4) as ready:
        assert [next(ready) for _ in range(4)] == [2, 4, 6, 8]
        assert len(ready.take_waits()) == 3
        assert ready.take_waits() == []
