"""Converts the leaves of a state to what a checkpoint stores, and back.

Zero-size arrays and Python scalars are in the manifest alone; typed PRNG keys are stored as their key data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autoshard.checkpoint.array_store import ToRead
from autoshard.checkpoint.manifest import MAX_PATH, SCALAR_CODECS, LeafEntry, abbreviated, first_line
from autoshard.errors import CheckpointError
from autoshard.jaxpr import PaddedArray, add_padding
from autoshard.jaxpr.paths import path_keys
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


def match_leaves(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry]) -> list[LeafEntry | None]:
    """For each leaf of ``wanted`` the one of ``saved`` with the same path, else with the same names along the path.

    An attribute, a key and an index of the same text have the same name: ``state.x``, ``state['x']``.
    """
    exact = {leaf.path: leaf for leaf in saved}
    paths = {leaf.path for leaf in wanted}
    rest = [(_key_names(leaf.path), leaf) for leaf in saved if leaf.path not in paths]
    count = Counter([names for names, _ in rest] + [_key_names(p) for p in paths - exact.keys()])
    by_names = {names: leaf for names, leaf in rest if count[names] == 2}  # one saved and one wanted: unambiguous
    return [exact.get(leaf.path) or by_names.get(_key_names(leaf.path)) for leaf in wanted]


def state_difference(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry], there: str) -> str:
    """How ``saved``, the state in ``there``, differs from ``wanted``; the empty string if it does not.

    Args:
      there: "checkpoint" or "plan", for the text.
    """
    pairs = list(zip(match_leaves(saved, wanted), wanted, strict=True))
    missing = [leaf for found, leaf in pairs if found is None]
    found = {leaf.path for leaf, _ in pairs if leaf is not None}
    unused = [leaf for leaf in saved if leaf.path not in found]
    differ = [(a, b) for a, b in pairs if a is not None and not _interchangeable(a, b)]
    if not (missing or unused or differ):
        return ""
    if differ:
        first = f"{differ[0][1].path} is {differ[0][0]} in the {there} and {differ[0][1]} here"
    elif missing:
        first = f"{missing[0].path} ({missing[0]}) is not in the {there}"
    else:
        first = f"{unused[0].path} ({unused[0]}) is in the {there} and not here"
    ends = f"; only here: {abbreviated([leaf.path for leaf in missing])}" if missing else ""
    ends += f"; only in the {there}: {abbreviated([leaf.path for leaf in unused])}" if unused else ""
    return (
        f"{first}. Of {len(wanted)} leaves here and {len(saved)} there, {len(differ)} "
        f"differ in shape or dtype, {len(missing)} are only here, {len(unused)} only there{ends}"
    )


def _key_names(path: str) -> tuple[str, ...]:
    """The names of the keys of ``path``."""
    keys = path_keys(path)
    return tuple(key.name for key in keys) if keys is not None else (path,)


def _interchangeable(saved: LeafEntry, wanted: LeafEntry) -> bool:
    """Whether shape and dtype are equal, or one is a Python number and the other a 0-d array of its family."""
    if saved.shape == wanted.shape and saved.dtype == wanted.dtype:
        return True
    scalar = saved.shape == wanted.shape == [] and "key" not in (saved.kind, wanted.kind)
    python = saved.kind != "array" or wanted.kind != "array"
    return scalar and python and _dtype_family(saved) == _dtype_family(wanted)


def _dtype_family(leaf: LeafEntry) -> str:
    if leaf.kind != "array":
        return leaf.kind
    dtype = jnp.dtype(leaf.dtype)
    families = {"bool": jnp.bool_, "float": jnp.floating, "int": jnp.integer}
    return next((name for name, family in families.items() if jnp.issubdtype(dtype, family)), leaf.dtype)


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


def array_to_read(leaf: LeafEntry, target: RestoreTarget) -> ToRead:
    """How to read the array of a leaf: into shards if its target is an array with a sharding, else to numpy."""
    if leaf.kind == "key":
        words = _key_words(leaf)
        return ToRead(words.shape, words.dtype, None)
    sharded = target.leaf.kind == "array" and not target.weak_type
    return ToRead(tuple(leaf.shape), jnp.dtype(leaf.dtype), target.sharding if sharded else None, target.stored)


def _restore_key(leaf: LeafEntry, words: Any, target: RestoreTarget, *, raw: bool) -> Any:
    if words is None:
        aval = _key_words(leaf)
        words = np.zeros(aval.shape, aval.dtype)
    if raw:
        return words
    return _put(jax.random.wrap_key_data(jnp.asarray(words), impl=cast(Any, leaf.impl)), target.sharding)


def _key_words(leaf: LeafEntry) -> Any:
    """Shape and dtype of the key data of a leaf of typed keys."""
    try:
        one: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=cast(Any, leaf.impl))))
    except ValueError as error:
        raise CheckpointError(f"{leaf.path} ({leaf}) cannot be restored: {first_line(error)}") from error
    return jax.ShapeDtypeStruct((*leaf.shape, *one.shape), one.dtype)


def _put(array: Any, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(array)
    if isinstance(array, np.ndarray):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return array if array.sharding == sharding else jax.device_put(array, sharding)
