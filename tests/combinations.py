"""Some of the combinations of several things, chosen so that none of the things is left out.

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
    return _diagonals(2, rows, columns)


def every_third[A, B](rows: Iterable[A], columns: Iterable[B]) -> list[tuple[A, B]]:
    """Every third pair: each with a third of the other side, of which there are three or more."""
    return _diagonals(3, rows, columns)


def _diagonals[A, B](apart: int, rows: Iterable[A], columns: Iterable[B]) -> list[tuple[A, B]]:
    board = itertools.product(enumerate(rows), enumerate(columns))
    return [(a, b) for (i, a), (j, b) in board if ALL or (i + j) % apart == 0]


def latin[A, B, C](letters: Sequence[A], rows: Iterable[B], columns: Iterable[C]) -> list[tuple[A, B, C]]:
    """Every second pair of a row and a column, with a letter, so that each of three letters meets every row and every
    column: of these there are six or more."""
    board = itertools.product(enumerate(rows), enumerate(columns))
    return [
        (a, b, c)
        for (i, b), (j, c) in board
        for k, a in enumerate(letters)
        if ALL or ((i + j) % 2 == 0 and (i // 2 + j) % len(letters) == k)
    ]


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
