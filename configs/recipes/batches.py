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


def pairs(*, rows=64, source=16, target=8, vocab=64):
    """Texts and what each becomes, as T5 reads them."""
    text, answer = line(np.random.default_rng(0), rows, source, vocab), np.zeros((rows, target + 1), np.int32)
    answer[:, 1:] = text[:, :target]
    return {"inputs": {"source": text, "target": answer[:, :-1]}, "targets": answer[:, 1:]}


def images(*, rows=64, size=8, channels=3, classes=8):
    """Images [row, y, x, channel] and their classes."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, classes, rows, np.int32)
    noise = rng.standard_normal((rows, size, size, channels), np.float32)
    return {"inputs": noise + 0.3 * targets[:, None, None, None].astype(np.float32), "targets": targets}


def latents(*, rows=64, size=8, channels=4):
    """What an image's encoder gives: [row, y, x, channel]."""
    return {"latents": images(rows=rows, size=size, channels=channels)["inputs"]}


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


def rollouts(*, rows=64, seq=16, vocab=64):
    """Answers that a policy gave: with the log-probabilities and values of then, and a reward at the end."""
    rng = np.random.default_rng(0)
    answer = np.broadcast_to(np.arange(1, seq) >= seq // 2, (rows, seq - 1)).astype(np.float32)
    reward = np.zeros((rows, seq - 1), np.float32)
    reward[:, -1] = rng.random(rows)
    values = 0.1 * rng.standard_normal((rows, seq - 1), np.float32)
    log_odds = -np.log(vocab) + 0.1 * rng.standard_normal((rows, seq - 1), np.float32)
    text = line(rng, rows, seq, vocab)
    return {
        "tokens": text,
        "answer": answer,
        "reward": reward,
        "value": values,
        "log_odds": log_odds.astype(np.float32),
    }


def questions(*, rows=64, seq=16, vocab=64):
    """Questions and the passage that answers each: [row, 2, position]."""
    text = line(np.random.default_rng(0), rows, 2 * seq, vocab)
    return {"tokens": text.reshape(rows, 2, seq)}


def pictures(*, rows=64, seq=16, vocab=64, image_token=63, grid=(1, 4, 4), merged=2, patch=(2, 4, 4, 3)):
    """An image before each text, as Qwen2-VL reads them: patches, and positions by frame, row and column."""
    rng = np.random.default_rng(0)
    shape = (grid[0], grid[1] // merged, grid[2] // merged)
    places, text = int(np.prod(shape)), line(rng, rows, seq + 1, vocab - 1)
    text[:, :places] = image_token
    at = np.concatenate([np.indices(shape).reshape(3, -1), max(shape) + np.arange(seq - places) + np.zeros((3, 1))], 1)
    inputs = {
        "tokens": text[:, :-1],
        "positions": np.broadcast_to(at.astype(np.int32), (rows, 3, seq)),
        "patches": rng.standard_normal((rows, int(np.prod(grid)), *patch), np.float32),
    }
    weights = np.broadcast_to(np.arange(seq) >= places, (rows, seq)).astype(np.float32)
    return {"inputs": inputs, "targets": text[:, 1:], "weights": weights}
