"""What a file of tensors says of itself: where each tensor is, and text beside them; and which files a set has."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from autoshard.checkpoint.manifest import MAX_BYTES, MAX_PATH, first_line
from autoshard.errors import CheckpointError
from autoshard.strict_files import cut, parse_json, read_text, shortened

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_RANK = 32

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
    files: tuple[Path, ...]


def open_tensors(path: Path) -> TensorSet:
    """The tensors of a file, or of a folder with `SINGLE` or `INDEX`.

    Raises:
      CheckpointError: neither is there, or a file is damaged: names it.
    """
    if path.is_file():
        return TensorSet(path, *read_header(path), (path,))
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / SINGLE).exists():
        return TensorSet(path, *read_header(path / SINGLE), (path / SINGLE,))
    pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".ckpt", ".pkl", ".pt", ".pth")]
    why = f"; {pickles[0]} is not read: a pickle executes what is in it. Save it as safetensors" if pickles else ""
    raise CheckpointError(f"{path} has no {SINGLE} and no {INDEX}{why}")


def _indexed(folder: Path) -> TensorSet:
    where = _index(folder)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    files = dict.fromkeys(where.values())
    for file in files:
        found, about = read_header(folder / file)
        listed = {name for name, other in where.items() if other == file}
        if found.keys() != listed:
            name = min(found.keys() ^ listed)
            raise CheckpointError(
                f"{folder / INDEX}: {cut(name)} is {'in' if name in found else 'not in'} {file}, "
                f"{'not ' if name in found else ''}as the index says"
            )
        tensors |= found
        metadata |= about
    return TensorSet(folder, {name: tensors[name] for name in where}, metadata, tuple(folder / file for file in files))


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


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its text.

    Raises:
      CheckpointError: it is no such file, or damaged.
    """
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
