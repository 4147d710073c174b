"""Batches of any sizes, padded to one of a few: a step has one plan for each, and its loss counts what is true.

The last batch of a data set has fewer rows, sentences have different lengths, and images different numbers of patches.
`Padding` says what the dimensions of each array are called, and to which sizes they are padded together. An array of
weights has one where something true stands and zero where padding does; a loss divided by their sum is that of the
true tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.errors import ArgumentError
from autoshard.strict_files import cut

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
        among them without being in the batches. What is not named here stays as it is.
      fill: the number that an array is padded with, 0 by default; of ``weights`` it is 0.

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
        """``batch`` padded. An array may come as a list of its rows, whose lengths differ: they are of the second
        dimension that is named.

        Raises:
          ArgumentError: a batch that is no dictionary, lacks an array, has one of other dimensions, or is larger than
            every bucket; names the array and the sizes.
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
        found, sizes = dict[str, Any](), self._sizes(arrays)
        bucket = next((b for b in self.buckets if all(n <= b[name] for name, n in sizes.items())), None)
        if bucket is None:
            large = {name: n for name, n in sizes.items() if n > max(b[name] for b in self.buckets)} or sizes
            raise ArgumentError(
                f"a batch has {_sizes_text(large)}, and no bucket is as large: {', '.join(map(str, self.buckets))}"
            )
        for name, dims in self.dims.items():
            if name not in arrays:
                found[name] = self._true(arrays, dims, bucket)
                continue
            fill = 0 if name == WEIGHTS else self.fill.get(name, 0)
            rows = arrays[name]
            if isinstance(rows, list):
                rows = [_padded(row, dims[1:], bucket, fill) for row in rows]
            found[name] = _padded(rows, dims, bucket, fill)
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

    def _true(self, batch: Mapping[str, Any], dims: Sequence[str | None], bucket: Mapping[str, int]) -> np.ndarray:
        """float32 weights of these dimensions: one where an array with the most of them has something true."""
        named = [name for name in dims if name is not None]
        if len(named) < len(dims):
            raise ArgumentError(f"{WEIGHTS!r} is made of dimensions that have a name")
        like = max((a for a in self.dims if a in batch), key=lambda a: len({*dims} & {*self.dims[a]}))
        if list(self.dims[like][: len(named)]) != named:
            raise ArgumentError(f"no array begins with the dimensions {named}, of which {WEIGHTS!r} is to be made")
        rows, rank = batch[like], len(named)
        if isinstance(rows, list) and rank > 1:
            ones = [np.ones(np.shape(row)[: rank - 1], np.float32) for row in rows]
            return _padded([_padded(one, dims[1:], bucket, 0) for one in ones], dims, bucket, 0)
        return _padded(np.ones(_shape(like, rows, dims)[:rank], np.float32), dims, bucket, 0)


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


def _shape(name: str, x: Any, dims: Sequence[str | None]) -> tuple[int, ...]:
    """The shape of an array, or of a list of rows that are as large as the largest is."""
    shapes = [np.shape(row) for row in x] if isinstance(x, list) else []
    if shapes and len({len(shape) for shape in shapes}) == 1:
        shape = (len(shapes), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    else:
        shape = np.shape(x)
    if len(shape) < len(dims):
        raise ArgumentError(f"{name!r} has the dimensions {list(dims)}, and a batch has one of {list(shape)}")
    return shape


def _padded(x: Any, dims: Sequence[str | None], bucket: Mapping[str, int], fill: float) -> np.ndarray:
    x = np.asarray(x)
    wanted = [size if name is None else bucket[name] for name, size in zip(dims, x.shape, strict=False)]
    more = [(0, want - size) for want, size in zip(wanted, x.shape, strict=False)]
    return np.pad(x, [*more, *[(0, 0)] * (x.ndim - len(more))], constant_values=np.asarray(fill, x.dtype))


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
