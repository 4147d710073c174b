"""Batches padded to a few sizes: what is true stays, what is not weighs nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.batches.padding import Padding, even_buckets
from autoshard.errors import ArgumentError

DIMS = {"tokens": ("rows", "length"), "weights": ("rows", "length"), "patches": ("patches", None), "label": ("rows",)}
BUCKETS = (
    {"rows": 4, "length": 4, "patches": 8},
    {"rows": 4, "length": 8, "patches": 8},
    {"rows": 4, "length": 8, "patches": 16},
)


def batch(rows: int, length: int, patches: int) -> dict[str, Any]:
    tokens = np.arange(1, rows * length + 1).reshape(rows, length)
    return {"tokens": tokens, "patches": np.ones((patches, 3)), "label": np.arange(rows), "name": ["a"] * rows}


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 16))
def test_a_batch_goes_into_the_first_bucket_that_holds_it(rows: int, length: int, patches: int):
    found = Padding(BUCKETS, DIMS, {"label": -1})(given := batch(rows, length, patches))
    number = 2 if patches > 8 else 1 if length > 4 else 0
    bucket = BUCKETS[number]
    assert found["tokens"].shape == found["weights"].shape == (4, bucket["length"])
    assert found["patches"].shape == (bucket["patches"], 3)
    np.testing.assert_array_equal(found["tokens"][:rows, :length], given["tokens"])
    assert found["tokens"].dtype == given["tokens"].dtype
    assert found["tokens"].sum() == given["tokens"].sum()
    np.testing.assert_array_equal(found["weights"] == 1, found["tokens"] > 0)
    assert found["label"].tolist() == [*range(rows), *[-1] * (4 - rows)]
    assert found["name"] is given["name"]


def test_a_none_passes_by_and_weights_are_made_in_its_place():
    """As masks of a model that has one in some configurations."""
    dims = {**DIMS, "inputs.mask": ("rows", "length")}
    found = Padding(BUCKETS, dims)({**batch(3, 2, 1), "inputs": {"mask": None}, "label": None, "weights": None})
    assert (found["inputs"], found["label"]) == ({"mask": None}, None)
    assert found["weights"].tolist() == [[1, 1, 0, 0]] * 3 + [[0] * 4]


def test_rows_of_different_lengths_are_one_array():
    rows = [np.arange(1, n + 1) for n in (3, 1)]
    found = Padding(BUCKETS[:2], {name: DIMS[name] for name in ("tokens", "weights")} | {"x": ("patches",)})(
        {"tokens": rows, "x": np.ones(5)}
    )
    assert found["tokens"].tolist() == [[1, 2, 3, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    np.testing.assert_array_equal(found["weights"] == 1, found["tokens"] > 0)
    assert found["weights"].dtype == np.float32


def test_each_array_has_dimensions_of_its_own_also_within_a_dictionary():
    """As Qwen2-VL reads them: patches of all images of a batch in a row, and where each text and image is."""
    padding = Padding(
        [{"rows": 2, "length": 4, "patches": 8, "images": 3}],
        {
            "inputs.tokens": ("rows", "length"),
            "inputs.positions": (None, "rows", "length"),
            "inputs.patches": ("patches",),
            "inputs.grid": ("images",),
            "weights": ("rows", "length"),
        },
        {"inputs.grid": 1},
    )
    inputs = {"tokens": np.ones((1, 3)), "positions": np.ones((3, 1, 3)), "patches": np.ones((6, 5))}
    found = padding({"inputs": {**inputs, "grid": np.full((2, 3), 2), "name": "a"}, "id": 7})
    assert {name: x.shape for name, x in found["inputs"].items() if name != "name"} == {
        "tokens": (2, 4),
        "positions": (3, 2, 4),
        "patches": (8, 5),
        "grid": (3, 3),
    }
    assert found["inputs"]["grid"].tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 1]]
    assert found["weights"].tolist() == [[1, 1, 1, 0], [0] * 4]
    assert (found["inputs"]["name"], found["id"]) == ("a", 7)


@pytest.mark.parametrize(
    "order", [("tokens", "at", "segments"), ("segments", "tokens", "at"), ("at", "segments", "tokens")]
)
def test_weights_are_of_what_every_array_has_whichever_is_named_first(order: tuple[str, ...]):
    dims = {"tokens": ("rows", "length"), "segments": ("rows", "length"), "at": (None, "rows", "length")}
    padding = Padding([{"rows": 3, "length": 4}], {name: dims[name] for name in order} | {"weights": dims["tokens"]})
    tokens = [np.arange(1, 3), np.arange(1, 4)]
    found = padding({"tokens": tokens, "segments": np.zeros((2, 3), int), "at": np.zeros((3, 2, 3))})
    assert found["weights"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0] * 4]


def test_rows_may_be_numbers_lists_or_larger_in_two_dimensions():
    assert Padding([{"rows": 4}], {"x": ("rows",)})({"x": [1, 2, 3]})["x"].tolist() == [1, 2, 3, 0]
    padding = Padding([{"rows": 2, "height": 3, "width": 3}], {"x": ("rows", "height", "width")}, {"x": -1})
    found = padding({"x": (np.ones((2, 1), np.int8), np.ones((1, 2), np.int8))})["x"]
    assert found.tolist() == [[[1, -1, -1], [1, -1, -1], [-1] * 3], [[1, 1, -1], [-1] * 3, [-1] * 3]]
    assert found.dtype == np.int8
    lengths = Padding([{"rows": 2, "length": 2}], {"x": ("rows", "length"), "weights": ("rows", "length")})
    found = lengths({"x": [[], [5, 6]]})
    assert (found["x"].tolist(), found["x"].dtype.kind) == ([[0, 0], [5, 6]], "i")
    assert found["weights"].tolist() == [[0, 0], [1, 1]]
    by_row = Padding([{"rows": 3, "length": 2}], {"x": ("rows", "length"), "weights": ("rows",)})
    assert by_row({"x": [[1], [5, 6]]})["weights"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("x", "dims", "fill", "message"),
    [
        ([np.arange(3), np.arange(2)], ["rows"], 0, r"'x' has rows of \[3\] and \[2\], .* name those that differ"),
        ((np.arange(3), np.arange(2)), ["rows"], 0, r"'x' has rows of \[3\] and \[2\], .* name those that differ"),
        ([np.arange(3), np.arange(2)], ["rows", None], 0, r"of its dimensions \['rows', None\] are padded"),
        ([np.arange(3), np.ones((2, 2))], ["rows"], 0, r"\[3\] and \[2, 2\], .* all rows as many dimensions"),
        ([[[1], [1, 2]], [[1], [2]]], ["rows"], 0, "rows are lists of different sizes: give each as an array"),
        ([], ["rows"], 0, r"'x' is a list of no rows, .*: leave the batch out, or give an array"),
        (np.ones(3, np.uint8), ["rows"], -1, r"'x' is uint8 \[3\], which cannot be padded with -1: give a `fill`"),
        (np.ones(3, np.uint8), ["rows"], -1.0, "cannot be padded with -1.0"),
        (np.ones(3, np.int32), ["rows"], -0.5, "cannot be padded with -0.5"),
        ([1, 2], ["rows"], float("nan"), r"int64 \[2\], which cannot be padded with nan"),
        (np.ones(3, np.int32), ["rows"], 2**70, "cannot be padded with 1180591620717411303424"),
        (np.ones(3, np.float16), ["rows"], 1e9, "cannot be padded with 1000000000.0"),
        (["a"], ["rows"], 0, r"'x' is <U1 \[1\], which cannot be padded with 0"),
    ],
)
def test_what_cannot_be_padded_is_refused_by_name(x: Any, dims: Any, fill: float, message: str):
    bucket = {name: 4 for name in dims if name is not None}
    with pytest.raises(ArgumentError, match=message):
        Padding([bucket], {"x": dims}, {"x": fill})({"x": x})


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("int32", -100), ("uint8", 255.0), ("float32", 0.1), ("float32", np.inf), ("bfloat16", -1), ("bool", 1)],
)
def test_a_fill_is_of_the_dtype_of_its_array(dtype: str, fill: float):
    found = Padding([{"rows": 2}], {"x": ["rows"]}, {"x": fill})({"x": np.zeros(1, jnp.dtype(dtype))})["x"]
    assert found.dtype == jnp.dtype(dtype)
    assert found[1] == np.asarray(fill).astype(jnp.dtype(dtype))


def test_weights_that_a_batch_has_are_padded_with_nothing():
    padding = Padding([{"rows": 3}], {"label": ("rows",), "weights": ("rows",)}, {"label": 7})
    found = padding({"label": np.zeros(2, int), "weights": np.full(2, 0.5)})
    assert found["weights"].tolist() == [0.5, 0.5, 0]
    assert found["label"].tolist() == [0, 0, 7]


def test_buckets_grow_in_equal_steps():
    assert even_buckets(3, of="length", rows=2, length=10) == [{"rows": 2, "length": n} for n in (4, 7, 10)]
    with pytest.raises(ArgumentError, match="the largest size of 'width'"):
        even_buckets(3, of="width", rows=2)


@pytest.mark.parametrize(
    ("buckets", "dims", "fill", "message"),
    [
        ([], DIMS, {}, "has a bucket or more"),
        ([{"rows": 4}], {"x": (None,)}, {}, "names a dimension"),
        ([{"rows": 4}], {"x": ("rows", "length")}, {}, "must have a size, 1 or more, for each of length, rows"),
        ([{"rows": 0}], {"x": ("rows",)}, {}, "must have a size, 1 or more"),
        ([{"rows": 4}], {"x": ("rows",)}, {"y": 1}, "must be arrays that are padded"),
    ],
)
def test_what_is_no_padding_is_refused(buckets: Any, dims: Any, fill: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        Padding(buckets, dims, fill)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones(3), "is a dictionary of arrays, and this is a ndarray"),
        ({"tokens": np.ones((2, 2))}, "lacks 'patches'"),
        (batch(5, 9, 3), r"rows 5, length 9, and no bucket is as large: .*'length': 4"),
        (batch(2, 3, 3) | {"label": np.arange(3)}, "'rows' has 2 in 'tokens' and 3 in 'label'"),
        (batch(2, 3, 3) | {"tokens": np.arange(2)}, r"'tokens' has the dimensions .*, and a batch has one of \[2\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(given: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        Padding(BUCKETS, DIMS)(given)
