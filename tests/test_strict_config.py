"""The strict YAML reader: what it refuses, with the line and in a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoshard.errors import ConfigError
from autoshard.strict_config import MAX_BYTES, Bytes, Config, parse_bytes


class _Config(Config):
    number: float = 1.0
    whole: int = 1
    text: str = ""
    size: Bytes = 1
    inner: dict[str, int | list[int]] | None = None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"number: 1\ntext: \xff", "cannot read .*config.yaml: byte 16 is not UTF-8"),
        (b"\nnumber: \x07", "config.yaml:2: the character 0x7 is not allowed in YAML"),
        (b"x" * (MAX_BYTES + 1), "more than 262,144 bytes"),
        (b"number: 1\nwhole: " + b"9" * 5000, "config.yaml:2: 9+...9+ is not an integer of 64 bits"),
        (b"whole: 0x8000000000000000", "config.yaml:1: 0x8000000000000000 is not an integer of 64 bits"),
        (b"whole: 0x_", "0x_ is not an integer"),
        (b"whole: 1" + b":59" * 20_000, "is not an integer of 64 bits"),
        (b"number: 1" + b":59" * 20_000 + b".5", "is not a number"),
        (b"number: .inf", "config.yaml:1: number: should be a finite number; it is inf"),
        (b"number: 1e999", "should be a finite number"),
        (b"size: 1e999GiB", "config.yaml:1: size: '1e999GiB' is 8 EiB or more"),
        (b"size: 1" + b" " * 50_000 + b"!", "config.yaml:1: size: .* is not a size in bytes"),
        (b"inner: " + b"[" * 10_000, "config.yaml:1: nested more than 32 levels deep"),
        (b"inner: " + b"{a: " * 10_000, "config.yaml:1: nested more than 32 levels deep"),
        (
            b"\n".join(b"k%d: 1" % n for n in range(6_000)),
            "config.yaml:2500: a configuration has 5,000 entries at most",
        ),
        (
            b"a: &a [1, 1]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n, n, n - 1, n - 1) for n in range(98, 120)),
            "entries",
        ),
        (b"inner: &a {b: *a}", r"config.yaml:1: \*a repeats what it stands in"),
        (b"text: !!bool maybe", "config.yaml:1: the tag tag:yaml.org,2002:bool is not read"),
        (b"text: !!python/name:os.system", "the tag .*os.system is not read"),
        (b"inner:\n  ? [a, b]\n  : 1", "config.yaml:2: a key is one word or number"),
        (b'text: "\\0"', "config.yaml:1: text with a character that no path or name has"),
        (b'text: "\\ud800"', "text with a character that no path or name has"),
        (b"inner:\n\ta: 1", r"config.yaml:2: found character '\\t' that cannot start any token: indent with spaces"),
        (b"<<: {text: a}", "config.yaml:1: <<: unknown key"),
    ],
)
def test_a_file_of_any_content_is_refused_in_a_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        _Config.load(path)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_what_people_write_is_read(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("inner: {a: &some [1, 2], b: *some, c: 0x10}\nnumber: 1e-3\ntext: 2001-99-99\nsize: 2 KiB\n")
    found = _Config.load(path)
    assert found.inner == {"a": [1, 2], "b": [1, 2], "c": 16}
    assert (found.number, found.text, found.size) == (1e-3, "2001-99-99", 2048)


def test_many_mistakes_are_counted(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("".join(f"k{n}: 0\n" for n in range(2_000)))
    with pytest.raises(ConfigError) as caught:
        _Config.load(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert re.search(r":20: k19: unknown key", lines[19])
    assert lines[20] == "and 1,980 more entries"


@pytest.mark.parametrize("text", ["1e999", "9" * 500, "1e10TiB", str(2**63)])
def test_sizes_end_below_eight_exbibytes(text: str):
    with pytest.raises(ValueError, match=r"8 EiB or more|not a size"):
        parse_bytes(text)
    assert parse_bytes("7340032 TiB") == 7 * 2**60
