"""Bounded reading of files, and JSON in which every entry counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.strict_files import parse_json, read_text, shortened


@pytest.mark.parametrize("value", ['{"a": [1, 2.5, null, true, "\\u00e9"]}', '"\\ud83d\\ude00"', "[[[]]]", "9" * 4300])
def test_json_is_read(value: str):
    assert parse_json(value) == json.loads(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "1e999 is out of range"),
        ("9" * 4301, "an integer of 4,301 digits is out of range"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_json_is_named(text: str, why: str):
    with pytest.raises(ValueError, match=why) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_python_s_own_constants_are_read_where_they_are_written():
    assert parse_json("[Infinity, 1]", non_finite=True) == [float("inf"), 1]
    with pytest.raises(ValueError, match="out of range"):
        parse_json("1e999", non_finite=True)


def test_a_file_is_bounded_and_utf_8(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_text(path, 100) == "x" * 100
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_text(path, 99)
    with pytest.raises(ValueError, match=r"more than 1,000 bytes"):
        read_text("/dev/zero", 1000)
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="byte 2 is not UTF-8"):
        read_text(path, 100)
    for path in (tmp_path / "a\0b", tmp_path / "\ud800"):
        with pytest.raises(ValueError, match=r"null|surrogates"):
            read_text(path, 100)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none", 100)


def test_what_is_quoted_is_a_line():
    assert shortened("a" * 1000) == "'" + "a" * 37 + "..." + "a" * 38 + "'"
    assert len(shortened([["x" * 50] * 10] * 100)) < 170
