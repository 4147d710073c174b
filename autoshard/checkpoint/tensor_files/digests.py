"""Digests of tensors and of headers, in the text of a header: what a set of files is verified by.

The entry ``crc32 NAME`` has the CRC-32 of a tensor's bytes, as zlib makes it, in 8 hexadecimal digits; the entry
``crc32`` that of the tensors' dtypes and shapes and of the rest of the text. Other readers keep such text or drop it.

CRC-32 is linear (Williams, "A painless guide to CRC error detection algorithms", 1993): bytes have the exclusive or of
what each of their parts has with zeros in the place of the others. So processes that each write a part of a tensor have
its digest together, and none reads what it has written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autoshard.checkpoint.manifest import abbreviated, first_line
from autoshard.checkpoint.tensor_files.headers import CODES, Tensor, TensorSet, read_header
from autoshard.checkpoint.tensor_files.runs import RUN_BYTES
from autoshard.errors import CheckpointError

HEADER = "crc32"
TENSOR = "crc32 "
"""Before a tensor's name."""
_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the coefficient of 1 in the highest bit."""


class Verified(NamedTuple):
    """How the bytes of a set of files were found. Every byte was read."""

    damaged: str
    """What is not as it was written; empty where nothing is known to be so."""
    without: tuple[str, ...]
    """Tensors that have no digest."""


def part_of_digest(content: Any, after: int) -> int:
    """What ``content``, bytes of a tensor, have of its digest where so many of its bytes come ``after`` them."""
    return _moved(zlib.crc32(content, _ONES) ^ _ONES, after)


def digest_text(parts: int, nbytes: int) -> str:
    """The digest of a tensor of so many bytes, of the exclusive or of its parts."""
    return f"{parts ^ _moved(_ONES, nbytes) ^ _ONES:08x}"


def header_digest(tensors: Mapping[str, tuple[str, Sequence[int]]], text: Mapping[str, str]) -> str:
    """The digest of a header: its tensors' dtypes, as codes, and shapes, and its text."""
    rest = {key: value for key, value in text.items() if key != HEADER}
    content = {name: [code, list(shape)] for name, (code, shape) in tensors.items()}
    return f"{zlib.crc32(json.dumps([content, rest], sort_keys=True).encode()):08x}"


def without_digests(text: Mapping[str, str]) -> dict[str, str]:
    """The text of a header that is not digests."""
    return {key: value for key, value in text.items() if key != HEADER and not key.startswith(TENSOR)}


def verify(found: TensorSet) -> Verified:
    """Reads all tensors, and compares those that have digests with them.

    Raises:
      CheckpointError: a file cannot be read.
    """
    damaged: list[str] = []
    without: list[str] = []
    for file in found.files:
        tensors, text = read_header(file)
        kinds = {name: (CODES[tensor.dtype.name], tensor.shape) for name, tensor in tensors.items()}
        if HEADER in text and header_digest(kinds, text) != text[HEADER]:
            damaged.append(f"the header of {file.name}")
        for name, tensor in tensors.items():
            made = _digest(tensor)
            if (wanted := text.get(TENSOR + name)) is None:
                without.append(name)
            elif made != wanted:
                damaged.append(f"{name} in {file.name}")
    what = f"{abbreviated(damaged)} {'have' if len(damaged) > 1 else 'has'} changed since written" if damaged else ""
    return Verified(what, tuple(without))


def _digest(tensor: Tensor) -> str:
    """The digest of a tensor in its file."""
    made, left = 0, tensor.nbytes
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            while content := file.read(min(left, RUN_BYTES)):
                made, left = zlib.crc32(content, made), left - len(content)
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {first_line(error)}") from error
    return f"{made:08x}"


def _moved(rest: int, count: int) -> int:
    """The remainder of what has the remainder ``rest`` and then ``count`` zeros, bytes: times x to the 8 * count."""
    power = 1 << 23  # x to the 8
    while count:
        if count & 1:
            rest = _product(rest, power)
        power = _product(power, power)
        count >>= 1
    return rest


def _product(a: int, b: int) -> int:
    """The product of two remainders, modulo the polynomial."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
