"""Groups arguments of equal shape, dtype and spec into one row of the report.

Thirty-two layers of nine weights each, with two moments of every weight, are a thousand arrays and perhaps six
decisions. Arrays form one group where they agree in shape, dtype and spec, and their paths differ in one key:
``state['layers'][0..31]['wk'|'wv']``. A subtree whose arrays all have the specs of the same-named arrays of another
subtree, as an optimizer's moments have those of the parameters, is one row that names the other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.jaxpr import dtype_bits, dtype_from_name
from autoshard.jaxpr.paths import argument_name, path_keys
from autoshard.plan.decisions import Place

PathKeys = tuple[tuple[str, ...], ...]
"""The argument's name and the keys of a path; each has one alternative or more."""

_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)
_SHOWN = 4
"""Most alternatives of a key that are spelled out."""


@dataclass(frozen=True)
class ArrayGroup:
    """Arrays of one shape, dtype and spec whose paths differ in few keys."""

    keys: PathKeys
    places: tuple[Place, ...]

    @property
    def path(self) -> str:
        """All paths as one text: ``state['layers'][0..31]['wk'|'wv']``."""
        return "".join(map(_key_text, self.keys))

    @property
    def first(self) -> Place:
        """An array of the group."""
        return self.places[0]


@dataclass(frozen=True)
class MatchingSubtree:
    """A subtree whose arrays have the specs of those with the same names under ``reference``."""

    path: str
    reference: str
    places: tuple[Place, ...]


def bytes_per_device(places: Sequence[Place], mesh: Mapping[str, int]) -> int:
    """Bytes that ``places`` take on one device of a mesh with these axis sizes."""
    bits = (math.prod(p.stored_shape) * dtype_bits(dtype_from_name(p.dtype)) for p in places)
    return sum(-(-n // (8 * p.spec.num_shards(mesh))) for n, p in zip(bits, places, strict=True))


def note_of(place: Place) -> str:
    """What the report notes beside an array: that its spec was demanded, or is for loading alone; how it is stored."""
    notes = [place.reason] if place.reason in ("pinned", "shared", "placed", "loading") else []
    if place.stored is not None:
        padded = [f"{m:,} stored as {n:,}" for m, n in zip(place.shape, place.stored, strict=True) if m != n]
        notes.append(", ".join(padded))
    return "; ".join(notes)


def group_arrays(places: Sequence[Place]) -> list[ArrayGroup]:
    """Groups ``places``, in the order of each group's first member."""
    rows = [ArrayGroup(tuple((k,) for k in _keys(p.path)), (p,)) for p in places]
    for depth in range(max((len(r.keys) for r in rows), default=0)):
        rows = _merged(rows, depth)
    return rows


def report_rows(places: Sequence[Place]) -> list[ArrayGroup | MatchingSubtree]:
    """The groups of ``places``, with every subtree that matches another as one entry."""
    rows = group_arrays(places)
    rows_under: dict[PathKeys, list[int]] = defaultdict(list)
    trees_with: dict[object, list[PathKeys]] = defaultdict(list)
    for i, row in enumerate(rows):
        for n in range(1, len(row.keys)):
            rows_under[row.keys[:n]].append(i)
            trees_with[_member(row, n)].append(row.keys[:n])
    references: dict[PathKeys, PathKeys] = {}
    for tree in sorted(rows_under, key=len):
        if not any(tree[:n] in references for n in range(1, len(tree))):
            reference = _reference(tree, [rows[i] for i in rows_under[tree]], trees_with, references)
            if reference:
                references[tree] = reference
    found: list[ArrayGroup | MatchingSubtree] = []
    done: set[PathKeys] = set()
    for row in rows:
        tree = next((row.keys[:n] for n in range(1, len(row.keys)) if row.keys[:n] in references), None)
        if tree is None:
            found.append(row)
        elif tree not in done:
            done.add(tree)
            members = itertools.chain.from_iterable(rows[i].places for i in rows_under[tree])
            path, reference = ("".join(map(_key_text, t)) for t in (tree, references[tree]))
            found.append(MatchingSubtree(path, reference, tuple(members)))
    return found


def _merged(rows: Sequence[ArrayGroup], depth: int) -> list[ArrayGroup]:
    """``rows``, those merged that differ in key ``depth`` alone."""
    groups: dict[object, list[ArrayGroup]] = {}
    for row in rows:
        p, others = row.first, (len(row.keys), row.keys[:depth], row.keys[depth + 1 :])
        groups.setdefault((others, p.shape, p.dtype, p.spec, p.memory_kind, note_of(p)), []).append(row)
    return [group[0] if len(group) == 1 else _union(group, depth) for group in groups.values()]


def _union(group: Sequence[ArrayGroup], depth: int) -> ArrayGroup:
    keys = group[0].keys
    alternatives = tuple(dict.fromkeys(k for row in group for k in row.keys[depth]))
    places = itertools.chain.from_iterable(row.places for row in group)
    return ArrayGroup((*keys[:depth], alternatives, *keys[depth + 1 :]), tuple(places))


def _member(row: ArrayGroup, n: int) -> object:
    """What a member of two matching subtrees has in common: the path after ``n`` keys, the shape and the spec."""
    return row.keys[n:], row.first.shape, row.first.spec, row.first.memory_kind


def _reference(
    tree: PathKeys,
    rows: Sequence[ArrayGroup],
    trees_with: Mapping[object, Sequence[PathKeys]],
    references: Mapping[PathKeys, PathKeys],
) -> PathKeys | None:
    """The subtree nearest the root with all members of ``tree``; not within it, nor one that matches another itself."""
    if not any(row.first.shape for row in rows):
        return None  # scalars have one spec only: a step count matches nothing
    members = [_member(row, len(tree)) for row in rows]
    for other in sorted(trees_with[members[0]], key=len):
        outside = len(other) < len(tree) and tree[: len(other)] != other
        free = not any(other[:n] in references for n in range(1, len(other) + 1))
        if outside and free and all(other in trees_with[m] for m in members):
            return other
    return None


def _keys(path: str) -> list[str]:
    keys = path_keys(path)
    return [path] if keys is None else [argument_name(path), *(key.text for key in keys)]


def _key_text(alternatives: tuple[str, ...]) -> str:
    """The alternatives of one key: ``[0..31]``, ``['wk'|'wv']``, ``.mu|nu``."""
    if len(alternatives) == 1:
        return alternatives[0]
    if all(s[0] == "[" for s in alternatives):
        return f"[{_either([s[1:-1] for s in alternatives])}]"
    if all(s[0] == "." for s in alternatives):
        return f".{_either([s[1:] for s in alternatives])}"
    return _either(alternatives)


def _either(names: Sequence[str]) -> str:
    parts = [_NUMBERED.fullmatch(n) for n in names]
    around = {(m[1], m[3]) for m in parts if m}
    numbers = sorted(int(m[2]) for m in parts if m)
    if len(numbers) == len(names) > 2 and len(around) == 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        before, after = around.pop()
        return f"{before}{numbers[0]}..{numbers[-1]}{after}"
    if len(names) > _SHOWN:
        return f"{'|'.join(names[: _SHOWN - 1])}|{len(names) - _SHOWN + 1} more"
    return "|".join(names)
