"""Whole checkpoints at rest, in any of three formats: inspected, compared, converted, merged.

The formats: ``autoshard``, what `checkpoint.save` writes; ``orbax``, what Orbax writes by itself; ``safetensors``.
Leaves are read one at a time, to the host; for a target in one of the first two formats all are in memory at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from autoshard.checkpoint.leaves import RestoreTarget, array_to_read, restore_leaf
from autoshard.checkpoint.manifest import LeafEntry, absolute_path
from autoshard.checkpoint.matching import dtype_family, interchangeable
from autoshard.checkpoint.names import LeftOut, RestoreOptions, name_matches, nested, renamed_leaves
from autoshard.checkpoint.pieces import Piece
from autoshard.checkpoint.restoring import StoredLeaves
from autoshard.checkpoint.safetensors_state import TensorsToWrite, open_safetensors, write_tensors
from autoshard.checkpoint.save_restore import open_checkpoint, save
from autoshard.checkpoint.tensor_files.headers import INDEX, SINGLE
from autoshard.errors import CheckpointError
from autoshard.strict_files import shortened

Format = Literal["autoshard", "orbax", "safetensors"]


@dataclass(frozen=True)
class Selection:
    """Which leaves, under which names and in which dtypes."""

    ignore: tuple[str, ...] = ()
    """Names or globs of saved leaves to leave out."""
    rename: tuple[tuple[str, str], ...] = ()
    """Saved names or globs, and what takes their place."""
    cast: tuple[tuple[str, str], ...] = ()
    """Names or globs as they are after renaming, and the dtype of their floats; the last that matches counts."""


class ChosenLeaf(NamedTuple):
    """A leaf that can be read."""

    name: str
    leaf: LeafEntry
    """As it is to be."""
    read: Callable[[], Any]
    """The leaf as a numpy array, a typed key or a Python scalar."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint that can be read."""

    where: str
    format: Format
    step: int | None
    leaves: tuple[ChosenLeaf, ...]
    left_out: tuple[LeftOut, ...]
    extra: dict[str, Any]
    """What was saved beside the leaves."""
    fingerprint: str | None = None

    @property
    def nbytes(self) -> int:
        """Of all leaves with data, as they are to be."""
        return sum(leaf_bytes(chosen.leaf) for chosen in self.leaves)


@dataclass(frozen=True)
class Difference:
    """A leaf that differs between two checkpoints."""

    name: str
    first: str | None
    """Its dtype and shape in the first, or None where it is not there."""
    second: str | None
    apart: int = 0
    """Elements that differ, where dtype and shape do not."""
    largest: float = math.nan
    """The largest difference of two such numbers."""

    def __str__(self) -> str:
        if self.second is None:
            return f"{self.name}: only in the first, {self.first}"
        if self.first is None:
            return f"{self.name}: only in the second, {self.second}"
        if self.first != self.second:
            return f"{self.name}: {self.first} in the first, {self.second} in the second"
        by = "" if math.isnan(self.largest) else f", by {self.largest:g} at most"
        return f"{self.name}: {self.first}, {self.apart:,} elements differ{by}"


def open_contents(path: epath.PathLike, step: int | None = None, selection: Selection | None = None) -> Contents:
    """The checkpoint at ``path``: safetensors, or a directory of `save`'s or of Orbax's.

    Raises:
      CheckpointError: none is there, or it is damaged; a selection that names no leaf.
    """
    root, chosen = absolute_path(path), selection or Selection()
    if has_tensors(root):
        if step is not None:
            raise CheckpointError(f"{root} is one set of tensors, without steps; leave step={step} out")
        stored, extra = open_safetensors(root)
        return _contents(stored, "safetensors", None, chosen, dict(extra), None)
    found = open_checkpoint(root, step)
    return _contents(found.stored, found.format, found.step, chosen, found.extra, found.fingerprint)


def has_tensors(root: epath.Path) -> bool:
    """Whether safetensors are at this path."""
    return root.is_file() or (root / INDEX).exists() or (root / SINGLE).exists()


def _contents(
    stored: StoredLeaves,
    format: Format,
    step: int | None,
    selection: Selection,
    extra: dict[str, Any],
    fingerprint: str | None,
) -> Contents:
    options = RestoreOptions(ignore=selection.ignore, rename=dict(selection.rename) or None)
    named, left_out = renamed_leaves(stored.leaves, options)
    leaves: list[ChosenLeaf] = []
    for name, saved in named.items():
        leaf = _cast(saved.leaf, name, selection.cast)
        leaves.append(ChosenLeaf(name, leaf, functools.partial(read_leaf, stored, saved.leaf, leaf)))
    return Contents(stored.where, format, step, tuple(leaves), tuple(left_out), extra, fingerprint)


def _cast(leaf: LeafEntry, name: str, casts: Sequence[tuple[str, str]]) -> LeafEntry:
    found = [dtype for glob, dtype in casts if name_matches(glob, name)]
    if not found or leaf.kind != "array" or dtype_family(leaf) != "float":
        return leaf
    try:
        dtype: Any = jnp.dtype(found[-1])
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"cast: {shortened(found[-1])} is no dtype of floats")
    return leaf.model_copy(update={"dtype": dtype.name})


def read_leaf(stored: StoredLeaves, saved: LeafEntry, leaf: LeafEntry) -> Any:
    """A stored leaf as ``leaf``: a numpy array, a typed key or a Python scalar.

    Raises:
      CheckpointError: its bytes are damaged, or it cannot be cast.
    """
    target = RestoreTarget(leaf, as_numpy=True)
    pieces = [Piece.of(saved.path, saved.shape, saved.dtype)] if saved.kind == "array" else []
    try:
        arrays = stored.read({"": array_to_read(leaf, target, pieces)}) if leaf.in_array_store else {}
    except ValueError as error:
        raise CheckpointError(f"{leaf.path} cannot be cast:{error}; leave it out of the cast") from error
    return restore_leaf(leaf, arrays.get(""), target, raw=False)


def leaf_bytes(leaf: LeafEntry) -> int:
    """Bytes of an array; 0 of what is none."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize if leaf.kind == "array" else 0


def write_contents(
    given: Contents, target: epath.PathLike, format: Format | None, *, step: int | None = None, max_bytes: str = "5GB"
) -> Format:
    """Writes a checkpoint in another format, or in the same.

    Args:
      format: None means safetensors, and of safetensors ``autoshard``.
      step: of the target, where it has steps; None means that of the source, or 0.

    Returns:
      The format.

    Raises:
      CheckpointError: something is there already, or the format does not have what is to be written.
    """
    chosen: Format = format or ("autoshard" if given.format == "safetensors" else "safetensors")
    if chosen == "safetensors":
        leaves = [(leaf.name, leaf.leaf, functools.partial(_tensor, leaf)) for leaf in given.leaves]
        write_tensors(target, TensorsToWrite.of(leaves), max_bytes)
        return chosen
    values = {leaf.name: leaf.read() for leaf in given.leaves}
    if chosen == "autoshard":
        number = step if step is not None else given.step or 0
        save(target, number, values, extra=given.extra, wait=True)
        return chosen
    path = absolute_path(target)
    if path.exists():
        raise CheckpointError(f"{path} is there already; choose another folder, or remove it first")
    empty = [leaf.name for leaf in given.leaves if 0 in leaf.leaf.shape]
    if empty:
        raise CheckpointError(f"{empty[0]} has no element, which Orbax does not save; ignore it")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, nested(values))
    return chosen


def _tensor(leaf: ChosenLeaf) -> Any:
    value = leaf.read()
    return np.asarray(jax.random.key_data(value) if leaf.leaf.kind == "key" else value)


def merged(given: Sequence[Contents]) -> Contents:
    """The leaves of several checkpoints together, and what is saved beside the first.

    Raises:
      CheckpointError: two of them have a leaf of one name, and not the same.
    """
    leaves: dict[str, tuple[ChosenLeaf, str]] = {}
    for contents in given:
        for leaf in contents.leaves:
            before, where = leaves.setdefault(leaf.name, (leaf, contents.where))
            if before is not leaf and (apart := _difference(leaf.name, before, leaf)):
                raise CheckpointError(
                    f"{apart}: the first is {where}, the second {contents.where}. Ignore the leaf of one, or rename it"
                )
    first = given[0]
    left_out = tuple(left for contents in given for left in contents.left_out)
    chosen = tuple(leaf for leaf, _ in leaves.values())
    return Contents(first.where, first.format, first.step, chosen, left_out, first.extra, first.fingerprint)


def differences(first: Contents, second: Contents) -> Iterable[Difference]:
    """Every leaf that is not the same in both, in the order of the first, then of the second."""
    others = {leaf.name: leaf for leaf in second.leaves}
    names = {leaf.name for leaf in first.leaves}
    for leaf in first.leaves:
        if found := _difference(leaf.name, leaf, others.get(leaf.name)):
            yield found
    for leaf in second.leaves:
        if leaf.name not in names:
            yield Difference(leaf.name, None, str(leaf.leaf))


def _difference(name: str, first: ChosenLeaf, second: ChosenLeaf | None) -> Difference | None:
    if second is None:
        return Difference(name, str(first.leaf), None)
    both = str(first.leaf), str(second.leaf)
    if not interchangeable(first.leaf, second.leaf):
        return Difference(name, *both)
    a, b = (np.atleast_1d(_plain(leaf)) for leaf in (first, second))
    if both[0] != both[1]:  # a Python number and an array of one element
        return None if a.item() == b.item() else Difference(name, f"{both[0]} {a.item()}", f"{both[1]} {b.item()}")
    if a.tobytes() == b.tobytes():
        return None
    bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (a, b)]
    count = int((bits[0] != bits[1]).any(axis=1).sum()) if a.dtype == b.dtype else 1
    numeric = first.leaf.kind in ("array", "int", "float") and not jnp.issubdtype(a.dtype, jnp.complexfloating)
    with np.errstate(all="ignore"):
        largest = float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)))) if numeric else math.nan
    return Difference(name, *both, count, largest)


def _plain(leaf: ChosenLeaf) -> np.ndarray:
    value = leaf.read()
    return np.asarray(jax.random.key_data(value) if leaf.leaf.kind == "key" else value)


def applicable(selection: Selection, names: Iterable[str]) -> Selection:
    """``selection`` with those new names alone whose old ones are among ``names``."""
    known = list(names)
    kept = tuple((old, new) for old, new in selection.rename if any(name_matches(old, name) for name in known))
    return replace(selection, rename=kept)


def selection_of(ignore: Sequence[str], rename: Sequence[str], cast_to: Sequence[str]) -> Selection:
    """A selection from words: ``GLOB``, ``OLD=NEW`` and ``DTYPE`` or ``GLOB=DTYPE``.

    Raises:
      CheckpointError: a word of another form.
    """
    pairs = [tuple(word.split("=", 1)) for word in rename]
    if wrong := [word for word, pair in zip(rename, pairs, strict=True) if len(pair) != 2 or not all(pair)]:
        raise CheckpointError(f"rename: {wrong[0]!r} is not OLD=NEW")
    casts = [tuple(word.rpartition("=")[::2]) for word in cast_to]
    return Selection(
        tuple(ignore), cast("tuple[tuple[str, str], ...]", tuple(pairs)), tuple((g or "*", d) for g, d in casts)
    )
