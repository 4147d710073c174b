"""Safetensors files: tensors in one file or several with an index, read and written by parts.

A folder has ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
``model.safetensors.index.json``, which says in which file each tensor is. The library `safetensors` has no numpy dtype
for bfloat16 and 8-bit floats and writes whole tensors only, so files are read and written here; the tests hold them
against it. A file begins with 8 bytes, the length of its header; the header is JSON; tensors follow without a gap.

A tensor is stored row by row, and is read and written in *runs*: boxes of at most `RUN_BYTES` that are contiguous.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import jax.numpy as jnp
import numpy as np

from autoshard.checkpoint.manifest import MAX_BYTES, MAX_PATH, first_line
from autoshard.checkpoint.pieces import ArrayRegion, Part, Piece, Window, as_index, common_box, whole
from autoshard.errors import CheckpointError
from autoshard.strict_files import cut, parse_json, read_text, shortened

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RUN_BYTES = 8 << 20
_MAX_RANK = 32
_SMALL_RUN = 1 << 16
"""Bytes of a piece of a run below which all of the run is read at once."""

DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Names of dtypes by their codes in a header. The codes of 4 and 6 bits have no counterpart: those are packed."""
CODES: Mapping[str, str] = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is."""

    file: Path
    offset: int
    """Of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSet:
    """All tensors of a folder or a file, by name, and the text that the headers have beside them."""

    where: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def open_tensors(path: Path) -> TensorSet:
    """The tensors of a file, or of a folder with `SINGLE` or `INDEX`.

    Raises:
      CheckpointError: neither is there, or a file is damaged: names it.
    """
    if path.is_file():
        return TensorSet(path, *_header(path))
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / SINGLE).exists():
        return TensorSet(path, *_header(path / SINGLE))
    pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".ckpt", ".pkl", ".pt", ".pth")]
    why = f"; {pickles[0]} is not read: a pickle executes what is in it. Save it as safetensors" if pickles else ""
    raise CheckpointError(f"{path} has no {SINGLE} and no {INDEX}{why}")


def _indexed(folder: Path) -> TensorSet:
    where = _index(folder)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in dict.fromkeys(where.values()):
        found, about = _header(folder / file)
        listed = {name for name, other in where.items() if other == file}
        if found.keys() != listed:
            name = min(found.keys() ^ listed)
            raise CheckpointError(
                f"{folder / INDEX}: {cut(name)} is {'in' if name in found else 'not in'} {file}, "
                f"{'not ' if name in found else ''}as the index says"
            )
        tensors |= found
        metadata |= about
    return TensorSet(folder, {name: tensors[name] for name in where}, metadata)


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    path = folder / INDEX
    try:
        index = parse_json(read_text(path, MAX_BYTES))
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict):
            raise ValueError("it has no object `weight_map`")
        for name, file in where.items():
            if not isinstance(file, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", file):
                raise ValueError(
                    f"the file of {cut(name)} is {shortened(file)}, which is no name of one in this folder"
                )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    return cast("dict[str, str]", where)


def _header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its text."""
    try:
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_BYTES):
                raise ValueError(f"its header would have {length:,} bytes, and the file has {size:,}")
            text = file.read(length).decode()
        items = parse_json(text)
        metadata = items.pop("__metadata__", {}) if isinstance(items, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its header is no object with an object of texts as `__metadata__`")
        found = [(name, *_checked(name, item)) for name, item in items.items()]
        found.sort(key=lambda item: item[3])
        tensors = {name: Tensor(path, 8 + length + start, shape, dtype) for name, dtype, shape, (start, _) in found}
        end = 0
        for name, _, _, (start, stop) in found:
            if start != end:
                raise ValueError(f"{cut(name)} begins at byte {start:,}, where {end:,} were expected")
            end = stop
        if end != size - 8 - length:
            raise ValueError(f"its tensors have {end:,} bytes, and {size - 8 - length:,} are there")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    return tensors, cast("dict[str, str]", metadata)


def _checked(name: str, item: Any) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    """Dtype, shape and offsets of a tensor, as its entry in a header says."""
    if len(name) > MAX_PATH:
        raise ValueError(f"the name {cut(name)} has {len(name):,} letters, and {MAX_PATH:,} are the most")
    match item:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]} if len(item) == 3:
            sizes: list[Any] = [*shape, start, stop]
            if code not in DTYPES:
                raise ValueError(f"{cut(name)} is of dtype {shortened(code)}, which JAX does not have")
            if len(shape) > _MAX_RANK or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
                raise ValueError(f"{cut(name)} has shape {shortened(shape)} and offsets {shortened([start, stop])}")
            dtype = jnp.dtype(DTYPES[code])
            if stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{cut(name)} is {dtype}{shortened(shape)} and has {stop - start:,} bytes")
            return dtype, tuple(shape), (start, stop)
        case _:
            raise ValueError(f"{cut(name)} has not exactly a dtype, a shape and data_offsets")


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
        for run in _runs(tensor.shape, tensor.dtype.itemsize):
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
        _read(descriptor, out.reshape(-1).view(np.uint8), _start(tensor, run))
        return
    pieces = sum(out.size for _, out in views)
    if pieces < math.prod(shape) and all(_contiguous(b, tensor) >= _SMALL_RUN for b, _ in views):
        for box, out in views:
            for piece in _lines(box, tensor.shape):
                row = np.empty([b - a for a, b in piece], tensor.dtype)
                _read(descriptor, row.reshape(-1).view(np.uint8), _start(tensor, piece))
                out[as_index(piece, box)] = row
        return
    buffer = np.empty(shape, tensor.dtype)
    _read(descriptor, buffer.reshape(-1).view(np.uint8), _start(tensor, run))
    for box, out in views:
        out[...] = buffer[as_index(box, run)]


def _read(descriptor: int, out: np.ndarray, offset: int) -> None:
    done = 0
    while done < out.size:
        count = os.preadv(descriptor, [memoryview(out)[done:]], offset + done)
        if not count:
            raise ValueError("the file ends before its last byte: it has changed since it was opened")
        done += count


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
    """A file of its full length with a header and no content yet."""
    header, length = _new_header(tensors, metadata)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + length)


def _new_header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The header, and the length of what follows it."""
    items: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in _aligned(tensors):
        offsets = [start, start + tensor.nbytes]
        items[tensor.name] = {"dtype": CODES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        start += tensor.nbytes
    text = json.dumps(items, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, start


def _aligned(tensors: Sequence[NewTensor]) -> list[NewTensor]:
    """In the order in which each begins at a multiple of its dtype's size."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def index_text(files: Mapping[str, Sequence[NewTensor]]) -> str:
    """The index of a set of files."""
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    where = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def write_tensor(descriptor: int, tensor: Tensor, blocks: Sequence[Part]) -> None:
    """Writes what a process has of a tensor, its ``blocks``, to an open file: run by run where it has all of it."""
    for run in _runs(tensor.shape, tensor.dtype.itemsize):
        having = [
            (common, block[as_index(common, box)])
            for box, block in blocks
            if (common := common_box(run, box)) is not None
        ]
        shape = [b - a for a, b in run]
        if sum(part.size for _, part in having) == math.prod(shape):
            whole_run = np.empty(shape, tensor.dtype)
            for box, part in having:
                whole_run[as_index(box, run)] = part
            having = [(run, whole_run)]
        for box, part in having:
            for line in _lines(box, tensor.shape):
                _write(descriptor, part[as_index(line, box)], _start(tensor, line))


def _write(descriptor: int, part: np.ndarray, offset: int) -> None:
    data = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _runs(shape: Sequence[int], itemsize: int) -> Iterator[ArrayRegion]:
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


def _lines(box: ArrayRegion, shape: Sequence[int]) -> Iterator[ArrayRegion]:
    """The contiguous parts of ``box``, a box of an array of ``shape``."""
    dim = len(shape)
    while dim and box[dim - 1] == (0, shape[dim - 1]):
        dim -= 1
    for outer in itertools.product(*(range(a, b) for a, b in box[: max(0, dim - 1)])):
        yield (*((n, n + 1) for n in outer), *box[max(0, dim - 1) :])


def _contiguous(box: ArrayRegion, tensor: Tensor) -> int:
    """Bytes of a contiguous part of ``box``."""
    return tensor.dtype.itemsize * math.prod(b - a for a, b in next(_lines(box, tensor.shape)))


def _start(tensor: Tensor, box: ArrayRegion) -> int:
    """The offset of the first byte of ``box``."""
    at = 0
    for (start, _), size in zip(box, tensor.shape, strict=True):
        at = at * size + start
    return tensor.offset + at * tensor.dtype.itemsize
