"""Batches of any origin: their order, and their position through JSON."""

from __future__ import annotations

import itertools
import json
from typing import Any

import grain
import jax
import numpy as np
import pytest
from absl import flags

from autoshard.errors import ArgumentError, ConfigError
from autoshard.train.sources import Peeked, Rows, arrays_only, source_of

NUMBERS = np.arange(10)


class Reads:
    """An array that says which rows are read."""

    def __init__(self) -> None:
        self.shape, self.dtype, self.ndim, self.read = (10, 2), np.dtype(np.int32), 2, []

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        self.read += rows.tolist()
        return np.stack([rows, rows], axis=1).astype(np.int32)


def loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        10, shuffle=True, seed=0, num_epochs=None, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(data_source=list(range(10)), sampler=sampler, operations=[grain.transforms.Batch(4)])


SOURCES = {
    "grain dataset": lambda: grain.MapDataset.range(10).shuffle(seed=1).repeat().batch(4).to_iter_dataset(),
    "grain loader": loader,
    "list": lambda: [np.arange(4) + n for n in range(3)],
    "generator": lambda: (np.arange(4) + n for n in itertools.count()),
    "rows": lambda: Rows(NUMBERS, 4),
    "shuffled rows": lambda: Rows(NUMBERS, 4, seed=3),
}


def test_what_grain_s_workers_read_is_set_without_a_program_of_absl():
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.unparse_flags()
    try:
        with pytest.raises(flags.UnparsedFlagAccessError):
            _ = flags.FLAGS.grain_enable_multiprocess_worker_profiling
        source_of(loader())
        assert flags.FLAGS.grain_enable_multiprocess_worker_profiling is False
    finally:
        (flags.FLAGS.mark_as_parsed if parsed else flags.FLAGS.unparse_flags)()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("taken", [1, 3, 5])
def test_a_position_goes_through_json_to_new_batches(kind: str, taken: int):
    source, again = source_of(SOURCES[kind]()), Peeked(source_of(SOURCES[kind]()))
    for _ in range(taken):
        next(source)
    again.set_state(json.loads(json.dumps(source.get_state())))
    for _ in range(4):
        np.testing.assert_array_equal(next(again), next(source))


@pytest.mark.parametrize("kind", SOURCES)
def test_a_look_at_the_first_batch_takes_nothing(kind: str):
    source, peeked = source_of(SOURCES[kind]()), Peeked(source_of(SOURCES[kind]()))
    assert peeked.get_state() == source.get_state()
    np.testing.assert_array_equal(peeked.first, source_of(SOURCES[kind]()).__next__())
    for _ in range(4):
        np.testing.assert_array_equal(next(peeked), next(source))
        assert peeked.get_state() == source.get_state()


def test_every_row_is_seen_once_a_pass():
    ordered, shuffled = Rows(NUMBERS, 4), Rows(NUMBERS, 4, seed=0)
    assert np.concatenate([next(ordered) for _ in range(5)]).tolist() == [*range(10), *range(10)]
    found = np.concatenate([next(shuffled) for _ in range(5)])
    first, second = found[:10].tolist(), found[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != sorted(second)


def test_rows_are_read_when_they_are_asked_for():
    array = Reads()
    rows = next(Rows(array, 4))
    assert rows.shape == (4, 2)
    assert array.read == []
    np.testing.assert_array_equal(rows[slice(1, 3), slice(0, 1)], [[1], [2]])
    assert array.read == [1, 2]


def test_rows_may_be_of_another_dimension_of_each_array():
    """As positions [3, rows, length] are, beside tokens [rows, length]."""
    tokens, positions = np.arange(20).reshape(10, 2), np.arange(60).reshape(3, 10, 2)
    batch = next(Rows({"at": positions, "x": tokens}, 4, seed=0, dims={"at": 1, "x": 0}))
    assert batch["at"].shape == (3, 4, 2)
    np.testing.assert_array_equal(np.asarray(batch["at"])[1], np.asarray(batch["x"]) + 20)
    np.testing.assert_array_equal(
        batch["at"][slice(0, 2), slice(1, 3), slice(0, 1)], np.asarray(batch["at"])[:2, 1:3, :1]
    )
    with pytest.raises(ArgumentError, match=r"which are dimensions \[1, 1\]: \['at'\] \[3, 10, 2\], \['x'\]"):
        Rows({"at": positions, "x": tokens}, 4, dims=1)
    for dims in ({"at": 1}, {"at": 1, "x": 0.5}, "1"):
        with pytest.raises(ArgumentError, match="one for each array of"):
            Rows({"at": positions, "x": tokens}, 4, dims=dims)


def test_a_position_is_of_rows_along_the_same_dimension():
    """Of square arrays nothing else tells."""
    square = {"x": np.arange(16).reshape(4, 4), "y": np.arange(16).reshape(4, 4)}
    second = Rows(square, 2, dims=np.int64(1))
    assert json.loads(json.dumps(second.get_state()))["made_of"]["dims"] == 1
    for dims in (0, {"x": 1, "y": 0}):
        for one, other in ((Rows(square, 2, dims=dims), second), (second, Rows(square, 2, dims=dims))):
            with pytest.raises(ConfigError, match=r"with dims=.*, and these have dims="):
                one.set_state(other.get_state())
    older = {"made_of": {"rows": 4, "batch": 2, "seed": None}, "taken": 1}
    Rows(square, 2).set_state(older)
    with pytest.raises(ConfigError, match="with dims=0, and these have dims=1"):
        second.set_state(older)


def test_arrays_of_different_numbers_of_rows_are_refused():
    with pytest.raises(ArgumentError, match=r"\['x'\] \[3\], \['y'\] \[4\]"):
        Rows({"x": np.zeros(3), "y": np.zeros(4)}, 2)
    with pytest.raises(ArgumentError, match="no array"):
        Rows({}, 2)
    with pytest.raises(ArgumentError, match="batch=0"):
        Rows(NUMBERS, 0)
    with pytest.raises(ArgumentError, match=r"autoshard\.train\.Rows\(arrays, batch="):
        source_of({"x": NUMBERS})
    with pytest.raises(ArgumentError, match="int is neither arrays"):
        source_of(3)
    with pytest.raises(ArgumentError, match=r"arrays are empty: \['x'\] \[0, 3\]"):
        Rows({"x": np.zeros((0, 3))}, 2)


def test_a_dictionary_with_more_than_arrays_says_what_is_none():
    with pytest.raises(ArgumentError, match=r"data set of arrays, and \['names'\] is a list: make an array of it"):
        source_of({"inputs": np.zeros((4, 3)), "names": ["a", "b", "c", "d"]}, 2)
    with pytest.raises(ArgumentError, match=r"\['x'\]\['y'\] is a int"):
        source_of({"x": {"y": 3, "z": np.zeros(4)}}, 2)
    with pytest.raises(ArgumentError, match="it is empty"):
        source_of({}, 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "has the keys 'made_of' and 'taken'"),
        ({"made_of": {"rows": 10, "batch": 4, "seed": None}, "taken": -1}, "has the keys"),
        ({"made_of": {"rows": 10, "batch": 5, "seed": None}, "taken": 1}, "batch=5, and these have batch=4"),
        ({"made_of": {"rows": 10, "batch": 4, "seed": 1}, "taken": 1}, "seed=1, and these have seed=None"),
    ],
)
def test_a_position_in_other_rows_is_refused(state: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Rows(NUMBERS, 4).set_state(state)


def test_a_position_behind_or_beyond_an_iterator_is_refused():
    source = source_of(iter([1, 2, 3]))
    with pytest.raises(ConfigError, match="end after 3, and the saved position is after 5"):
        source.set_state({"taken": 5})
    with pytest.raises(ConfigError, match="is none in these batches"):
        source.set_state({"taken": 2})


class Foreign:
    """An iterator that takes no position."""

    def __next__(self) -> Any:
        return 0

    def get_state(self) -> Any:
        return {"bytes": "of its own"}

    def set_state(self, state: Any) -> None:
        raise ValueError(f"{state}: no\nthank you")


def test_what_a_foreign_iterator_raises_at_a_position_names_it():
    source = source_of(Foreign())
    with pytest.raises(ConfigError, match=r"Foreign refuses the saved position: ValueError: {'bytes': 'of .*'}: no\."):
        source.set_state(json.loads(json.dumps(source.get_state())))
    with pytest.raises(ConfigError, match="Foreign refuses .* in as many processes; or start over"):
        source.set_state({"bytes": "no base 64"})
    for state in ({"taken": 2}, {"bytes": 1}, {"state": 1, "more": 2}, None):
        with pytest.raises(ConfigError, match="is none that Foreign gave: use the batches that the run was begun with"):
            source.set_state(state)


def test_what_no_array_can_hold_becomes_none():
    batch = {"x": NUMBERS, "text": "a", "mask": None, "names": np.array(["a"]), "n": (1, "b"), "k": jax.numpy.ones(2)}
    kept = arrays_only(batch)
    assert {key for key, value in kept.items() if value is None} == {"text", "mask", "names"}
    assert kept["n"] == (1, None)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_list_of_strings_is_one_leaf_whatever_its_length(rows: int):
    batch = {"x": [1.0] * rows, "name": ["a"] * rows, "tags": [["b"], [], [None, "c"]][:rows], "raw": (b"d",) * rows}
    assert arrays_only(batch) == {"x": [1.0] * rows, "name": None, "tags": None, "raw": None}


def test_rows_of_strings_become_none_too():
    data = {"x": NUMBERS, "name": NUMBERS.astype(str), "any": NUMBERS.astype(object)}
    kept = arrays_only(next(Rows(data, 4)))
    assert (kept["name"], kept["any"], kept["x"].shape) == (None, None, (4,))
