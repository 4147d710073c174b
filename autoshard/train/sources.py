"""Where batches come from: iterators that save their position, any iterable, and arrays in memory or on disk.

A source yields batches and has a position in JSON, which a checkpoint keeps: what was taken before is not seen again,
and nothing is left out. Whole batches at a position do not depend on the number of processes or devices, so a run
resumes on others; a source of the rows of one process has a position of its own, and resumes on as many
(`autoshard.train.processes.positions`).
"""

from __future__ import annotations

import base64
import functools
import itertools
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import jax
import numpy as np
from absl import flags

from autoshard.errors import ArgumentError, AutoshardError, ConfigError
from autoshard.strict_files import cut, shortened

type Tree = Any
"""A pytree."""


class Source(Protocol):
    """Batches in order, with a position."""

    def __next__(self) -> Tree: ...

    def get_state(self) -> Any:
        """The position, after the batches taken so far, as strict JSON."""
        ...

    def set_state(self, state: Any) -> None:
        """Moves to a position that `get_state` gave."""
        ...


class ChosenRows:
    """Some rows of an array, none of which is read before it is asked for: ``rows[index]`` reads those alone.

    Args:
      array: a numpy array or memory map, or what has its ``shape``, ``dtype`` and indexing by an array.
      chosen: int64 [batch], which rows.
      dim: the dimension of the array that they are of.
    """

    def __init__(self, array: Any, chosen: np.ndarray, dim: int = 0) -> None:
        self._array, self._chosen, self._dim = array, chosen, dim
        self.shape = (*array.shape[:dim], len(chosen), *array.shape[dim + 1 :])
        self.dtype = np.dtype(array.dtype)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        before, rows, rest = index[: self._dim], index[self._dim], index[self._dim + 1 :]
        return np.asarray(self._read(self._chosen[rows]))[(*before, slice(None), *rest)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what is read is a copy
        return np.asarray(self._read(self._chosen), dtype)

    def _read(self, rows: np.ndarray) -> Any:
        return self._array[(*[slice(None)] * self._dim, rows)] if self._dim else self._array[rows]


class Rows(Iterator[Tree]):
    """Batches of the rows of arrays, which all have as many: endless, each row once a pass.

    The rows of a pass that fill no batch begin the first batch of the next pass, so that none is left out. A process
    reads only the rows that its devices hold.

    Args:
      arrays: a pytree of numpy arrays or memory maps.
      batch: rows per batch, over all devices.
      seed: shuffles the rows, in every pass anew; None takes them in order.
      dims: which dimension of each array its rows are: 0, one number for all, or a pytree of the arrays' structure,
        such as ``{"tokens": 0, "positions": 1}``.

    Raises:
      ArgumentError: no array, arrays of different numbers of rows, a dimension that one lacks, ``dims`` of another
        structure, or a batch below one row.

    Example:
      >>> rows = autoshard.train.Rows({"x": np.arange(6)}, batch=4)
      >>> np.asarray(next(rows)["x"]), np.asarray(next(rows)["x"])
      (array([0, 1, 2, 3]), array([4, 5, 0, 1]))
      >>> rows.per_pass
      1
      >>> position, third = rows.get_state(), next(rows)
      >>> rows.set_state(position)
      >>> bool(np.all(np.asarray(next(rows)["x"]) == np.asarray(third["x"])))
      True
    """

    def __init__(self, arrays: Tree, batch: int, seed: int | None = None, dims: Tree = 0) -> None:
        leaves, self._tree = jax.tree.flatten(arrays)
        each = [dims] * len(leaves) if isinstance(dims, numbers.Integral) else jax.tree.leaves(dims)
        of_all = isinstance(dims, numbers.Integral) or jax.tree.structure(dims) == self._tree
        if not of_all or not all(isinstance(d, numbers.Integral) for d in each):
            raise ArgumentError(f"dims={cut(str(dims))}: give one number, or one for each array of {self._tree}")
        self._dims = [operator.index(d) for d in each]
        pairs = [*zip(leaves, self._dims, strict=True)]
        lengths = {np.shape(x)[d] if 0 <= d < np.ndim(x) else None for x, d in pairs}
        if len(lengths) != 1 or None in lengths or 0 in lengths:
            paths = jax.tree_util.tree_flatten_with_path(arrays)[0]
            found = ", ".join(f"{jax.tree_util.keystr(p) or 'the array'} {list(np.shape(x))}" for p, x in paths[:5])
            if 0 in lengths:
                raise ArgumentError(f"an array data set has one row at least, and arrays are empty: {found}")
            which = "" if not any(self._dims) else f", which are dimensions {self._dims[:5]}"
            raise ArgumentError(
                "an array data set has arrays of the same number of rows, their first dimension or that which `dims` "
                f"names{which}: {found or 'no array'}"
            )
        if operator.index(batch) < 1:
            raise ArgumentError(f"batch={batch}: a batch has one row or more")
        self._leaves, self._rows = leaves, cast("int", lengths.pop())
        self._batch, self._seed, self._taken = batch, seed, 0
        self._order = functools.lru_cache(maxsize=2)(self._order_of_pass)

    @property
    def per_pass(self) -> int:
        """Whole batches of a pass, one at least."""
        return max(1, self._rows // self._batch)

    def __next__(self) -> Tree:
        start = self._taken * self._batch
        chosen: list[np.ndarray] = []
        while start < (self._taken + 1) * self._batch:
            number, first = divmod(start, self._rows)
            chosen.append(self._order(number)[first : first + (self._taken + 1) * self._batch - start])
            start += len(chosen[-1])
        self._taken += 1
        rows = np.concatenate(chosen)
        return self._tree.unflatten([ChosenRows(x, rows, d) for x, d in zip(self._leaves, self._dims, strict=True)])

    def _order_of_pass(self, number: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(self._rows)
        return np.random.Generator(np.random.PCG64([self._seed, number])).permutation(self._rows)

    @property
    def _made_of(self) -> dict[str, Any]:
        dims = self._dims if len(set(self._dims)) > 1 else self._dims[0]
        return {"rows": self._rows, "batch": self._batch, "seed": self._seed, "dims": dims}

    def get_state(self) -> Any:
        """The position as strict JSON."""
        return {"made_of": self._made_of, "taken": self._taken}

    def set_state(self, state: Any) -> None:
        """Moves to a position that `get_state` gave, without reading what is before it.

        Raises:
          ConfigError: not a position, or one in other rows, batches or another order.
        """
        match state:
            case {"made_of": dict(made_of), "taken": int(taken)} if taken >= 0:
                pass
            case _:
                raise ConfigError(f"a saved position has the keys 'made_of' and 'taken'; this is {shortened(state)}")
        made_of = {"dims": 0, **made_of}  # which it lacks if it is older than they are
        for name, value in self._made_of.items():
            if made_of.get(name) != value:
                raise ConfigError(
                    f"the saved position is in batches with {name}={shortened(made_of.get(name))}, and these have "
                    f"{name}={value!r}: they cannot continue. Use the same data and settings, or start over"
                )
        self._taken = taken


class _Seekable:
    """An iterator with ``get_state`` and ``set_state``, such as grain's; bytes become text."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        if not flags.FLAGS.is_parsed():  # grain's workers read flags of absl, which an absl program alone parses
            flags.FLAGS.mark_as_parsed()

    def __next__(self) -> Tree:
        return next(self._iterator)

    def get_state(self) -> Any:
        state = self._iterator.get_state()
        return {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"state": state}

    def set_state(self, state: Any) -> None:
        """Moves the iterator to a position that `get_state` gave.

        Raises:
          ConfigError: not such a position, or the iterator refuses it.
        """
        name = type(self._iterator).__name__
        match state:
            case {"bytes": str(text), **rest} if not rest:
                state = text.encode()
            case {"state": theirs, **rest} if not rest:
                state = theirs
            case _:
                raise ConfigError(
                    f"batches: the saved position {shortened(state)} is none that {name} gave: use the batches that "
                    "the run was begun with, or start over in another folder"
                )
        try:
            self._iterator.set_state(base64.b64decode(state, validate=True) if isinstance(state, bytes) else state)
        except AutoshardError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"batches: {name} refuses the saved position: {type(error).__name__}: {cut(reason.rstrip('.'), 300)}. "
                "Give it the same data (grain compares what `repr` gives of it), in the same order and, where it reads "
                "a part for each process, in as many processes; or start over in another folder"
            ) from error


class _Counted:
    """Any iterable: its position is the number of batches taken, which are taken again to move there.

    One that can be iterated anew, such as a list or a loader, begins again at its end; a generator does not.
    """

    def __init__(self, batches: Iterable[Tree]) -> None:
        self._batches = batches
        self._iterator = iter(batches)
        self._again = self._iterator is not batches
        self._taken = 0

    def __next__(self) -> Tree:
        try:
            found = next(self._iterator)
        except StopIteration:
            if not self._again:
                raise
            self._iterator = iter(self._batches)
            found = next(self._iterator)
        self._taken += 1
        return found

    def get_state(self) -> Any:
        return {"taken": self._taken}

    def set_state(self, state: Any) -> None:
        match state:
            case {"taken": int(taken)} if taken >= self._taken:
                pass
            case _:
                raise ConfigError(
                    f"the saved position {shortened(state)} is none in these batches, which have no `set_state`: an "
                    "iterator is moved by taking its batches again, from the first. Start with a new iterator of the "
                    "same batches"
                )
        while self._taken < taken:
            if next(self, None) is None:
                raise ConfigError(f"the batches end after {self._taken}, and the saved position is after {taken}")


class Mapped:
    """A source whose batches each go through a function."""

    def __init__(self, source: Source, function: Callable[[Tree], Tree]) -> None:
        self._source, self._function = source, function

    def __next__(self) -> Tree:
        return self._function(next(self._source))

    def get_state(self) -> Any:
        return self._source.get_state()

    def set_state(self, state: Any) -> None:
        self._source.set_state(state)


class Peeked:
    """A source whose first batch is looked at before it is taken."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = source.get_state()
        self.first = next(source, None)
        """The batch that is taken first unless the source is moved; None where there is none."""
        self._ahead = itertools.islice((self.first,), 1) if self.first is not None else iter(())

    def __next__(self) -> Tree:
        for batch in self._ahead:
            self._start = None
            return batch
        return next(self._source)

    def get_state(self) -> Any:
        return self._source.get_state() if self._start is None else self._start

    def set_state(self, state: Any) -> None:
        self._ahead, self._start = iter(()), None
        self._source.set_state(state)


def source_of(batches: Any, batch: int | None = None, seed: int | None = None) -> Source:
    """A source of ``batches``: see `autoshard.train.fit` for what they may be.

    Args:
      batch: rows per batch where they are arrays.
      seed: their order; see `Rows`.

    Raises:
      ArgumentError: none of these, or arrays and no size of a batch.
    """
    if _is_seekable(batches):
        return _Seekable(batches)
    if _is_arrays(batches):
        if batch is None:
            raise ArgumentError(
                "batches: arrays are a data set of rows, and nothing says how many a batch has: pass "
                "autoshard.train.Rows(arrays, batch=...)"
            )
        return Rows(batches, batch, seed)
    if isinstance(batches, Mapping):
        paths = jax.tree_util.tree_flatten_with_path(batches, is_leaf=lambda x: not isinstance(x, dict))[0]
        others = [f"{jax.tree_util.keystr(p)} is a {type(x).__name__}" for p, x in paths if not _is_arrays(x)]
        raise ArgumentError(
            f"batches: a dictionary is a data set of arrays, and {', '.join(others[:5]) or 'it is empty'}: make an "
            "array of it with numpy, or leave it out"
        )
    if not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches: {type(batches).__name__} is neither arrays, nor an iterable or iterator of batches"
        )
    iterator = iter(cast("Iterable[Tree]", batches))
    return _Seekable(iterator) if _is_seekable(iterator) else _Counted(cast("Iterable[Tree]", batches))


def _is_seekable(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("__next__", "get_state", "set_state"))


def _is_arrays(x: Any) -> bool:
    """Whether ``x`` is arrays in containers, and no list or iterator of batches."""
    if isinstance(x, np.ndarray | jax.Array):
        return True
    if not isinstance(x, dict | tuple):
        return False
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)


def arrays_only(batch: Tree) -> Tree:
    """``batch`` with None in the place of each leaf that no array can hold, such as a string, or a list of strings."""
    return jax.tree.map(lambda x: x if _is_numeric(x) else None, batch, is_leaf=_is_text)


def _is_numeric(x: Any) -> bool:
    if isinstance(x, jax.Array):
        return True
    if _is_text(x):
        return False
    dtype = x.dtype if isinstance(x, ChosenRows) else np.asarray(x).dtype
    return dtype.kind in "biufcV"  # V: bfloat16 and its like


def _is_text(x: Any) -> bool:
    """Whether ``x`` is a string, or a list of strings, in lists or not: of any length it is one leaf."""
    if isinstance(x, list | tuple):
        return all(isinstance(leaf, str | bytes) for leaf in jax.tree.leaves(x))
    return isinstance(x, str | bytes)
