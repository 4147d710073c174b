"""A sixtieth of the programs that JAX ships, of every group some, each on one of the meshes in turn; `make harness`
runs them all, on both."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from tests import corpus

CHUNKS, EVERY = 8, 60
CORPUS = corpus.harnesses()
CHOSEN = corpus.sample(CORPUS, EVERY)


def test_the_sample_has_a_sixtieth_of_every_group() -> None:
    whole, part = (Counter(h.group_name for h in some) for some in (CORPUS, [CORPUS[i] for i in CHOSEN]))
    assert part == {group: -(-n // EVERY) for group, n in whole.items()}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sharded_as_on_one_device(chunk: int) -> None:
    turns = zip(CHOSEN[chunk::CHUNKS], itertools.cycle(corpus.MESHES), strict=False)
    outcomes = [o for i, axes in turns for o in corpus.run(i, CORPUS[i], [axes])]
    assert not [o for o in outcomes if o.status == "failed"]
    assert sum(o.status == "sharded" for o in outcomes) > len(outcomes) / 2


def test_a_difference_is_told() -> None:
    x = np.arange(4.0, dtype="f4")
    assert corpus.difference(x, x) == ("", 0)
    assert "error 1," in corpus.difference(x, x + 1)[0]
    assert "error inf," in corpus.difference(x, np.where(x == 2, np.nan, x))[0]
    assert "float32(4,) for" in corpus.difference(np.arange(4), x)[0]
    assert "float32(2, 2) for" in corpus.difference(x, x.reshape(2, 2))[0]
    assert "structure" in corpus.difference((x,), [x])[0]


def test_an_array_that_does_not_lie_as_pinned_is_told() -> None:
    x, unread = np.zeros(4, "f4"), corpus.Split((P(("b",)), None), (None,))
    wrong, off = corpus.sharded(lambda x, y: y + 1, {"a": 2, "b": 4}, unread, (x, x), x + 1)
    assert "is sharded as None" in wrong
    assert off == np.inf


def test_what_stays_whole_says_why() -> None:
    def reason(fun, *shapes: tuple[int, ...]) -> str:
        step = autoshard.jit(fun, mesh={"a": 2, "b": 4}, strategy="replicated")
        args = [np.zeros(s, "f4") for s in shapes]
        return corpus.pins(step.executable(*args).graph, {"a": 2, "b": 4}, one=True).reason

    assert reason(lambda x: x + 1, (3, 2)) == ""
    assert reason(lambda x: x + 1, (3, 5)) == corpus.INDIVISIBLE
    assert reason(lambda x: x + 1, (0, 8)) == ""
    assert reason(lambda x: x + 1, (0, 3)) == corpus.INDIVISIBLE
    assert reason(lambda x: x + 1, (0,)) == corpus.EMPTY
    assert reason(lambda x: x + 1, ()) == corpus.NO_ARRAY
    assert reason(lambda x, y: y + 1, (8,), (3,)) == corpus.UNREAD
    assert reason(lambda x: x.reshape(3, 2), (2, 3)).startswith("reshape: kept whole by ab -> cd {")
