"""Blocks of equations that repeat: the same operations, in the same order, wired the same, each after the one before.

With the keys of all equations in a row, blocks of ``b`` equations that repeat are where each key equals that ``b``
further on. Operands of a block are its own values, values of the block before (carried), values that all blocks read,
or a value from outside for each block.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard import jaxpr as jx

MIN_LAYERS = 2
"""Fewest blocks that count as layers."""
MAX_CANDIDATES = 64
"""Most rows of repeating blocks whose wiring is looked at, those of most equations first."""
type Place = tuple[int, int]
"""Of a value in a block: which equation makes it, and which of its results it is."""


@dataclass(frozen=True)
class Repeat:
    """Blocks of equations that repeat."""

    start: int
    """The first equation."""
    width: int
    """Equations in a block."""
    count: int
    """Number of blocks."""
    shared: tuple[jx.Atom, ...]
    """What all blocks read from outside."""
    carried: tuple[tuple[jx.Atom, Place], ...]
    """What the first block reads in place of a value of the block before, and that value."""
    own: tuple[tuple[jx.Atom, ...], ...]
    """What each block reads from outside, in the order in which blocks run."""
    operands: tuple[tuple[tuple[str, Any], ...], ...]
    """Of each equation, each operand: ("value", `Place`), ("shared" | "carried" | "own", position)."""

    @property
    def stop(self) -> int:
        """After the last equation."""
        return self.start + self.width * self.count

    def results(self, eqns: Sequence[jx.JaxprEqn], place: Place) -> tuple[jx.Var, ...]:
        """The variable of each block at a place."""
        at, out = place
        return tuple(eqns[self.start + k * self.width + at].outvars[out] for k in range(self.count))


def find_repeats(eqns: Sequence[jx.JaxprEqn], weighs: Any) -> list[Repeat]:
    """Rows of blocks that repeat, apart from each other, those of most equations first.

    Args:
      weighs: tells of an equation whether it is one of those that a block must have.
    """
    numbers = dict[Any, int]()
    keys = np.array([numbers.setdefault(_key(n, eqn), len(numbers)) for n, eqn in enumerate(eqns)])
    weighty = np.array([bool(weighs(eqn)) for eqn in eqns])
    heavy = np.cumsum([0, *weighty])
    rows = [r for r in _rows(keys, _distances(keys, weighty)) if heavy[r[0] + r[1]] > heavy[r[0]]]
    rows.sort(key=lambda r: (-r[1] * r[2], r[1]))
    made = _made(eqns)
    found: list[Repeat] = []
    for start, width, count, more in rows[:MAX_CANDIDATES]:
        if any(start < r.stop and r.start < start + width * count for r in found):
            continue
        wired = [w for first in range(start, start + more + 1) if (w := _wired(eqns, made, first, width, count))]
        if wired:
            found.append(min(wired, key=lambda r: (sum(jx.aval_bytes(jx.aval(a)) for a, _ in r.carried), r.start)))
    return found


def transposed(eqns: Sequence[jx.JaxprEqn], forward: Repeat, backward: Repeat) -> tuple[Repeat, Repeat] | None:
    """The blocks of layers that both rows have; None if ``backward`` does not read, from the last to the first, what
    the blocks of ``forward`` left."""
    made, known = _made(eqns), _by_layer(eqns, forward)
    tops = [
        layer
        for atoms in backward.own
        for layer, values in known.get(id(atoms[0]), ())
        if layer + 1 >= len(atoms) and all(a is values[layer - n] for n, a in enumerate(atoms))
    ]
    if not tops:
        return None
    first, last = max(0, max(tops) - forward.count + 1), min(backward.count - 1, max(tops))
    count = last - first + 1
    if count < MIN_LAYERS:
        return None
    cut = (
        _wired(eqns, made, r.start + n * r.width, r.width, count)
        for r, n in ((forward, max(tops) - last), (backward, first))
    )
    one, other = cut
    return None if one is None or other is None else (one, other)


def _by_layer(eqns: Sequence[jx.JaxprEqn], row: Repeat) -> dict[int, list[tuple[int, tuple[jx.Atom, ...]]]]:
    """What blocks make, and what they are given in place of it: by the identity of a value, its layer, and the values
    that all layers have there."""
    places = [(at, out) for at in range(row.width) for out in range(len(eqns[row.start + at].outvars))]
    values: list[tuple[jx.Atom, ...]] = [row.results(eqns, place) for place in places]
    values += [(first, *row.results(eqns, place)[:-1]) for first, place in row.carried]
    found = defaultdict[int, list[tuple[int, tuple[jx.Atom, ...]]]](list)
    for of_layers in values:
        for layer, a in enumerate(of_layers):
            found[id(a)].append((layer, of_layers))
    return found


def _made(eqns: Sequence[jx.JaxprEqn]) -> dict[jx.Var, Place]:
    return {v: (n, i) for n, eqn in enumerate(eqns) for i, v in enumerate(eqn.outvars)}


def _key(number: int, eqn: jx.JaxprEqn) -> Any:
    """Equal for equations that do the same; whatever their literals are."""
    if eqn.effects or any(r.body.consts or r.body.effects for r in jx.regions(eqn)):
        return number
    types = tuple((jx.aval(a).shape, jx.aval(a).dtype, getattr(jx.aval(a), "weak_type", False)) for a in eqn.invars)
    bodies = tuple(str(r.body) for r in jx.regions(eqn))
    params = tuple((k, v) for k, v in sorted(eqn.params.items()) if not (bodies and _has_jaxpr(v)))
    key = eqn.primitive, types, params, bodies, tuple(jx.aval(v).shape for v in eqn.outvars)
    try:
        hash(key)
    except TypeError:
        return number
    return key


def _has_jaxpr(param: Any) -> bool:
    if isinstance(param, tuple | list):
        return any(map(_has_jaxpr, param))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return isinstance(param, jx.Jaxpr) or hasattr(param, "jaxpr")


def _distances(keys: np.ndarray[Any, Any], weighty: np.ndarray[Any, Any]) -> list[int]:
    """How far those ``weighty`` equations are apart that have one key: no other block that repeats has one of them."""
    places = np.flatnonzero(weighty)
    found = (np.subtract.outer(p, p) for key in np.unique(keys[places]) for p in [places[keys[places] == key]])
    apart = {int(d) for distances in found for d in np.unique(distances)}
    return sorted(d for d in apart if 0 < d <= len(keys) // MIN_LAYERS)


def _rows(keys: np.ndarray[Any, Any], widths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of ``widths`` that repeat as (start, width, count, by how many equations they can begin later)."""
    for width in widths:
        same = np.concatenate([[False], keys[:-width] == keys[width:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in edges.reshape(-1, 2).tolist():
            if end - begin >= width:
                yield begin, width, (end - begin) // width + 1, (end - begin) % width


def _wired(eqns: Sequence[jx.JaxprEqn], made: dict[jx.Var, Place], start: int, width: int, count: int) -> Repeat | None:
    """The blocks, if each reads of the others only what the one before left, and the same of it."""
    stop = start + width * count
    shared, carried, own = list[jx.Atom](), list[tuple[jx.Atom, Place]](), list[tuple[jx.Atom, ...]]()
    operands: list[tuple[tuple[str, Any], ...]] = []

    def origin(atom: jx.Atom, block: int) -> tuple[int, Place] | None:
        """How many blocks before, and where; None from outside."""
        if isinstance(atom, jx.Literal) or atom not in made or not start <= made[atom][0] < stop:
            return None
        at, out = made[atom]
        return block - (at - start) // width, ((at - start) % width, out)

    for j in range(width):
        read: list[tuple[str, Any]] = []
        for atoms in zip(*(eqns[start + k * width + j].invars for k in range(count)), strict=True):
            froms = [origin(a, k) for k, a in enumerate(atoms)]
            if all(f is None for f in froms):
                if _all_same(atoms):
                    read.append(("shared", _position(shared, atoms[0])))
                else:
                    read.append(("own", _position(own, atoms)))
                continue
            if len({*froms[1:]}) > 1 or (back := froms[1]) is None:
                return None
            if back[0] == 0 and froms[0] == back:
                read.append(("value", back[1]))
            elif froms[0] is None:
                read.append(("carried", _position(carried, (atoms[0], back[1]))))
            else:
                return None
        operands.append(tuple(read))
    if not carried:
        return None
    return Repeat(start, width, count, tuple(shared), tuple(carried), tuple(own), tuple(operands))


def _position(found: list[Any], new: Any) -> int:
    for n, old in enumerate(found):
        if _all_same((old, new)) if not isinstance(new, tuple) else _equal(old, new):
            return n
    found.append(new)
    return len(found) - 1


def _equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y or (isinstance(x, tuple) and x == y) for x, y in zip(a, b, strict=True))


def _all_same(atoms: Sequence[Any]) -> bool:
    """Whether all are one variable, or literals of one value."""
    first = atoms[0]
    if isinstance(first, jx.Literal):
        return all(isinstance(a, jx.Literal) and np.array_equal(a.val, first.val) for a in atoms[1:])
    return all(a is first for a in itertools.islice(atoms, 1, None))
