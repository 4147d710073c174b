"""A published model's folder, ``config.json`` and safetensors files, as a tree of our leaves; and back."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.checkpoint.leaves import flatten_state
from autoshard.checkpoint.manifest import LeafEntry
from autoshard.checkpoint.names import NamedLeaf, Rename, RestoreOptions, leaf_names, nested
from autoshard.checkpoint.pieces import Piece, ToRead
from autoshard.checkpoint.restoring import CheckpointPlan, RestoreReport, StoredLeaves, restored
from autoshard.checkpoint.safetensors_state import TensorsToWrite, open_safetensors, write_tensors
from autoshard.errors import CheckpointError, nearest
from autoshard.weights.family import Family, Settings, TensorRow, family_of, read_config
from autoshard.weights.layout import inside

CONFIG = "config.json"


@dataclass(frozen=True)
class Pretrained:
    """A published model that can be read.

    Example: a Llama's folder, of which but one leaf is written here.
      >>> folder, llama = tempfile.mkdtemp(), autoshard.weights.family.family_of({"model_type": "llama"})
      >>> part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
      >>> autoshard.weights.write_pretrained(folder, part, llama, {})
      >>> model = autoshard.weights.open_pretrained(folder)
      >>> model
      <Pretrained llama, 4,096 bytes of weights>
      >>> model.abstract
      {'layers': {'mlp': {'down': ShapeDtypeStruct(shape=(2, 32, 16), dtype=float32)}}}
      >>> model.read()["layers"]["mlp"]["down"].shape, sorted(model.settings)[:2]
      ((2, 32, 16), ['activation', 'eps'])
    """

    family: Family
    config: Settings
    """Its ``config.json``."""
    stored: StoredLeaves
    """Its weights under the names of our leaves and in their layouts, and under their own what is no weight of ours."""

    def __repr__(self) -> str:
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract))
        return f"<Pretrained {self.family.model_type}, {size:,} bytes of weights>"

    @property
    def settings(self) -> dict[str, Any]:
        """What the module `Family.model` of `autoshard.weights.models` takes as its settings.

        Raises:
          ConfigError: the config asks for what that does not do.
        """
        return self.family.model_settings(self.config)

    @property
    def abstract(self) -> Any:
        """The tree of the weights, a `jax.ShapeDtypeStruct` each in nested dicts: what a step is planned with."""
        own = ((name, leaf) for name, leaf in self.stored.leaves if name in self.family.leaves)
        return nested({name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for name, leaf in own})

    def read(
        self,
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
        """The weights, directly into shards: each device reads its part of a tensor.

        Args:
          plan: of a step whose argument 0 is the tree, whole or in part; or ``like``, an example of it. Neither gives
            the tree as `abstract` has it, on the default device.
          ignore, rename, cast, missing, extra, fallback, report: as in `autoshard.checkpoint.restore`; names are those
            of our leaves.

        Raises:
          CheckpointError: weights of another tree, in what the options do not forgive, or damaged files.
        """
        example = self.abstract if plan is None and like is None else like
        options = RestoreOptions.of(ignore, rename, cast, missing, extra)
        return restored(self.stored, plan, example, options, fallback, RestoreReport() if report else None)


def open_pretrained(dir: str | Path, *, family: Family | None = None) -> Pretrained:
    """The model in the folder ``dir``, with ``config.json`` and safetensors files; reads no weight.

    Args:
      family: None means what ``model_type`` says, of those in ``configs/weights/``.

    Raises:
      CheckpointError: no or damaged safetensors files, or ones that are not laid out as the config says: names the
        tensor and its shape.
      ConfigError: no ``config.json``, or one of a family that is not known.

    Example:
      >>> folder, llama = tempfile.mkdtemp(), autoshard.weights.family.family_of({"model_type": "llama"})
      >>> part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
      >>> autoshard.weights.write_pretrained(folder, part, llama, {})
      >>> autoshard.weights.open_pretrained(folder).read()["layers"]["mlp"]["down"].shape
      (2, 32, 16)
    """
    config = read_config(Path(dir) / CONFIG)
    chosen = family or family_of(config)
    tensors, _ = open_safetensors(dir)
    return Pretrained(chosen, config, in_our_layout(tensors, chosen, config))


def in_our_layout(tensors: StoredLeaves, family: Family, config: Settings) -> StoredLeaves:
    """The tensors as our leaves.

    Raises:
      CheckpointError: tensors that are not laid out as the family says.
    """
    entries = {named.name: named.leaf for named in tensors.leaves}
    names = family.without_prefix(list(entries), config)
    known = family.known_sizes(config)
    leaves: list[NamedLeaf] = []
    pieces: dict[str, list[Piece]] = {}
    used: set[str] = set()
    for row in family.rows:
        found = row.numbered(list(names), config)
        if not found:
            continue
        used |= set(found.values())
        counts = _counts(row, found, config, tensors.where)
        sources = {numbers: entries[names[name]] for numbers, name in found.items()}
        first = next(iter(sources.values()))
        sizes = _sizes(row, sources.values(), known, tensors.where) | counts
        for letter, count in counts.items():
            if known.setdefault(letter, count) != count:
                raise CheckpointError(
                    f"{tensors.where}: {len(found)} tensors {row.template} are there, and {known[letter]} are expected "
                    f"of {letter}"
                )
        entry = LeafEntry(path=row.leaf, kind="array", dtype=first.dtype, shape=[sizes[n] for n in row.layout.leaf])
        leaves.append(NamedLeaf(row.leaf, entry))
        stored = {numbers: leaf.path for numbers, leaf in sources.items()}
        pieces[row.leaf] = list(row.layout.pieces(stored, sizes, first.dtype))
    for name in names.keys() - used:
        entry = entries[names[name]]
        leaves.append(NamedLeaf(names[name], entry))
        pieces[entry.path] = [Piece.of(entry.path, entry.shape, entry.dtype)]

    def read(wanted: Mapping[str, ToRead]) -> dict[str, Any]:
        goals = {
            name: replace(goal, pieces=tuple(p for piece in goal.pieces for p in inside(piece, pieces[piece.name])))
            for name, goal in wanted.items()
        }
        return tensors.read(goals)

    return StoredLeaves(tensors.where, leaves, read)


def _counts(row: TensorRow, found: Mapping[tuple[int, ...], str], config: Settings, where: str) -> dict[str, int]:
    """How many tensors there are of each letter that counts them; all of them are there."""
    counts = {letter: 1 + max(numbers[at] for numbers in found) for at, letter in enumerate(row.layout.counted)}
    for numbers in itertools.product(*map(range, counts.values())):
        if numbers not in found:
            name = row.name(dict(zip(counts, numbers, strict=True)), config)
            raise CheckpointError(
                f"{where} has no {name}, which {row.leaf} is stacked of with {len(found)} others, such as "
                f"{next(iter(found.values()))}; no option makes part of a stack: add the file that has it"
            )
    return counts


def _sizes(row: TensorRow, entries: Iterable[LeafEntry], known: Mapping[str, int], where: str) -> dict[str, int]:
    """The sizes of a tensor's dimensions by letter; the same for all tensors of a row."""
    first: LeafEntry | None = None
    sizes: dict[str, int] = {}
    for entry in entries:
        if first is not None and (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{where}: {entry.path} is {entry} and {first.path} is {first}, and both are layers of {row.leaf}"
            )
        if first is None:
            first = entry
            try:
                sizes = row.layout.sizes(entry.shape, known)
            except ValueError as error:
                raise CheckpointError(
                    f"{where}: {entry.path} is {entry}, not laid out as {row.leaf} is: it {error}. Does {CONFIG} "
                    "belong to these files?"
                ) from None
    return sizes


def write_pretrained(
    dir: str | Path,
    params: Any,
    family: Family,
    settings: Settings,
    *,
    config: Settings | None = None,
    max_bytes: int | str = "5GB",
) -> None:
    """Writes a tree of our leaves as such a folder, ``dir``: what `open_pretrained` reads, and `transformers`.

    Args:
      params: the tree, or part of it; arrays on devices or in numpy.
      family: of `Pretrained.family`, whose names and layouts it is written in.
      settings: of the model, as `Pretrained.settings`.
      config: what ``config.json`` has beside settings and sizes, such as the ids of special tokens; sizes and settings
        take the place of what it has of them.
      max_bytes: as in `autoshard.checkpoint.to_safetensors`.

    Raises:
      CheckpointError: a leaf that the family does not have, or not of its rank; files that are there already.

    Example: a stack of layers is written layer by layer, under the names that others read.
      >>> folder, llama = tempfile.mkdtemp(), autoshard.weights.family.family_of({"model_type": "llama"})
      >>> part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
      >>> autoshard.weights.write_pretrained(folder, part, llama, {})
      >>> autoshard.checkpoint.from_safetensors(folder)["model.layers.1.mlp.down_proj.weight"].shape
      (16, 32)
    """
    sizes, tensors = tensors_of(params, family, config or {}, settings)
    made = dict(config or {}) | family.config_of(settings, sizes)
    write_tensors(dir, tensors, max_bytes)
    if jax.process_index() == 0:
        (Path(dir) / CONFIG).write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")


def tensors_of(
    params: Any, family: Family, config: Settings, settings: Settings
) -> tuple[dict[str, int], TensorsToWrite]:
    """The size of each letter in a tree of our leaves, and its tensors; see `write_pretrained`.

    Raises:
      CheckpointError: a leaf that the family does not have, or not of its rank.
    """
    flat, _ = flatten_state(params)
    values = dict(zip((leaf.path for leaf in flat), jax.tree.leaves(params), strict=True))
    named = {leaf.name: (leaf.leaf, values[leaf.leaf.path]) for leaf in leaf_names(flat)}
    rows = {row.leaf: row for row in family.rows}
    for name, (leaf, _) in named.items():
        if name not in rows:
            raise CheckpointError(f"{name} is no leaf of {family.model_type}{nearest(name, rows)}")
        if len(leaf.shape) != len(rows[name].layout.leaf):
            raise CheckpointError(f"{name} is {leaf}, and a leaf of {' '.join(rows[name].layout.leaf)} is expected")
    sizes = _leaf_sizes(rows, {name: leaf for name, (leaf, _) in named.items()}, family)
    made = dict(config) | family.config_of(settings, sizes)
    tensors: list[tuple[str, LeafEntry, Any]] = []
    for name, row in rows.items():
        if name not in named:
            continue
        leaf, value = named[name]
        own = dict(zip(row.layout.leaf, leaf.shape, strict=True))
        shape = [math.prod(own[letter] for letter in group) for group in row.layout.tensor]
        for numbers in itertools.product(*(range(own[letter]) for letter in row.layout.counted)):
            tensor = family.prefix[0] + row.name(dict(zip(row.layout.counted, numbers, strict=True)), made)
            entry = leaf.model_copy(update={"path": tensor, "shape": shape})
            tensors.append((tensor, entry, functools.partial(row.layout.tensor_of, value, numbers)))
    return sizes, TensorsToWrite.of(tensors)


def _leaf_sizes(rows: Mapping[str, TensorRow], leaves: Mapping[str, LeafEntry], family: Family) -> dict[str, int]:
    """The size of each letter, the same in all leaves; a count of layers that begins later counts those before it."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, leaf in leaves.items():
        for letter, size in zip(rows[name].layout.leaf, leaf.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise CheckpointError(
                    f"{name} is {leaf}, and {first[letter]} is {leaves[first[letter]]}: {letter} of "
                    f"{family.model_type} would be {size} and {sizes[letter]}"
                )
            first.setdefault(letter, name)
    return sizes
