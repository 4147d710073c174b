"""Pytree structures as JSON values, and back.

Tuples, lists, dicts, ordered dicts and None come back as what they were. Classes are not stored, so a node of any other
class (a named tuple, a dataclass, an NNX state) comes back as an `UnknownNode` whose children have the same keys. The
JSON: ``"leaf"``, ``null``, ``{"tuple": [...]}``, ``{"list": [...]}``,
``{"dict": [[key, ...], ...]}``, ``{"OrderedDict": ...}``, ``{"class": name, "parts": [[step, name, ...], ...]}``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from autoshard.errors import PlanError
from autoshard.ir.program import TreeDef

ChildKey = tuple[str, Any]
"""How a child is reached: ``attr``, ``key``, ``index`` or ``flat`` with its name, or ``text``, any other key."""

_LEAF = "leaf"
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_NUMBERED = {"index": SequenceKey, "flat": FlattenedIndexKey}


@dataclass(frozen=True)
class TextKey:
    """A key that is neither an attribute, a string nor a number, as JAX writes it."""

    text: str

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, repr=False)
class UnknownNode:
    """A pytree node whose class was not stored.

    Its children are reached as before: ``node.mu`` or ``node[1]`` where it was a named tuple, ``node["kernel"]`` where
    it was a mapping. It is a pytree, and its leaves have the paths of the original.
    """

    _class: str
    _keys: tuple[ChildKey, ...]
    _children: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dataclass_fields__ or name.startswith("__"):
            raise AttributeError(name)  # copy and pickle ask before the fields are set
        if ("attr", name) in self._keys:
            return self._children[self._keys.index(("attr", name))]
        raise AttributeError(f"{self._class} has no {name!r}; it has {', '.join(str(n) for _, n in self._keys)}")

    def __getitem__(self, key: Any) -> Any:
        for (how, name), part in zip(self._keys, self._children, strict=True):
            if how != "attr" and name == key and type(name) is type(key):
                return part
        if isinstance(key, int) and not any(kind == "key" for kind, _ in self._keys):
            return self._children[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        keyed = any(kind == "key" for kind, _ in self._keys)
        return iter([name for _, name in self._keys] if keyed else self._children)

    def __len__(self) -> int:
        return len(self._children)

    def __repr__(self) -> str:
        return f"{self._class}({', '.join(f'{n}={p!r}' for (_, n), p in zip(self._keys, self._children, strict=True))})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, tuple[ChildKey, ...]]]:
        """For `jax.tree_util`."""
        return list(zip(map(_jax_key, self._keys), self._children, strict=True)), (self._class, self._keys)

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, tuple[ChildKey, ...]], parts: Any) -> UnknownNode:
        """For `jax.tree_util`."""
        return cls(*aux, tuple(parts))


def treedef_to_json(tree: TreeDef) -> Any:
    """``tree`` as JSON values; the inverse of `treedef_from_json`."""
    slot = object()
    return _to_json(tree.unflatten([slot] * tree.num_leaves), slot)


def treedef_from_json(stored: Any) -> TreeDef:
    """The tree that `treedef_to_json` was given, with an `UnknownNode` for every class that is not stored.

    Raises:
      PlanError: ``stored`` is not what `treedef_to_json` returns.
    """
    try:
        tree = jax.tree.structure(_from_json(stored))
    except (TypeError, ValueError):  # keys that cannot be sorted
        tree = None
    if tree is None or treedef_to_json(tree) != stored:
        raise PlanError("its keys are not in the order in which JAX has them")
    return tree


def difference(a: TreeDef, b: TreeDef) -> str:
    """Where two structures first differ, as a sentence about ``a``; the empty string if they are equal."""
    return _difference(treedef_to_json(a), treedef_to_json(b), "")


def leaf_paths(tree: TreeDef) -> list[tuple[Any, ...]]:
    """The path of each leaf, as `jax.tree_util` gives it."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree.unflatten([0] * tree.num_leaves))[0]]


def _to_json(x: Any, slot: object) -> Any:
    if x is slot:
        return _LEAF
    if x is None:
        return None
    children = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    items = [(_child_key(path[0]), _to_json(child, slot)) for path, child in children]
    kind = type(x).__name__
    if type(x) is _SEQUENCES.get(kind):
        return {kind: [child for _, child in items]}
    if type(x) is _MAPPINGS.get(kind) and all(how == "key" for (how, _), _ in items):
        return {kind: [[name, child] for (_, name), child in items]}
    name = x._class if isinstance(x, UnknownNode) else kind
    return {"class": name, "parts": [[*key, child] for key, child in items]}


def _from_json(stored: Any) -> Any:
    if stored is None or stored == _LEAF:
        return stored
    match stored:
        case {"class": str(name), "parts": list(parts)} if len(stored) == 2 and all(map(_is_child, parts)):
            keys, children = zip(*(((how, at), child) for how, at, child in parts), strict=True) if parts else ((), ())
            return UnknownNode(name, tuple(keys), tuple(map(_from_json, children)))
        case dict() if len(stored) == 1:
            kind, parts = next(iter(cast("dict[str, Any]", stored).items()))
            if kind in _SEQUENCES and isinstance(parts, list):
                return _SEQUENCES[kind](map(_from_json, parts))
            if kind in _MAPPINGS and isinstance(parts, list) and all(map(_is_item, parts)):
                return _MAPPINGS[kind]((key, _from_json(part)) for key, part in parts)
        case _:
            pass
    text = repr(stored)
    raise PlanError(f"{text if len(text) < 60 else text[:57] + '...'} is not a structure")


def _difference(a: Any, b: Any, at: str) -> str:
    if a == b:
        return ""
    (kind, parts), (other, wanted) = _kind_and_children(a), _kind_and_children(b)
    if kind != other:
        return f"{at or 'the tree'} is {kind}, not {other}"
    if parts.keys() != wanted.keys():
        have, want = (", ".join(side) or "nothing" for side in (parts, wanted))
        return f"{at or 'the tree'} has {have}, not {want}"
    found = (_difference(parts[k], wanted[k], at + k) for k in parts)
    return next(filter(None, found), f"{at or 'the tree'} has its children in another order")


def _kind_and_children(described: Any) -> tuple[str, dict[str, Any]]:
    """The kind of a node as text, and its children by their key as it stands in a path."""
    if described is None or described == _LEAF:
        return ("None" if described is None else "an array"), {}
    if "class" in described:
        return described["class"], {str(_jax_key((how, at))): child for how, at, child in described["parts"]}
    kind, parts = next(iter(described.items()))
    items = enumerate(parts) if kind in _SEQUENCES else parts
    return f"a {kind}", {f"[{at!r}]": child for at, child in items}


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)


def _is_child(part: Any) -> bool:
    if not (isinstance(part, list) and len(part) == 3):
        return False
    kind, name, _ = part
    return (
        (kind in _NUMBERED and type(name) is int)
        or (kind in ("attr", "text") and type(name) is str)
        or (kind == "key" and type(name) in (str, int))
    )


def _child_key(key: Any) -> ChildKey:
    match key:
        case GetAttrKey(name=str(name)):
            return "attr", name
        case DictKey(key=name) if type(name) in (str, int):
            return "key", name
        case SequenceKey(idx=int(at)):
            return "index", at
        case FlattenedIndexKey(key=int(at)):
            return "flat", at
        case _:
            return "text", str(key)


def _jax_key(key: ChildKey) -> Any:
    how, name = key
    if how in _NUMBERED:
        return _NUMBERED[how](name)
    return GetAttrKey(name) if how == "attr" else DictKey(name) if how == "key" else TextKey(name)
