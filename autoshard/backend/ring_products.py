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
import jax.numpy as jnp
import numpy as np

from autoshard.ir.rule import Rule
from autoshard.ir.spec import Spec

MAX_PARTS = 8
"""Devices of a ring: each part is an instruction of its own."""
MIN_PRODUCT = 1 << 20
"""Elements of a part of a product: smaller ones leave the chip's units idle."""
MIN_SUM = 1 << 16
"""Elements of a part of what has been summed over another axis: the latency of smaller ones is all that they take."""


@dataclass(frozen=True)
class Ring:
    """A result that is reduce-scattered over one mesh axis."""

    axis: str
    dim: int
    """Of the result: scattered over ``axis``."""
    operands: tuple[tuple[int, int], ...]
    """Operands of the operation that have that dimension, and which of theirs it is."""
    parts: int
    left: Spec
    """Of the result after the ring."""

    def product(self, operation: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """The device's shard of the sum of all devices' results, each of which is computed part by part."""

        def part(n: Any) -> Any:
            cut = list(operands)
            for operand, dim in self.operands:
                cut[operand] = self._cut(cut[operand], dim, n)
            return operation(*cut)

        return self._sum(part)

    def sum(self, x: Any) -> Any:
        """The device's shard of the sum of all devices' ``x``."""
        return self._sum(lambda n: self._cut(x, self.dim, n))

    def _sum(self, part: Callable[[Any], Any]) -> Any:
        """Inside of a `jax.shard_map` over ``axis``."""
        order, total = folded(self.parts), None
        onwards = [(order[i - 1], device) for i, device in enumerate(order)]
        place = jnp.asarray(np.argsort(order))[jax.lax.axis_index(self.axis)]
        for step in range(1, self.parts + 1):
            own = part(jnp.asarray(order)[(place - step) % self.parts])
            total = own if total is None else own + jax.lax.ppermute(total, self.axis, onwards)
        return total

    def _cut(self, x: Any, dim: int, part: Any) -> Any:
        size = x.shape[dim] // self.parts
        return jax.lax.dynamic_slice_in_dim(x, part * size, size, dim)


def folded(parts: int) -> list[int]:
    """Devices of a line in the order of a ring in which each is at most two from the next: up over the even ones, down
    over the odd ones. XLA for TPU (libtpu 0.0.50) waits for permutes along a part of a torus that go farther."""
    return [*range(0, parts, 2), *reversed(range(1, parts, 2))]


def first_ring(
    rule: Rule, made: Spec, reduced: Spec, shape: Sequence[int], sizes: Mapping[str, int], least: int
) -> Ring | None:
    """The ring for the first axis over which the only result of an operation is reduce-scattered; None without one.

    Args:
      made: of the result, with partial sums.
      reduced: the same after them.
      shape: of one device's partial sum.
      sizes: of the mesh axes.
      least: elements of a part.
    """
    sums = {a for a, kind in made.partial if kind == "sum"}
    for dim, (before, after) in enumerate(zip(made.dims, reduced.dims, strict=True)):
        (axis, *_), factor = after[len(before) :] or ("",), rule.results[0][dim]
        if axis not in sums or len(factor) != 1 or rule.kind(factor[0]) != "parallel":
            continue
        parts = sizes[axis]
        if parts <= MAX_PARTS and shape[dim] % parts == 0 and math.prod(shape) >= parts * least:
            places = tuple((i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor)
            left = Spec(made.dims, tuple((a, kind) for a, kind in made.partial if a != axis))
            return Ring(axis, dim, places, parts, left.with_dim(dim, (*before, axis)))
    return None
