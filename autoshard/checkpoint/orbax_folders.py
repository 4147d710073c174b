"""Folders that Orbax wrote by itself: their leaves, without their shardings.

A folder of a `StandardCheckpointer` or a `PyTreeCheckpointer` has the file ``_METADATA``, JSON that names every leaf by
the keys of its path, and a Zarr array for each: of version 2 or 3, in one OCDBT store or in folders. Of a
`CheckpointManager` such folders are *items* of a step, ``DIR/STEP/ITEM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from etils import epath
from pydantic import BaseModel, ConfigDict, ValidationError

from autoshard.checkpoint.array_store import StoredArrays, folder_spec
from autoshard.checkpoint.leaves import key_dtype
from autoshard.checkpoint.manifest import MAX_BYTES, SCALAR_CODECS, LeafEntry, first_line, step_directories
from autoshard.checkpoint.names import NamedLeaf
from autoshard.checkpoint.pieces import Piece, ToRead, read, uses
from autoshard.checkpoint.restoring import StoredLeaves
from autoshard.errors import CheckpointError
from autoshard.strict_files import parse_json, read_text

_METADATA = "_METADATA"


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Key(_Entry):
    key: str


class _Value(_Entry):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(_Entry):
    key_metadata: list[_Key]
    value_metadata: _Value


class _Tree(_Entry):
    """What ``_METADATA`` says; more than this is ignored."""

    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool = True
    use_zarr3: bool = False


@dataclass(frozen=True)
class OrbaxFolder:
    """A tree that Orbax saved."""

    item: epath.Path
    """The folder with ``_METADATA``."""
    step: int | None
    beside: tuple[epath.Path, ...] = ()
    """The other items of the step."""

    def leaves(self) -> StoredLeaves:
        """Its leaves.

        Raises:
          CheckpointError: its metadata or the header of an array cannot be read.
        """
        tree = self._tree()
        named = {
            ".".join(keys): ("/".join(keys), leaf.value_metadata.value_type)
            for leaf in tree.tree_metadata.values()
            if not leaf.value_metadata.skip_deserialize
            for keys in ([key.key for key in leaf.key_metadata],)
        }
        texts = _json(self.item / "_strings.json") if "string" in {kind for _, kind in named.values()} else {}
        impls = self._key_impls()
        arrays = StoredArrays(self._spec(tree), {path: 1 for path, (_, kind) in named.items() if kind != "string"})
        shapes = arrays.shapes()

        def load(wanted: Mapping[str, ToRead]) -> dict[str, Any]:
            return read(StoredArrays(self._spec(tree), uses(wanted)), wanted)

        scalars = {path: shapes[path][1] for path, (_, kind) in named.items() if kind == "scalar"}
        goals = {p: ToRead((), dtype, None, (Piece.of(p, (), dtype),)) for p, dtype in scalars.items()}
        numbers = {path: value.item() for path, value in load(goals).items()}
        found: list[NamedLeaf] = []
        for path, (name, kind) in named.items():
            if kind == "string":
                leaf = LeafEntry(path=path, kind="str", dtype="str", shape=[], value=str(texts.get(path, "")))
            elif (number := type(numbers.get(path)).__name__) in SCALAR_CODECS:
                text = SCALAR_CODECS[number][0](numbers[path])
                leaf = LeafEntry(path=path, kind=cast(Any, number), dtype=number, shape=[], value=text)
            elif path in impls:
                shape, dtype = list(shapes[path][0][:-1]), key_dtype(name, impls[path])
                leaf = LeafEntry(path=path, kind="key", dtype=dtype, shape=shape, impl=impls[path])
            else:
                leaf = LeafEntry(path=path, kind="array", dtype=shapes[path][1].name, shape=list(shapes[path][0]))
            found.append(NamedLeaf(name, leaf))
        return StoredLeaves(str(self.item), found, load)

    def extra(self) -> dict[str, Any]:
        """The items beside the tree that are JSON, by name."""
        return {path.name: _json(path / "metadata") for path in self.beside}

    def _tree(self) -> _Tree:
        try:
            return _Tree.model_validate(_json(self.item / _METADATA))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{self.item / _METADATA} cannot be read: {where}: {first['msg']}") from error

    def _key_impls(self) -> dict[str, str]:
        """The generator of each array that is the key data of typed keys."""
        found: dict[str, str] = {}
        folder = self.item / "array_metadatas"
        for path in folder.iterdir() if folder.is_dir() else ():
            for entry in _json(path).get("array_metadatas", ()):
                match entry:
                    case {"array_metadata": {"param_name": str(name), "ext_metadata": {"random_key_impl": str(impl)}}}:
                        found[name] = impl
                    case _:
                        pass
        return found

    def _spec(self, tree: _Tree) -> Any:
        driver = "zarr3" if tree.use_zarr3 else "zarr"

        def spec(name: str) -> dict[str, Any]:
            folder = folder_spec(self.item)
            if tree.use_ocdbt:
                return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": folder, "path": f"{name}/"}}
            return {"driver": driver, "kvstore": folder_spec(self.item / name)}

        return spec


def _json(path: epath.Path) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path, MAX_BYTES))
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    return cast("dict[str, Any]", value)


def find_orbax(root: epath.Path, step: int | None) -> OrbaxFolder | None:
    """The tree that Orbax saved in ``root``, or in its step ``step``, by default the newest; None where there is none.

    Raises:
      CheckpointError: a step has several trees.
    """
    if (root / _METADATA).exists():
        if step is not None:
            raise CheckpointError(f"{root} is one tree, without steps; leave step={step} out")
        return OrbaxFolder(root, None)
    present = step_directories(root)
    chosen = step if step is not None else max(present, default=None)
    if chosen not in present or (root / str(chosen) / "inventory.json").exists():
        return None
    items = sorted(path for path in (root / str(chosen)).iterdir() if path.is_dir())
    trees = [path for path in items if (path / _METADATA).exists()]
    if len(trees) > 1:
        names = ", ".join(path.name for path in trees)
        raise CheckpointError(f"step {chosen} in {root} has several trees, {names}; restore one: {trees[0]}")
    return OrbaxFolder(trees[0], chosen, tuple(p for p in items if (p / "metadata").exists())) if trees else None
