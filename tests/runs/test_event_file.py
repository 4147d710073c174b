"""Event files, read back by protocol buffers' own library and by the checksum's published test value."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from autoshard.runs import event_file
from autoshard.runs.event_file import first_events, scalar_event


def event_class() -> Any:
    """TensorFlow's ``Event`` as far as it is written."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    messages = {
        "Value": [("tag", 1, kinds.TYPE_STRING, ""), ("simple_value", 2, kinds.TYPE_FLOAT, "")],
        "Summary": [("value", 1, kinds.TYPE_MESSAGE, ".t.Value")],
        "SessionLog": [("status", 1, kinds.TYPE_INT32, "")],
        "Event": [
            ("wall_time", 1, kinds.TYPE_DOUBLE, ""),
            ("step", 2, kinds.TYPE_INT64, ""),
            ("file_version", 3, kinds.TYPE_STRING, ""),
            ("summary", 5, kinds.TYPE_MESSAGE, ".t.Summary"),
            ("session_log", 7, kinds.TYPE_MESSAGE, ".t.SessionLog"),
        ],
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, type_name in fields:
            label = kinds.LABEL_REPEATED if field == "value" else kinds.LABEL_OPTIONAL
            message.field.add(name=field, number=number, type=kind, type_name=type_name or None, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


def unmasked(masked: int) -> int:
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def read(content: bytes) -> Iterator[Any]:
    """The events of a file."""
    event = event_class()
    while content:
        (size,), (of_size,) = struct.unpack("<Q", content[:8]), struct.unpack("<I", content[8:12])
        body, (of_body,) = content[12 : 12 + size], struct.unpack("<I", content[12 + size : 16 + size])
        assert of_size == event_file._masked(content[:8])
        assert of_body == event_file._masked(body)
        yield event.FromString(body)
        content = content[16 + size :]


def test_the_checksum_is_castagnoli_s():
    """The check value of CRC-32/ISCSI, and RFC 3720, B.4: 32 bytes of zeros."""
    assert unmasked(event_file._masked(b"123456789")) == 0xE3069283
    assert unmasked(event_file._masked(bytes(32))) == 0x8A9136AA


def test_events_are_read_back():
    metrics = {"loss": 1.5, "eval_loss": math.nan, "large": 1e300, "é": -math.inf, "long " * 100: 0.0}
    version, start, event = read(first_events(12.5, 301) + scalar_event(13.0, 2**40, metrics))
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status, start.wall_time) == (301, 1, 12.5)
    assert (event.step, event.wall_time) == (2**40, 13.0)
    found = {value.tag: value.simple_value for value in event.summary.value}
    assert found == pytest.approx({**metrics, "large": math.inf}, nan_ok=True)
