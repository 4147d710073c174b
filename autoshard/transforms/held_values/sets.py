"""Which values of a layer to hold for the backward part: least time within given bytes, an exact choice.

For every set S of the values of a layer that may be held, at most `MAX_VALUES` of them, is computed by one reversed
walk over the forward part, for all sets at once:

    seconds(S): of the values that the backward part must make again, each at its price
    bytes(S):   of the values in S that it reads, or needs to make others again

A value is made again if it is needed and not in S; it is needed if the backward part reads it, or it is an operand of
what is made again. What enters a layer is held in any case. All layers of a loop have the same two sets, S_low in the
first k layers and S_high, which contains it, in the others:

    minimize    sum over loops of k seconds(S_low) + (L - k) seconds(S_high)
    subject to  sum over loops of k bytes(S_low) + (L - k) bytes(S_high) <= room

Of one loop this is solved by comparing all pairs of sets that no other beats in both. Of several, the room is first
divided as the relaxed problem has it: along the lower convex hulls of seconds over bytes, steepest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard import jaxpr as jx
from autoshard.transforms import remat
from autoshard.transforms.held_values.names import ResidualGroup

MAX_VALUES = 10
"""Most values of a loop that are decided, those that take longest to make again; of others none is held."""
MAX_SETS = 64
"""Most sets of a loop that are paired: of those that no other beats, evenly by bytes."""

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Price(NamedTuple):
    """Of one value in one layer, or of several."""

    bytes: float
    """Per device."""
    seconds: float
    """To make it again."""


@dataclass(frozen=True)
class LayerLoop:
    """A loop over layers, or all layers that are unrolled, and its sets of held values."""

    layers: int
    names: tuple[str, ...]
    """Set number s holds names[i] where bit i of s is 1."""
    needed: tuple[str, ...]
    """All values that are made again where none is held; the other ones are held for nothing."""
    seconds: FloatArray
    """[sets]: of one layer."""
    bytes: FloatArray
    """[sets]: of one layer, per device."""
    eqns: frozenset[jx.JaxprEqn] = frozenset()
    """That make the values."""

    def sets(self, held: Mapping[str, int]) -> list[int]:
        """The set of each layer where the last ``held`` layers hold a value, by name."""
        first = [self.layers - held.get(name, 0) for name in self.names]
        return [sum(1 << i for i, start in enumerate(first) if layer >= start) for layer in range(self.layers)]


def layer_loops(
    jaxpr: jx.Jaxpr,
    groups: Sequence[ResidualGroup],
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
) -> tuple[LayerLoop, ...]:
    """The loops over layers of ``jaxpr`` at any depth outside of differentiated code, and the unrolled layers."""
    found: list[LayerLoop] = []
    for body in remat.differentiated_bodies(jaxpr):
        for scan in body.eqns:
            inside = [(m.eqn, g) for g in groups for m in g.members if m.scan is scan]
            targets = remat.stacked_residuals(body, scan) if inside else set[jx.Var]()
            if targets:
                eqns, entering = jx.regions(scan)[0].body.eqns, set[jx.Var]()
                layers = jx.scan_groups(scan)
                assert layers is not None
                found.append(_loop(eqns, inside, targets, entering, layers.length, 1, prices, is_held_anyway))
        here = set(body.eqns)
        inside = [(m.eqn, g) for g in groups for m in g.members if m.scan is None and m.eqn in here]
        targets, entering = remat.unrolled_residuals(body, is_held_anyway) if inside else (set[jx.Var](), set[jx.Var]())
        if targets:
            layers = max(len([e for e, h in inside if h is g]) for _, g in inside)
            forward = [e for e in body.eqns if remat.is_forward(e)]
            found.append(_loop(forward, inside, targets, entering, layers, layers, prices, is_held_anyway))
    return tuple(loop for loop in found if loop.names)


def _loop(
    eqns: Sequence[jx.JaxprEqn],
    inside: Sequence[tuple[jx.JaxprEqn, ResidualGroup]],
    targets: set[jx.Var],
    entering: set[jx.Var],
    layers: int,
    share: int,
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
) -> LayerLoop:
    """The sets of a loop.

    Args:
      eqns: of a layer, or of all ``share`` layers.
      targets: what the backward part reads.
      entering: what is held in any case, beside what ``eqns`` do not compute.
    """
    by_eqn = dict(inside)
    made_by = {e: {by_eqn[x].name for x in (e, *_inner(e)) if x in by_eqn} for e in eqns}
    everything = _walk(eqns, made_by, targets, entering, (), prices, is_held_anyway)
    needed = tuple(dict.fromkeys(n for e in eqns if everything.again.get(e, _NONE).any() for n in sorted(made_by[e])))
    names = tuple(sorted(sorted(needed, key=lambda n: -prices[n].seconds)[:MAX_VALUES], key=needed.index))
    found = _walk(eqns, made_by, targets, entering, names, prices, is_held_anyway)
    return LayerLoop(layers, names, needed, found.seconds / share, found.bytes / share, frozenset(by_eqn))


_NONE: BoolArray = np.zeros(1, bool)


class _Walked(NamedTuple):
    again: dict[jx.JaxprEqn, BoolArray]
    """[sets]: whether an equation runs again."""
    seconds: FloatArray
    bytes: FloatArray


def _walk(
    eqns: Sequence[jx.JaxprEqn],
    made_by: Mapping[jx.JaxprEqn, set[str]],
    targets: set[jx.Var],
    entering: set[jx.Var],
    names: tuple[str, ...],
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
) -> _Walked:
    sets = np.arange(1 << len(names))
    holds = {name: (sets >> i & 1).astype(bool) for i, name in enumerate(names)}
    wanted: dict[jx.Var, BoolArray] = {v: np.ones(len(sets), bool) for v in targets}
    again: dict[jx.JaxprEqn, BoolArray] = {}
    seconds, held_bytes = np.zeros(len(sets)), np.zeros(len(sets))
    for eqn in reversed(eqns):
        asked = [wanted[v] for v in eqn.outvars if v in wanted and v not in entering]
        if not asked or is_held_anyway(eqn):
            continue
        need = np.logical_or.reduce(asked)
        made = made_by[eqn]
        kept = np.logical_or.reduce([holds[n] for n in made if n in holds] or [np.zeros(len(sets), bool)])
        again[eqn] = runs = need & ~kept
        for n in made:
            seconds += runs * prices[n].seconds
            held_bytes += (need & kept) * prices[n].bytes
        for v in eqn.invars:
            if isinstance(v, jx.Var):
                wanted[v] = wanted[v] | runs if v in wanted else runs
    return _Walked(again, seconds, held_bytes)


def _inner(eqn: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    return [e for r in jx.regions(eqn) for e in jx.walk(r.body)]


def price_of_held(loops: Sequence[LayerLoop], held: Sequence[Mapping[str, int]]) -> Price:
    """Bytes per device of what is held in these loops, and seconds to make the rest again; ``held``: by name, in how
    many layers, the last ones."""
    size, seconds = 0.0, 0.0
    for loop, counts in zip(loops, held, strict=True):
        sets = loop.sets(counts)
        size += float(loop.bytes[sets].sum())
        seconds += float(loop.seconds[sets].sum())
    return Price(size, seconds)


def choose_held(loops: Sequence[LayerLoop], room: float, *, may_differ: bool = True) -> list[dict[str, int]]:
    """For each loop, in how many layers each of its values is held: least time within ``room`` bytes per device.

    Args:
      may_differ: whether the layers of a loop may hold different values.
    """
    rooms = _divided(loops, room)
    return [_best_pair(loop, part, may_differ) for loop, part in zip(loops, rooms, strict=True)]


def _divided(loops: Sequence[LayerLoop], room: float) -> list[float]:
    """The room of each loop: for steps along the hulls, the most seconds for each byte first; of equals the last loop,
    as the first layers make values again."""
    steps: list[tuple[float, int, float]] = []
    for i, loop in enumerate(loops):
        hull = _hull(loop)
        for a, b in pairwise(hull):
            size = float(loop.bytes[b] - loop.bytes[a])
            steps.append((-float(loop.seconds[a] - loop.seconds[b]) / size, -i, size * loop.layers))
    rooms = [0.0 for _ in loops]
    for _, minus, size in sorted(steps):
        given = min(size, room)
        rooms[-minus] += given
        room -= given
    return rooms


def _front(loop: LayerLoop) -> list[int]:
    """The sets that no other beats in bytes and seconds, by bytes."""
    found: list[int] = []
    for s in np.lexsort((loop.seconds, loop.bytes)):
        if not found or loop.seconds[s] < loop.seconds[found[-1]] * (1 - 1e-12):
            found.append(int(s))
    return found


def _hull(loop: LayerLoop) -> list[int]:
    """The sets on the lower convex hull of seconds over bytes, by bytes."""
    hull: list[int] = []
    for s in _front(loop):
        while len(hull) > 1 and _slope(loop, hull[-2], hull[-1]) >= _slope(loop, hull[-2], s):
            hull.pop()
        hull.append(s)
    return hull


def _slope(loop: LayerLoop, a: int, b: int) -> float:
    return float((loop.seconds[b] - loop.seconds[a]) / max(loop.bytes[b] - loop.bytes[a], 1e-9))


def _best_pair(loop: LayerLoop, room: float, may_differ: bool) -> dict[str, int]:
    front, n = _front(loop), loop.layers
    front = [front[i * (len(front) - 1) // (MAX_SETS - 1)] for i in range(MAX_SETS)] if len(front) > MAX_SETS else front
    best: tuple[float, float, int, int, int] | None = None
    for low in front:
        for high in front:
            if low & ~high or (low != high and not may_differ):
                continue
            each = float(loop.bytes[high] - loop.bytes[low])
            spare = room - n * float(loop.bytes[low])
            if spare < 0 and low:
                continue
            more = n if each <= 0 else max(0, min(n, int(spare // each)))
            held = n * float(loop.bytes[low]) + more * each
            found = n * float(loop.seconds[low]) - more * float(loop.seconds[low] - loop.seconds[high])
            if best is None or (found, held) < best[:2]:
                best = found, held, low, high, more
    assert best is not None
    _, _, low, high, more = best
    return {name: n if low >> i & 1 else more for i, name in enumerate(loop.names) if (low | high) >> i & 1}
