"""Products whose partial sums are reduce-scattered in a ring, or an operand all-gathered in one, beside the product.

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

from autoshard.ir.rule import Rule
from autoshard.ir.spec import Spec
from autoshard.plan.exposed_gathers import gathered_axis

MAX_PARTS = 16
"""Devices of a ring in which sums travel: a side of a v5e's torus has as many, and each part is an instruction of its
own. A longer axis has several such rings, whose sums a second one adds up."""
MAX_GATHERED = 8
"""Devices of a ring in which an operand does."""
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
    rings: int
    """The axis has as many rings of ``parts`` neighbours."""
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
        total = _summed(part, _Place(self.axis, self.parts, 1, self.rings * self.parts))
        if self.rings == 1:
            return total
        size = total.shape[self.dim] // self.rings
        across = _Place(self.axis, self.rings, self.parts, self.rings * self.parts)
        return _summed(lambda n: _part(total, self.dim, n, size), across)

    def _cut(self, x: Any, dim: int, part: Any) -> Any:
        """What the devices at the place ``part`` of all rings keep."""
        size = x.shape[dim] // self.parts // self.rings
        if self.rings == 1:
            return _part(x, dim, part, size)
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(*before, self.rings, self.parts, size, *after)
        return jax.lax.dynamic_index_in_dim(x, part, dim + 1, keepdims=False).reshape(
            *before, self.rings * size, *after
        )


@dataclass(frozen=True)
class _Place:
    """Rings along a mesh axis of ``size`` devices, each of ``parts`` that are ``stride`` apart."""

    axis: str
    parts: int
    stride: int
    size: int

    def before(self, step: int) -> Any:
        """The place of the device that is ``step`` before this one in its ring."""
        order = folded(self.parts)
        place = jnp.asarray(np.argsort(order))[jax.lax.axis_index(self.axis) // self.stride % self.parts]
        return jnp.asarray(order)[(place - step) % self.parts]

    def sent_on(self, x: Any) -> Any:
        """What the device before this one in its ring has of ``x``."""
        order = folded(self.parts)
        after = dict(zip(order, [*order[1:], order[0]], strict=True))
        places = [(n, n // self.stride % self.parts) for n in range(self.size)]
        return jax.lax.ppermute(x, self.axis, [(n, n + (after[at] - at) * self.stride) for n, at in places])


def _summed(part: Callable[[Any], Any], ring: _Place) -> Any:
    """The sum over a ring of the part of this device."""
    total = None
    for step in range(1, ring.parts + 1):
        own = part(ring.before(step))
        total = own if total is None else own + ring.sent_on(total)
    return total


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
        return _put(result, made, self.result_dim, device, self.parts)


def gathered_products(
    rings: Sequence[GatherRing],
    operations: Sequence[Callable[..., Any]],
    operands: Sequence[Sequence[Any]],
    *,
    keep: bool,
) -> tuple[list[Any], Any]:
    """Products that gather one operand, the same array, in one ring, and if they ``keep`` it that operand as gathered;
    inside a `jax.shard_map` over the axis."""
    ring, place = rings[0], _Place(rings[0].axis, rings[0].parts, 1, rings[0].parts)
    x, whole, results = operands[0][ring.operand], None, [None] * len(rings)
    for step in range(ring.parts):
        device = place.before(step)
        for n, (one, operation) in enumerate(zip(rings, operations, strict=True)):
            results[n] = one.add(results[n], operation(*one.cut(operands[n], x, device)), device)
        if keep:
            whole = _put(whole, x, ring.dim, device, ring.parts)
        if step < ring.parts - 1:
            x = place.sent_on(x)
    return results, whole


def _put(whole: Any, part: Any, dim: int, device: Any, parts: int) -> Any:
    """``whole``, None at first, with the part of ``device``."""
    size = part.shape[dim]
    if whole is None:
        whole = jax.lax.empty((*part.shape[:dim], size * parts, *part.shape[dim + 1 :]), part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, part, device * size, dim)


def _part(x: Any, dim: int, part: Any, size: int) -> Any:
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
        whole = sizes[axis]
        parts = min(whole, MAX_PARTS)
        if shape[dim] % whole == 0 and whole % parts == 0 and math.prod(shape) >= parts * least:
            places = tuple((i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor)
            left = Spec(made.dims, tuple((a, kind) for a, kind in made.partial if a != axis))
            return Ring(axis, dim, places, parts, whole // parts, left.with_dim(dim, (*before, axis)))
    return None


def gather_ring(
    rule: Rule, operand: int, before: Spec, after: Spec, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> GatherRing | None:
    """The ring in which an operand of a product with one result is all-gathered; None where it is not.

    Args:
      before: of the operand.
      after: in which the product reads it.
      shapes: of one device's operands, as the product reads them, and of its result.
      sizes: of the mesh axes.
    """
    gathered = gathered_axis(before, after)
    if gathered is None or rule.halos:
        return None
    dim, axis = gathered
    factor = rule.operands[operand][dim]
    if len(factor) != 1:
        return None
    in_result = [d for d, f in enumerate(rule.results[0]) if f == factor]
    if rule.kind(factor[0]) != ("parallel" if in_result else "sum"):
        return None
    parts, whole = sizes[axis], math.prod(shapes[-1])
    if not in_result and whole > math.prod(shapes[operand]):  # sums would take longer than the gather
        return None
    least = MIN_PRODUCT * (parts if in_result else 1)
    if not 1 < parts <= MAX_GATHERED or shapes[operand][dim] % parts or whole < least:
        return None
    others = tuple(
        (i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor and i != operand
    )
    return GatherRing(axis, parts, operand, dim, others, in_result[0] if in_result else None)
