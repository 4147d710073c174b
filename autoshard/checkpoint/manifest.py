"""The layout of a checkpoint directory, and which of its steps are complete.

A step is a directory, ``DIR/STEP``, in Orbax's layout:

    manifest/metadata   JSON: every leaf's path, shape and dtype; the caller's ``extra``; the plan's fingerprint; the
                        versions of what wrote it; a digest of all this
    arrays/             the leaves with data; see `autoshard.checkpoint.array_store`
    plan-DIGEST.json    the plan, if the state was saved with one, as `Plan.save` writes it
    inventory.json      the size of every file above, the digest of every one that is not the array store's, and a
                        digest of these; written last

Orbax writes into a temporary directory and renames it when everything is on disk, so that a process killed at any
moment leaves the complete step or none. The inventory detects what renaming cannot: files truncated or changed later.
The array store has checksums of its own, which are checked when arrays are read.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import jax.numpy as jnp
from etils import epath
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from autoshard.errors import CheckpointError
from autoshard.strict_files import parse_json, read_text, shortened

TEMPORARY = ".orbax-checkpoint-tmp"
"""Suffix of the directory of a step that Orbax is still writing."""


LOCK = "save.lock"
"""The file by which a directory is kept for the program that saves to it."""
MAX_BYTES = 2**26
"""Of a manifest, with the caller's ``extra``, and of an inventory."""
MAX_PATH = 4096
"""Letters of a leaf's path."""
SCALAR_CODECS: Mapping[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "bool": (lambda v: "true" if v else "false", lambda t: {"true": True, "false": False}[t]),
    "float": (float.hex, float.fromhex),
    "int": (str, int),
    "str": (str, str),
}
"""Conversions of Python scalars to text and back, exact, by type name."""


class LeafEntry(BaseModel):
    """The manifest's entry of one leaf of the state."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str = Field(max_length=MAX_PATH)
    kind: Literal["array", "key", "bool", "float", "int", "str"]
    dtype: str
    shape: list[NonNegativeInt]
    impl: str | None = None
    """The generator's name, of a typed PRNG key."""
    value: str | None = None
    """The value, of a Python scalar."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if (self.value is None) == (self.kind in SCALAR_CODECS):
            raise ValueError(f"{self.path} is {self.kind} and has {'no' if self.value is None else 'a'} value")
        try:
            _ = self.scalar
        except (KeyError, OverflowError, ValueError):
            raise ValueError(f"the value of {self.path} is not that of a Python {self.kind}") from None
        if self.kind == "array" and not _is_numeric(self.dtype):
            raise ValueError(f"the dtype of {self.path} is {shortened(self.dtype)}")
        return self

    @property
    def scalar(self) -> bool | int | float | str | None:
        """The value of a Python scalar; None of an array or a key."""
        return None if self.value is None else SCALAR_CODECS[self.kind][1](self.value)

    @property
    def in_array_store(self) -> bool:
        """Whether the array store has it."""
        return self.kind in ("array", "key") and 0 not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.kind in ("array", "key") else self.kind


def _is_numeric(dtype: str) -> bool:
    try:
        return any(jnp.issubdtype(jnp.dtype(dtype), family) for family in (jnp.number, jnp.bool_))
    except TypeError:
        return False


class Manifest(BaseModel):
    """The content of one step, without the arrays' data."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: Literal[2, 3] = 3
    """Those of 2 have neither `versions` nor `digest`."""
    fingerprint: str | None
    extra: dict[str, Any]
    leaves: list[LeafEntry]
    versions: dict[str, str] = Field(default_factory=dict)
    """Of what wrote the step, by the name of the package."""
    digest: int | None = None
    """CRC-32 of the rest as JSON."""

    @model_validator(mode="after")
    def _as_written(self) -> Self:
        if self.version > 2 and self.digest != manifest_digest(self.model_dump()):
            raise ValueError("it has changed since it was written")
        return self

    @classmethod
    def of(cls, leaves: Sequence[LeafEntry], extra: Mapping[str, Any], fingerprint: str | None) -> Self:
        """What is written today."""
        draft = cls.model_construct(
            version=3, fingerprint=fingerprint, extra=dict(extra), leaves=list(leaves), versions=dict(_versions())
        )
        return draft.model_copy(update={"digest": manifest_digest(draft.model_dump())})


@functools.cache  # reading them took a third of the time for which a save blocks
def _versions() -> Mapping[str, str]:
    return {name: importlib.metadata.version(name) for name in ("autoshard", "jax", "orbax-checkpoint")}


def manifest_digest(manifest: Mapping[str, Any]) -> int:
    """CRC-32 of a manifest as JSON values, without its digest."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class Inventory(BaseModel):
    """The files of one step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, tuple[int, int | None]]
    """Bytes, and CRC-32 where the file has no checksum of its own, by name relative to the step's directory."""
    digest: int
    """CRC-32 of `files` as JSON."""

    @classmethod
    def of(cls, files: dict[str, tuple[int, int | None]]) -> Self:
        """The inventory with these files."""
        return cls(files=files, digest=zlib.crc32(json.dumps(files, sort_keys=True).encode()))


def absolute_path(dir: epath.PathLike) -> epath.Path:
    """``dir`` as an absolute path, so that all spellings of it are equal; links are not resolved."""
    return epath.Path(dir).expanduser().absolute()


def step_directories(root: epath.Path, suffix: str = "") -> list[int]:
    """Steps that have a directory ``STEP + suffix``, in order, complete or not."""
    if not root.is_dir():
        return []
    names = [p.name.removesuffix(suffix) for p in root.iterdir() if p.name.endswith(suffix)]
    return sorted(int(n) for n in names if n.isascii() and n.isdigit() and str(int(n)) == n)


def complete_steps(root: epath.Path) -> tuple[int, ...]:
    """The steps that are complete in ``root``, in order, whatever is being written."""
    return tuple(n for n in step_directories(root) if incompleteness(root / str(n)) is None)


def choose_step(root: epath.Path, step: int | None) -> tuple[int, Manifest]:
    """The step to restore, by default the newest complete one, and its manifest. Warns of newer incomplete steps.

    Raises:
      CheckpointError: no such step, or it is incomplete.
    """
    present = step_directories(root)
    problems = {n: "its write never finished" for n in step_directories(root, TEMPORARY) if n not in present}
    problems |= {n: problem for n in present if (problem := incompleteness(root / str(n)))}
    complete = [n for n in present if n not in problems]
    if step is None and complete:
        step = max(complete)
        skipped = {n: p for n, p in sorted(problems.items()) if n > step}
        if skipped:
            named = "; ".join(f"step {n}: {p}" for n, p in skipped.items())
            warnings.warn(f"restoring step {step} of {root}, the last complete one; skipped {named}", stacklevel=3)
    if step is None and problems:
        named = "; ".join(f"step {n}: {p}" for n, p in sorted(problems.items()))
        raise CheckpointError(f"{root} has no complete checkpoint ({named})")
    if step is None:
        why = "has no checkpoint" if root.is_dir() else "is not a directory" if root.exists() else "does not exist"
        raise CheckpointError(f"{root} {why}")
    if step in problems:
        newest = newest_complete_text(complete)
        raise CheckpointError(f"step {step} in {root} is incomplete: {problems[step]}. {newest}")
    if step not in complete:
        near = f", the nearest is {min(complete, key=lambda n: abs(n - step))}" if complete else ""
        raise CheckpointError(f"{root} has no step {step}{near}. {newest_complete_text(complete)}")
    return step, read_manifest(root / str(step))


def incompleteness(path: epath.Path) -> str | None:
    """Why the step at ``path`` is incomplete, or None; reads the manifest and the files' sizes, not the arrays."""
    if not (path / "manifest" / "metadata").exists():
        return "it has no manifest"
    if not (path / "inventory.json").exists():
        return "it has no inventory"
    try:
        read_manifest(path)
    except (ValueError, OSError) as error:
        return f"its manifest cannot be read ({first_line(error)})"
    try:
        for name, (size, digest) in read_inventory(path).files.items():
            if not (path / name).exists():
                return f"{name} is missing"
            if (found := (path / name).stat().length) != size:
                return f"{name} has {found} bytes of {size}"
            if digest is not None and zlib.crc32((path / name).read_bytes()) != digest:
                return f"{name} has changed since it was written"
    except (ValueError, OSError) as error:
        return f"its inventory cannot be read ({first_line(error)})"
    return None


def read_inventory(path: epath.Path) -> Inventory:
    """The inventory of the step at ``path``; raises ValueError or OSError if it is not whole."""
    inventory = Inventory.model_validate(parse_json(read_text(path / "inventory.json", MAX_BYTES)))
    if inventory.digest != inventory.of(inventory.files).digest:
        raise ValueError("it has changed since it was written")
    return inventory


def inventory_text(path: epath.Path) -> str:
    """The inventory of the step at ``path``, as JSON."""
    items = {item.name: file_sizes(item) for item in path.iterdir() if item.is_dir()}
    sizes = {f"{item}/{name}": size for item, files in items.items() for name, size in files.items()}
    sizes |= {plan.name: plan.stat().length for plan in plan_files(path)}
    files = {
        name: (size, None if name.startswith("arrays/") else zlib.crc32((path / name).read_bytes()))
        for name, size in sorted(sizes.items())
    }
    return Inventory.of(files).model_dump_json(indent=0)


def file_sizes(path: epath.Path) -> dict[str, int]:
    """Bytes of every file below ``path``, by name relative to it."""
    sizes: dict[str, int] = {}
    for child in path.iterdir():
        if child.is_dir():
            sizes |= {f"{child.name}/{name}": size for name, size in file_sizes(child).items()}
        else:
            sizes[child.name] = child.stat().length
    return sizes


def plan_file_name(text: str) -> str:
    """The name of the file with a plan's JSON, by which it is known to be whole."""
    return f"plan-{zlib.crc32(text.encode()):08x}.json"


def plan_files(path: epath.Path) -> list[epath.Path]:
    """The files of plans in the step at ``path``: one, or none."""
    return sorted(file for file in path.iterdir() if re.fullmatch(r"plan-[0-9a-f]{8}\.json", file.name))


def read_manifest(path: epath.Path) -> Manifest:
    """The manifest of the step at ``path``; raises ValueError if it is not strictly what `checkpoint.save` writes."""
    try:
        return Manifest.model_validate(parse_json(read_text(path / "manifest" / "metadata", MAX_BYTES)))
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{key}." for key in first["loc"]).rstrip(".")
        raise ValueError(f"{where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}") from error


def newest_complete_text(complete: Sequence[int]) -> str:
    """The sentence of an error message that names the steps to restore instead."""
    if not complete:
        return "There is no complete step"
    return f"The last complete step is {max(complete)} (of {abbreviated(sorted(complete))})"


def abbreviated(items: Sequence[Any], limit: int = 5) -> str:
    """The first ``limit`` of ``items``, and the number of the rest."""
    more = len(items) - limit
    return ", ".join(map(str, items[:limit])) + (f" and {more} more" if more > 0 else "")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, to quote in another one."""
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
