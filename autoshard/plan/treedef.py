"""structure: the shape of a pytree as plain data, and back.

Tuples, lists, dicts, ordered dicts and None come back as what they were. Plain data cannot bring back a class, so a
node of any other one (a named tuple, a dataclass, an NNX state) comes back as a `Node`, whose parts have the names
they had. The data is JSON: ``"leaf"``, ``null``, ``{"tuple": [...]}``, ``{"list": [...]}``,
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

Step = tuple[str, Any]
"""How a part is reached: ``attr``, ``key``, ``index`` or ``flat`` with its name, or ``text``, any other way."""

_LEAF = "leaf"
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_NUMBERED = {"index": SequenceKey, "flat": FlattenedIndexKey}


@dataclass(frozen=True)
class TextKey:
    """One step of a path that is neither an attribute nor a key of text or a number, as it is written."""

    text: str

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, repr=False)
class UnknownNode:
    """Stands for a node of a pytree whose class is not known here.

    Its parts are reached as they were: ``node.mu`` or ``node[1]`` where it was a named tuple, ``node["kernel"]`` where
    it was a mapping. It is a pytree, and the paths of its leaves are those of the original.
    """

    _class: str
    _steps: tuple[Step, ...]
    _parts: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dataclass_fields__ or name.startswith("__"):
            raise AttributeError(name)  # of a copy that is being made
        if ("attr", name) in self._steps:
            return self._parts[self._steps.index(("attr", name))]
        raise AttributeError(f"{self._class} has no {name!r}; it has {', '.join(str(n) for _, n in self._steps)}")

    def __getitem__(self, key: Any) -> Any:
        for step, part in zip(self._steps, self._parts, strict=True):
            if step[0] != "attr" and step[1] == key and type(step[1]) is type(key):
                return part
        if isinstance(key, int) and not any(kind == "key" for kind, _ in self._steps):
            return self._parts[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        keyed = any(kind == "key" for kind, _ in self._steps)
        return iter([name for _, name in self._steps] if keyed else self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"{self._class}({', '.join(f'{n}={p!r}' for (_, n), p in zip(self._steps, self._parts, strict=True))})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, tuple[Step, ...]]]:
        """For `jax.tree_util`."""
        return list(zip(map(_key, self._steps), self._parts, strict=True)), (self._class, self._steps)

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, tuple[Step, ...]], parts: Any) -> UnknownNode:
        """For `jax.tree_util`."""
        return cls(*aux, tuple(parts))


def treedef_to_json(tree: TreeDef) -> Any:
    """``tree`` as JSON values. Of a tree that `rebuild` made it is what that was made from."""
    slot = object()
    return _describe(tree.unflatten([slot] * tree.num_leaves), slot)


def treedef_from_json(stored: Any) -> TreeDef:
    """The tree that `describe` was given, with a `Node` for every class that is not plain.

    Raises:
      PlanError: ``stored`` is not what `describe` gives.
    """
    try:
        tree = jax.tree.structure(_build(stored))
    except (TypeError, ValueError):  # keys that cannot be sorted
        tree = None
    if tree is None or treedef_to_json(tree) != stored:
        raise PlanError("its keys are not in the order in which JAX has them")
    return tree


def difference(a: TreeDef, b: TreeDef) -> str:
    """Where two structures first differ, as a sentence about ``a``; the empty string if they do not."""
    return _difference(treedef_to_json(a), treedef_to_json(b), "")


def leaf_paths(tree: TreeDef) -> list[tuple[Any, ...]]:
    """The path of each leaf, as `jax.tree_util` gives it."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree.unflatten([0] * tree.num_leaves))[0]]


def _describe(x: Any, slot: object) -> Any:
    if x is slot:
        return _LEAF
    if x is None:
        return None
    children = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    parts = [(_step(path[0]), _describe(child, slot)) for path, child in children]
    kind = type(x).__name__
    if type(x) is _SEQUENCES.get(kind):
        return {kind: [part for _, part in parts]}
    if type(x) is _MAPPINGS.get(kind) and all(step == "key" for (step, _), _ in parts):
        return {kind: [[name, part] for (_, name), part in parts]}
    return {"class": x._class if isinstance(x, UnknownNode) else kind, "parts": [[*step, part] for step, part in parts]}


def _build(stored: Any) -> Any:
    if stored is None or stored == _LEAF:
        return stored
    match stored:
        case {"class": str(name), "parts": list(parts)} if len(stored) == 2 and all(map(_is_part, parts)):
            return UnknownNode(name, tuple((kind, at) for kind, at, _ in parts), tuple(_build(part) for *_, part in parts))
        case dict() if len(stored) == 1:
            kind, parts = next(iter(cast("dict[str, Any]", stored).items()))
            if kind in _SEQUENCES and isinstance(parts, list):
                return _SEQUENCES[kind](map(_build, parts))
            if kind in _MAPPINGS and isinstance(parts, list) and all(map(_is_item, parts)):
                return _MAPPINGS[kind]((key, _build(part)) for key, part in parts)
        case _:
            pass
    text = repr(stored)
    raise PlanError(f"{text if len(text) < 60 else text[:57] + '...'} is no structure")


def _difference(a: Any, b: Any, at: str) -> str:
    if a == b:
        return ""
    (kind, parts), (other, wanted) = _taken_apart(a), _taken_apart(b)
    if kind != other:
        return f"{at or 'the whole'} is {kind}, not {other}"
    if parts.keys() != wanted.keys():
        have, want = (", ".join(side) or "nothing" for side in (parts, wanted))
        return f"{at or 'the whole'} has {have}, not {want}"
    found = (_difference(parts[k], wanted[k], at + k) for k in parts)
    return next(filter(None, found), f"{at or 'the whole'} has its parts in another order")


def _taken_apart(described: Any) -> tuple[str, dict[str, Any]]:
    """What kind of node it is, in words, and its parts by the step of a path that leads to each."""
    if described is None or described == _LEAF:
        return ("None" if described is None else "an array"), {}
    if "class" in described:
        return described["class"], {str(_key((kind, at))): part for kind, at, part in described["parts"]}
    kind, parts = next(iter(described.items()))
    steps = enumerate(parts) if kind in _SEQUENCES else parts
    return f"a {kind}", {f"[{at!r}]": part for at, part in steps}


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)


def _is_part(part: Any) -> bool:
    if not (isinstance(part, list) and len(part) == 3):
        return False
    kind, name, _ = part
    return (
        (kind in _NUMBERED and type(name) is int)
        or (kind in ("attr", "text") and type(name) is str)
        or (kind == "key" and type(name) in (str, int))
    )


def _step(key: Any) -> Step:
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


def _key(step: Step) -> Any:
    kind, name = step
    if kind in _NUMBERED:
        return _NUMBERED[kind](name)
    return GetAttrKey(name) if kind == "attr" else DictKey(name) if kind == "key" else TextKey(name)
