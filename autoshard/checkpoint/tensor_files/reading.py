"""Reads parts of tensors, run by run, in threads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from autoshard.checkpoint.manifest import first_line
from autoshard.checkpoint.pieces import ArrayRegion, Part, Piece, Window, as_index, common_box
from autoshard.checkpoint.tensor_files.headers import Tensor, TensorSet
from autoshard.checkpoint.tensor_files.runs import contiguous, lines, runs, start_of
from autoshard.errors import CheckpointError

_SMALL_RUN = 1 << 16
"""Bytes of a piece of a run below which all of the run is read at once."""


class TensorFiles:
    """The tensors of a set, for `autoshard.checkpoint.pieces`; a context, which closes the files."""

    def __init__(self, found: TensorSet) -> None:
        self._tensors = found.tensors
        self._pool = ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), thread_name_prefix="tensors")
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._open.values():
            os.close(descriptor)

    def fill(self, piece: Piece, parts: Sequence[Part], window: Window) -> None:
        """Begins to read ``parts`` of the tensor that ``piece`` is of."""
        tensor = self._tensors[piece.name]
        descriptor = self._descriptor(tensor.file)
        for run in runs(tensor.shape, tensor.dtype.itemsize):
            asked = [(common, box, out) for box, out in parts if (common := common_box(run, box)) is not None]
            if not asked:
                continue
            views = [(common, out[as_index(common, box)]) for common, box, out in asked]
            read: Future[None] = self._pool.submit(_read_run, descriptor, tensor, run, views)
            nbytes = tensor.dtype.itemsize * math.prod(b - a for a, b in run)
            window.add(read, nbytes, f"{piece.name} of {tensor.file.name}", run)

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
        return self._open[path]


def _read_run(descriptor: int, tensor: Tensor, run: ArrayRegion, views: Sequence[Part]) -> None:
    """Reads the parts of a run that are asked for."""
    shape = tuple(b - a for a, b in run)
    (box, out), *others = views
    if not others and box == run and out.flags.c_contiguous:
        _read(descriptor, out.reshape(-1).view(np.uint8), start_of(tensor, run))
        return
    pieces = sum(out.size for _, out in views)
    if pieces < math.prod(shape) and all(contiguous(b, tensor) >= _SMALL_RUN for b, _ in views):
        for box, out in views:
            for piece in lines(box, tensor.shape):
                row = np.empty([b - a for a, b in piece], tensor.dtype)
                _read(descriptor, row.reshape(-1).view(np.uint8), start_of(tensor, piece))
                out[as_index(piece, box)] = row
        return
    buffer = np.empty(shape, tensor.dtype)
    _read(descriptor, buffer.reshape(-1).view(np.uint8), start_of(tensor, run))
    for box, out in views:
        out[...] = buffer[as_index(box, run)]


def _read(descriptor: int, out: np.ndarray, offset: int) -> None:
    done = 0
    while done < out.size:
        count = os.preadv(descriptor, [memoryview(out)[done:]], offset + done)
        if not count:
            raise ValueError("the file ends before its last byte: it has changed since it was opened")
        done += count
