"""Fewer combinations of two or three things than there are, chosen so that none of their pairs or halves is left out.

``AUTOSHARD_COMBINATIONS=all`` takes them all: `make combinations`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

ALL = os.environ.get("AUTOSHARD_COMBINATIONS") == "all"


def every_second[A, B](rows: Iterable[A], columns: Iterable[B]) -> list[tuple[A, B]]:
    """Every second pair, as the fields of one color on a chessboard: each with half of the other side."""
    board = itertools.product(enumerate(rows), enumerate(columns))
    return [(a, b) for (i, a), (j, b) in board if ALL or (i + j) % 2 == 0]


def latin[A, B, C](letters: Sequence[A], rows: Iterable[B], columns: Iterable[C]) -> list[tuple[A, B, C]]:
    """Every pair of two different sides, as in a Latin square: as long as there are no fewer rows, and columns, than
    letters."""
    board = itertools.product(enumerate(rows), enumerate(columns))
    return [(a, b, c) for (i, b), (j, c) in board for a in (letters if ALL else [letters[(i + j) % len(letters)]])]


def with_every_pair(*sides: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one of each side, as few as come easily, such that any two of different sides are in one of them.

    Each row begins with a pair that no row has yet, and takes of every other side what makes most new pairs; of equally
    good ones another each time, or the first would be in every row.
    """
    sizes = [*map(len, sides)]
    places = [(i, a) for i, n in enumerate(sizes) for a in range(n)]
    missing = {(p, q) for p, q in itertools.combinations(places, 2) if p[0] != q[0]}
    rows: list[tuple[Any, ...]] = []
    while missing:
        row = dict(min(missing))
        for k in sorted(set(range(len(sides))) - row.keys(), key=lambda k: -sizes[k]):
            turned = [(c + len(rows)) % sizes[k] for c in range(sizes[k])]
            new = [len(missing & _pairs({**row, k: c})) for c in turned]
            row[k] = turned[new.index(max(new))]
        missing -= _pairs(row)
        rows.append(tuple(side[row[k]] for k, side in enumerate(sides)))
    return rows


def _pairs(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {*itertools.combinations(sorted(row.items()), 2)}
