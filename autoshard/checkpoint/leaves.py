"""leaves: what a checkpoint holds for each leaf of a state, and the leaf it makes of that again.

Leaves that Orbax refuses are carried by the manifest (zero-size arrays, Python scalars) or as plain arrays (typed
PRNG keys as their words, dtypes that TensorStore lacks as wider ones).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autoshard.checkpoint.manifest import LeafEntry, abbreviated
from autoshard.errors import CheckpointError
from autoshard.jaxpr.paths import path_keys

_STORED_DTYPE = {"int1": "int8", "uint2": "uint8", "uint4": "uint8", "float8_e4m3": "float16"}
"""Dtypes that TensorStore cannot hold, and one that it can and that holds their every value."""

_SCALAR_CODECS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "bool": (lambda v: "true" if v else "false", lambda t: {"true": True, "false": False}[t]),
    "float": (float.hex, float.fromhex),
    "int": (str, int),
    "str": (str, str),
}
"""Python leaves by type name: to text and back, exactly."""


@dataclass(frozen=True)
class RestoreTarget:
    """Where one leaf goes. ``sharding`` None: numpy if ``host``, else the default device, uncommitted."""

    leaf: LeafEntry
    sharding: Sharding | None = None
    as_numpy: bool = False
    weak_type: bool = False


def flatten_state(state: Any) -> tuple[list[LeafEntry], dict[str, Any]]:
    """The leaves of ``state``, and by path the arrays that the store is to hold.

    Raises:
      CheckpointError: a leaf that no checkpoint can hold, or two whose paths print alike.
    """
    leaves: list[LeafEntry] = []
    arrays: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(state):
        leaf = _describe_leaf("state" + jax.tree_util.keystr(path), value)
        if isinstance(value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{leaf.path} is a ShapeDtypeStruct, which holds no values to save")
        leaves.append(leaf)
        if leaf.in_array_store:
            arrays[leaf.path] = _to_stored(leaf, value)
    if len({leaf.path for leaf in leaves}) < len(leaves):
        paths = [leaf.path for leaf in leaves]
        twice = next(p for p in paths if paths.count(p) > 1)
        raise CheckpointError(f"two leaves have the path {twice}: their keys print alike; rename one")
    return leaves, arrays


def _to_stored(leaf: LeafEntry, value: Any) -> Any:
    if leaf.kind == "key":
        return jax.random.key_data(value)
    if leaf.dtype in _STORED_DTYPE:
        return value.astype(_STORED_DTYPE[leaf.dtype])
    # The caller may write into a numpy array as soon as save returns.
    return value if isinstance(value, jax.Array) else np.array(value)


def _describe_leaf(path: str, value: Any) -> LeafEntry:
    kind = type(value).__name__
    if type(value) in (bool, float, int, str):
        return LeafEntry(path=path, kind=cast(Any, kind), dtype=kind, shape=[], value=_SCALAR_CODECS[kind][0](value))
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
        f"{path} is {kind}; a checkpoint holds numeric arrays, typed PRNG keys and Python bool, float, int, str. "
        "Take it out of the state, or give it as `extra` if it is JSON"
    )


def restore_targets(tree: Any, shardings: Any = None) -> tuple[list[RestoreTarget], Any]:
    """Where each leaf of ``tree`` goes, and its structure; ``shardings`` is a prefix of it.

    Raises:
      CheckpointError: a leaf that no checkpoint can hold, or a sharding that does not divide it.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    places: list[Any] = [None] * len(paths)
    if shardings is not None:
        places = jax.tree.leaves(jax.tree.broadcast(shardings, tree, is_leaf=_no_sharding), is_leaf=_no_sharding)
    found: list[RestoreTarget] = []
    for (path, value), place in zip(paths, places, strict=True):
        leaf = _describe_leaf("state" + jax.tree_util.keystr(path), value)
        sharding: Any = place or getattr(value, "sharding", None)
        if isinstance(value, jax.Array) and not value.committed:
            sharding = place
        if sharding is not None:
            try:
                sharding.shard_shape(tuple(leaf.shape))
            except ValueError as error:
                raise CheckpointError(f"{leaf.path}: {leaf} cannot be laid out as {sharding}: {error}") from error
        host = sharding is None and isinstance(value, np.ndarray | np.generic)
        found.append(RestoreTarget(leaf, sharding, host, bool(getattr(value, "weak_type", False))))
    return found, treedef


def _no_sharding(value: Any) -> bool:
    return value is None


def match_leaves(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry]) -> list[LeafEntry | None]:
    """For each of ``wanted`` the leaf of ``saved`` with its path; else the one whose path names the same.

    An attribute, a key and an index name the same when they read the same: ``state.x``, ``state['x']``.
    """
    exact = {leaf.path: leaf for leaf in saved}
    paths = {leaf.path for leaf in wanted}
    rest = [(_path_names(leaf.path), leaf) for leaf in saved if leaf.path not in paths]
    count = Counter([names for names, _ in rest] + [_path_names(p) for p in paths - exact.keys()])
    alike = {names: leaf for names, leaf in rest if count[names] == 2}
    return [exact.get(leaf.path) or alike.get(_path_names(leaf.path)) for leaf in wanted]


def state_difference(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry], there: str) -> str:
    """What tells ``saved`` from ``wanted``, the state here; the empty string if nothing does."""
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


def _path_names(path: str) -> tuple[str, ...]:
    """The names of the keys of ``path``."""
    keys = path_keys(path)
    return tuple(key.name for key in keys) if keys is not None else (path,)


def _interchangeable(saved: LeafEntry, wanted: LeafEntry) -> bool:
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
    """The restored leaf. ``array``: what the store gave, numpy or already sharded; None for a leaf without bytes."""
    wanted = target.leaf
    if leaf.value is not None:
        value = _SCALAR_CODECS[leaf.kind][1](leaf.value)
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
    if list(array.shape) != leaf.shape:
        raise CheckpointError(f"{leaf.path} is {leaf} in the manifest and has the shape {array.shape} in the store")
    if leaf.dtype in _STORED_DTYPE:
        array = array.astype(jnp.dtype(leaf.dtype))
    if wanted.kind != "array":
        return array.item()
    if target.weak_type and array.ndim == 0:
        return _put(jnp.asarray(array.item()), target.sharding)
    return array if target.as_numpy else _put(array, target.sharding)


def _restore_key(leaf: LeafEntry, words: Any, target: RestoreTarget, *, raw: bool) -> Any:
    impl = cast(Any, leaf.impl)
    if words is None:
        one: Any = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        words = np.zeros((*leaf.shape, *one.shape), one.dtype)
    if raw:
        return words
    return _put(jax.random.wrap_key_data(jnp.asarray(words), impl=impl), target.sharding)


def _put(array: Any, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(array)
    if isinstance(array, np.ndarray):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return array if array.sharding == sharding else jax.device_put(array, sharding)
