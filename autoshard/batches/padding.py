"""Batches of any sizes, padded to one of a few: a step has one plan for each, and its loss counts what is true.

The last batch of a data set has fewer rows, sentences have different lengths, and images different numbers of patches.
`Padding` says what the dimensions of each array are called, and to which sizes they are padded together. An array of
weights has one where something true stands and zero where padding does; a loss divided by their sum is that of the
true tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.strict_files import cut

type _Array = Any
"""An array, or a list of rows of different sizes, numpy arrays of one dtype."""

WEIGHTS = "weights"
"""The array that is made where `Padding.dims` names it and a batch lacks it."""


@dataclass(frozen=True)
class Padding:
    """What batches are padded to.

    Args:
      buckets: sizes by the names of dimensions, such as ``[{"rows": 8, "length": 128}, {"rows": 8, "length": 512}]``. A
        batch goes into the first that holds all of it.
      dims: for each array of a batch, which is a dictionary, the names of its dimensions, the first ones; None where a
        dimension is never padded: ``{"tokens": ["rows", "length"], "positions": [None, "rows", "length"], "patches":
        ["patches"], "grid": ["images"]}``. ``inputs.patches`` is an array of a dictionary within. ``weights`` may be
        among them without being in the batches. What is not named here stays as it is, and so does a None.
      fill: the number that an array is padded with, 0 by default; of ``weights`` it is 0. The array's dtype has to
        have it: no -0.5 among integers.

    Raises:
      ArgumentError: no bucket or no named dimension, a bucket without a size for each, or a fill of another array. Of a
        batch that is padded: it lacks an array, or is larger than every bucket.

    Example:
      >>> padding = autoshard.train.Padding([{"rows": 4}, {"rows": 8}], {"x": ["rows"]})
      >>> [bucket["rows"] for bucket in padding.buckets]
      [4, 8]
    """

    buckets: Sequence[Mapping[str, int]]
    dims: Mapping[str, Sequence[str | None]]
    fill: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        names = {name for names in self.dims.values() for name in names if name is not None}
        if not self.buckets or not names:
            raise ArgumentError("a padding has a bucket or more, and names a dimension of an array")
        for bucket in self.buckets:
            wrong = {name: size for name, size in bucket.items() if type(size) is not int or size < 1}
            if set(bucket) != names or wrong:
                raise ArgumentError(
                    f"the bucket {dict(bucket)} must have a size, 1 or more, for each of {', '.join(sorted(names))}, "
                    "the names of dimensions, and no other"
                )
        if self.fill.keys() - self.dims.keys() or WEIGHTS in self.fill:
            raise ArgumentError(f"fill: {sorted(self.fill)} must be arrays that are padded, and not {WEIGHTS!r}")

    def __call__(self, batch: Any) -> dict[str, Any]:
        """``batch`` padded. An array may come as a list or tuple of its rows, whose sizes differ along dimensions that
        are named. ``weights`` that are made are one where every array that begins with their dimensions has something.

        Raises:
          ArgumentError: a batch that is no dictionary, lacks an array, has one of other dimensions, rows that differ
            where nothing is padded, or a dtype without the fill, or is larger than every bucket; names the array and
            the sizes.
        """
        if not isinstance(batch, Mapping):
            raise ArgumentError(
                f"a batch that is padded is a dictionary of arrays, and this is a {type(batch).__name__}"
            )
        arrays = dict(_named(batch))
        if missing := [name for name in self.dims if name not in arrays and name != WEIGHTS]:
            raise ArgumentError(
                f"a batch lacks {cut(missing[0])!r}, which is to be padded; it has {sorted(arrays)[:20]}"
            )
        arrays = {n: _read(n, arrays[n], dims) for n, dims in self.dims.items() if arrays.get(n) is not None}
        found, sizes = dict[str, Any](), self._sizes(arrays)
        bucket = next((b for b in self.buckets if all(n <= b[name] for name, n in sizes.items())), None)
        if bucket is None:
            large = {name: n for name, n in sizes.items() if n > max(b[name] for b in self.buckets)} or sizes
            raise ArgumentError(
                f"a batch has {_sizes_text(large)}, and no bucket is as large: {', '.join(map(str, self.buckets))}"
            )
        for name, dims in self.dims.items():
            if name in arrays:
                found[name] = _padded(name, arrays[name], dims, bucket, self.fill.get(name, 0))
            elif name == WEIGHTS:
                found[name] = self._true(arrays, dims, bucket)
        return _replaced({WEIGHTS: None, **batch} if WEIGHTS in found else batch, found)

    def _sizes(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of the named dimensions."""
        sizes: dict[str, tuple[int, str]] = {}
        for array, dims in self.dims.items():
            if array not in batch:
                continue
            for name, size in zip(dims, _shape(array, batch[array], dims), strict=False):
                if name is None:
                    continue
                if sizes.setdefault(name, (size, array))[0] != size:
                    raise ArgumentError(
                        f"the dimension {name!r} has {sizes[name][0]} in {sizes[name][1]!r} and {size} in {array!r} of "
                        "one batch"
                    )
        return {name: size for name, (size, _) in sizes.items()}

    def _true(self, batch: Mapping[str, _Array], dims: Sequence[str | None], bucket: Mapping[str, int]) -> np.ndarray:
        """float32 weights of these dimensions: one where each array that begins with them has something true."""
        named, rank = [name for name in dims if name is not None], len(dims)
        if len(named) < rank:
            raise ArgumentError(f"{WEIGHTS!r} is made of dimensions that have a name")
        like = [batch[name] for name, of in self.dims.items() if name in batch and list(of[:rank]) == named]
        if not like:
            raise ArgumentError(f"no array begins with the dimensions {named}, of which {WEIGHTS!r} is to be made")
        ones = [
            [np.ones(row.shape[: rank - 1], np.float32) for row in x]
            if isinstance(x, list) and rank > 1
            else np.ones(_shape(WEIGHTS, x, dims)[:rank], np.float32)
            for x in like
        ]
        return np.minimum.reduce([_padded(WEIGHTS, each, dims, bucket, 0) for each in ones])


def _named(batch: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a dictionary and in those within it, by names with dots between the keys."""
    for key, x in batch.items():
        if isinstance(x, Mapping):
            yield from _named(x, f"{within}{key}.")
        else:
            yield f"{within}{key}", x


def _replaced(batch: Mapping[str, Any], found: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """``batch`` with what is ``found`` in the place of what has these names."""
    return {
        key: _replaced(x, found, f"{within}{key}.") if isinstance(x, Mapping) else found.get(f"{within}{key}", x)
        for key, x in batch.items()
    }


def _read(name: str, x: Any, dims: Sequence[str | None]) -> _Array:
    """An array as it comes; of a list of rows one array, or a list of arrays of a dtype where their sizes differ."""
    if not isinstance(x, list | tuple):
        return x
    try:
        rows = [np.asarray(row) for row in x]
    except ValueError:
        raise ArgumentError(
            f"{name!r} is a list whose rows are lists of different sizes: give each as an array"
        ) from None
    if not rows:
        raise ArgumentError(
            f"{name!r} is a list of no rows, whose dtype and dimensions {list(dims)} are not known: leave the batch "
            "out, or give an array, such as np.zeros((0, 8), np.int32)"
        )
    dtype = np.result_type(*{row.dtype for row in rows if row.size} or {rows[0].dtype})  # [] is float64
    rows, shapes = [row.astype(dtype, copy=False) for row in rows], list(dict.fromkeys(row.shape for row in rows))
    if len(shapes) == 1:
        return np.stack(rows)
    differ = [n for n, sizes in enumerate(itertools.zip_longest(*shapes), start=1) if len(set(sizes)) > 1]
    if len({*map(len, shapes)}) > 1 or any(n >= len(dims) or dims[n] is None for n in differ):
        raise ArgumentError(
            f"{name!r} has rows of {' and '.join(str(list(shape)) for shape in shapes[:3])}, and of its dimensions "
            f"{list(dims)} are padded: give all rows as many dimensions, and name those that differ, such as "
            f"{{{name!r}: ['rows', 'length']}}"
        )
    return rows


def _shape(name: str, x: _Array, dims: Sequence[str | None]) -> tuple[int, ...]:
    """The shape of an array, or of a list of rows that are as large as the largest is."""
    rows = [row.shape for row in x] if isinstance(x, list) else []
    shape = (len(rows), *(max(sizes) for sizes in zip(*rows, strict=True))) if rows else np.shape(x)
    if len(shape) < len(dims):
        raise ArgumentError(f"{name!r} has the dimensions {list(dims)}, and a batch has one of {list(shape)}")
    return shape


def _padded(name: str, x: _Array, dims: Sequence[str | None], bucket: Mapping[str, int], fill: float) -> np.ndarray:
    if isinstance(x, list):
        x = np.stack([_padded(name, row, dims[1:], bucket, fill) for row in x])
    x = np.asarray(x)
    wanted = [size if name is None else bucket[name] for name, size in zip(dims, x.shape, strict=False)]
    more = [(0, want - size) for want, size in zip(wanted, x.shape, strict=False)]
    return np.pad(x, [*more, *[(0, 0)] * (x.ndim - len(more))], constant_values=_fill_of(name, x, fill))


def _fill_of(name: str, x: np.ndarray, fill: float) -> np.ndarray:
    """``fill`` in the dtype of ``x``, which has it: integers exactly, floats rounded."""
    try:
        with np.errstate(all="ignore"):
            made = np.asarray(fill).astype(x.dtype)
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        has = np.isfinite(made) == np.isfinite(fill) if is_float else made == fill
    except (OverflowError, TypeError, ValueError):
        made, has = x, False
    if not has or x.dtype.kind not in "biufcV":  # V: bfloat16 and its like
        raise ArgumentError(
            f"{name!r} is {x.dtype} {list(x.shape)}, which cannot be padded with {fill!r}: give a `fill` that "
            f"{x.dtype} has, or the array another dtype"
        )
    return made


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def even_buckets(count: int, *, of: str, **sizes: int) -> list[dict[str, int]]:
    """``count`` buckets whose dimension ``of`` grows in equal steps to the size given in ``sizes``; others as given.

    Raises:
      ArgumentError: no bucket, or no size of ``of``.

    Example:
      >>> autoshard.train.even_buckets(2, of="length", rows=8, length=512)
      [{'rows': 8, 'length': 256}, {'rows': 8, 'length': 512}]
    """
    if count < 1 or of not in sizes:
        raise ArgumentError(
            f"even_buckets({count}, of={of!r}): give one bucket or more, and the largest size of {of!r}"
        )
    return [{**sizes, of: -(-sizes[of] * n // count)} for n in range(1, count + 1)]
