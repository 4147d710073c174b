"""Operands that products wait for, and the products that gather one of them in a ring together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard import jaxpr as jx
from autoshard.backend.rings.ring import GatherRing, when_done
from autoshard.cost.overlap.exposed_values import exposed_values
from autoshard.ir.graph import Graph
from autoshard.ir.spec import Spec
from autoshard.plan.record import PlanRecord


class Change(NamedTuple):
    """Specs of a value before and after it is gathered."""

    before: Spec
    after: Spec


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
        made_at = places_made(jaxpr)
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


def places_made(jaxpr: jx.Jaxpr) -> dict[jx.Var, int]:
    """By variable, the number of the equation that makes it."""
    return {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}


def made_last(eqn: jx.JaxprEqn, made_at: Mapping[jx.Var, int]) -> int:
    """Which operand of ``eqn`` is made last."""
    made = [made_at.get(a, -1) if isinstance(a, jx.Var) else -1 for a in eqn.invars]
    return made.index(max(made))


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
