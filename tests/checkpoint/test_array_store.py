"""The array store: a changed byte is an error or changes nothing; chunks; what is read where."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import checkpoint
from autoshard.checkpoint import array_store, pieces
from autoshard.checkpoint.array_store import StoredArrays, chunk_shape, on_host, stored_spec, write
from autoshard.checkpoint.pieces import Piece, ToRead, Window, uses
from autoshard.errors import CheckpointError

FLIPS = int(os.environ.get("AUTOSHARD_FLIPS", "30"))


def mesh(data: int, model: int) -> Mesh:
    grid = np.asarray(jax.devices()[: data * model], dtype=object).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def noise() -> np.ndarray:
    """Bytes that no compression changes."""
    return np.random.default_rng(0).integers(0, 256, (128, 512), np.uint8)


def to_read(name: str, shape: Any, dtype: np.dtype, sharding: Any = None) -> ToRead:
    return ToRead(tuple(shape), dtype, sharding, (Piece.of(name, shape, dtype),))


def read(directory: epath.Path, wanted: dict[str, ToRead]) -> dict[str, Any]:
    return pieces.read(StoredArrays(functools.partial(stored_spec, directory), uses(wanted)), wanted)


def state() -> dict[str, Any]:
    """Leaves in one chunk and in several, that compress and that do not, scalars, a key."""
    sharding = NamedSharding(mesh(4, 2), P("data", "model"))
    return {
        "w": jax.device_put(random(64, 64), sharding),
        "noise": jax.device_put(noise(), sharding),
        "zeros": jax.device_put(jnp.zeros((64, 64), jnp.bfloat16), sharding),
        "b": jnp.asarray(random(7)),
        "host": random(300),
        "narrow": jnp.arange(16).astype(jnp.float8_e4m3fn),
        "count": jnp.int32(3),
        "key": jax.random.key(5),
        "python": (3, 0.25, "text", True),
    }


def bits(tree: Any) -> list[bytes]:
    def words(x: Any) -> Any:
        key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if key else x

    return [np.asarray(words(x)).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one step."""
    root = tmp_path_factory.mktemp("flips")
    checkpoint.save(root, 1, state(), extra={"data": {"position": [17, 4]}}, wait=True)
    return root


def files(root: Path) -> list[Path]:
    return sorted(p for p in (root / "1").rglob("*") if p.is_file())


@pytest.mark.filterwarnings("ignore:restoring step")
@pytest.mark.parametrize("attempt", range(FLIPS))
def test_a_changed_byte_is_named_or_harmless(saved: Path, attempt: int):
    """Every file in turn, at a random byte: nothing else than what was saved is ever restored."""
    chosen = np.random.default_rng(attempt)
    path = files(saved)[attempt % len(files(saved))]
    before = path.read_bytes()
    changed = bytearray(before)
    at = int(chosen.integers(len(changed)))
    changed[at] ^= int(chosen.integers(1, 256))
    path.write_bytes(changed)
    error = None
    try:
        back, report = checkpoint.restore(saved, like=state(), report=True)
    except CheckpointError as caught:
        error = str(caught)
    finally:
        path.write_bytes(before)
    if error is None:
        assert bits(back) == bits(state())
        assert report.extra == {"data": {"position": [17, 4]}}
    else:
        assert any(name in error for name in (path.name.partition(".")[0], path.parent.name, "state["))


def test_a_changed_value_that_reads_well_is_an_error(saved: Path):
    """Of the same length, in a file that is not an array: the checksum alone tells."""
    (path,) = (p for p in files(saved) if b"[17,4]" in p.read_bytes().replace(b" ", b"").replace(b"\n", b""))
    before = path.read_bytes()
    path.write_bytes(before.replace(b"17", b"18", 1))
    try:
        with pytest.raises(CheckpointError, match="manifest cannot be read .it has changed since it was written"):
            checkpoint.restore(saved, 1)
    finally:
        path.write_bytes(before)


def test_every_array_is_checked(saved: Path):
    """A byte within the data of each array: the error names the array, its part, the store and the chunk."""
    row = noise()[33, 256:].tobytes()
    path = next(p for p in files(saved) if row in p.read_bytes())
    before = path.read_bytes()
    changed = bytearray(before)
    changed[before.index(row)] ^= 1
    path.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(saved)
    finally:
        path.write_bytes(before)
    assert "state['noise'][32:64, 256:512] cannot be read" in str(caught.value)
    assert "arrays of step 1" in str(caught.value)
    assert "arrays/" in str(caught.value)
    assert "c/1/1" in str(caught.value)


@pytest.mark.parametrize(
    ("shard", "itemsize", "chunk"),
    [
        ((), 4, ()),
        ((1024, 2048), 4, (1024, 2048)),
        ((8192, 4096), 4, (512, 4096)),
        ((3, 8192, 8192), 4, (1, 256, 8192)),
        ((1 << 30,), 1, (1 << 23,)),
        ((50257, 4096), 4, (29, 4096)),
        ((50261, 4096), 4, (50261, 32)),
    ],
)
def test_chunks_are_equal_parts_of_a_shard(shard: tuple[int, ...], itemsize: int, chunk: tuple[int, ...]):
    found = chunk_shape(shard, itemsize)
    assert found == chunk
    assert math.prod(found) * itemsize <= array_store.CHUNK_BYTES
    assert all(size % part == 0 for size, part in zip(shard, found, strict=True))


SPECS = [P("data", "model"), P("model"), P(None, ("data", "model")), P()]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("other", SPECS)
def test_regions_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P, other: P):
    """Many chunks to a shard and many shards to a chunk, with room in memory for two chunks."""
    monkeypatch.setattr(array_store, "CHUNK_BYTES", 640)
    monkeypatch.setattr(pieces, "READ_BYTES", 1280)
    monkeypatch.setattr(array_store, "WRITE_BYTES", 1280)
    x = random(24, 40)
    placed = jax.device_put(x, NamedSharding(mesh(4, 2), spec))
    write(epath.Path(tmp_path), on_host({"x": placed, "y": x}))
    sharding = NamedSharding(mesh(2, 4), other)
    back = read(epath.Path(tmp_path), {n: to_read(n, x.shape, x.dtype, s) for n, s in (("x", sharding), ("y", None))})
    assert back["x"].sharding == sharding
    np.testing.assert_array_equal(back["x"], x)
    np.testing.assert_array_equal(back["y"], x)
    back["y"][:] = 0  # its own memory, which may be written


def test_no_more_is_in_flight_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside the arrays themselves, reading and writing take a window of memory, however many chunks there are."""
    monkeypatch.setattr(array_store, "CHUNK_BYTES", 640)
    monkeypatch.setattr(pieces, "READ_BYTES", 1280)
    monkeypatch.setattr(array_store, "WRITE_BYTES", 1280)
    waiting: list[int] = []
    result = Window.result

    def watched(self: Any, *args: Any) -> Any:
        waiting.append(len(self._pending))
        return result(self, *args)

    monkeypatch.setattr(Window, "result", watched)
    x = random(24, 400)
    write(epath.Path(tmp_path), on_host({"x": x}))
    np.testing.assert_array_equal(read(epath.Path(tmp_path), {"x": to_read("x", x.shape, x.dtype)})["x"], x)
    assert len(waiting) > x.nbytes / 640
    assert max(waiting) <= 3


DTYPES = [*(np.dtype(t) for t in "?bhilBHILefdFD"), *(jnp.dtype(getattr(ml_dtypes, n)) for n in dir(ml_dtypes)
          if isinstance(getattr(ml_dtypes, n), type) and n.startswith(("int", "uint", "float", "bfloat")))]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: np.dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    write(epath.Path(tmp_path), on_host({"x": x}))
    back = read(epath.Path(tmp_path), {"x": to_read("x", (3, 4), dtype)})["x"]
    assert back.dtype == dtype
    assert back.tobytes() == x.tobytes()


def test_another_shape_or_dtype_than_in_the_manifest_is_named(tmp_path: Path):
    write(epath.Path(tmp_path), on_host({"x": random(8)}))
    with pytest.raises(CheckpointError, match=r"x is float32\[9\] in the manifest and float32\[8\] in the store"):
        read(epath.Path(tmp_path), {"x": to_read("x", (9,), np.dtype("float32"))})
    with pytest.raises(CheckpointError, match="y cannot be read: NOT_FOUND"):
        read(epath.Path(tmp_path), {"y": to_read("y", (9,), np.dtype("float32"))})
