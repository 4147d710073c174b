"""Reads files that anyone may have written: so many bytes at most, UTF-8, and JSON in which every entry counts.

A file that is not so is a ValueError that says why; callers add the file's name and raise a class of their own.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from typing import Any

from etils import epath

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 4300
"""Digits of an integer, as many as Python converts to text."""


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """The text of the file at ``path``, of at most ``limit`` bytes.

    Raises:
      OSError: it cannot be read.
      ValueError: it has more bytes, is not UTF-8, or no file can have this path.
    """
    try:
        with epath.Path(path).open("rb") as file:
            content: bytes = file.read(limit + 1)
    except ImportError as error:  # a bucket's address, without the library that reads it
        raise ValueError(f"it cannot be opened: {error}") from None
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, the most that is read")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def parse_json(text: str, *, non_finite: bool = False) -> Any:
    """The value that ``text`` describes.

    Args:
      non_finite: reads ``NaN`` and ``Infinity``, which Python writes and JSON does not have.

    Raises:
      ValueError: not JSON, a key that stands twice in an object, a number that is out of range, text that is not
        Unicode, or structures nested too deeply.
    """

    def constant(name: str) -> float:
        if not non_finite:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    def real(digits: str) -> float:
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"{cut(digits)} is out of range")
        return number

    try:
        value = json.loads(
            text, parse_constant=constant, parse_float=real, parse_int=_integer, object_pairs_hook=_distinct
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except UnicodeEncodeError:
        raise ValueError("it has text that is not Unicode: half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def shortened(value: object) -> str:
    """``value`` as it is written in Python, in the length of a line."""
    return cut(_short.repr(value), 160)


def cut(text: str, length: int = 80) -> str:
    """``text``, without its middle where it is longer than ``length``."""
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 2) :]}"


_short = reprlib.Repr(maxlevel=3, maxstring=80, maxother=80, maxlong=40, maxlist=6, maxdict=6)


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits is out of range")
    return int(digits)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shortened(next(k for k in keys if keys.count(k) > 1))} stands twice")
    return found
