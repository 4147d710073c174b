"""The arrays of a checkpoint: a Zarr v3 array for each leaf in one OCDBT key-value store, through TensorStore.

A chunk is a shard as it was saved, or an equal part of one. Each carries a checksum of its content (XXH64), made while
it is compressed and checked while it is decompressed, and each node of the store's index has a CRC-32C: bytes that
changed on disk give an error, no array. Beside the arrays themselves no more than `WRITE_BYTES` are in memory for
writing, and no more than `pieces.READ_BYTES` for reading.

Several processes write a store each, in ``process_N/``; `merge` makes one index of theirs, which refers to their files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from autoshard.checkpoint import pieces
from autoshard.checkpoint.pieces import ArrayRegion, Part, Piece, Window, as_index, region_of, whole, within
from autoshard.errors import CheckpointError
from autoshard.jaxpr import PaddedArray

CHUNK_BYTES = 8 << 20
"""Bytes of a chunk, at most, where a shard's sizes have such divisors."""
WRITE_BYTES = 128 << 20
"""Bytes that are written at a time: TensorStore writes them as one file, and waits until it is on the disk."""
CODECS = ({"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "checksum": True}})
"""How a chunk is encoded. Zstandard's checksum of the content costs a third of what CRC-32C as a codec does."""

_BY_NAME = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    + ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
)
"""Dtypes that every reader of Zarr v3 has; the bits of others are stored as those of unsigned integers."""


def stored_dtype(dtype: Any) -> np.dtype:
    """The dtype that stands for ``dtype`` in the store, of the same size."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype.name in _BY_NAME else np.dtype(f"uint{8 * dtype.itemsize}")


@dataclass(frozen=True)
class ToWrite:
    """What a process has to write of an array, in host memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    shard: tuple[int, ...]
    """The shape of a shard."""
    blocks: list[tuple[ArrayRegion, np.ndarray]]


def on_host(arrays: Mapping[str, Any]) -> dict[str, ToWrite]:
    """Copies to the host what this process has to write: of each shard one replica, and in process 0 what is numpy.

    Raises:
      CheckpointError: there are several processes, and an array is on devices of this one alone.
    """
    shards: dict[str, list[Any]] = {}
    stored = {name: value.stored if isinstance(value, PaddedArray) else value for name, value in arrays.items()}
    for name, value in stored.items():
        if isinstance(value, jax.Array):
            if value.is_fully_addressable and jax.process_count() > 1:
                raise CheckpointError(
                    f"{name} is on devices of this process alone, and {jax.process_count()} processes save together; "
                    "place the state on the mesh that they share, as plan.put does"
                )
            shards[name] = [s for s in value.addressable_shards if s.replica_id == 0]
            for shard in shards[name]:
                shard.data.copy_to_host_async()
    found: dict[str, ToWrite] = {}
    for name, value in arrays.items():
        if isinstance(value, jax.Array):
            held = stored[name]
            parts = [(within(region_of(s.index, held.shape), value.shape), s.data) for s in shards[name]]
            blocks = [(r, np.asarray(x)[as_index(r, r)]) for r, x in parts if all(a < b for a, b in r)]
            shape = tuple(map(min, held.sharding.shard_shape(held.shape), value.shape))
        else:
            blocks = [(whole(value.shape), value)] if jax.process_index() == 0 else []
            shape = value.shape
        found[name] = ToWrite(value.shape, value.dtype, shape, blocks)
    return found


def write(directory: epath.Path, arrays: Mapping[str, ToWrite]) -> None:
    """Writes this process's blocks of each array."""
    context = _context()
    root = directory / f"process_{jax.process_index()}" if jax.process_count() > 1 else directory
    opened = {name: ts.open(_array_spec(root, name, a), context=context, create=True) for name, a in arrays.items()}
    window = Window("cannot be written", WRITE_BYTES)
    for name, array in arrays.items():
        target, chunk = window.result(opened.pop(name), name, ()), chunk_shape(array.shard, array.dtype.itemsize)
        for region, block in array.blocks:
            bits = block.view(stored_dtype(array.dtype))
            for part in _by_chunk(region, chunk):
                piece = bits[as_index(part, region)]
                written = target[as_index(part)].write(piece, can_reference_source_data_indefinitely=True)
                window.add(written, piece.nbytes, name, part)
    window.finish()


def merge(directory: epath.Path) -> None:
    """Makes one store of those of the processes."""
    parts = [path for path in directory.iterdir() if path.name.startswith("process_")]
    if parts:
        context, at_once = _context(), ts.Transaction(atomic=True)
        whole = ts.KvStore.open(_store_spec(directory), context=context).result().with_transaction(at_once)
        for path in parts:
            own = ts.KvStore.open(_store_spec(path), context=context).result()
            own.experimental_copy_range_to(whole).result()
        at_once.commit_async().result()


class StoredArrays:
    """Arrays that TensorStore reads, for `autoshard.checkpoint.pieces`.

    Args:
      spec: TensorStore's spec of an array, by name.
      counts: how many leaves each array is read for.
    """

    def __init__(self, spec: Callable[[str], dict[str, Any]], counts: Mapping[str, int]) -> None:
        self._spec, self._context, self._counts = spec, _context(), counts
        # All at once: opening waits for the file system.
        self._opening = {name: self._open(name, kept=count > 1) for name, count in counts.items()}

    def _open(self, name: str, *, kept: bool) -> Any:
        """Opens an array; with ``kept`` some of its chunks are kept in memory."""
        cache = {"cache_pool": {"total_bytes_limit": 4 * CHUNK_BYTES}} if kept else {}
        return ts.open(self._spec(name) | cache, context=self._context, open=True)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array."""
        window = Window("cannot be read", pieces.READ_BYTES)
        found = {name: window.result(opening, name, ()) for name, opening in self._opening.items()}
        return {name: (array.shape, array.dtype.numpy_dtype) for name, array in found.items()}

    def fill(self, piece: Piece, parts: Sequence[Part], window: Window) -> None:
        """Begins to read ``parts`` of the array that ``piece`` is of.

        Raises:
          CheckpointError: it is missing, or of another shape or dtype than ``piece`` says.
        """
        name = piece.name
        source = window.result(self._opening[name], name, ())
        dtype = source.dtype.numpy_dtype
        if source.shape != piece.shape or dtype not in (stored_dtype(piece.dtype), piece.dtype):
            raise CheckpointError(
                f"{name} is {piece.dtype}{list(piece.shape)} in the manifest and {dtype}{list(source.shape)} in the "
                "store"
            )
        chunk = source.chunk_layout.read_chunk.shape or ()  # None of a scalar
        cut = [(_chunk_of(part, chunk), part, box, out) for box, out in parts for part in _by_chunk(box, chunk)]
        if len({number for number, *_ in cut}) < len(cut):
            # A chunk that several regions share is decoded once: its parts follow one another.
            cut.sort(key=lambda part: part[0])
            if self._counts[name] == 1:
                source = window.result(self._open(name, kept=True), name, ())
        for _, part, box, out in cut:
            goal = out[as_index(part, box)]
            filled = ts.array(goal.view(dtype)).write(source[as_index(part)][ts.d[:].translate_to[0]])
            window.add(filled, goal.nbytes, name, part)


def chunk_shape(shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of the chunks of an array with such shards: divides that of a shard, of `CHUNK_BYTES` at most where the
    sizes have divisors for it, and not of much less."""
    chunk = list(shard)
    for d, size in enumerate(shard):
        rest = math.prod(chunk[:d] + chunk[d + 1 :]) * itemsize
        if size * rest <= CHUNK_BYTES:
            break
        small = [k for k in range(1, math.isqrt(size) + 1) if size % k == 0]
        divisors = sorted({*small, *(size // k for k in small)})
        fitting = [k for k in divisors if CHUNK_BYTES >= k * rest >= CHUNK_BYTES // 32]
        larger = [k for k in divisors if k * rest > CHUNK_BYTES]
        chunk[d] = 1 if rest > CHUNK_BYTES else fitting[-1] if fitting else larger[0]
    return tuple(chunk)


def _by_chunk(region: ArrayRegion, chunk: Sequence[int]) -> Iterator[ArrayRegion]:
    """The parts of ``region`` that are in different chunks."""
    ranges: list[list[tuple[int, int]]] = []
    for (start, stop), size in zip(region, chunk, strict=True):
        cuts = [start, *range((start // size + 1) * size, stop, size), stop]
        ranges.append(list(itertools.pairwise(cuts)))
    return itertools.product(*ranges)


def _chunk_of(part: ArrayRegion, chunk: Sequence[int]) -> tuple[int, ...]:
    """The number of the chunk that ``part`` is in, by dimension."""
    return tuple(start // size for (start, _), size in zip(part, chunk, strict=True))


def _context() -> ts.Context:
    return ts.Context({"file_io_concurrency": {"limit": 32}})


def folder_spec(directory: epath.Path) -> Any:
    """TensorStore's spec of a folder."""
    path = directory.as_posix().rstrip("/") + "/"
    return {"driver": "file", "path": path} if path.startswith("/") else path


def _store_spec(directory: epath.Path, name: str | None = None) -> dict[str, Any]:
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
    spec: dict[str, Any] = {"driver": "ocdbt", "base": folder_spec(directory), "config": config}
    return spec if name is None else {**spec, "path": f"{name}/"}


def stored_spec(directory: epath.Path, name: str) -> dict[str, Any]:
    """TensorStore's spec of an array of a store."""
    return {"driver": "zarr3", "kvstore": _store_spec(directory, name)}


def _array_spec(directory: epath.Path, name: str, array: ToWrite) -> dict[str, Any]:
    chunk = chunk_shape(array.shard, array.dtype.itemsize)
    metadata = {
        "shape": list(array.shape),
        "data_type": stored_dtype(array.dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": list(CODECS),
    }
    return {
        "driver": "zarr3",
        "kvstore": _store_spec(directory, name),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
