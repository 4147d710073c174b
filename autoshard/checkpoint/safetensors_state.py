"""A state to safetensors files and back: what other programs read and write."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from autoshard.checkpoint.array_store import on_host
from autoshard.checkpoint.leaves import flatten_state, key_dtype, key_words
from autoshard.checkpoint.manifest import LeafEntry, absolute_path, first_line
from autoshard.checkpoint.names import NamedLeaf, Rename, RestoreOptions, leaf_names, renamed_leaves
from autoshard.checkpoint.pieces import ToRead, read
from autoshard.checkpoint.restoring import CheckpointPlan, RestoreReport, StoredLeaves, restored
from autoshard.checkpoint.tensor_files.digests import digest_text, without_digests
from autoshard.checkpoint.tensor_files.headers import CODES, INDEX, TensorSet, open_tensors
from autoshard.checkpoint.tensor_files.reading import TensorFiles
from autoshard.checkpoint.tensor_files.writing import (
    NewTensor,
    add_digests,
    create_file,
    divided,
    file_names,
    index_text,
    write_tensor,
)
from autoshard.errors import CheckpointError
from autoshard.runtime import nnx
from autoshard.shared_folder import in_all, in_first, of_all
from autoshard.strict_config import parse_bytes
from autoshard.strict_files import cut

_KEY = "prng "
"""Before a tensor's name: the entry of a header's text that says of which generator the tensor is the key data."""


def to_safetensors(
    dir: epath.PathLike, state: Any, *, rename: Rename | None = None, max_bytes: int | str = "5GB"
) -> None:
    """Writes ``state`` as safetensors files, which appear complete or not at all.

    Tensors have the names of leaves, the keys of their paths joined by ``/``, or what ``rename`` makes of these. Dtypes
    are kept. An array that stands in the state several times is written once; the header's text says which other names
    it has, as that of PyTorch's does. A typed key is written as its key data. A Python number becomes a scalar tensor.

    Several processes write their shards at once, into files that all must reach.

    Args:
      dir: a local folder, created if it does not exist, without such files.
      state: any pytree of arrays, typed PRNG keys and Python bool, int and float.
      rename: from names of leaves to names of tensors, as in `restore`; a leaf that becomes None is not written.
      max_bytes: of tensors in a file, at most; an int, or text such as ``"5GB"``. A larger tensor has one of its own.

    Raises:
      CheckpointError: a leaf of another type or of a dtype that the format does not have, files that are there already,
        or a write that failed.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> autoshard.checkpoint.to_safetensors(folder, {"w": jnp.ones((2, 4))}, rename={"w": "model.weight"})
      >>> os.listdir(folder)
      ['model.safetensors']
    """
    state = nnx.split((state,)).states[0]
    leaves, _ = flatten_state(state)
    renamed, _ = renamed_leaves(leaf_names(leaves), RestoreOptions(rename=rename))
    values = dict(zip([leaf.path for leaf in leaves], jax.tree.leaves(state), strict=True))
    tensors = _once({name: (leaf.leaf, values[leaf.leaf.path]) for name, leaf in renamed.items()})
    write_tensors(dir, tensors, max_bytes)


@dataclass(frozen=True)
class TensorsToWrite:
    """Tensors, and what makes the value of each: an array of any kind, asked for once."""

    tensors: dict[str, tuple[NewTensor, Callable[[], Any]]]
    metadata: dict[str, str]
    """The header's text."""

    @classmethod
    def of(cls, leaves: Iterable[tuple[str, LeafEntry, Callable[[], Any]]]) -> Self:
        """Leaves by name: of typed keys the value is the key data.

        Raises:
          CheckpointError: a leaf that no tensor holds.
        """
        made = cls({}, {"format": "pt"})  # without which some readers refuse a file
        for name, leaf, value in leaves:
            if name == "__metadata__":
                raise CheckpointError(f"{leaf.path} cannot be named {name}, which headers use themselves; rename it")
            if leaf.kind == "str":
                raise CheckpointError(f"{name} is text, which no tensor holds; rename it to None, or ignore it")
            shape, dtype = tuple(leaf.shape), leaf.dtype
            if leaf.kind == "key":
                made.metadata[_KEY + name] = str(leaf.impl)
                words = key_words(leaf)
                shape, dtype = words.shape, words.dtype
            elif leaf.kind != "array":
                dtype = np.asarray(leaf.scalar).dtype
            if jnp.dtype(dtype).name not in CODES:
                raise CheckpointError(f"{name} is {leaf}, and safetensors has no {dtype}; cast it first")
            made.tensors[name] = NewTensor(name, tuple(shape), jnp.dtype(dtype)), value
        return made


def write_tensors(dir: epath.PathLike, given: TensorsToWrite, max_bytes: int | str) -> None:
    """Writes tensors to files of at most ``max_bytes``; see `to_safetensors`."""
    folder = _local(dir)
    try:
        groups = divided([tensor for tensor, _ in given.tensors.values()], parse_bytes(max_bytes))
    except ValueError as error:
        raise CheckpointError(f"max_bytes: {error}") from None
    files = dict(zip(file_names(len(groups)), groups, strict=True))
    own: dict[str, int] = {}
    _together(in_first, lambda: _create(folder, files, given.metadata))
    _together(in_all, lambda: own.update(_write(folder, files, {k: value for k, (_, value) in given.tensors.items()})))
    parts = np.bitwise_xor.reduce(of_all(np.asarray([own[name] for name in given.tensors], np.uint32)))
    digests = {
        name: digest_text(int(part), tensor.nbytes)
        for (name, (tensor, _)), part in zip(given.tensors.items(), parts, strict=True)
    }
    _together(in_first, lambda: _finish(folder, files, given.metadata, digests))


def from_safetensors(
    dir: epath.PathLike,
    *,
    plan: CheckpointPlan | None = None,
    like: Any = None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    missing: str = "error",
    extra: str = "error",
    fallback: Any = None,
    report: bool = False,
) -> Any:
    """Reads safetensors files directly into shards: each device receives its part of a tensor.

    Tensors are matched by their names as saved leaves are in `restore`, which has the options: ``rename`` maps a
    tensor's name to a leaf's, such as ``{"model.layers.*.w": "params/layers/*/w"}``.

    Args:
      dir: a file, or a folder with ``model.safetensors`` or with several files and ``model.safetensors.index.json``.
      plan, like, ignore, rename, cast, missing, extra, fallback, report: as in `restore`.

    Returns:
      The state; with ``report`` a pair of it and the report, whose ``extra`` is the text of the headers.

    Raises:
      CheckpointError: no such files, damaged ones, or tensors of another state.

    Example:
      >>> folder = tempfile.mkdtemp()
      >>> autoshard.checkpoint.to_safetensors(folder, {"w": jnp.ones((2, 4))}, rename={"w": "model.weight"})
      >>> like = {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
      >>> autoshard.checkpoint.from_safetensors(folder, like=like, rename={"model.weight": "w"})["w"].shape
      (2, 4)
    """
    options = RestoreOptions.of(ignore, rename, cast, missing, extra)
    stored, text = open_safetensors(dir)
    return restored(stored, plan, like, options, fallback, RestoreReport(extra=dict(text)) if report else None)


def open_safetensors(dir: epath.PathLike) -> tuple[StoredLeaves, dict[str, str]]:
    """The tensors of a file or a folder as leaves, and the text of the headers that is not about single tensors."""
    found = open_tensors(_local(dir))
    about = without_digests(found.metadata).items()
    text = {k: v for k, v in about if k != "format" and not k.startswith(_KEY) and v not in found.tensors}

    def load(wanted: Mapping[str, ToRead]) -> dict[str, Any]:
        with TensorFiles(found) as files:
            return read(files, wanted)

    return StoredLeaves(str(found.where), tensor_leaves(found), load), text


def tensor_leaves(found: TensorSet) -> list[NamedLeaf]:
    """The tensors as leaves, and under each of its other names those that are written once.

    Raises:
      CheckpointError: the text of the header says of a tensor that it is a key, and it is not.
    """
    leaves: list[NamedLeaf] = []
    for name, tensor in found.tensors.items():
        shape, impl = list(tensor.shape), found.metadata.get(_KEY + name)
        leaf = LeafEntry(path=name, kind="array", dtype=tensor.dtype.name, shape=shape)
        if impl is not None:
            words = (tensor.dtype.name, shape[-1:])
            shape = shape[:-1]
            leaf = LeafEntry(path=name, kind="key", dtype=key_dtype(name, impl), shape=shape, impl=impl)
            wanted = key_words(leaf)
            if (wanted.dtype.name, list(wanted.shape[len(shape) :])) != words:
                raise CheckpointError(
                    f"{found.where}: {cut(name)} is {words[0]}{[*shape, *words[1]]}, no key of {impl}"
                )
        leaves.append(NamedLeaf(name, leaf))
    known = {leaf.name: leaf.leaf for leaf in leaves}
    others = [
        (other, name)
        for other, name in without_digests(found.metadata).items()
        if name in known and other not in known and other != "format" and not other.startswith(_KEY)
    ]
    return [*leaves, *(NamedLeaf(other, known[name]) for other, name in others)]


def _once(named: Mapping[str, tuple[LeafEntry, Any]]) -> TensorsToWrite:
    """What to write of a state in memory, each array once."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    leaves: list[tuple[str, LeafEntry, Callable[[], Any]]] = []
    for name, (leaf, value) in named.items():
        if isinstance(value, jax.Array | np.ndarray) and first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
        else:
            leaves.append((name, leaf, functools.partial(_as_array, leaf, value)))
    made = TensorsToWrite.of(leaves)
    return TensorsToWrite(made.tensors, made.metadata | tied)


def _as_array(leaf: LeafEntry, value: Any) -> Any:
    if leaf.kind == "key":
        return jax.random.key_data(value)
    return value if isinstance(value, jax.Array) else np.asarray(value)


def _create(folder: Path, files: Mapping[str, Sequence[NewTensor]], metadata: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if there := next(
        (p.name for p in sorted(folder.iterdir()) if p.name.endswith(".safetensors") or p.name == INDEX), ""
    ):
        raise CheckpointError(f"{folder} has {there} already; choose another folder, or remove it first")
    for file, tensors in files.items():
        create_file(_unfinished(folder, file), tensors, _own_text(tensors, metadata))


def _own_text(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """What of the headers' text is about these tensors."""
    names = {tensor.name for tensor in tensors}
    return {k: v for k, v in metadata.items() if k == "format" or v in names or k.removeprefix(_KEY) in names}


def _write(
    folder: Path, files: Mapping[str, Sequence[NewTensor]], arrays: Mapping[str, Callable[[], Any]]
) -> dict[str, int]:
    """Writes what this process has, and returns what it has of each tensor's digest."""
    digests: dict[str, int] = {}
    for file in files:
        path = _unfinished(folder, file)
        places = open_tensors(path).tensors
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for name, place in places.items():
                blocks = on_host({name: arrays[name]()})[name].blocks if 0 not in place.shape else []
                digests[name] = write_tensor(descriptor, place, blocks)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digests


def _finish(
    folder: Path,
    files: Mapping[str, Sequence[NewTensor]],
    metadata: Mapping[str, str],
    digests: Mapping[str, str],
) -> None:
    for file, tensors in files.items():
        path = _unfinished(folder, file)
        add_digests(path, tensors, _own_text(tensors, metadata), digests)
        path.rename(folder / file)
    if len(files) > 1:
        path = _unfinished(folder, INDEX)
        path.write_text(index_text(files))
        path.rename(folder / INDEX)


def _unfinished(folder: Path, file: str) -> Path:
    return folder / f"{file}.unfinished"


def _together(run: Callable[[Callable[[], object], str], None], call: Callable[[], object]) -> None:
    try:
        run(call, "the files could not be written")
    except OSError as error:
        raise CheckpointError(f"the files could not be written: {first_line(error)}") from error


def _local(dir: epath.PathLike) -> Path:
    if "://" in os.fspath(dir):
        raise CheckpointError(f"{dir} is no local path; safetensors files are read and written in local folders")
    return Path(absolute_path(dir))
