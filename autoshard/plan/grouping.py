"""families: arguments that lie alike, told together.

Thirty-two layers of nine weights each, and two moments of every one, are a thousand arrays and perhaps six
decisions. Two arrays belong to one family when they agree in shape, dtype and spec, and their paths differ
in one step: ``state['layers'][0..31]['wk'|'wv']``. A subtree in which every array lies as the one of the same
name in another *follows* it: an optimizer's moments follow the parameters.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.jaxpr import dtype_bits, dtype_named
from autoshard.plan.decisions import Place

Steps = tuple[tuple[str, ...], ...]
"""A path step by step; each step has one alternative or more."""

_STEP = re.compile(r"\[[^\]]*\]|\.\w+|^[^.\[]+")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)
_SHOWN = 4
"""Most alternatives of a step that are spelled out."""


@dataclass(frozen=True)
class ArrayGroup:
    """Arrays of one shape, dtype and spec whose paths go together."""

    steps: Steps
    places: tuple[Place, ...]

    @property
    def path(self) -> str:
        """The paths in one: ``state['layers'][0..31]['wk'|'wv']``."""
        return "".join(map(_alternatives, self.steps))

    @property
    def first(self) -> Place:
        return self.places[0]


@dataclass(frozen=True)
class MatchingSubtree:
    """A subtree whose arrays lie as those of the same name under ``leader``."""

    path: str
    leader: str
    places: tuple[Place, ...]


def bytes_per_device(places: Iterable[Place], mesh: Mapping[str, int]) -> int:
    """Bytes that ``places`` take on one device of a mesh with these axis sizes."""
    return sum(-(-math.prod(p.shape) * dtype_bits(dtype_named(p.dtype)) // (8 * p.spec.num_shards(mesh))) for p in places)


def group_arrays(places: Sequence[Place]) -> list[ArrayGroup]:
    """Groups ``places``; families come in the order of their first member, members in theirs."""
    rows = [ArrayGroup(tuple((s,) for s in _steps(p.path)), (p,)) for p in places]
    for depth in range(max((len(r.steps) for r in rows), default=0)):
        rows = _merged(rows, depth)
    return rows


def report_rows(places: Sequence[Place]) -> list[ArrayGroup | MatchingSubtree]:
    """The families of ``places``, with every subtree that follows another as one entry."""
    rows = group_arrays(places)
    trees: dict[Steps, list[int]] = defaultdict(list)
    holders: dict[object, list[Steps]] = defaultdict(list)
    for i, row in enumerate(rows):
        for n in range(1, len(row.steps)):
            trees[row.steps[:n]].append(i)
            holders[_member(row, n)].append(row.steps[:n])
    leaders: dict[Steps, Steps] = {}
    for tree in sorted(trees, key=len):
        if not any(tree[:n] in leaders for n in range(1, len(tree))):
            leader = _leader(tree, rows, trees, holders, leaders)
            if leader:
                leaders[tree] = leader
    found: list[ArrayGroup | MatchingSubtree] = []
    done: set[Steps] = set()
    for row in rows:
        tree = next((row.steps[:n] for n in range(1, len(row.steps)) if row.steps[:n] in leaders), None)
        if tree is None:
            found.append(row)
        elif tree not in done:
            done.add(tree)
            members = itertools.chain.from_iterable(rows[i].places for i in trees[tree])
            path, leader = ("".join(map(_alternatives, t)) for t in (tree, leaders[tree]))
            found.append(MatchingSubtree(path, leader, tuple(members)))
    return found


def _merged(rows: Sequence[ArrayGroup], depth: int) -> list[ArrayGroup]:
    """``rows`` with those put together that differ in step ``depth`` alone."""
    groups: dict[object, list[ArrayGroup]] = {}
    for row in rows:
        p, others = row.first, (len(row.steps), row.steps[:depth], row.steps[depth + 1 :])
        groups.setdefault((others, p.shape, p.dtype, p.spec, p.why == "pinned"), []).append(row)
    return [group[0] if len(group) == 1 else _union(group, depth) for group in groups.values()]


def _union(group: Sequence[ArrayGroup], depth: int) -> ArrayGroup:
    steps = group[0].steps
    either = tuple(dict.fromkeys(s for row in group for s in row.steps[depth]))
    places = itertools.chain.from_iterable(row.places for row in group)
    return ArrayGroup((*steps[:depth], either, *steps[depth + 1 :]), tuple(places))


def _member(row: ArrayGroup, n: int) -> object:
    """What a subtree's member must share with one in another: the rest of its path, its shape, its spec."""
    return row.steps[n:], row.first.shape, row.first.spec


def _leader(
    tree: Steps,
    rows: Sequence[ArrayGroup],
    trees: Mapping[Steps, list[int]],
    holders: Mapping[object, list[Steps]],
    leaders: Mapping[Steps, Steps],
) -> Steps | None:
    """The subtree nearest the root that has all members of ``tree``; not a part of it, nor a follower itself."""
    members = [_member(rows[i], len(tree)) for i in trees[tree]]
    if not any(rows[i].first.shape for i in trees[tree]):
        return None  # scalars lie one way only: a step count follows nothing
    for other in sorted(holders[members[0]], key=len):
        apart = len(other) < len(tree) and tree[: len(other)] != other
        free = not any(other[:n] in leaders for n in range(1, len(other) + 1))
        if apart and free and all(other in holders[m] for m in members):
            return other
    return None


def _steps(path: str) -> list[str]:
    found = _STEP.findall(path)
    return found if "".join(found) == path else [path]


def _alternatives(step: tuple[str, ...]) -> str:
    """One step of a path: ``[0..31]``, ``['wk'|'wv']``, ``.mu|nu``."""
    if len(step) == 1:
        return step[0]
    if all(s[0] == "[" for s in step):
        return f"[{_either([s[1:-1] for s in step])}]"
    if all(s[0] == "." for s in step):
        return f".{_either([s[1:] for s in step])}"
    return _either(step)


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
