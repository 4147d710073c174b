"""Rings over the devices of a mesh axis, on shards: products whose partial sums are reduce-scattered in one, or an
operand all-gathered, beside the product.

Each device computes the part of its product that another one keeps, adds what its neighbour has summed of it, and sends
the sum on, while it computes the next part (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023). A device's own part comes last, and stays. Of an operand
that is gathered a device multiplies its own part first, and sends each part on while it multiplies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cost.overlap.rings import MAX_PARTS
from autoshard.ir.spec import Spec

MIN_SUM = 1 << 16
"""Elements of a part of what has been summed over another axis: the latency of smaller ones is all that they take."""


@dataclass(frozen=True)
class Ring:
    """A result that is reduce-scattered over one mesh axis."""

    axis: str
    dim: int
    """Of the result: scattered over ``axis``."""
    parts: int
    left: Spec
    """Of the result after the ring."""
    placed: Spec
    """Of the result once the other axes are reduced too: shards may be in another order than is asked for."""
    operands: tuple[tuple[int, int], ...] = ()
    """Operands of a product that have that dimension, and which of theirs it is."""

    def product(self, operation: Callable[..., Any], operands: Sequence[Any], beside: Sequence[Any] = ()) -> Any:
        """The device's shard of the sum of all devices' results, each of which is computed part by part; what is
        ``beside`` each permute, None for nothing, is there before what the permute brings is added.

        Parts are kept from one kernel with their sums: XLA for TPU (libtpu 0.0.50) makes one of the second part and its
        sum with the first, and computes neither while the first is sent. Of several products in a part it does so with
        the last, and the others run before.
        """

        def part(n: Any) -> Any:
            cut = list(operands)
            for operand, dim in self.operands:
                cut[operand] = self._cut(cut[operand], dim, n)
            made = operation(*cut)
            return jax.lax.optimization_barrier(made) if len(cut) == 2 else made

        return self._sum(part, beside)

    def sum(self, x: Any) -> Any:
        """The device's shard of the sum of all devices' ``x``."""
        return self._sum(lambda n: self._cut(x, self.dim, n))

    def _sum(self, part: Callable[[Any], Any], beside: Sequence[Any] = ()) -> Any:
        """Inside of a `jax.shard_map` over ``axis``."""
        total, others = None, iter(beside)
        for step in range(1, self.parts + 1):
            own = part(device_before(self.axis, self.parts, step))
            total = own if total is None else when_done(own, next(others, None)) + sent_on(total, self.axis, self.parts)
        return total

    def _cut(self, x: Any, dim: int, part: Any) -> Any:
        return _part(x, dim, part, x.shape[dim] // self.parts)


@dataclass(frozen=True)
class GatherRing:
    """An operand of a product that is all-gathered over one mesh axis."""

    axis: str
    parts: int
    operand: int
    dim: int
    """Of the operand: gathered over ``axis``."""
    others: tuple[tuple[int, int], ...]
    """Other operands that have that dimension, whole, and which of theirs it is."""
    result_dim: int | None
    """Which of the result's it is; None: it is summed over."""

    def cut(self, operands: Sequence[Any], part: Any, device: Any) -> list[Any]:
        """The operands of the product of a part that ``device`` has."""
        found, size = [*operands], part.shape[self.dim]
        for operand, dim in self.others:
            found[operand] = _part(operands[operand], dim, device, size)
        found[self.operand] = part
        return found

    def add(self, result: Any, made: Any, device: Any) -> Any:
        """The result with the product of the part of ``device``; ``result``: None at first."""
        if self.result_dim is None:
            return made if result is None else result + made
        return put_part(result, made, self.result_dim, device, self.parts)


def gathered_products(
    rings: Sequence[GatherRing],
    operations: Sequence[Callable[..., Any]],
    operands: Sequence[Sequence[Any]],
    *,
    keep: bool,
) -> tuple[list[Any], Any]:
    """Products that gather one operand, the same array, in one ring, and if they ``keep`` it that operand as gathered;
    inside a `jax.shard_map` over the axis."""
    ring = rings[0]
    x, whole, results = operands[0][ring.operand], None, [None] * len(rings)
    for step in range(ring.parts):
        device = device_before(ring.axis, ring.parts, step)
        for n, (one, operation) in enumerate(zip(rings, operations, strict=True)):
            results[n] = one.add(results[n], operation(*one.cut(operands[n], x, device)), device)
        if keep:
            whole = put_part(whole, x, ring.dim, device, ring.parts)
        if step < ring.parts - 1:
            x = sent_on(x, ring.axis, ring.parts)
    return results, whole


def put_part(whole: Any, part: Any, dim: int, device: Any, parts: int) -> Any:
    """``whole``, None at first, with the part of ``device``."""
    size = part.shape[dim]
    if whole is None:
        whole = jax.lax.empty((*part.shape[:dim], size * parts, *part.shape[dim + 1 :]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, device * size, dim)


def device_before(axis: str, parts: int, step: int) -> Any:
    """The device that is ``step`` before this one in the ring."""
    order = folded(parts)
    place = jnp.asarray(np.argsort(order))[jax.lax.axis_index(axis)]
    return jnp.asarray(order)[(place - step) % parts]


def sent_on(x: Any, axis: str, parts: int) -> Any:
    """What the device before this one in the ring has of ``x``."""
    order = folded(parts)
    return jax.lax.ppermute(x, axis, [(order[i - 1], device) for i, device in enumerate(order)])


def _part(x: Any, dim: int, part: Any, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, part * size, size, dim)


def folded(parts: int) -> list[int]:
    """Devices of a line in the order of a ring in which each is at most two from the next: up over the even ones, down
    over the odd ones. XLA for TPU (libtpu 0.0.50) waits for permutes along a part of a torus that go farther."""
    return [*range(0, parts, 2), *reversed(range(1, parts, 2))]


def first_ring(made: Spec, reduced: Spec, shape: Sequence[int], sizes: Mapping[str, int], least: int) -> Ring | None:
    """The ring for the first axis over which a result is reduce-scattered; None without one.

    Args:
      made: of the result, with partial sums.
      reduced: the same after them.
      shape: of one device's partial sum.
      sizes: of the mesh axes.
      least: elements of a part.
    """
    sums = {a for a, kind in made.partial if kind == "sum"}
    for dim, (before, after) in enumerate(zip(made.dims, reduced.dims, strict=True)):
        (axis, *_) = after[len(before) :] or ("",)
        if axis not in sums:
            continue
        parts = sizes[axis]
        if parts <= MAX_PARTS and shape[dim] % parts == 0 and math.prod(shape) >= parts * least:
            left = Spec(made.dims, tuple((a, kind) for a, kind in made.partial if a != axis))
            return Ring(axis, dim, parts, left.with_dim(dim, (*before, axis)), reduced)
    return None


def when_done(x: Any, last: Any) -> Any:
    """``x`` as a value that is there no earlier than ``last``; itself where that is None."""
    return x if last is None else jax.lax.optimization_barrier((x, last))[0]
