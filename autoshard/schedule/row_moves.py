"""Rows of stacked layers that stages send to each other, each row once at most, to the stage that needs it.

Let m[s, d] be how many rows stage s sends to stage d. Filled up to equal sums of all lines, such a matrix is a sum of
permutation matrices (Birkhoff 1946), each of them a round in which a stage sends to one other at most: in all as many
rows as the busiest stage sends or receives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.optimize

type Table = npt.NDArray[np.intp]
"""[stage, row]"""


@dataclass(frozen=True)
class Round:
    """As many rows from each stage that sends, to one other."""

    pairs: tuple[tuple[int, int], ...]
    """Sender and receiver."""
    rows: Table
    """Which of its rows each stage sends."""


@dataclass(frozen=True)
class RowMoves:
    """How stages come from the rows that they have to those that they need."""

    rounds: tuple[Round, ...]
    taken: Table
    """[stage, row needed]: where it is among the stage's own rows and, behind them, those of each round."""

    @property
    def sent(self) -> int:
        """Rows that a stage sends and receives at most."""
        return sum(r.rows.shape[1] for r in self.rounds)


def row_moves(had: Table, needed: Table) -> RowMoves:
    """The moves after which each stage has the rows ``needed``.

    Args:
      had, needed: the layer of each row; -1 of a row that no layer has. Every layer is had once.
    """
    stages = len(had)
    at = {int(layer): (s, row) for s, own in enumerate(had) for row, layer in enumerate(own) if layer >= 0}
    taken = np.zeros_like(needed)
    sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # row had, row needed
    for d, row in zip(*np.nonzero(needed >= 0), strict=True):
        s, own = at[int(needed[d, row])]
        if s == d:
            taken[d, row] = own
        else:
            sent[s, int(d)].append((own, int(row)))
    counts = np.zeros((stages, stages), np.intp)
    for pair, rows in sent.items():
        counts[pair] = len(rows)
    rounds, begin = list[Round](), had.shape[1]
    for matching in _matchings(counts):
        now = {pair: sent[pair][:n] for pair, n in matching.items()}
        size = max(map(len, now.values()))
        rows = np.tile(np.arange(size), (stages, 1))
        for (s, d), moved in now.items():
            del sent[s, d][: len(moved)]
            for i, (own, row) in enumerate(moved):
                rows[s, i], taken[d, row] = own, begin + i
        rounds.append(Round(tuple(sorted(now)), rows))
        begin += size
    return RowMoves(tuple(rounds), taken)


def _matchings(counts: Table) -> Iterator[dict[tuple[int, int], int]]:
    """Pairs of a row and a column of ``counts``, each with so many of its count, in which no row and no column stands
    twice: together all counts."""
    left = counts.copy()
    most = max(left.sum(0).max(), left.sum(1).max())
    filled = left.copy()
    for s in range(len(left)):
        for d in range(len(left)):
            filled[s, d] += min(most - filled[s].sum(), most - filled[:, d].sum())
    while left.any():
        # Of the matchings with no empty pair, which there are while all lines have one sum, one with many in it.
        s, d = scipy.optimize.linear_sum_assignment(np.where(filled > 0, filled, -filled.sum()), maximize=True)
        size = filled[s, d].min()
        found = {(int(a), int(b)): int(min(size, left[a, b])) for a, b in zip(s, d, strict=True) if left[a, b]}
        filled[s, d] -= size
        for pair, n in found.items():
            left[pair] -= n
        if found:
            yield found
