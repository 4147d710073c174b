"""Fewer combinations of two or three things than there are, chosen so that none of their pairs or halves is left out.

``AUTOSHARD_COMBINATIONS=all`` takes them all: `make combinations`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

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
