"""Made-up data of each recipe's form, to be replaced by one's own: arrays, whose rows a run shuffles."""

import numpy as np


def line(rng, rows, length, vocab):
    """Tokens that follow from the one before, with noise. -> int32 [rows, length]."""
    found = rng.integers(0, vocab, (rows, length), np.int32)
    kept = rng.random((rows, length)) < 0.9
    for i in range(1, length):
        found[:, i] = np.where(kept[:, i], (5 * found[:, i - 1] + 1) % vocab, found[:, i])
    return found


def tokens(*, rows=64, seq=16, vocab=64):
    """Text: ``inputs`` and ``targets``, [row, position]."""
    text = line(np.random.default_rng(0), rows, seq + 1, vocab)
    return {"inputs": text[:, :-1], "targets": text[:, 1:]}


def packed(*, rows=64, seq=32, vocab=64, longest=16):
    """Conversations, several in a row: their numbers are ``segment_ids``, and ``weights`` are one for answers alone."""
    rng = np.random.default_rng(0)
    text, segments = line(rng, rows, seq + 1, vocab), np.zeros((rows, seq), np.int32)
    weights = np.zeros((rows, seq), np.float32)
    for row in range(rows):
        at, number = 0, 0
        while at < seq:
            end, number = min(at + int(rng.integers(longest // 2, longest + 1)), seq), number + 1
            segments[row, at:end] = number
            weights[row, (at + end) // 2 : end - 1] = 1  # the second half; its last token has no next one
            at = end
    return {"inputs": text[:, :-1], "targets": text[:, 1:], "segment_ids": segments, "weights": weights}


def preferences(*, rows=64, seq=16, vocab=64):
    """Two answers to each question, the better first: [row, 2, position], and where the answer is."""
    rng = np.random.default_rng(0)
    both = np.stack([line(rng, rows, seq, vocab), rng.integers(0, vocab, (rows, seq), np.int32)], 1)
    both[:, 1, : seq // 2] = both[:, 0, : seq // 2]
    return {"tokens": both, "answer": np.broadcast_to(np.arange(seq) >= seq // 2, both.shape).astype(np.float32)}


def questions(*, rows=64, seq=16, vocab=64):
    """Questions and the passage that answers each: [row, 2, position]."""
    text = line(np.random.default_rng(0), rows, 2 * seq, vocab)
    return {"tokens": text.reshape(rows, 2, seq)}
