"""Products whose partial sums are reduce-scattered in a ring, or an operand all-gathered in one, beside the product.

Each device computes the part of its product that another one keeps, adds what its neighbour has summed of it, and sends
the sum on, while it computes the next part (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023). A device's own part comes last, and stays. Of an operand
that is gathered a device multiplies its own part first, and sends each part on while it multiplies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import jaxpr as jx
from autoshard.cost.overlap import MAX_PARTS, MIN_PRODUCT, exposed_values, gathered_axis
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.spec import Spec
from autoshard.machine.collective import (
    ALL_GATHER,
    COLLECTIVE_PERMUTE,
    REDUCE_SCATTER,
    collective_rate,
)
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island
from autoshard.plan.record import PlanRecord

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

    def product(self, operation: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """The device's shard of the sum of all devices' results, each of which is computed part by part.

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

        return self._sum(part)

    def sum(self, x: Any) -> Any:
        """The device's shard of the sum of all devices' ``x``."""
        return self._sum(lambda n: self._cut(x, self.dim, n))

    def _sum(self, part: Callable[[Any], Any]) -> Any:
        """Inside of a `jax.shard_map` over ``axis``."""
        total = None
        for step in range(1, self.parts + 1):
            own = part(device_before(self.axis, self.parts, step))
            total = own if total is None else own + sent_on(total, self.axis, self.parts)
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


def _in_other_order(made: Spec, reduced: Spec, sizes: Mapping[str, int]) -> Iterator[Spec]:
    """``reduced`` with, in one dimension, an axis of few enough devices for a ring before the first, of too many."""
    for dim, (before, after) in enumerate(zip(made.dims, reduced.dims, strict=True)):
        first, *others = after[len(before) :] or ("",)
        for axis in others if sizes.get(first, 0) > MAX_PARTS else ():
            yield reduced.with_dim(dim, (*before, axis, *(a for a in after[len(before) :] if a != axis)))


class Change(NamedTuple):
    """Specs of a value before and after it is gathered."""

    before: Spec
    after: Spec


def product_ring(kind: OpKind, island: Island, mesh: LogicalMesh) -> Ring | None:
    """The ring that sums the result of a product, where XLA would wait for a reduce-scatter; None where it has no parts
    along the dimension, or waits less without."""
    if not mesh.hardware.blocking_reduce_scatters or not _is_of_xla(kind):
        return None
    (made,), (reduced,), rule = island.out_specs, island.reduced_specs, kind.rule
    shape = _shard_shape(kind, -1, made, mesh)
    orders = (reduced, *_in_other_order(made, reduced, mesh.shape))
    rings = (first_ring(made, order, shape, mesh.shape, MIN_PRODUCT) for order in orders)
    ring = next(filter(None, rings), None)
    factor = rule.results[0][ring.dim] if ring else ()
    if ring is None or len(factor) != 1 or rule.kind(factor[0]) != "parallel":
        return None
    size, own = math.prod(shape) * kind.bits[-1] / 8, len(made.dims[ring.dim])
    at_once, (_, *rest) = (spec.dims[ring.dim][own:] for spec in (reduced, ring.placed))
    (_, whole), (_, left) = (collective_rate(REDUCE_SCATTER, axes, mesh) for axes in (at_once, tuple(rest)))
    saved = whole * size - left * size / ring.parts
    if not _pays(saved, _permuted_seconds(ring.axis, size, mesh), _seconds(kind, island, mesh)):
        return None
    places = tuple((i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor)
    return replace(ring, operands=places)


def gather_ring(kind: OpKind, operand: int, change: Change, island: Island, mesh: LogicalMesh) -> GatherRing | None:
    """The ring in which an operand of a product with one result is all-gathered; None where it waits less without."""
    if not _is_of_xla(kind) or len(island.out_specs) != 1:
        return None
    (out,), rule, gathered = island.out_specs, kind.rule, gathered_axis(*change)
    if gathered is None:
        return None
    dim, axis = gathered
    factor = rule.operands[operand][dim]
    if len(factor) != 1:
        return None
    in_result = [d for d, f in enumerate(rule.results[0]) if f == factor]
    if rule.kind(factor[0]) != ("parallel" if in_result else "sum"):
        return None
    parts, read = mesh.shape[axis], _shard_shape(kind, operand, island.in_specs[operand], mesh)
    made = math.prod(_shard_shape(kind, -1, out, mesh))
    if not in_result and made > math.prod(read):  # sums would take longer than the gather
        return None
    least = MIN_PRODUCT * (parts if in_result else 1)
    if not 1 < parts <= MAX_PARTS or read[dim] % parts or made < least:
        return None
    # Each part of what is summed over reads the sum of those before, and writes it with its own.
    moved = 0.0 if in_result else 2 * parts * made * kind.bits[-1] / 8
    size = math.prod(read) * kind.sent_bits[operand] / 8
    longest = max(_permuted_seconds(axis, size, mesh), moved / mesh.hardware.memory_rate)
    if not _pays(collective_rate(ALL_GATHER, (axis,), mesh)[1] * size, longest, _seconds(kind, island, mesh)):
        return None
    others = tuple(
        (i, d) for i, dims in enumerate(rule.operands) for d, f in enumerate(dims) if f == factor and i != operand
    )
    return GatherRing(axis, parts, operand, dim, others, in_result[0] if in_result else None)


def _is_of_xla(kind: OpKind) -> bool:
    """Whether it is a product without halos that has no form of its own on shards."""
    rule = kind.rule
    return bool(kind.flops) and not (rule.local and rule.local.fun) and not rule.halos


def _shard_shape(kind: OpKind, position: int, spec: Spec, mesh: LogicalMesh) -> list[int]:
    return [n // mesh.axes_size(axes) for n, axes in zip(kind.shapes[position], spec.dims, strict=True)]


def _seconds(kind: OpKind, island: Island, mesh: LogicalMesh) -> float:
    """Of the product, on one device."""
    axes = {a for spec in (*island.in_specs, *island.out_specs) for a in spec.axes}
    return kind.flops / mesh.axes_size(tuple(axes)) / mesh.hardware.product_rate(kind.product_dtype)


def _permuted_seconds(axis: str, size: float, mesh: LogicalMesh) -> float:
    """Of the permutes of a ring that sends ``size`` bytes in all, but for a device's own part."""
    return (1 - 1 / mesh.shape[axis]) * size * collective_rate(COLLECTIVE_PERMUTE, (axis,), mesh)[1]


def _pays(at_once: float, in_ring: float, product: float) -> bool:
    """Whether a ring, what runs ``in_ring`` beside the ``product``, takes less time than the product and what it
    replaces, ``at_once``, in turn: that may use more links, or both directions of them, where a permute uses one."""
    return max(product, in_ring) < product + at_once


Gathered = tuple[int, Spec]
"""A value and the spec that it is read with."""


@dataclass(frozen=True)
class Bundle:
    """Equations that are lowered together."""

    eqns: tuple[jx.JaxprEqn, ...]
    rings: tuple[GatherRing, ...] = ()
    """In which each of them, if they are products, gathers the same operand; () of an equation without."""
    shared: bool = False
    """Whether others read the operand as gathered too."""


@dataclass(frozen=True)
class OperandGathers:
    """Operands that products wait for."""

    value_of: Mapping[jx.Var, int]
    changes: Mapping[tuple[int, int], Change]
    """By value and node."""
    node_of: Callable[[jx.JaxprEqn], int | None]
    ring_of: Callable[[jx.JaxprEqn, int, Change], GatherRing | None]
    """The ring in which an equation could gather an operand."""

    def change(self, eqn: jx.JaxprEqn, operand: int) -> Change | None:
        """Of an operand that ``eqn`` waits for."""
        var, node = eqn.invars[operand], self.node_of(eqn)
        return None if node is None or isinstance(var, jx.Literal) else self.changes.get((self.value_of[var], node))

    def gathered(self, eqn: jx.JaxprEqn, operand: int) -> Gathered | None:
        """What ``eqn`` waits for and reads as this operand."""
        change, var = self.change(eqn, operand), eqn.invars[operand]
        return None if change is None or isinstance(var, jx.Literal) else (self.value_of[var], change.after)

    def bundles(self, jaxpr: jx.Jaxpr) -> list[Bundle]:
        """The equations of ``jaxpr`` in order. Products that gather one operand in a ring are one bundle, which comes
        before all else that reads it gathered."""
        found, taken = list[tuple[float, Bundle]](), set[int]()
        made_at = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        for each in self._readers(jaxpr).values():
            first, able = each[0][0], list[tuple[int, GatherRing]]()
            for n, operand in each:
                eqn, change = jaxpr.eqns[n], self.change(jaxpr.eqns[n], operand)
                ready = all(made_at.get(a, -1) < first for a in eqn.invars if isinstance(a, jx.Var))
                once = sum(a is eqn.invars[operand] for a in eqn.invars) == 1
                if ready and once and change and n not in taken:
                    ring = self.ring_of(eqn, operand, change)
                    able += [(n, ring)] if ring else []
            # Where the parts of one are added up it has a ring of its own.
            able = [one for one in able if one[1].result_dim is not None] or able[:1]
            if able:
                rings = tuple(ring for _, ring in able)
                bundle = Bundle(tuple(jaxpr.eqns[n] for n, _ in able), rings, shared=len(each) > len(able))
                found.append((first, bundle))
                taken.update(n for n, _ in able)
        alone = [(n + 0.5, Bundle((eqn,))) for n, eqn in enumerate(jaxpr.eqns) if n not in taken]
        return [bundle for _, bundle in sorted((*found, *alone), key=lambda one: one[0])]

    def _readers(self, jaxpr: jx.Jaxpr) -> dict[Gathered, list[tuple[int, int]]]:
        """The equations, and which of their operands, that wait for a value."""
        found: dict[Gathered, list[tuple[int, int]]] = {}
        for n, eqn in enumerate(jaxpr.eqns if self.changes else ()):
            for i in range(len(eqn.invars)):
                if key := self.gathered(eqn, i):
                    found.setdefault(key, []).append((n, i))
        return found


def begun_after(
    last: jx.Atom | None, like: jx.JaxprEqn, products: Sequence[tuple[list[jx.Atom], int]]
) -> list[jx.JaxprEqn]:
    """What makes a ring begin when ``last`` is done, put in the place of an operand of its products: XLA for TPU
    (libtpu 0.0.50) runs two rings at once part by part in turn, and waits for each permute.

    Args:
      last: what the ring before has made; None: there is none.
      products: the operands of each, and which of them is the same in all.
    """
    if last is None:
        return []
    operands, position = products[0]
    x, waiting = operands[position], jx.Var(like.invars[position].aval)
    for atoms, n in products:
        atoms[n] = waiting
    return jx.splice(when_done, like.replace(outvars=[waiting]), [x, last])


def when_done(x: Any, last: Any) -> Any:
    """``x`` as a value that is there no earlier than ``last``; itself where that is None."""
    return x if last is None else jax.lax.optimization_barrier((x, last))[0]


def exposed_changes(graph: Graph, plan: PlanRecord) -> dict[tuple[int, int], Change]:
    """By value and node, the operands that are gathered while XLA would wait."""
    if not plan.mesh.hardware.blocking_gathers:
        return {}
    moved = {
        (c.value, c.node): Change(c.resharded_from, c.spec)
        for c in plan.intermediates
        if c.node is not None and c.resharded_from and not c.waypoints
    }
    exposed = exposed_values(graph, lambda node, value: moved.get((value, node)))
    return {(value, node): change for (value, node), change in moved.items() if value in exposed}
