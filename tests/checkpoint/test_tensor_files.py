"""Safetensors files by parts: what is read and written where, against the library that others use."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import checkpoint
from autoshard.checkpoint.pieces import Piece
from autoshard.checkpoint.tensor_files import reading, runs
from autoshard.checkpoint.tensor_files.headers import DTYPES, INDEX, open_tensors
from autoshard.checkpoint.tensor_files.writing import NewTensor, divided
from autoshard.errors import CheckpointError

safetensors = pytest.importorskip("safetensors.numpy", reason="the reference that others read and write with")

MESH = Mesh(np.asarray(jax.devices(), dtype=object).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SPECS = [P("x", "y"), P("y"), P(None, ("x", "y")), P()]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def like(array: np.ndarray, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(MESH, spec))


@pytest.mark.parametrize("small_run", [0, 1 << 16])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("other", SPECS)
def test_every_spec_to_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P, other: P, small_run: int
) -> None:
    """In runs of two rows and in runs of a part of one."""
    monkeypatch.setattr(runs, "RUN_BYTES", 400)
    monkeypatch.setattr(reading, "_SMALL_RUN", small_run)
    state = {"w": random(24, 40), "wide": random(2, 400), "deep": random(8, 8, 5), "one": random(8)}
    specs = {name: P(*spec[: x.ndim]) if x.shape[0] % 8 == 0 else P() for name, x in state.items()}
    placed = {name: jax.device_put(x, NamedSharding(MESH, specs[name])) for name, x in state.items()}
    checkpoint.to_safetensors(tmp_path, placed)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == state.keys()
    text = open_tensors(tmp_path).metadata
    assert {name: text[f"crc32 {name}"] for name in state} == {n: f"{zlib.crc32(x):08x}" for n, x in state.items()}
    goal = {name: like(x, P(*other[: x.ndim]) if x.shape[0] % 8 == 0 else P()) for name, x in state.items()}
    back = checkpoint.from_safetensors(tmp_path, like=goal)
    for name, x in state.items():
        np.testing.assert_array_equal(loaded[name], x)
        np.testing.assert_array_equal(back[name], x)
        assert back[name].sharding == goal[name].sharding


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    state = {"b": random(3), "a": np.arange(6, dtype=np.int8).reshape(2, 3), "c": np.asarray(True), "e": random(0, 4)}
    safetensors.save_file(state, tmp_path / "some.safetensors", {"note": "text"})
    back, report = checkpoint.from_safetensors(tmp_path / "some.safetensors", report=True)
    assert report.extra == {"note": "text"}
    assert back.keys() == state.keys()
    for name, x in state.items():
        assert (back[name].dtype, back[name].tolist()) == (x.dtype, x.tolist())


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_keeps_its_bits(tmp_path: Path, code: str) -> None:
    x = np.asarray([[0, 1, 2], [1, 0, 1]]).astype(jnp.dtype(DTYPES[code]))
    checkpoint.to_safetensors(tmp_path, {"x": x})
    ((name, stored),) = safetensors.deserialize((tmp_path / "model.safetensors").read_bytes())
    assert (name, stored["dtype"], stored["shape"], bytes(stored["data"])) == ("x", code, [2, 3], x.tobytes())
    back = checkpoint.from_safetensors(tmp_path)["x"]
    assert (back.dtype, back.tobytes()) == (x.dtype, x.tobytes())


def test_files_are_cut_in_order_and_by_size() -> None:
    tensors = [
        NewTensor(name, (size,), np.dtype(np.uint8)) for name, size in zip("abcde", (4, 4, 9, 3, 5), strict=True)
    ]
    assert [[t.name for t in file] for file in divided(tensors, 8)] == [["a", "b"], ["c"], ["d", "e"]]
    assert divided([], 8) == [[]]


def test_a_column_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are long, where one device has an eighth of them."""
    x = random(4, 1 << 17)
    checkpoint.to_safetensors(tmp_path, {"x": x})
    read: list[int] = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", watched)
    one = Mesh(np.asarray(jax.devices()[:1], dtype=object), ("x",), axis_types=(AxisType.Auto,))
    goal = {"x/0": jax.ShapeDtypeStruct((1 << 17,), jnp.float32, sharding=NamedSharding(one, P()))}
    whole = checkpoint.from_safetensors(tmp_path, like={"x": [*goal.values()] * 4})["x"]
    np.testing.assert_array_equal(np.stack(whole), x)
    assert sum(read) == x.nbytes


PACKED = b'{"b":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'.ljust(60)
DAMAGE = {
    "cut": (
        lambda f: f.write_bytes(f.read_bytes()[:-1]),
        "model-00002-of-00002.safetensors cannot .*its tensors have 16 bytes, and 15 are there",
    ),
    "empty": (lambda f: f.write_bytes(b""), "cannot be read: its header would have 0 bytes, and the file has 0"),
    "long": (
        lambda f: f.write_bytes(b"\xff" * 7 + b"\0" + f.read_bytes()[8:]),
        "cannot be read: .*its header would have",
    ),
    "gone": (lambda f: f.unlink(), "model-00002-of-00002.safetensors cannot be read: .*No such file"),
    "another tensor": (lambda f: safetensors.save_file({"z": random(2)}, f), "in model-00002.*as the index says"),
    "packed": (
        lambda f: f.write_bytes((60).to_bytes(8, "little") + PACKED + b"\0"),
        "b is of dtype 'F4', which JAX does not have",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_error(tmp_path: Path, damage: str) -> None:
    checkpoint.to_safetensors(tmp_path, {"a": random(4), "b": random(4)}, max_bytes=16)
    break_it, why = DAMAGE[damage]
    break_it(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=why):
        checkpoint.from_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("{", "not JSON"),
        ("[]", "it has no object `weight_map`"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "is '../a.safetensors', which is no name of one in this folder"),
        ('{"weight_map": {"a": "/a.safetensors"}}', "no name of one in this folder"),
        ('{"weight_map": {"a": 3}}', "no name of one in this folder"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors", "a": "x"}}', "the key 'a' stands twice"),
        (
            '{"weight_map": {"b": "model-00001-of-00002.safetensors"}}',
            "a is in model-00001-of-00002.safetensors, not as",
        ),
    ],
)
def test_a_damaged_index_is_one_error(tmp_path: Path, index: str, why: str) -> None:
    checkpoint.to_safetensors(tmp_path, {"a": random(4), "b": random(4)}, max_bytes=16)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=why):
        checkpoint.from_safetensors(tmp_path)


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    checkpoint.to_safetensors(tmp_path, {"a": random(4)})
    found = open_tensors(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    goal = Piece.of("a", (4,), np.float32)
    with (
        reading.TensorFiles(found) as files,
        pytest.raises(CheckpointError, match="a of model.safetensors.* ends"),
    ):
        checkpoint.pieces.read(files, {"a": checkpoint.pieces.ToRead((4,), np.dtype(np.float32), None, (goal,))})


def test_the_index_is_as_others_write_it(tmp_path: Path) -> None:
    checkpoint.to_safetensors(tmp_path, {"a": random(4), "b": random(4)}, max_bytes=16)
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 32},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX,
    ]  # fmt: skip


ENTRY = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "no object"),
        ({"__metadata__": {"a": 1}}, "texts as `__metadata__`"),
        ({"a": 1}, "a has not exactly"),
        ({"a": ENTRY | {"more": 1}}, "a has not exactly"),
        ({"a": ENTRY | {"shape": [-2]}}, "a has shape"),
        ({"a": ENTRY | {"shape": [True, 2]}}, "a has shape"),
        ({"a": ENTRY | {"shape": [1] * 33 + [2]}}, "a has shape"),
        ({"a": ENTRY | {"shape": [3]}}, r"a is uint8\[3\] and has 2 bytes"),
        ({"a": ENTRY | {"data_offsets": [1, 3]}}, "a begins at byte 1, where 0 were expected"),
        ({"a": ENTRY, "b": ENTRY}, "b begins at byte 0, where 2 were expected"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 4]}}, "its tensors have 4 bytes, and 2 are there"),
    ],
)
def test_a_damaged_header_is_one_error(tmp_path: Path, header: Any, why: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    with pytest.raises(CheckpointError, match=rf"x.safetensors cannot be read: .*{why}"):
        checkpoint.from_safetensors(tmp_path / "x.safetensors")
