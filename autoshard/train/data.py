"""Byte-level text data: batches whose position can be saved and restored exactly.

A corpus is the files of a directory, in the order of their names, split into training and held-out files by a hash of
the name alone, so that the split is the same on every machine. Every machine has one: the sources of the Python
standard library. Of a single file the end is held out. A token is a byte, so bits per byte compare with any other model
of the same text.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grain
import numpy as np
from etils import epath

from autoshard.errors import ConfigError
from autoshard.plan.document import plural
from autoshard.strict_files import shortened

VOCAB = 256
"""Number of tokens: the values of a byte."""

STDLIB = "stdlib"
"""The name of the sources of the Python standard library."""

# Directories that differ between installations of one Python version, or that some lack.
_STDLIB_EXCLUDE = (
    *("__pycache__", "_sysconfigdata*", "config-*", "dist-packages", "idle_test", "lib-dynload"),
    *("site-packages", "sitecustomize.py", "test", "tests"),
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out text, uint8 [bytes], and the relative names of the files of each, in order."""

    train: np.ndarray
    heldout: np.ndarray
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]

    def __str__(self) -> str:
        of_train, of_heldout = (
            f"{len(text):,} bytes of {plural(len(files), 'file')}"
            for text, files in ((self.train, self.train_files), (self.heldout, self.heldout_files))
        )
        return f"{of_train} to train on, {of_heldout} held out"


def corpus(
    source: epath.PathLike = STDLIB,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    holdout: int = 10,
) -> Corpus:
    """Reads every chosen file below ``source`` and concatenates them in the order of their names.

    Args:
      source: ``"stdlib"``, a directory, or one file.
      include: globs on a file's name relative to ``source`` (``*`` matches ``/`` too); by default ``*.py`` in the
        standard library, and everything in a directory.
      exclude: globs on the name of a file or of any directory on its path; by default tests and installed packages in
        the standard library, and hidden names in a directory.
      holdout: one file in this many, by a hash of its relative name, is held out; of one file, one byte in this many,
        the last.

    Raises:
      ConfigError: no such directory or file, globs for one file, no file matches, or a side of the split is empty.
    """
    stdlib = str(source) == STDLIB
    root = epath.Path(sysconfig.get_path("stdlib") if stdlib else source).expanduser()
    if holdout < 2:
        raise ConfigError(f"holdout={holdout} leaves nothing to train on; 2 or more, and 10 holds out one file in ten")
    if root.is_file():
        if include is not None or exclude is not None:
            raise ConfigError(f"include and exclude choose files of a directory, and the text source {root} is a file")
        return _of_file(root, holdout)
    include = include if include is not None else ("*.py",) if stdlib else ("*",)
    exclude = exclude if exclude is not None else _STDLIB_EXCLUDE if stdlib else (".*",)
    if not root.is_dir():
        raise ConfigError(f"there is no text source {root}; name a directory or a file that exists, or {STDLIB!r}")
    names = sorted(n for n in _files(root, "", exclude) if any(fnmatch.fnmatchcase(n, g) for g in include))
    if not names:
        excluded = f", excluding {', '.join(exclude)}" if exclude else ""
        raise ConfigError(f"{root} has no file that matches {', '.join(include)}{excluded}")
    heldout = tuple(n for n in names if is_held_out(n, holdout))
    train = tuple(n for n in names if not is_held_out(n, holdout))
    parts = Corpus(_read(root, train), _read(root, heldout), train, heldout)
    for part, files in ((parts.train, "train"), (parts.heldout, "held-out")):
        if not len(part):
            raise ConfigError(
                f"the {files} part of {root} is empty: {len(names)} files, one in {holdout} held out by its name. "
                "Add files, or change holdout"
            )
    return parts


def _of_file(file: epath.Path, holdout: int) -> Corpus:
    text = _read(file.parent, (file.name,))
    if len(text) < holdout:
        raise ConfigError(f"the text source {file} has {len(text)} bytes, of which one in {holdout} is to be held out")
    end = len(text) - len(text) // holdout
    return Corpus(text[:end], text[end:], (file.name,), (file.name,))


def is_held_out(name: str, holdout: int) -> bool:
    """Whether the file of this relative name is held out: one in ``holdout`` is, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % holdout == 0


def _files(root: epath.Path, prefix: str, exclude: Sequence[str]) -> Iterator[str]:
    for path in (root / prefix if prefix else root).iterdir():
        if any(fnmatch.fnmatchcase(path.name, glob) for glob in exclude):
            continue
        name = f"{prefix}/{path.name}" if prefix else path.name
        if path.is_dir():
            yield from _files(root, name, exclude)
        else:
            yield name


def _read(root: epath.Path, names: Sequence[str]) -> np.ndarray:
    return np.frombuffer(b"".join((root / name).read_bytes() for name in names), np.uint8)


class _WindowSource:
    """Windows of ``seq + 1`` bytes, each of which starts at the last byte of the one before it."""

    def __init__(self, text: np.ndarray, seq: int) -> None:
        self._text, self._seq = text, seq

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._seq

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        window = self._text[index * self._seq : (index + 1) * self._seq + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}

    def __repr__(self) -> str:
        return f"windows of {self._seq} bytes"


class Batches(Iterator[dict[str, np.ndarray]]):
    """An iterator over batches, endless or of one pass, whose position can be saved and restored.

    Yields ``{"inputs": int32 [batch, seq], "targets": int32 [batch, seq]}`` in numpy, on the host; ``targets`` is
    ``inputs`` one byte later. The batch at a position depends on the text, ``batch``, ``seq`` and ``seed`` alone.
    """

    def __init__(self, dataset: Any, made_of: Mapping[str, Any], per_pass: int, name: str) -> None:
        self._iterator: Any = iter(dataset)
        self._made_of, self._name = dict(made_of), name
        self.per_pass = per_pass
        """Full batches in one pass over the text."""

    def __next__(self) -> dict[str, np.ndarray]:
        return cast("dict[str, np.ndarray]", next(self._iterator))

    def get_state(self) -> dict[str, Any]:
        """The position as strict JSON, for `set_state`."""
        return {"made_of": dict(self._made_of), "position": self._iterator.get_state()}

    def set_state(self, state: Any) -> None:
        """Moves to a position from `get_state`, without reading the text before it.

        Raises:
          ConfigError: not a position, or one in other text or of another batch size, length or seed; names both values.
        """
        match state:
            case {"made_of": dict(made_of), "position": position}:
                pass
            case _:
                raise ConfigError(f"a saved position has the keys 'made_of' and 'position'; this is {shortened(state)}")
        for name, value in self._made_of.items():
            if made_of.get(name) != value and name == "text":
                raise ConfigError(
                    f"{self._name} has changed since the position was saved, so that its batches cannot continue: put "
                    "it back as it was, or start over"
                )
            if made_of.get(name) != value:
                raise ConfigError(
                    f"the saved position is in batches with {name}={shortened(made_of.get(name))}, and these have "
                    f"{name}={value!r}: they cannot continue. Use the same text and settings, or start over"
                )
        try:
            self._iterator.set_state(position)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved position {shortened(position)} is none in these batches: {error}") from None


def batches(
    text: np.ndarray, *, batch: int, seq: int, seed: int | None = 0, prefetch: int = 0, name: str = "the text"
) -> Batches:
    """Batches of windows of ``text`` (uint8 [bytes]), in which each byte is a target once a pass.

    Args:
      batch: windows per batch.
      seq: targets per window, in bytes.
      seed: shuffles the windows in each of endless passes; None yields them in order, once.
      prefetch: batches to prepare ahead in a thread; 0 prepares each on demand. The batches are the same.
      name: what an error calls the text.

    The end of the text that fills no window is dropped, and in order the windows that fill no batch.

    Raises:
      ConfigError: a size below 1, or text too short for one batch.
    """
    if batch < 1 or seq < 1:
        raise ConfigError(f"batch={batch} and seq={seq}: both are 1 or more")
    windows = _WindowSource(text, seq)
    if len(windows) < (batch if seed is None else 1):
        least = 1 + seq * (batch if seed is None else 1)
        longest = (len(text) - 1) // (batch if seed is None else 1)
        smaller = ", a smaller batch" if seed is None and batch > 1 else ""
        remedy = f"use seq={longest} at most{smaller} or more text" if longest > 0 else "use more text"
        raise ConfigError(
            f"{len(text)} bytes of text are too few for batch={batch}, seq={seq}, which needs {least}; {remedy}"
        )
    dataset: Any = grain.MapDataset.source(windows)
    dataset = dataset.shuffle(seed=seed).repeat() if seed is not None else dataset
    dataset = dataset.batch(batch, drop_remainder=True)
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    made_of = {"batch": batch, "seed": seed, "seq": seq, "text": hashlib.sha256(text.tobytes()).hexdigest()[:16]}
    return Batches(dataset.to_iter_dataset(options), made_of, len(windows) // batch, name)


def bigram_bits_per_byte(train: np.ndarray, heldout: np.ndarray, *, alpha: float = 1.0) -> float:
    """Bits per byte of the byte-bigram model fitted on ``train``, over the bytes of ``heldout`` after the first.

    ``p(b | a) = (count(a, b) + alpha) / (count(a) + 256 * alpha)``, Laplace's rule at alpha 1. To compare with a model,
    pass the bytes that the model was scored on.

    Args:
      train, heldout: uint8 [bytes], two bytes or more.
    """
    if min(len(train), len(heldout)) < 2:
        raise ConfigError(f"a bigram needs two bytes: {len(train)} to fit on and {len(heldout)} to score")
    fitted, scored = _bigram_counts(train), _bigram_counts(heldout)
    probability = (fitted + alpha) / (fitted.sum(1, keepdims=True) + VOCAB * alpha)
    nats = float(np.sum(scored * np.log(probability, where=scored > 0, out=np.zeros_like(probability))))
    return -nats / math.log(2) / (len(heldout) - 1)


def _bigram_counts(text: np.ndarray) -> np.ndarray:
    """Counts of each pair of consecutive bytes, int64 [first, second]."""
    joined = text[:-1].astype(np.int64) * VOCAB + text[1:]
    return np.bincount(joined, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)
