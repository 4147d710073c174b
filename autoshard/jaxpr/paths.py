"""Argument paths as `jax.tree_util.keystr` writes them: ``state['layers'][0].kernel``."""

from __future__ import annotations

import re
from typing import NamedTuple

_ARGUMENT = re.compile(r"[^\[.]+|\[[^\]]*\]")
_KEY = re.compile(r"""\[(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|<flat index (\d+)>|([^\]]*))\]|\.(\w+)""")
_NUMBER = re.compile(r"\d+")


class PathKey(NamedTuple):
    """One key of a path: ``['layers']``, ``[0]`` or ``.kernel``."""

    text: str
    """As it stands in the path."""
    name: str
    """Without brackets, quotes and dot."""


def argument_name(path: str) -> str:
    """The argument or result that ``path`` leads into: ``state``."""
    found = _ARGUMENT.match(path)
    return found[0] if found else path


def path_keys(path: str) -> tuple[PathKey, ...] | None:
    """The keys of ``path`` after the argument's name; None where it is not written in this grammar."""
    start = len(argument_name(path))
    found = list(_KEY.finditer(path, start))
    if "".join(m[0] for m in found) != path[start:]:
        return None
    return tuple(PathKey(m[0], m[m.lastindex or 0]) for m in found)


def path_names(path: str) -> tuple[str, ...]:
    """The names of the argument and of the keys of ``path``; ``path`` itself where it is not in this grammar."""
    keys = path_keys(path)
    return (path,) if keys is None else (argument_name(path), *(key.name for key in keys))


def unnumbered(path: str) -> str:
    """``path`` with every number as ``#``: equal for what numbered layers have in common, ``p['layer_#'].kernel``."""
    return _NUMBER.sub("#", path)
