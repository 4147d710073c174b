"""New files of tensors: their headers first, then the tensors, by as many processes as have parts of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.checkpoint.pieces import Part, as_index, common_box
from autoshard.checkpoint.tensor_files.digests import HEADER, TENSOR, header_digest, part_of_digest
from autoshard.checkpoint.tensor_files.headers import CODES, SINGLE, Tensor
from autoshard.checkpoint.tensor_files.runs import lines, runs, start_of


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def divided(tensors: Sequence[NewTensor], max_bytes: int) -> list[list[NewTensor]]:
    """The tensors of each file: in order, of at most ``max_bytes`` together; a larger tensor has a file of its own."""
    files: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def file_names(count: int) -> list[str]:
    """The names of a set of ``count`` files."""
    return [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def create_file(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> None:
    """A file of its full length with a header, and neither content nor digests yet."""
    header, length = _new_header(tensors, metadata, {tensor.name: "0" * 8 for tensor in tensors})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + length)


def add_digests(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], digests: Mapping[str, str]
) -> None:
    """Writes the header of a file anew, with the digests of its tensors by name: `digests.digest_text`."""
    with path.open("r+b") as file:
        file.write(_new_header(tensors, metadata, digests)[0])
        file.flush()
        os.fsync(file.fileno())


def _new_header(
    tensors: Sequence[NewTensor], metadata: Mapping[str, str], digests: Mapping[str, str]
) -> tuple[bytes, int]:
    """The header, and the length of what follows it."""
    text = dict(metadata) | {TENSOR + tensor.name: digests[tensor.name] for tensor in tensors}
    kinds = {tensor.name: (CODES[tensor.dtype.name], tensor.shape) for tensor in tensors}
    items: dict[str, Any] = {"__metadata__": text | {HEADER: header_digest(kinds, text)}}
    start = 0
    for tensor in _aligned(tensors):
        code, shape = kinds[tensor.name]
        offsets = [start, start + tensor.nbytes]
        items[tensor.name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        start += tensor.nbytes
    header = json.dumps(items, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, start


def _aligned(tensors: Sequence[NewTensor]) -> list[NewTensor]:
    """In the order in which each begins at a multiple of its dtype's size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def index_text(files: Mapping[str, Sequence[NewTensor]]) -> str:
    """The index of a set of files."""
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    where = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def write_tensor(descriptor: int, tensor: Tensor, blocks: Sequence[Part]) -> int:
    """Writes what a process has of a tensor, its ``blocks``, to an open file: run by run where it has all of it.

    Returns:
      What it has of the tensor's digest: `digests.part_of_digest`.
    """
    digest = 0
    for run in runs(tensor.shape, tensor.dtype.itemsize):
        having = [
            (common, block[as_index(common, box)])
            for box, block in blocks
            if (common := common_box(run, box)) is not None
        ]
        if not having:
            continue
        filled = np.zeros([b - a for a, b in run], tensor.dtype)
        for box, part in having:
            filled[as_index(box, run)] = part
        if sum(part.size for _, part in having) == filled.size:
            having = [(run, filled)]
        for box, part in having:
            for line in lines(box, tensor.shape):
                _write(descriptor, part[as_index(line, box)], start_of(tensor, line))
        end = start_of(tensor, run) + filled.nbytes
        digest ^= part_of_digest(filled.reshape(-1).view(np.uint8), tensor.offset + tensor.nbytes - end)
    return digest


def _write(descriptor: int, part: np.ndarray, offset: int) -> None:
    data = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
