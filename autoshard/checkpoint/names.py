"""Names of leaves, the keys of their paths joined by ``/``, and what a restore does with them: ignores and renames."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Self

from autoshard.checkpoint.manifest import LeafEntry
from autoshard.errors import CheckpointError, nearest
from autoshard.jaxpr.paths import path_keys
from autoshard.strict_files import shortened

Rename = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class RestoreOptions:
    """What a restore forgives; see `autoshard.checkpoint.restore`."""

    ignore: Any = ()
    rename: Any = None
    cast: bool = False
    missing: str = "error"
    extra: str = "error"

    @classmethod
    def of(cls, ignore: Iterable[str], rename: Rename | None, cast: bool, missing: str, extra: str) -> Self:
        """As readers take them, in their order; ``ignore`` is any iterable but text."""
        return cls(ignore if isinstance(ignore, str) else tuple(ignore), rename, cast, missing, extra)

    def __post_init__(self) -> None:
        if self.missing not in ("error", "init", "keep"):
            raise CheckpointError(f'missing={self.missing!r} is none of "error", "init" and "keep"')
        if self.extra not in ("error", "ignore"):
            raise CheckpointError(f'extra={self.extra!r} is neither "error" nor "ignore"')
        if not isinstance(self.ignore, tuple) or not all(isinstance(glob, str) for glob in self.ignore):
            raise CheckpointError(f"ignore={shortened(self.ignore)} is not a list of names and globs")
        if isinstance(self.rename, Mapping):
            for old, new in self.rename.items():
                if not isinstance(old, str) or not isinstance(new, str) or new.count("*") > old.count("*"):
                    raise CheckpointError(
                        f"rename={{{shortened(old)}: {shortened(new)}}}: both are names, and the new one has no `*` "
                        "that the old one has not"
                    )
        elif self.rename is not None and not callable(self.rename):
            raise CheckpointError(f"rename={shortened(self.rename)} is neither a dict nor a function of a name")


class NamedLeaf(NamedTuple):
    """A leaf of a state."""

    name: str
    leaf: LeafEntry


@dataclass(frozen=True)
class LeftOut:
    """A saved leaf that is not restored."""

    name: str
    why: Literal["ignored", "renamed to nothing", "extra"]


def leaf_names(leaves: Sequence[LeafEntry]) -> list[NamedLeaf]:
    """The leaves with their names. Where two would have the same, each has its path for a name."""
    keys = [path_keys(leaf.path) for leaf in leaves]
    names = [leaf.path if k is None else "/".join(key.name for key in k) for k, leaf in zip(keys, leaves, strict=True)]
    count = Counter(names)
    return [NamedLeaf(n if count[n] == 1 else leaf.path, leaf) for n, leaf in zip(names, leaves, strict=True)]


def renamed_leaves(saved: Sequence[NamedLeaf], options: RestoreOptions) -> tuple[dict[str, NamedLeaf], list[LeftOut]]:
    """The saved leaves by the names that they have now, and those that have none."""
    left_out = [LeftOut(leaf.name, "ignored") for leaf in saved if _any(options.ignore, leaf.name)]
    kept = [leaf for leaf in saved if not _any(options.ignore, leaf.name)]
    rename = _function(options.rename, [leaf.name for leaf in saved])
    found: dict[str, NamedLeaf] = {}
    for leaf in kept:
        name = rename(leaf.name)
        if name is None:
            left_out.append(LeftOut(leaf.name, "renamed to nothing"))
            continue
        if name in found:
            raise CheckpointError(
                f"rename gives {found[name].name} and {leaf.name} of the checkpoint one name, {name}; a new name with "
                "as many `*` as the old one keeps them apart"
            )
        found[name] = leaf
    return found, left_out


def _function(rename: Any, saved: Sequence[str]) -> Callable[[str], str | None]:
    """``rename`` as a function of one saved name."""
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):

        def called(name: str) -> str | None:
            try:
                new = rename(name)
            except Exception as error:
                raise CheckpointError(f"rename({name!r}) raises {type(error).__name__}: {error}") from error
            if new is not None and not isinstance(new, str):
                raise CheckpointError(
                    f"rename({name!r}) gives {shortened(new)}: must be a name, or None to leave it out"
                )
            return new

        return called
    exact = {old: new for old, new in rename.items() if "*" not in old}
    globs = [(_pattern(old), new) for old, new in rename.items() if "*" in old]
    for old in rename:
        if not any(_pattern(old).fullmatch(name) for name in saved):
            raise CheckpointError(
                f"rename={{{old!r}: ...}}: no leaf of the checkpoint has this name{nearest(old, saved)}"
            )

    def renamed(name: str) -> str:
        if name in exact:
            return exact[name]
        for pattern, new in globs:
            if match := pattern.fullmatch(name):
                first, *others = new.split("*")
                return first + "".join(map(operator.add, match.groups(), others))
        return name

    return renamed


def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(re.escape(text) for text in glob.split("*")), re.DOTALL)


def _any(globs: Sequence[str], name: str) -> bool:
    return any(name_matches(glob, name) for glob in globs)


def name_matches(glob: str, name: str) -> bool:
    """Whether ``name`` is ``glob``, or is matched by it."""
    return name == glob or fnmatchcase(name, glob)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts, of the keys that ``/`` joins."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split("/")
        at = found
        for key in folders:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise CheckpointError(f"{name} has another leaf as a prefix; rename one of them")
        if last in at:
            raise CheckpointError(f"{name} is a prefix of another leaf; rename one of them")
        at[last] = value
    return found
