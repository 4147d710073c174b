"""Text as batches: the split, the order, and resuming exactly."""

from __future__ import annotations

import itertools
import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import ConfigError
from autoshard.train import data

TEXT = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def take(batches: data.Batches, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches, count))


def assert_same(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        assert all(a[k].dtype == b[k].dtype and (a[k] == b[k]).all() for k in a)


def test_the_standard_library_is_a_corpus_on_every_machine() -> None:
    corpus = data.corpus()
    assert len(corpus.train) > 1_000_000 < 10 * len(corpus.heldout)
    assert not set(corpus.train_files) & set(corpus.heldout_files)
    names = corpus.train_files + corpus.heldout_files
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names)
    assert not any(part in ("site-packages", "test", "tests") for name in names for part in name.split("/"))
    assert list(corpus.train_files) == sorted(corpus.train_files)
    first = Path(sysconfig.get_path("stdlib"), corpus.heldout_files[0]).read_bytes()
    assert corpus.heldout[: len(first)].tobytes() == first
    assert (data.corpus().train == corpus.train).all()
    assert f"{len(corpus.train):,} bytes of {len(corpus.train_files)} files" in str(corpus)


def test_the_split_is_by_name_alone() -> None:
    held = ["0", "7", "9", "10", "33", "40", "44", "51", "57", "59"]
    assert [n for n in map(str, range(60)) if data.is_held_out(n, 10)] == held


def test_a_directory_with_globs(tmp_path: Path) -> None:
    files = {f"{n}.txt": f"{n}\n" for n in range(40)} | {".git/x.txt": "no", "sub/a.txt": "yes", "sub/b.md": "no"}
    write(tmp_path, files)
    corpus = data.corpus(tmp_path, include=("*.txt",))
    names = set(corpus.train_files + corpus.heldout_files)
    assert names == {f"{n}.txt" for n in range(40)} | {"sub/a.txt"}
    assert corpus.train.tobytes() == b"".join((tmp_path / n).read_bytes() for n in corpus.train_files)
    narrowed = data.corpus(tmp_path, include=("*.txt", "*.md"), exclude=("sub", ".*"))
    assert set(narrowed.train_files + narrowed.heldout_files) == names - {"sub/a.txt"}


def test_of_one_file_the_end_is_held_out(tmp_path: Path) -> None:
    text = write(tmp_path, {"book.txt": "0123456789" * 7}) / "book.txt"
    corpus = data.corpus(text, holdout=10)
    assert (corpus.train.tobytes(), corpus.heldout.tobytes()) == (b"0123456789" * 6 + b"012", b"3456789")
    assert str(corpus) == "63 bytes of 1 file to train on, 7 bytes of 1 file held out"
    with pytest.raises(ConfigError, match="include and exclude choose files of a directory, and .*book.txt is a file"):
        data.corpus(text, include=("*.txt",))
    with pytest.raises(ConfigError, match="short.txt has 4 bytes, of which one in 10 is to be held out"):
        data.corpus(write(tmp_path, {"short.txt": "text"}) / "short.txt")


def test_an_impossible_corpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no text source .*absent; name a directory or a file"):
        data.corpus(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no file that matches \*\.txt, excluding \.\*"):
        data.corpus(tmp_path, include=("*.txt",))
    with pytest.raises(ConfigError, match="the train part of .* is empty: 1 files, one in 10"):
        data.corpus(write(tmp_path, {"0": "text"}))
    with pytest.raises(ConfigError, match="the held-out part of .* is empty: 2 files"):
        data.corpus(write(tmp_path, {"0": "", "1": "text"}))
    with pytest.raises(ConfigError, match="holdout=1 leaves nothing to train on"):
        data.corpus(tmp_path, holdout=1)


def test_every_byte_is_a_target_once_in_a_pass() -> None:
    text = np.arange(121, dtype=np.uint8)
    in_order = list(data.batches(text, batch=4, seq=10, seed=None))
    assert len(in_order) == 3
    assert np.concatenate([b["inputs"] for b in in_order]).ravel().tolist() == list(range(120))
    assert np.concatenate([b["targets"] for b in in_order]).ravel().tolist() == list(range(1, 121))
    assert {(b["inputs"].dtype, b["inputs"].shape) for b in in_order} == {(np.dtype("int32"), (4, 10))}
    shuffled = data.batches(text, batch=4, seq=10, seed=1)
    assert shuffled.per_pass == 3
    passes = [np.concatenate([b["targets"] for b in take(shuffled, 3)]).ravel().tolist() for _ in range(2)]
    assert passes[0] != passes[1] != list(range(1, 121))
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(1, 121))


def test_the_seed_decides_the_order() -> None:
    first = take(data.batches(TEXT, batch=2, seq=7, seed=5), 30)
    assert_same(take(data.batches(TEXT, batch=2, seq=7, seed=5), 30), first)
    other = take(data.batches(TEXT, batch=2, seq=7, seed=6), 30)
    assert any((a["inputs"] != b["inputs"]).any() for a, b in zip(first, other, strict=True))


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 90), prefetch=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_resuming_gives_the_same_batches(at: int, prefetch: int, seed: int) -> None:
    whole = data.batches(TEXT, batch=3, seq=8, seed=seed)
    take(whole, at)
    state = json.loads(json.dumps(whole.get_state(), allow_nan=False))
    resumed = data.batches(TEXT, batch=3, seq=8, seed=seed, prefetch=prefetch)
    resumed.set_state(state)
    assert_same(take(resumed, 50), take(whole, 50))
    assert resumed.get_state() == whole.get_state()


def test_resuming_in_order_ends_where_it_would_have() -> None:
    batches = data.batches(TEXT, batch=2, seq=10, seed=None)
    take(batches, 48)
    resumed = data.batches(TEXT, batch=2, seq=10, seed=None)
    resumed.set_state(batches.get_state())
    assert len(list(resumed)) == 1


def test_a_position_of_other_batches_is_refused() -> None:
    state = data.batches(TEXT, batch=2, seq=7).get_state()
    for other, why in (
        (data.batches(TEXT, batch=4, seq=7), "batch=2, and these have batch=4"),
        (data.batches(TEXT, batch=2, seq=8), "seq=7, and these have seq=8"),
        (data.batches(TEXT, batch=2, seq=7, seed=1), "seed=0, and these have seed=1"),
        (data.batches(TEXT[1:], batch=2, seq=7, name="book.txt"), "^book.txt has changed since the position was saved"),
    ):
        with pytest.raises(ConfigError, match=why):
            other.set_state(state)
    with pytest.raises(ConfigError, match=r"'made_of' and 'position'; this is {'step': 1}"):
        data.batches(TEXT, batch=2, seq=7).set_state({"step": 1})


@pytest.mark.parametrize("position", [None, 3, [], {}, "nowhere", {"next_index": "3"}, {"next_index": None}, {"a": 1}])
def test_what_is_no_position_is_refused(position: object) -> None:
    batches = data.batches(TEXT, batch=2, seq=7)
    with pytest.raises(ConfigError, match="saved position"):
        batches.set_state({**batches.get_state(), "position": position})


def test_impossible_batches() -> None:
    with pytest.raises(
        ConfigError, match="1000 bytes of text are too few for .*seq=1000, which needs 1001; use seq=999"
    ):
        data.batches(TEXT, batch=1, seq=1000)
    with pytest.raises(ConfigError, match="which needs 1025; use seq=15 at most"):
        data.batches(TEXT, batch=64, seq=16, seed=None)
    with pytest.raises(ConfigError, match="use more text"):
        data.batches(TEXT[:1], batch=1, seq=1)
    with pytest.raises(ConfigError, match="both are 1 or more"):
        data.batches(TEXT, batch=0, seq=1)
    assert next(data.batches(TEXT, batch=2, seq=999))["inputs"].shape == (2, 999)


def test_bigram_closed_forms() -> None:
    uniform = np.zeros(2, np.uint8)
    assert data.bigram_bits_per_byte(uniform, np.asarray([1, 2, 3], np.uint8)) == pytest.approx(8.0)
    ab = np.tile(np.frombuffer(b"ab", np.uint8), 500)
    # "ab" was seen 500 times of a's 500, "ba" 499 of b's 499; scored are two of the first and one of the second.
    by_hand = -(2 * math.log2(501 / 756) + math.log2(500 / 755)) / 3
    assert data.bigram_bits_per_byte(ab, ab[:4]) == pytest.approx(by_hand)
    assert data.bigram_bits_per_byte(ab, ab, alpha=1e-9) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ConfigError, match="a bigram needs two bytes: 1 to fit on"):
        data.bigram_bits_per_byte(ab[:1], ab)


def test_a_bigram_of_the_standard_library_beats_chance_by_far() -> None:
    corpus = data.corpus()
    bits = data.bigram_bits_per_byte(corpus.train, corpus.heldout)
    assert 3 < bits < 4
