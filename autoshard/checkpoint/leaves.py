"""Converts the leaves of a state to what a checkpoint stores, and back.

Zero-size arrays and Python scalars are in the manifest alone; typed PRNG keys are stored as their key data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autoshard.checkpoint.manifest import MAX_PATH, SCALAR_CODECS, LeafEntry, first_line
from autoshard.checkpoint.pieces import Piece, ToRead
from autoshard.errors import CheckpointError
from autoshard.jaxpr import PaddedArray, add_padding
from autoshard.strict_files import cut


@dataclass(frozen=True)
class RestoreTarget:
    """What to restore one leaf to."""

    leaf: LeafEntry
    sharding: Sharding | None = None
    """None restores to numpy if ``as_numpy``, else to the default device, uncommitted."""
    as_numpy: bool = False
    weak_type: bool = False
    stored: tuple[int, ...] | None = None
    """The shape with the padding that it is restored with, which the sharding divides; None: without padding."""


def flatten_state(state: Any) -> tuple[list[LeafEntry], dict[str, Any]]:
    """The entries of ``state``'s leaves for the manifest, and the arrays to store, by path.

    Raises:
      CheckpointError: a leaf of an unsupported type, or two leaves whose paths print the same.
    """
    leaves: list[LeafEntry] = []
    arrays: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(state):
        leaf = _describe_leaf("state" + jax.tree_util.keystr(path), value)
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{leaf.path} is a ShapeDtypeStruct, which has no values to save")
        leaves.append(leaf)
        if leaf.in_array_store:
            arrays[leaf.path] = _to_stored(leaf, value)
    if len({leaf.path for leaf in leaves}) < len(leaves):
        paths = [leaf.path for leaf in leaves]
        twice = next(p for p in paths if paths.count(p) > 1)
        raise CheckpointError(f"two leaves have the path {twice}: their keys print the same; rename one")
    return leaves, arrays


def _to_stored(leaf: LeafEntry, value: Any) -> Any:
    if leaf.kind == "key":
        return jax.random.key_data(value)
    # The caller may write into a numpy array as soon as save returns.
    return value if isinstance(value, jax.Array) else np.array(value)


def _describe_leaf(path: str, value: Any) -> LeafEntry:
    kind = type(value).__name__
    if len(path) > MAX_PATH:
        raise CheckpointError(
            f"{cut(path)}: the path of a leaf has {MAX_PATH:,} letters at most, and this {len(path):,}"
        )
    if type(value) in (bool, float, int, str):
        try:
            text = SCALAR_CODECS[kind][0](value)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
        return LeafEntry(path=path, kind=cast(Any, kind), dtype=kind, shape=[], value=text)
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        dtype: Any = value.dtype
        shape = [int(n) for n in value.shape]
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else None
            return LeafEntry(path=path, kind="key", dtype=str(dtype), shape=shape, impl=impl)
        if jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_):
            return LeafEntry(path=path, kind="array", dtype=dtype.name, shape=shape)
        kind = f"an array of {dtype}"
    raise CheckpointError(
        f"{path} is {kind}; a checkpoint stores numeric arrays, typed PRNG keys and Python bool, float, int, str. "
        "Take it out of the state, or pass it as `extra` if it is JSON"
    )


def restore_targets(tree: Any, stored: Any = None) -> tuple[list[RestoreTarget], Any]:
    """The restore target of each leaf of ``tree``, and its structure.

    Args:
      stored: where given, a pytree of the same structure of what is to be in memory: `jax.ShapeDtypeStruct`s with
        shardings, longer than the leaves of ``tree`` where these are stored with padding.

    Raises:
      CheckpointError: a leaf of an unsupported type, or a sharding that does not divide it.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    places = [None] * len(paths) if stored is None else jax.tree.leaves(stored)
    found: list[RestoreTarget] = []
    for (path, value), place in zip(paths, places, strict=True):
        leaf = _describe_leaf("state" + jax.tree_util.keystr(path), value)
        held: Any = place if place is not None else value.stored if isinstance(value, PaddedArray) else value
        sharding: Any = getattr(held, "sharding", None)
        if isinstance(held, jax.Array) and not held.committed:
            sharding = None
        shape = tuple(leaf.shape) if sharding is None else tuple(held.shape)
        if sharding is not None:
            try:
                sharding.shard_shape(shape)
            except ValueError as error:
                raise CheckpointError(f"{leaf.path}: {leaf} cannot be sharded as {sharding}: {error}") from error
        host = sharding is None and isinstance(value, np.ndarray | np.generic)
        weak = bool(getattr(value, "weak_type", False))
        padded = shape if shape != tuple(leaf.shape) else None
        found.append(RestoreTarget(leaf, sharding, host, weak, padded))
    return found, treedef


def restore_leaf(leaf: LeafEntry, array: Any, target: RestoreTarget, *, raw: bool) -> Any:
    """The restored leaf.

    Args:
      array: the stored array, numpy or sharded already; None for a leaf that is in the manifest only.
      raw: restores typed keys as their key data.

    Raises:
      CheckpointError: what is stored is not what the manifest says.
    """
    try:
        return _restored(leaf, array, target, raw=raw)
    except (OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"{leaf.path} ({leaf}) cannot be restored: {first_line(error)}") from error


def _restored(leaf: LeafEntry, array: Any, target: RestoreTarget, *, raw: bool) -> Any:
    wanted = target.leaf
    if leaf.value is not None:
        value = leaf.scalar
        if wanted.kind != "array":
            return value
        try:
            array = np.asarray(value, jnp.dtype(wanted.dtype))
        except OverflowError as error:
            raise CheckpointError(f"{leaf.path} = {value} in the checkpoint does not fit {wanted.dtype}") from error
    if leaf.kind == "key":
        return _restore_key(leaf, array, target, raw=raw)
    if array is None:
        array = np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
    if wanted.kind != "array":
        return array.item()
    if target.weak_type and array.ndim == 0:
        return _put(jnp.asarray(array.item()), target.sharding)
    if target.stored is not None and array.shape != target.stored:
        array = add_padding(np.asarray(array), target.stored)
    placed = array if target.as_numpy else _put(array, target.sharding)
    return placed if target.stored is None else PaddedArray(placed, tuple(leaf.shape))


def place_leaf(leaf: LeafEntry, value: Any, target: RestoreTarget) -> Any:
    """A leaf that is in memory, as the target wants it: ``value`` itself where it is so already."""
    wanted = target.leaf
    if leaf.kind == "key":
        return _put(value, target.sharding)
    if wanted.kind == "array" and leaf.kind == "array":
        if leaf.dtype != wanted.dtype:
            value = value.astype(jnp.dtype(wanted.dtype))
        if isinstance(value, PaddedArray) and value.stored.shape == target.stored:
            return PaddedArray(_put(value.stored, target.sharding), tuple(leaf.shape))
        if target.as_numpy:
            return np.array(value)
    array = np.asarray(value) if isinstance(value, np.generic | PaddedArray) else value
    return restore_leaf(leaf, None if leaf.value is not None else array, target, raw=False)


def array_to_read(leaf: LeafEntry, target: RestoreTarget, pieces: Sequence[Piece]) -> ToRead:
    """How to read the array of a leaf: into shards if its target is an array with a sharding, else to numpy.

    Args:
      leaf: the leaf as it is to be: of the target's shape, and its dtype if both are arrays.
      pieces: what it is made of; of typed keys nothing, their key data are read whole.
    """
    if leaf.kind == "key":
        words = key_words(leaf)
        return ToRead(words.shape, words.dtype, None, (Piece.of(leaf.path, words.shape, words.dtype),))
    sharded = target.leaf.kind == "array" and not target.weak_type
    sharding = target.sharding if sharded else None
    return ToRead(tuple(leaf.shape), jnp.dtype(leaf.dtype), sharding, tuple(pieces), target.stored)


def _restore_key(leaf: LeafEntry, words: Any, target: RestoreTarget, *, raw: bool) -> Any:
    if words is None:
        aval = key_words(leaf)
        words = np.zeros(aval.shape, aval.dtype)
    if raw:
        return words
    if target.sharding is not None:  # that of the keys, whose words are in further dimensions
        words = _put(np.asarray(words), target.sharding)
    keys = jax.random.wrap_key_data(jnp.asarray(words), impl=cast(Any, leaf.impl))
    same = target.sharding is None or target.sharding.is_equivalent_to(keys.sharding, keys.ndim)
    return keys if same else jax.device_put(keys, target.sharding)


def key_words(leaf: LeafEntry) -> Any:
    """Shape and dtype of the key data of a leaf of typed keys."""
    one = _one_key(leaf.path, leaf.impl, jax.random.key_data)
    return jax.ShapeDtypeStruct((*leaf.shape, *one.shape), one.dtype)


def key_dtype(path: str, impl: str) -> str:
    """The dtype of keys of the generator ``impl``."""
    return str(_one_key(path, impl, lambda key: key).dtype)


def _one_key(path: str, impl: str | None, of: Callable[[jax.Array], jax.Array]) -> Any:
    try:
        return jax.eval_shape(lambda: of(jax.random.key(0, impl=cast(Any, impl))))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be restored: {first_line(error)}") from error


def _put(array: Any, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(array)
    if isinstance(array, np.ndarray):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return array if array.sharding == sharding else jax.device_put(array, sharding)
