"""The arrays of a checkpoint: a Zarr v3 array for each leaf in one OCDBT key-value store, through TensorStore.

A chunk is a shard as it was saved, or an equal part of one. Each carries a checksum of its content (XXH64), made while
it is compressed and checked while it is decompressed, and each node of the store's index has a CRC-32C: bytes that
changed on disk give an error, no array. Beside the arrays themselves no more than `IN_FLIGHT_BYTES` are in memory for
reading or writing.

Several processes write a store each, in ``process_N/``; `merge` makes one index of theirs, which refers to their files.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import Sharding

from autoshard.errors import CheckpointError
from autoshard.jaxpr import PaddedArray

CHUNK_BYTES = 8 << 20
"""Bytes of a chunk, at most, where a shard's sizes have such divisors."""
IN_FLIGHT_BYTES = 2 * max(2, os.cpu_count() or 2) * CHUNK_BYTES
CODECS = ({"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "checksum": True}})
"""How a chunk is encoded. Zstandard's checksum of the content costs a third of what CRC-32C as a codec does."""

ArrayRegion = tuple[tuple[int, int], ...]
"""Of each dimension the first index, and the one after the last."""

_BY_NAME = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    + ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
)
"""Dtypes that every reader of Zarr v3 has; the bits of others are stored as those of unsigned integers."""


@dataclass(frozen=True)
class ToRead:
    """What to read one array to."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None
    """None reads it to numpy."""
    stored: tuple[int, ...] | None = None
    """The shape that it gets, with zeros at the end of its dimensions; None: its own."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.shape if self.stored is None else self.stored


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
            parts = [(_within(_region(s.index, held.shape), value.shape), s.data) for s in shards[name]]
            blocks = [(r, np.asarray(x)[_index(r, r)]) for r, x in parts if all(a < b for a, b in r)]
            shape = tuple(map(min, held.sharding.shard_shape(held.shape), value.shape))
        else:
            blocks = [(_whole(value.shape), value)] if jax.process_index() == 0 else []
            shape = value.shape
        found[name] = ToWrite(value.shape, value.dtype, shape, blocks)
    return found


def write(directory: epath.Path, arrays: Mapping[str, ToWrite]) -> None:
    """Writes this process's blocks of each array."""
    context = _context()
    root = directory / f"process_{jax.process_index()}" if jax.process_count() > 1 else directory
    opened = {name: ts.open(_array_spec(root, name, a), context=context, create=True) for name, a in arrays.items()}
    window = _Window("cannot be written")
    for name, array in arrays.items():
        target, chunk = window.result(opened.pop(name), name, ()), chunk_shape(array.shard, array.dtype.itemsize)
        for region, block in array.blocks:
            bits = block.view(stored_dtype(array.dtype))
            for part in _by_chunk(region, chunk):
                piece = bits[_index(part, region)]
                written = target[_index(part)].write(piece, can_reference_source_data_indefinitely=True)
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


def read(directory: epath.Path, wanted: Mapping[str, ToRead]) -> dict[str, Any]:
    """Reads arrays, each directly into the shards of this process's devices, or to numpy.

    Raises:
      CheckpointError: an array that is missing, of another shape or dtype, or whose bytes have changed since they were
        written; names it, and which part of it.
    """
    context = _context()
    opened = {
        name: ts.open({"driver": "zarr3", "kvstore": _store_spec(directory, name)}, context=context, open=True)
        for name in wanted
    }
    found: dict[str, Any] = {}
    window = _Window("cannot be read")
    for name, goal in wanted.items():
        source = window.result(opened.pop(name), name, ())
        dtype = source.dtype.numpy_dtype
        if source.shape != goal.shape or dtype != stored_dtype(goal.dtype):
            raise CheckpointError(
                f"{name} is {goal.dtype}{list(goal.shape)} in the manifest and {dtype}{list(source.shape)} in the store"
            )
        buffers = {region: _aligned_empty([b - a for a, b in region], dtype) for region in _regions(goal)}
        blocks: dict[ArrayRegion, np.ndarray] = {}
        for region, buffer in buffers.items():
            true = _within(region, goal.shape)
            if true != region:
                buffer.fill(0)
            if true == region or all(a < b for a, b in true):
                blocks[true] = buffer[_index(true, region)]
        chunk = source.chunk_layout.read_chunk.shape or ()  # None of a scalar
        parts = [(_chunk_of(part, chunk), part, region) for region in blocks for part in _by_chunk(region, chunk)]
        if len({number for number, _, _ in parts}) < len(parts):
            # A chunk that several regions share is decoded once: its parts follow one another.
            parts.sort(key=lambda part: part[0])
            source = window.result(ts.open(_kept_spec(directory, name), context=context, open=True), name, ())
        for _, part, region in parts:
            piece = blocks[region][_index(part, region)]
            filled = ts.array(piece).write(source[_index(part)][ts.d[:].translate_to[0]])
            window.add(filled, piece.nbytes, name, part)
        window.then(functools.partial(_finish, found, name, goal, buffers))
    window.finish()
    return found


def _finish(found: dict[str, Any], name: str, goal: ToRead, blocks: dict[ArrayRegion, np.ndarray]) -> None:
    if goal.sharding is None:
        found[name] = blocks[_whole(goal.shape)].view(goal.dtype)
    else:
        found[name] = jax.make_array_from_callback(
            goal.result_shape,
            goal.sharding,
            lambda index: blocks[_region(index, goal.result_shape)].view(goal.dtype),
            dtype=goal.dtype,
        )


class _Window:
    """Operations under way, finished in the order in which they began; no more than `IN_FLIGHT_BYTES` at a time."""

    def __init__(self, failed: str) -> None:
        self._failed = failed
        self._bytes = 0
        self._pending: deque[Callable[[], None]] = deque()

    def add(self, operation: Any, nbytes: int, name: str, part: ArrayRegion) -> None:
        """Waits for earlier operations until there is room for this one, on ``part`` of the array ``name``."""

        def wait() -> None:
            self.result(operation, name, part)
            self._bytes -= nbytes

        self._bytes += nbytes
        self._pending.append(wait)
        while self._bytes > IN_FLIGHT_BYTES and len(self._pending) > 1:
            self._pending.popleft()()

    def then(self, call: Callable[[], None]) -> None:
        """``call`` is called when all that was added so far is finished."""
        self._pending.append(call)

    def finish(self) -> None:
        """Waits for all."""
        while self._pending:
            self._pending.popleft()()

    def result(self, operation: Any, name: str, part: ArrayRegion) -> Any:
        """The result of an operation.

        Raises:
          CheckpointError: it failed; names the array, the part of it, and what TensorStore says, which has the file.
        """
        try:
            return operation.result()
        except ValueError as error:
            where = f"{name}[{', '.join(f'{a}:{b}' for a, b in part)}]" if part else name
            reason = str(error).partition(" [")[0].replace("\n", " ")
            raise CheckpointError(f"{where} {self._failed}: {reason}") from error


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


def _regions(goal: ToRead) -> set[ArrayRegion]:
    """The regions that this process reads."""
    if goal.sharding is None:
        return {_whole(goal.shape)}
    shape = goal.result_shape
    return {_region(i, shape) for i in goal.sharding.addressable_devices_indices_map(shape).values()}


def _region(index: Any, shape: Sequence[int]) -> ArrayRegion:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _within(region: ArrayRegion, shape: Sequence[int]) -> ArrayRegion:
    """The part of ``region`` that is in an array of ``shape``."""
    return tuple((a, min(b, n)) for (a, b), n in zip(region, shape, strict=True))


def _whole(shape: Sequence[int]) -> ArrayRegion:
    return tuple((0, size) for size in shape)


def _index(part: ArrayRegion, within: ArrayRegion | None = None) -> tuple[Any, ...]:
    """``part`` as an index; into an array that has ``within`` if given."""
    starts = [start for start, _ in within] if within else [0] * len(part)
    slices = [slice(a - start, b - start) for (a, b), start in zip(part, starts, strict=True)]
    return (*slices, ...)  # without the ellipsis NumPy would copy a scalar


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array at an address that JAX takes without a copy where the device is a CPU."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes].view(dtype).reshape(shape)


def _context() -> ts.Context:
    return ts.Context({"file_io_concurrency": {"limit": 32}})


def _store_spec(directory: epath.Path, name: str | None = None) -> dict[str, Any]:
    path = directory.as_posix().rstrip("/") + "/"
    base = {"driver": "file", "path": path} if path.startswith("/") else path
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}
    spec: dict[str, Any] = {"driver": "ocdbt", "base": base, "config": config}
    return spec if name is None else {**spec, "path": f"{name}/"}


def _kept_spec(directory: epath.Path, name: str) -> dict[str, Any]:
    """To read an array some of whose chunks are kept in memory."""
    kept = {"total_bytes_limit": 4 * CHUNK_BYTES}
    return {"driver": "zarr3", "kvstore": _store_spec(directory, name), "cache_pool": kept}


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
