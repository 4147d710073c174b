"""The arithmetic of batches: what a step takes, and the parts in which its devices compute it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.errors import ArgumentError


@dataclass(frozen=True)
class BatchSizes:
    """Rows of a step: ``batch = micro * accumulation * shards``.

    Example:
      >>> autoshard.train.BatchSizes(batch=512, micro=4, accumulation=8, shards=16).micro
      4
    """

    batch: int
    """Of a step, over all devices."""
    micro: int
    """That a device computes at a time."""
    accumulation: int
    """Micro-batches that a step computes one after the other."""
    shards: int
    """Parts of a micro-batch on different devices."""


def batch_sizes(
    batch: int | None = None, *, micro: int | None = None, accumulation: int | None = None, shards: int | None = None
) -> BatchSizes:
    """All four sizes from three of them, or from all, which must agree.

    Raises:
      ArgumentError: more than one is missing; one is not a whole number of 1 or more; or they contradict each other.

    Example:
      >>> autoshard.train.batch_sizes(512, micro=4, shards=16).accumulation
      8
    """
    given = {"batch": batch, "micro": micro, "accumulation": accumulation, "shards": shards}
    known = {name: size for name, size in given.items() if size is not None}
    if wrong := [name for name, size in known.items() if type(size) is not int or size < 1]:
        raise ArgumentError(f"{wrong[0]}={known[wrong[0]]!r}: a size is a whole number, 1 or more")
    missing = [name for name in given if name not in known]
    if len(missing) > 1:
        raise ArgumentError(
            f"batch = micro * accumulation * shards: {' and '.join(missing)} are missing, and one of them must be given"
        )
    product = math.prod(size for name, size in known.items() if name != "batch")
    text = " * ".join(f"{size} ({name})" for name, size in known.items() if name != "batch")
    if batch is None:
        return BatchSizes(**{**known, "batch": product})
    if batch % product or (not missing and batch != product):
        near = max(batch // product, 1) * product
        raise ArgumentError(
            f"a batch of {batch} is not {'a multiple of ' if missing else ''}{text} = {product}; "
            f"{'the nearest that is: ' + str(near) if missing else 'leave out one of them'}"
        )
    return BatchSizes(**{**known, **dict.fromkeys(missing, batch // product)})
