"""The artifact's own part is read strictly, also where its checksum is right."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import ExportError
from autoshard.export import artifact

pytest.importorskip("flatbuffers", reason="jax.export writes with it")


@pytest.fixture(scope="module")
def content() -> bytes:
    return autoshard.jit(lambda x: {"y": (x * 2).sum()}, mesh={"data": 8}).export(jnp.ones(16))


def parts(content: bytes) -> tuple[bytes, dict[str, Any]]:
    size, _, _ = struct.unpack("<QI8s", content[-20:])
    return content[: -20 - size], json.loads(content[-20 - size : -20])


def joined(program: bytes, text: bytes, size: int | None = None) -> bytes:
    length = struct.pack("<Q", len(text) if size is None else size)
    return program + text + length + struct.pack("<I", zlib.crc32(program + text + length)) + artifact.MAGIC


def test_it_is_as_it_was(content: bytes) -> None:
    program, contents = parts(content)
    assert joined(program, json.dumps(contents).encode()) == content
    assert contents["name"] == "<lambda>"
    assert artifact.read_artifact(content).donated == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"more": 1}, "more: Extra inputs"),
        ({"donated": [1]}, "its program has 1 arguments and 1 results"),
        ({"donated": [-1]}, "donated.0"),
        ({"in_tree": {"tuple": []}}, "its program has 1 arguments and 1 results"),
        ({"in_tree": {"os": ["system"]}}, "is not a structure"),
        ({"plan": {}}, "cannot be read"),
    ],
)
def test_an_odd_entry_is_named(content: bytes, change: dict[str, Any], why: str) -> None:
    program, contents = parts(content)
    with pytest.raises(ExportError, match=why):
        artifact.read_artifact(joined(program, json.dumps(contents | change).encode()))


def test_odd_text_and_lengths(content: bytes) -> None:
    program, contents = parts(content)
    text = json.dumps(contents).encode()
    for odd in (b"", b"[]", b"{", b"\xff", text[:-1] + b', "name": "x"}'):
        with pytest.raises(ExportError, match="cannot be read"):
            artifact.read_artifact(joined(program, odd))
    with pytest.raises(ExportError, match="has changed"):
        artifact.read_artifact(joined(program, text, size=len(program) + len(text) + 1))
