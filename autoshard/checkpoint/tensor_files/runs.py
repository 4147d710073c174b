"""Runs: boxes of a tensor that are contiguous in its file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autoshard.checkpoint.pieces import ArrayRegion, whole
from autoshard.checkpoint.tensor_files.headers import Tensor

RUN_BYTES = 8 << 20


def runs(shape: Sequence[int], itemsize: int) -> Iterator[ArrayRegion]:
    """Boxes that are contiguous in an array of ``shape``, of at most `RUN_BYTES`, that cover it."""
    if 0 in shape:
        return
    dim, inner = len(shape), itemsize
    while dim and inner * shape[dim - 1] <= RUN_BYTES:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield whole(shape)
        return
    size, step = shape[dim - 1], max(1, RUN_BYTES // inner)
    for outer in itertools.product(*map(range, shape[: dim - 1])):
        for start in range(0, size, step):
            at = [(n, n + 1) for n in outer]
            yield (*at, (start, min(start + step, size)), *whole(shape[dim:]))


def lines(box: ArrayRegion, shape: Sequence[int]) -> Iterator[ArrayRegion]:
    """The contiguous parts of ``box``, a box of an array of ``shape``."""
    dim = len(shape)
    while dim and box[dim - 1] == (0, shape[dim - 1]):
        dim -= 1
    for outer in itertools.product(*(range(a, b) for a, b in box[: max(0, dim - 1)])):
        yield (*((n, n + 1) for n in outer), *box[max(0, dim - 1) :])


def contiguous(box: ArrayRegion, tensor: Tensor) -> int:
    """Bytes of a contiguous part of ``box``."""
    return tensor.dtype.itemsize * math.prod(b - a for a, b in next(lines(box, tensor.shape)))


def start_of(tensor: Tensor, box: ArrayRegion) -> int:
    """The offset of the first byte of ``box`` in the file."""
    at = 0
    for (start, _), size in zip(box, tensor.shape, strict=True):
        at = at * size + start
    return tensor.offset + at * tensor.dtype.itemsize
