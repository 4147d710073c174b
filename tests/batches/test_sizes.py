"""The four sizes of a batch from any three."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.batches.sizes import BatchSizes, batch_sizes
from autoshard.errors import ArgumentError

SIZE = st.integers(1, 64)


@given(SIZE, SIZE, SIZE, st.sampled_from(["batch", "micro", "accumulation", "shards", None]))
def test_the_missing_one_is_derived(micro: int, accumulation: int, shards: int, missing: str | None):
    whole = {"batch": micro * accumulation * shards, "micro": micro, "accumulation": accumulation, "shards": shards}
    assert batch_sizes(**{name: n for name, n in whole.items() if name != missing}) == BatchSizes(**whole)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 8, "micro": 2}, "accumulation and shards are missing"),
        ({"batch": 8, "micro": 0, "shards": 1}, "micro=0: a size is a whole number"),
        ({"batch": 10, "micro": 2, "shards": 4}, r"10 is not a multiple of 2 \(micro\) \* 4 \(shards\) = 8; .*is: 8"),
        ({"batch": 16, "micro": 2, "accumulation": 3, "shards": 4}, r"16 is not 2 \(micro\) .* = 24; leave out one"),
    ],
)
def test_what_contradicts_is_refused(sizes: dict[str, Any], message: str):
    with pytest.raises(ArgumentError, match=message):
        batch_sizes(**sizes)
