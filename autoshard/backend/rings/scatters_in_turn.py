"""Gradients of a loop's body whose scatters run beside the gradients that come after them: the largest first.

Where SparseCores scatter, a chip waits for a scatter that no product comes after. XLA for TPU (libtpu 0.0.50.1) puts
gradients off until all else is computed, and of a decoder's layer it computes a large one last. Here a gradient is
computed when the one before it is, by decreasing size, so that the smallest scatter is what is waited for; and no
earlier than the scatter before that is done, or XLA puts all scatters off until all gradients are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.backend.on_shards import reduce_partials
from autoshard.backend.rings.gradients_in_turn import placed_last
from autoshard.backend.rings.operand_gathers import Bundle, made_last, places_made
from autoshard.backend.rings.product_rings import is_of_xla, operand_bytes, shard_shape
from autoshard.backend.rings.ring import when_done
from autoshard.ir.graph import OpKind
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island


@dataclass(frozen=True)
class ScattersInTurn:
    """Products that are lowered together, in the order in which they are computed."""

    eqns: tuple[jx.JaxprEqn, ...]
    waits: tuple[int, ...]
    """Of each, which operand it reads no earlier than the product before it is done: the one that is made last."""

    @property
    def waiting(self) -> tuple[jx.JaxprEqn, ...]:
        """All that is put off until all else is computed."""
        return self.eqns


@dataclass(frozen=True)
class GradientScatters:
    """The gradients of a step that are reduced on shards."""

    node_of: Callable[[jx.JaxprEqn], int | None]
    islands: Mapping[int, tuple[OpKind, Island]]
    makes_gradient: Callable[[jx.JaxprEqn], bool]
    """Whether no product reads what an equation makes."""
    mesh: LogicalMesh
    room: float
    """Bytes per device that operands of products that are put off may take: the plan counts them for a shorter time."""

    def in_turn(self, jaxpr: jx.Jaxpr, bundles: Sequence[Bundle]) -> ScattersInTurn | None:
        """What of the body of a loop is lowered together, of equations that are ``bundles`` by themselves.

        None where that is fewer than two products, their operands may not fit so long, or an equation has effects,
        which come in order.
        """
        if not self.mesh.hardware.sparse_core_collectives or any(eqn.effects for eqn in jaxpr.eqns):
            return None
        found = [b.eqns[0] for b in bundles if not b.rings and self._is_scattered(b.eqns[0])]
        stored = sum(sum(operand_bytes(*self.islands[self.node_of(eqn) or 0], self.mesh)) for eqn in found)
        if len(found) < 2 or stored > self.room:
            return None
        in_order, made_at = sorted(found, key=self._sent_bytes, reverse=True), places_made(jaxpr)
        return ScattersInTurn(tuple(in_order), tuple(made_last(eqn, made_at) for eqn in in_order))

    def _is_scattered(self, eqn: jx.JaxprEqn) -> bool:
        """Whether it is a product of XLA's own that makes partial sums of a gradient."""
        node = self.node_of(eqn)
        if node is None or node not in self.islands or not self.makes_gradient(eqn):
            return False
        kind, island = self.islands[node]
        return is_of_xla(kind) and len(island.out_specs) == 1 and bool(island.out_specs[0].partial)

    def _sent_bytes(self, eqn: jx.JaxprEqn) -> float:
        kind, island = self.islands[self.node_of(eqn) or 0]
        return math.prod(shard_shape(kind, -1, island.out_specs[0], self.mesh)) * kind.bits[-1] / 8

    def placed(self, jaxpr: jx.Jaxpr, bundles: Sequence[Bundle]) -> Iterator[Bundle | ScattersInTurn]:
        """The ``bundles`` of the body of a loop; what is lowered together comes after all that does not depend on
        it."""
        return placed_last(bundles, self.in_turn(jaxpr, bundles))

    def on_shards(self, together: ScattersInTurn, operands: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """The gradients, of the shards of the operands of each."""
        last, before, found = None, None, list[Any]()
        for eqn, waits, of in zip(together.eqns, together.waits, operands, strict=True):
            waiting = [when_done(when_done(x, last), before) if i == waits else x for i, x in enumerate(of)]
            last, before = jax.tree.leaves(jx.bind_on_shards(eqn, [])(*waiting))[0], found[-1] if found else None
            island = self.islands[self.node_of(eqn) or 0][1]
            found.append(reduce_partials(last, island.out_specs[0], island.reduced_specs[0], self.mesh))
        return tuple(found)
