"""Where to cut a sequence of n equations into segments that the backward part recomputes one at a time.

Values that cross a cut are saved; the residuals of a segment are recomputed when the backward part comes to it, so that
those of one segment are in memory at a time. With cuts 0 < c_1 < ... < c_k < n before equations, c_0 = 0, c_{k+1} = n:

    memory = sum_i saved(c_{i-1}, c_i) + max_i residual(c_{i-1}, c_i)                       (`saved_bytes`)
    saved(a, c): bytes of the values computed in [a, c) that equations from c on read       (`_crossing_bytes`)
    residual(a, c): bytes of the residuals that the equations in [a, c) compute             (`_residual_bytes`)

`choose_cuts` makes it small: for each of some limits on the largest segment, the cheapest cuts within the limit, by
dynamic programming. Limits grow by a factor r = (sum of residuals / largest one)^(1 / 23), so that the best of these is
at most r times the optimum, where every position is a candidate. Since the last segment is not recomputed, coarse cuts
save work: the coarsest are taken that need at most 2 % more memory than the best.
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, is the case of a chain.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_CANDIDATES = 256
"""The most positions considered, those that fewest bytes cross; the dynamic program takes their square."""
_LIMITS = 24
"""How many limits on the largest segment are tried."""
_SLACK = 1.02
"""The memory that coarser cuts may need, as a multiple of the best."""


@dataclass(frozen=True)
class LiveValue:
    """A value that equation ``defined_at`` computes; ``last_use`` is the same index where nothing reads it."""

    defined_at: int
    last_use: int
    bytes: int

    def crosses(self, cut: int) -> bool:
        """Whether it is computed before the cut and read after it."""
        return self.defined_at < cut <= self.last_use


def choose_cuts(
    n: int, values: Sequence[LiveValue], residuals: Sequence[int], saved_anyway: int = 0
) -> tuple[int, ...]:
    """The cuts of n equations that need little memory; none where no cut makes `saved_bytes` enough smaller.

    Args:
      values: what the equations compute, residuals among them.
      residuals: bytes of the residuals that each equation computes: [n].
      saved_anyway: further bytes in memory, however the equations are cut.
    """
    positions = _candidates(n, values)
    whole = sum(residuals)
    if not whole or len(positions) == 2:
        return ()
    crossing, segment = _crossing_bytes(positions, values), _residual_bytes(positions, residuals)
    options: list[tuple[int, tuple[int, ...]]] = []
    for limit in np.geomspace(max(residuals), whole, _LIMITS):
        found = _cheapest_cuts(crossing, segment, limit * (1 + 1e-9))
        if found is None:
            continue  # only where not all positions are candidates
        cuts = tuple(positions[i] for i in found)
        options.append((saved_bytes(n, values, residuals, cuts), cuts))
    most = _SLACK * (saved_anyway + min(bytes for bytes, _ in options))
    return next(cuts for bytes, cuts in reversed(options) if saved_anyway + bytes <= most)


def saved_bytes(n: int, values: Sequence[LiveValue], residuals: Sequence[int], cuts: Sequence[int]) -> int:
    """Bytes in memory under these cuts: the values that cross any of them, and the largest segment's residuals."""
    crossing = sum(v.bytes for v in values if any(v.crosses(c) for c in cuts))
    return crossing + max(sum(residuals[a:b]) for a, b in pairwise((0, *cuts, n)))


def _candidates(n: int, values: Sequence[LiveValue]) -> list[int]:
    """0, n, and the positions between; of many, those that no more bytes cross than their neighbours."""
    if n <= _CANDIDATES:
        return list(range(n + 1))
    step = np.zeros(n + 2, np.int64)
    for v in values:
        if v.last_use > v.defined_at:
            step[v.defined_at + 1] += v.bytes
            step[v.last_use + 1] -= v.bytes
    crossing = np.cumsum(step)
    bounded = np.concatenate([[np.inf], crossing[1:n], [np.inf]])
    minima = [p for p in range(1, n) if bounded[p] <= min(bounded[p - 1], bounded[p + 1])]
    return [0, *sorted(sorted(minima, key=lambda p: crossing[p])[:_CANDIDATES]), n]


def _crossing_bytes(positions: Sequence[int], values: Sequence[LiveValue]) -> np.ndarray:
    """[i, j]: bytes of the values computed from position i on that cross position j."""
    where = np.asarray(positions)
    corners = np.zeros((len(positions) + 1, len(positions) + 1))
    for v in values:
        first, last = np.searchsorted(where, (v.defined_at, v.last_use), "right")
        # v counts at i up to its definition and j between that and its last use: a rectangle, as differences of sums.
        corners[0, first] += v.bytes
        corners[0, last] -= v.bytes
        corners[first, first] -= v.bytes
        corners[first, last] += v.bytes
    return corners.cumsum(0).cumsum(1)[:-1, :-1]


def _residual_bytes(positions: Sequence[int], residuals: Sequence[int]) -> np.ndarray:
    """[i, j]: bytes of the residuals that the equations between positions i and j compute."""
    total = np.concatenate([[0], np.cumsum(residuals)])[np.asarray(positions)]
    return total[None, :] - total[:, None]


def _cheapest_cuts(crossing: np.ndarray, segment: np.ndarray, limit: float) -> list[int] | None:
    """The cuts (indices of positions) that fewest bytes cross, with every segment within the limit; None: no such."""
    n = len(crossing)
    cost, previous = np.full(n, np.inf), np.zeros(n, np.int64)
    cost[0] = 0
    for j in range(1, n):
        options = np.where(segment[:j, j] <= limit, cost[:j] + crossing[:j, j], np.inf)
        previous[j] = j - 1 - int(np.argmin(options[::-1]))
        cost[j] = options[previous[j]]
    if not np.isfinite(cost[-1]):
        return None
    chosen: list[int] = []
    j = int(previous[-1])
    while j:
        chosen.append(j)
        j = int(previous[j])
    return chosen[::-1]
