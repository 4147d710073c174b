"""Gradients of a loop's body whose rings take longer than their own products: one ring after the other, each permute
beside a part of another gradient's product.

No product reads a gradient, so that XLA for TPU (libtpu 0.0.50.1) puts off what makes it, and begins what it gathers
for that late: permutes then wait behind a gather, and for each other, while whole products before and after have
nothing beside them. Here a product without a ring is computed in parts, each of which is there before a ring adds what
it has been sent meanwhile. As the parts read what is gathered, no ring adds anything before that is there. Of what
comes before the first ring in the program, products that gather nothing are done before it begins, and after all that
makes no gradient: XLA gathers beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from autoshard import jaxpr as jx
from autoshard.backend.on_shards import product_in_ring, reduce_partials
from autoshard.backend.rings.operand_gathers import Bundle, made_last, places_made
from autoshard.backend.rings.product_rings import (
    is_of_xla,
    operand_bytes,
    permuted_seconds,
    product_seconds,
    shard_shape,
)
from autoshard.backend.rings.ring import Ring, put_part, when_done
from autoshard.cost.overlap.rings import MIN_PRODUCT
from autoshard.ir.graph import OpKind
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island

LANES = 128
"""Elements of a part along the dimension that is cut come in so many: a register's."""


@dataclass(frozen=True)
class GradientsInTurn:
    """Products that are lowered together."""

    rings: tuple[jx.JaxprEqn, ...]
    """Each is summed in a ring that begins when the one before it is done."""
    waits: tuple[int, ...]
    """Of each ring, which operand it reads no earlier: the one that is made last."""
    in_parts: tuple[jx.JaxprEqn, ...]
    """Have no ring: parts of them are computed beside the permutes."""
    before: tuple[jx.JaxprEqn, ...]
    """Precede the rings in the program, gather nothing, and are done before the first one begins."""
    last: jx.Var | None
    """What the last product that makes no gradient makes; the products of ``before`` are computed after it."""

    @property
    def eqns(self) -> tuple[jx.JaxprEqn, ...]:
        """Those that are lowered together."""
        return (*self.in_parts, *self.rings)

    @property
    def waiting(self) -> tuple[jx.JaxprEqn, ...]:
        """All that is put off until all else is computed."""
        return (*self.before, *self.eqns)


@dataclass(frozen=True)
class GradientRings:
    """The gradients of a step that are summed in rings."""

    node_of: Callable[[jx.JaxprEqn], int | None]
    islands: Mapping[int, tuple[OpKind, Island]]
    rings: Mapping[int, Ring]
    """Of products, by node."""
    makes_gradient: Callable[[jx.JaxprEqn], bool]
    """Whether no product reads what an equation makes."""
    gathers: Callable[[jx.JaxprEqn], bool]
    """Whether XLA gathers an operand of a product while it computes others."""
    mesh: LogicalMesh
    room: float
    """Bytes per device that operands of products that are put off may take: the plan counts them for a shorter time."""

    def in_turn(self, jaxpr: jx.Jaxpr, bundles: Sequence[Bundle]) -> GradientsInTurn | None:
        """What of the body of a loop is lowered together, of equations that are ``bundles`` by themselves.

        None where no ring takes longer than its product, there is no other product, their operands may not fit so
        long, or an equation has effects, which come in order.
        """
        alone = {bundle.eqns[0] for bundle in bundles if not bundle.rings}
        if any(eqn.effects for eqn in jaxpr.eqns):
            return None
        rings, others, before = list[jx.JaxprEqn](), list[jx.JaxprEqn](), list[jx.JaxprEqn]()
        last: jx.Var | None = None
        for eqn in jaxpr.eqns:
            node = self.node_of(eqn)
            if not self.makes_gradient(eqn):
                last = eqn.outvars[0] if jx.contraction_flops(eqn) else last
                continue
            if node is None or node not in self.islands or eqn not in alone:
                continue
            kind, island = self.islands[node]
            if node in self.rings:
                rings += [eqn] if self._outlasts(self.rings[node], kind, island) else []
            elif self._is_large(kind, island) and _cut(kind, island, self.mesh):
                others.append(eqn)
                before += [] if rings else [eqn]
        in_parts = [eqn for eqn in others if self.gathers(eqn)] or others
        before = [eqn for eqn in before if eqn not in in_parts]
        if not rings or not in_parts or sum(map(self._stored, (*in_parts, *before))) > self.room:
            return None
        made_at = places_made(jaxpr)
        waits = tuple(made_last(eqn, made_at) for eqn in rings)
        return GradientsInTurn(tuple(rings), waits, tuple(in_parts), tuple(before), last)

    def _is_large(self, kind: OpKind, island: Island) -> bool:
        """Whether it is a product of XLA's own whose result is no less than a part of a ring should be."""
        if not is_of_xla(kind) or kind.convolution is not None or len(island.out_specs) != 1:
            return False
        return math.prod(shard_shape(kind, -1, island.out_specs[0], self.mesh)) >= MIN_PRODUCT

    def _stored(self, eqn: jx.JaxprEqn) -> float:
        """Bytes per device of the operands of a product."""
        return sum(operand_bytes(*self.islands[self.node_of(eqn) or 0], self.mesh))

    def _outlasts(self, ring: Ring, kind: OpKind, island: Island) -> bool:
        """Whether the permutes of a ring take longer than its product."""
        size = math.prod(shard_shape(kind, -1, island.out_specs[0], self.mesh)) * kind.bits[-1] / 8
        return permuted_seconds(ring.axis, size, self.mesh) > product_seconds(kind, island, self.mesh)

    def placed(self, jaxpr: jx.Jaxpr, bundles: Sequence[Bundle]) -> Iterator[Bundle | GradientsInTurn]:
        """The ``bundles`` of the body of a loop; what is lowered together comes after all that does not depend on
        it."""
        return placed_last(bundles, self.in_turn(jaxpr, bundles))

    def on_shards(self, together: GradientsInTurn, operands: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """The gradients, of the shards of the operands of each."""
        nodes = [self.node_of(eqn) or 0 for eqn in together.eqns]
        each = [(*self.islands[n], jx.bind_on_shards(eqn, [])) for n, eqn in zip(nodes, together.eqns, strict=True)]
        n, rings = len(together.in_parts), [self.rings[n] for n in nodes[len(together.in_parts) :]]
        steps = sum(ring.parts - 1 for ring in rings)
        parts = [
            _in_parts(kind, island, one, of, self.mesh, -(-steps // n))
            for (kind, island, one), of in zip(each[:n], operands, strict=False)
        ]
        every = [part for of in parts for part in of.parts]
        beside: list[Any] = [None] * steps
        for i, part in enumerate(every[:steps]):
            beside[i * steps // min(steps, len(every))] = part
        found, last, begin = list[Any](), None, 0
        for ring, (_, island, one), of, waits in zip(rings, each[n:], operands[n:], together.waits, strict=True):
            waiting = [when_done(x, last) if i == waits else x for i, x in enumerate(of)]
            end = begin + ring.parts - 1
            last = product_in_ring(ring, one, waiting, island.reduced_specs[0], self.mesh, beside[begin:end])
            found.append(last)
            begin = end
        whole = [
            reduce_partials(of.whole(), island.out_specs[0], island.reduced_specs[0], self.mesh)
            for of, (_, island, _) in zip(parts, each, strict=False)
        ]
        return (*whole, *found)


class _Together(Protocol):
    @property
    def waiting(self) -> tuple[jx.JaxprEqn, ...]: ...


def placed_last[T: _Together](bundles: Sequence[Bundle], together: T | None) -> Iterator[Bundle | T]:
    """``bundles`` of the body of a loop, of which what is lowered ``together`` comes after all that does not depend on
    it."""
    if together is None:
        yield from bundles
        return
    made, after = {v for eqn in together.waiting for v in eqn.outvars}, list[Bundle]()
    for bundle in bundles:
        if not made.isdisjoint(a for eqn in bundle.eqns for a in eqn.invars if isinstance(a, jx.Var)):
            made.update(v for eqn in bundle.eqns for v in eqn.outvars)
            after.append(bundle)
        elif made.isdisjoint(bundle.eqns[0].outvars):
            yield bundle
    yield together
    yield from after


@dataclass(frozen=True)
class _Parts:
    dim: int
    """Of the result: cut."""
    parts: Sequence[Any]

    def whole(self) -> Any:
        result = None
        for i, part in enumerate(self.parts):
            result = put_part(result, part, self.dim, i, len(self.parts))
        return result


def _cut(kind: OpKind, island: Island, mesh: LogicalMesh) -> tuple[int, int, int] | None:
    """The larger operand of those that have a dimension of their own in the result; which of theirs it is, and which of
    the result's; None without one."""
    rule, found = kind.rule, list[tuple[int, int, int, int]]()
    for d, factor in enumerate(rule.results[0]):
        places = [(i, dims.index(factor)) for i, dims in enumerate(rule.operands) if factor in dims]
        if len(factor) == 1 and len(places) == 1 and rule.kind(factor[0]) == "parallel":
            (i, dim) = places[0]
            found.append((math.prod(shard_shape(kind, i, island.in_specs[i], mesh)), i, dim, d))
    return max(found)[1:] if found else None


def _in_parts(
    kind: OpKind, island: Island, operation: Callable[..., Any], operands: Sequence[Any], mesh: LogicalMesh, most: int
) -> _Parts:
    """The product in at most so many parts: each reads a part of the larger operand, and all of the other one."""
    cut = _cut(kind, island, mesh)
    assert cut is not None
    operand, dim, of_result = cut
    size = operands[operand].shape[dim]
    unit, whole = LANES if size % LANES == 0 else 1, operands[operand]
    if dim == whole.ndim - 1:  # XLA for TPU would transpose all of it, so that it is another one
        whole = with_layout_constraint(whole, Layout(tuple(range(whole.ndim))))
    most = min(most, math.prod(shard_shape(kind, -1, island.out_specs[0], mesh)) // MIN_PRODUCT)
    number = max(n for n in range(1, most + 1) if size // unit % n == 0)
    made: list[Any] = []
    for i in range(number):
        read = [*operands]
        read[operand] = jax.lax.slice_in_dim(whole, i * size // number, (i + 1) * size // number, axis=dim)
        made.append(jax.lax.optimization_barrier(jax.tree.leaves(operation(*read))[0]))
    return _Parts(of_result, made)
