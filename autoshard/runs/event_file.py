"""Event files that TensorBoard reads: one scalar for each metric and step.

A file is records, each a length and its checksum, then an ``Event`` of TensorFlow's ``event.proto`` and its checksum
(tensorflow/core/lib/io/record_writer.cc). No library that is kept writes it without TensorFlow; of the format a few
fields are needed.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping

_DOUBLE, _BYTES, _FLOAT, _INTEGER = 1, 2, 5, 0
"""Wire types of protocol buffers."""
MAX_FLOAT = 3.4028234e38
"""Beyond which a value is infinite in 32 bits."""


def first_events(wall_time: float, step: int) -> bytes:
    """The records that a file of a run begins with, which takes steps from ``step`` on: what earlier files have of
    these is not shown.

    Args:
      wall_time: seconds since 1970.
    """
    version = _field(1, _DOUBLE, wall_time) + _field(3, _BYTES, b"brain.Event:2")
    start = _field(1, _DOUBLE, wall_time) + _field(2, _INTEGER, step) + _field(7, _BYTES, _field(1, _INTEGER, 1))
    return _record(version) + _record(start)


def scalar_event(wall_time: float, step: int, metrics: Mapping[str, float]) -> bytes:
    """The record of the metrics of one step."""
    values = [_field(1, _BYTES, name.encode()) + _field(2, _FLOAT, value) for name, value in metrics.items()]
    summary = b"".join(_field(1, _BYTES, value) for value in values)
    return _record(_field(1, _DOUBLE, wall_time) + _field(2, _INTEGER, step) + _field(5, _BYTES, summary))


def _field(number: int, kind: int, value: float | bytes) -> bytes:
    """One field of a protocol buffer's message."""
    tag = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint(len(value)) + value
    if kind == _INTEGER:
        return tag + _varint(int(value))
    if kind == _FLOAT and MAX_FLOAT < abs(value) < math.inf:
        value = math.copysign(math.inf, value)
    return tag + struct.pack("<d" if kind == _DOUBLE else "<f", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", _masked(length)) + message + struct.pack("<I", _masked(message))


def _masked(content: bytes) -> int:
    """CRC-32C (Castagnoli) of ``content``, masked as records have it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    """The remainder of each byte, by the polynomial of Castagnoli with its bits reversed."""
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return tuple(table)
