"""Where to cut a straight line of work into segments that are recomputed one at a time. Plain numbers only.

What crosses a cut is saved; what a segment makes for later is recomputed when that segment's turn comes, so
that only one segment's worth is held at once. With positions 0..n between n pieces of work, cuts
0 < c_1 < ... < c_k < n, and c_0 = 0, c_{k+1} = n:

    held = sum_i saved(c_{i-1}, c_i) + max_i residual(c_{i-1}, c_i)                              (`held`)
    saved(a, c): bytes of the values made in [a, c) that work from c on reads                     (`_saved`)
    residual(a, c): bytes that the work in [a, c) leaves for later

`cuts` makes it small: for each of some limits on the largest segment, the cheapest cuts that keep to the limit,
by dynamic programming. Limits grow by a factor r = (whole / largest piece)^(1 / 23), so that the best of these is
at most r times the least possible, where every position is a candidate. Since the last segment is not run again,
coarse cuts save work: the coarsest are taken that hold at most a fiftieth more than the best.
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, is the case of a chain.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_CANDIDATES = 256
"""Positions considered, those that cost least to cut; the dynamic programme takes their square."""
_LIMITS = 24
_SLACK = 1.02
"""What may be held for less work, as a multiple of the best."""


@dataclass(frozen=True)
class Value:
    """A value: made by the work at ``at``, read last by the work at ``last`` (``at`` when nothing reads it)."""

    at: int
    last: int
    bytes: int


def choose_cuts(n: int, made: Sequence[Value], residual: Sequence[int], anyway: int = 0) -> tuple[int, ...]:
    """Positions at which to cut n pieces of work; none where no cut makes `held` enough smaller to matter.

    ``residual``: bytes that each piece leaves for later, [n]. ``anyway``: bytes held beside them, however it is cut.
    """
    places = _candidates(n, made)
    whole = sum(residual)
    if not whole or len(places) == 2:
        return ()
    saved, left = _saved(places, made), _left(places, residual)
    options: list[tuple[int, tuple[int, ...]]] = []
    for limit in np.geomspace(max(residual), whole, _LIMITS):
        found = _cheapest(saved, left, limit * (1 + 1e-9))
        if found is None:
            continue  # only where candidates were left out
        at = tuple(places[i] for i in found)
        options.append((saved_bytes(n, made, residual, at), at))
    most = _SLACK * (anyway + min(bytes for bytes, _ in options))
    return next(at for bytes, at in reversed(options) if anyway + bytes <= most)


def saved_bytes(n: int, made: Sequence[Value], residual: Sequence[int], at: Sequence[int]) -> int:
    """Bytes held at once under the cuts ``at``: what crosses any of them, and the largest segment's residual."""
    crossing = sum(m.bytes for m in made if any(m.at < c <= m.last for c in at))
    return crossing + max(sum(residual[a:b]) for a, b in pairwise((0, *at, n)))


def _candidates(n: int, made: Sequence[Value]) -> list[int]:
    """0, n, and the inner positions; where there are many, those that cost no more than their neighbours to cut."""
    if n <= _CANDIDATES:
        return list(range(n + 1))
    step = np.zeros(n + 2, np.int64)
    for m in made:
        if m.last > m.at:
            step[m.at + 1] += m.bytes
            step[m.last + 1] -= m.bytes
    crossed = np.cumsum(step)
    around = np.concatenate([[np.inf], crossed[1:n], [np.inf]])
    low = [p for p in range(1, n) if around[p] <= min(around[p - 1], around[p + 1])]
    return [0, *sorted(sorted(low, key=lambda p: crossed[p])[:_CANDIDATES]), n]


def _saved(places: Sequence[int], made: Sequence[Value]) -> np.ndarray:
    """[i, j]: bytes made from place i on that cross place j."""
    where = np.asarray(places)
    corners = np.zeros((len(places) + 1, len(places) + 1))
    for m in made:
        before, after = np.searchsorted(where, (m.at, m.last), "right")
        # The rectangle of places up to m.at by places past m.at and up to m.last, as differences of its corners.
        corners[0, before] += m.bytes
        corners[0, after] -= m.bytes
        corners[before, before] -= m.bytes
        corners[before, after] += m.bytes
    return corners.cumsum(0).cumsum(1)[:-1, :-1]


def _left(places: Sequence[int], residual: Sequence[int]) -> np.ndarray:
    """[i, j]: bytes left for later by the work between places i and j."""
    total = np.concatenate([[0], np.cumsum(residual)])[np.asarray(places)]
    return total[None, :] - total[:, None]


def _cheapest(saved: np.ndarray, left: np.ndarray, limit: float) -> list[int] | None:
    """Indices of the cuts that save least with every segment within the limit; None where there are none."""
    n = len(saved)
    cost, came = np.full(n, np.inf), np.zeros(n, np.int64)
    cost[0] = 0
    for j in range(1, n):
        options = np.where(left[:j, j] <= limit, cost[:j] + saved[:j, j], np.inf)
        came[j] = j - 1 - int(np.argmin(options[::-1]))
        cost[j] = options[came[j]]
    if not np.isfinite(cost[-1]):
        return None
    chosen: list[int] = []
    j = int(came[-1])
    while j:
        chosen.append(j)
        j = int(came[j])
    return chosen[::-1]
