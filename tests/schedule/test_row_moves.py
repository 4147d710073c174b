"""Rows that stages send to each other: each arrives where it is needed, in as few rounds as there can be."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.schedule.row_moves import RowMoves, Table, row_moves


def after(moves: RowMoves, had: Table) -> Table:
    """The rows of each stage as `RowMoves` says."""
    arrived = [had]
    for sent in moves.rounds:
        rows = np.full(sent.rows.shape, -2)
        for source, target in sent.pairs:
            rows[target] = had[source, sent.rows[source]]
        arrived.append(rows)
    return np.take_along_axis(np.concatenate(arrived, 1), moves.taken, 1)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2), st.randoms(use_true_random=False))
def test_rows_arrive_where_they_are_needed(stages: int, each: int, empty: int, random: Random) -> None:
    stored = np.arange(stages * each).reshape(stages, each)
    rows = [*range(stages * each), *[-1] * (stages * empty)]
    random.shuffle(rows)
    run = np.array(rows).reshape(stages, -1)
    at = {layer: s for s, own in enumerate(run.tolist()) for layer in own if layer >= 0}
    counts = np.zeros((stages, stages), int)
    for layer, s in at.items():
        counts[layer // each, s] += s != layer // each
    for had, needed in ((stored, run), (run, stored)):
        moves = row_moves(had, needed)
        assert (np.where(needed >= 0, after(moves, had), -1) == needed).all()
        assert all(len({*ends}) == len(ends) for sent in moves.rounds for ends in zip(*sent.pairs, strict=True))
        assert moves.sent == max(counts.sum(0).max(), counts.sum(1).max())


def test_chunks_go_as_they_are() -> None:
    """Of two stages with two chunks each, the second chunk of the first and the first of the second change places."""
    moves = row_moves(np.array([[0, 1, 2, 3], [4, 5, 6, 7]]), np.array([[0, 1, 4, 5], [2, 3, 6, 7]]))
    (sent,) = moves.rounds
    assert sent.pairs == ((0, 1), (1, 0))
    assert sent.rows.tolist() == [[2, 3], [0, 1]]
    assert moves.taken.tolist() == [[0, 1, 4, 5], [4, 5, 2, 3]]
