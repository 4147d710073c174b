"""Arguments that two steps of one program share: found in the other step by the names of their keys, shape by shape.

``params`` of a predict function is ``state.params`` of the training step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from autoshard.jaxpr.paths import path_names
from autoshard.plan.decisions import Place

Names = tuple[str, ...]
Array = tuple[tuple[int, ...], str]
"""Shape and dtype."""


def shared_arguments(arrays: Sequence[tuple[str, tuple[int, ...], str]], places: Sequence[Place]) -> dict[int, Place]:
    """Which of ``places`` each array is, by its position; those that are none are left out.

    All arrays of one argument are looked for in one subtree of the places: the one that has the most of them under the
    same keys, with the same shape and dtype. Of equals the one at the argument's own place, then one whose last key is
    the argument's name, then the one with the fewest keys, then the first. An argument that is one array is found by
    its name only; of one key that is a number, nothing.

    Args:
      arrays: path, shape and dtype of each flat argument.
    """
    by_rest, full = _index(places)
    arguments: dict[str, list[tuple[int, Names, Array]]] = defaultdict(list)
    for i, (path, shape, dtype) in enumerate(arrays):
        name, *keys = path_names(path)
        arguments[name].append((i, tuple(keys), (shape, dtype)))
    found: dict[int, Place] = {}
    for name, leaves in arguments.items():
        roots = Counter[Names]()
        named: set[Names] = set()
        for _, keys, array in leaves:
            roots.update(r for r in by_rest.get((keys, array), ()) if keys or r[-1] == name)
            if not all(map(str.isdecimal, keys)):
                named.update(by_rest.get((keys, array), ()))
        certain = {r: n for r, n in roots.items() if n > 1 or r in named or r[-1] == name}
        if not certain:
            continue
        root = max(certain, key=lambda r: (certain[r], r == (name,), r[-1] == name, -len(r)))
        for i, keys, array in leaves:
            place = full.get((*root, *keys))
            if place is not None and (place.shape, place.dtype) == array:
                found[i] = place
    return found


def _index(places: Sequence[Place]) -> tuple[Mapping[tuple[Names, Array], list[Names]], Mapping[Names, Place]]:
    """The roots of all subtrees that have an array under some keys, and the places by all names of their path."""
    by_rest: dict[tuple[Names, Array], list[Names]] = defaultdict(list)
    full: dict[Names, Place] = {}
    for place in places:
        names = path_names(place.path)
        full.setdefault(names, place)
        for n in range(1, len(names) + 1):
            by_rest[names[n:], (place.shape, place.dtype)].append(names[:n])
    return by_rest, full
