"""Leaves as pieces of stored arrays, read straight into shards, whatever keeps the arrays.

A `Piece` says which box of a leaf is which box of a stored array: the whole of it; one layer of a stacked array; the
rows that a grown table had. `read` gives each device its shard of a leaf and reads nothing else. Beside the leaves
themselves no more than `READ_BYTES` are in memory, and of a leaf that changes its dtype its shards as stored.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autoshard.errors import CheckpointError

READ_BYTES = 2 * max(2, os.cpu_count() or 2) * (8 << 20)

ArrayRegion = tuple[tuple[int, int], ...]
"""Of each dimension the first index, and the one after the last."""
Part = tuple[ArrayRegion, np.ndarray]
"""A box of a stored array, and where its elements go: of the box's shape, not always contiguous."""


@dataclass(frozen=True)
class Piece:
    """A box of a leaf, and the box of a stored array that it is."""

    name: str
    """Of the stored array."""
    shape: tuple[int, ...]
    dtype: np.dtype
    box: ArrayRegion
    """In the stored array."""
    at: ArrayRegion
    """In the leaf."""
    dims: tuple[int | None, ...]
    """For each dimension of the leaf, that of the stored array along which it runs; None where the box has one index
    and the stored array no such dimension. Other dimensions of the stored array have one index in its box."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: Any) -> Piece:
        """The whole of a stored array."""
        box = whole(shape)
        return cls(name, tuple(shape), jnp.dtype(dtype), box, box, tuple(range(len(box))))

    def part(self, buffer: np.ndarray, region: ArrayRegion, common: ArrayRegion) -> Part:
        """What to read for ``common``, a box of `at` and of ``region``, which ``buffer`` has."""
        box, view = list(self.box), buffer[as_index(common, region)]
        for (start, stop), (first, _), dim in zip(common, self.at, self.dims, strict=True):
            if dim is not None:
                box[dim] = (self.box[dim][0] + start - first, self.box[dim][0] + stop - first)
        view = view[(*(0 if dim is None else slice(None) for dim in self.dims), ...)]
        kept = [dim for dim in self.dims if dim is not None]
        view = view.transpose(np.argsort(kept)) if kept else view
        return tuple(box), view[(*(slice(None) if d in kept else None for d in range(len(box))), ...)]


@dataclass(frozen=True)
class ToRead:
    """What to read one leaf to."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None
    """None reads it to numpy."""
    pieces: tuple[Piece, ...]
    """Disjoint; what none of them has is 0."""
    stored: tuple[int, ...] | None = None
    """The shape that it gets, with zeros at the end of its dimensions; None: its own."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.shape if self.stored is None else self.stored


class Store(Protocol):
    """What keeps arrays by name."""

    def fill(self, piece: Piece, parts: Sequence[Part], window: Window) -> None:
        """Begins to read ``parts`` of the array that ``piece`` is of; raises CheckpointError if it is not there, or not
        what ``piece`` says."""
        ...


def read(store: Store, wanted: Mapping[str, ToRead]) -> dict[str, Any]:
    """Reads leaves, each directly into the shards of this process's devices, or to numpy.

    Raises:
      CheckpointError: an array that is missing, of another shape or dtype, or whose bytes have changed since they were
        written; names it, and which part of it.
      ValueError: a number that the leaf's dtype does not hold; names the leaf.
    """
    found: dict[str, Any] = {}
    window = Window("cannot be read", READ_BYTES)
    for name, goal in wanted.items():
        blocks: dict[ArrayRegion, np.ndarray] = {}
        asked: list[tuple[Piece, list[Part]]] = [(piece, []) for piece in goal.pieces]
        casts: list[tuple[np.ndarray, np.ndarray]] = []
        for region in _regions(goal):
            overlaps = [common_box(region, piece.at) for piece in goal.pieces]
            read = sum(_size(box) for box in overlaps if box is not None)
            buffer = _aligned_empty([b - a for a, b in region], goal.dtype, zero=read < _size(region))
            blocks[region] = buffer
            for (piece, parts), common in zip(asked, overlaps, strict=True):
                if common is None:
                    continue
                box, view = piece.part(buffer, region, common)
                if piece.dtype != goal.dtype:
                    raw = np.empty(view.shape, piece.dtype)
                    casts.append((raw, view))
                    view = raw
                parts.append((box, view))
        for piece, parts in asked:
            if parts:
                store.fill(piece, parts, window)
        window.then(functools.partial(_finish, found, name, goal, blocks, casts))
    window.finish()
    return found


def uses(wanted: Mapping[str, ToRead]) -> Counter[str]:
    """How many leaves each stored array is read for."""
    return Counter(name for goal in wanted.values() for name in {piece.name for piece in goal.pieces})


def _finish(
    found: dict[str, Any],
    name: str,
    goal: ToRead,
    blocks: dict[ArrayRegion, np.ndarray],
    casts: Sequence[tuple[np.ndarray, np.ndarray]],
) -> None:
    for raw, view in casts:
        view[...] = converted(raw, goal.dtype, name)
    if goal.sharding is None:
        found[name] = blocks[whole(goal.shape)]
    else:
        found[name] = jax.make_array_from_callback(
            goal.result_shape,
            goal.sharding,
            lambda index: blocks[region_of(index, goal.result_shape)],
            dtype=goal.dtype,
        )


def converted(x: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """``x`` in another dtype of its family.

    Raises:
      ValueError: an integer that is out of range, or a finite number that would become infinite or NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = x.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        wrong = (made.astype(x.dtype) != x) | ((made < 0) != (x < 0))
    else:
        wrong = np.isfinite(x) & ~np.isfinite(made)
    if wrong.any():
        raise ValueError(f"{name} is not {dtype}: it has {x[wrong].flat[0]}, which {dtype} does not hold")
    return made


class Window:
    """Operations under way, finished in the order in which they began; no more than a number of bytes at a time."""

    def __init__(self, failed: str, most: int) -> None:
        """``failed`` says of an array that an operation on it failed: "cannot be read"; ``most`` is how many bytes."""
        self._failed, self._most = failed, most
        self._bytes = 0
        self._pending: deque[Callable[[], None]] = deque()

    def add(self, operation: Any, nbytes: int, name: str, part: ArrayRegion) -> None:
        """Waits for earlier operations until there is room for this one, on ``part`` of the array ``name``."""

        def wait() -> None:
            self.result(operation, name, part)
            self._bytes -= nbytes

        self._bytes += nbytes
        self._pending.append(wait)
        while self._bytes > self._most and len(self._pending) > 1:
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
        except (OSError, ValueError) as error:
            where = f"{name}[{', '.join(f'{a}:{b}' for a, b in part)}]" if part else name
            reason = str(error).partition(" [")[0].replace("\n", " ")
            raise CheckpointError(f"{where} {self._failed}: {reason}") from error


def region_of(index: Any, shape: Sequence[int]) -> ArrayRegion:
    """The region that ``index``, a tuple of slices, has of an array of ``shape``."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def within(region: ArrayRegion, shape: Sequence[int]) -> ArrayRegion:
    """The part of ``region`` that is in an array of ``shape``."""
    return tuple((a, min(b, n)) for (a, b), n in zip(region, shape, strict=True))


def whole(shape: Sequence[int]) -> ArrayRegion:
    """All of an array of ``shape``."""
    return tuple((0, size) for size in shape)


def as_index(part: ArrayRegion, inside: ArrayRegion | None = None) -> tuple[Any, ...]:
    """``part`` as an index; into an array that has ``inside`` if given."""
    starts = [start for start, _ in inside] if inside else [0] * len(part)
    slices = [slice(a - start, b - start) for (a, b), start in zip(part, starts, strict=True)]
    return (*slices, ...)  # without the ellipsis NumPy would copy a scalar


def _regions(goal: ToRead) -> set[ArrayRegion]:
    """The regions that this process reads."""
    if goal.sharding is None:
        return {whole(goal.shape)}
    shape = goal.result_shape
    return {region_of(i, shape) for i in goal.sharding.addressable_devices_indices_map(shape).values()}


def common_box(a: ArrayRegion, b: ArrayRegion) -> ArrayRegion | None:
    """The box that is in both, if any."""
    found = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return found if all(p < q for p, q in found) else None


def _size(region: ArrayRegion) -> int:
    return math.prod(b - a for a, b in region)


def _aligned_empty(shape: Sequence[int], dtype: np.dtype, *, zero: bool) -> np.ndarray:
    """An array at an address that JAX takes without a copy where the device is a CPU."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = (np.zeros if zero else np.empty)(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes].view(dtype).reshape(shape)
