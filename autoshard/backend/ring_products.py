"""Products whose partial sums are reduce-scattered in a ring, beside the product.

Each device computes the part of its product that another one keeps, adds what its neighbour has summed of it, and sends
the sum on, while it computes the next part (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023). A device's own part comes last, and stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.ir.rule import Rule
from autoshard.ir.spec import Spec

MAX_PARTS = 8
"""Devices of a ring: each part is an instruction of its own."""
MIN_PART = 1 << 20
"""Elements of a part of the result: smaller products leave the chip's units idle."""


@dataclass(frozen=True)
class RingProduct:
    """How an operation is cut into the parts of its result that each device keeps."""

    axis: str
    dim: int
    """Of the result: scattered over ``axis``."""
    operands: tuple[tuple[int, int], ...]
    """Operands that have that dimension, and which of theirs it is."""
    parts: int

    def __call__(self, operation: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """The device's shard of the sum of all devices' results, inside of a `jax.shard_map` over ``axis``."""
        me, total = jax.lax.axis_index(self.axis), None
        onwards = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        for step in range(self.parts):
            part = operation(*self._cut(operands, (me - step - 1) % self.parts))
            total = part if total is None else part + jax.lax.ppermute(total, self.axis, onwards)
        return total

    def _cut(self, operands: Sequence[Any], part: Any) -> list[Any]:
        found = list(operands)
        for operand, dim in self.operands:
            size = found[operand].shape[dim] // self.parts
            found[operand] = jax.lax.dynamic_slice_in_dim(found[operand], part * size, size, dim)
        return found


def ring_product(
    rule: Rule, made: Spec, reduced: Spec, shape: Sequence[int], sizes: Mapping[str, int]
) -> RingProduct | None:
    """The ring for the first axis over which the only result of an operation is reduce-scattered; None without one.

    Args:
      made: of the result, with partial sums.
      reduced: the same after them.
      shape: of one device's partial sum.
      sizes: of the mesh axes.
    """
    sums = {a for a, kind in made.partial if kind == "sum"}
    for dim, (before, after) in enumerate(zip(made.dims, reduced.dims, strict=True)):
        (axis, *_), factor = after[len(before) :] or ("",), rule.results[0][dim]
        if axis not in sums or len(factor) != 1 or rule.kind(factor[0]) != "parallel":
            continue
        parts = sizes[axis]
        if parts <= MAX_PARTS and shape[dim] % parts == 0 and math.prod(shape) >= parts * MIN_PART:
            places = tuple((i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor)
            return RingProduct(axis, dim, places, parts)
    return None
