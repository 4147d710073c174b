"""Lowers a plan: inserts its sharding constraints and `jax.shard_map` islands into the program's jaxpr.

Equations are kept. A constrained result is followed by `with_sharding_constraint`; an operand that an equation reads
with another spec is preceded by one; constraints are identities. An equation that the plan runs in its local form
becomes an island: a `jax.shard_map` of that form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.backend.fetches_in_turn import fetched_in_turn, least_padded
from autoshard.backend.gathers.reversed_kernels import place_before_reversal
from autoshard.backend.gathers.rows_ahead import made_ahead
from autoshard.backend.host_copies import (
    Wait,
    fetched,
    in_one_layout,
    one_order,
    products_that_wait,
    sent,
    stacks_beside_copies,
)
from autoshard.backend.islands import Islands
from autoshard.backend.rings.fused_with_products import FusedWithProducts
from autoshard.backend.rings.gradients_in_turn import GradientRings, GradientsInTurn
from autoshard.backend.rings.kernel_rings import weight_rings
from autoshard.backend.rings.operand_gathers import (
    Bundle,
    Change,
    Gathered,
    OperandGathers,
    begun_after,
    exposed_changes,
    made_last,
    places_made,
)
from autoshard.backend.rings.product_rings import gather_ring, room_beside, sum_rings
from autoshard.backend.rings.ring import GatherRing
from autoshard.backend.rings.scatters_in_turn import GradientScatters, ScattersInTurn
from autoshard.cost.overlap.host_copies import copied_beside_products
from autoshard.cost.overlap.products import is_kernel
from autoshard.cost.overlap.weights_and_gradients import gradients_of
from autoshard.ir.graph import Graph
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.plan.record import PlanRecord


def constrain(graph: Graph, plan: PlanRecord, mesh: Mesh) -> jx.Jaxpr:
    """The program's jaxpr with the plan's constraints and islands, in nested jaxprs too."""
    shardings = {
        (c.value, c.node): [NamedSharding(mesh, s.partition_spec()) for s in (*c.waypoints, c.spec)]
        for c in plan.intermediates
    }
    results = {v: s for (v, n), s in shardings.items() if n is None}
    operands = {(v, n): s for (v, n), s in shardings.items() if n is not None}
    # Operand constraints number the program's results after the nodes: they are "read" by the caller.
    readers = {n for _, n in operands if n < len(graph.nodes)}
    outputs = [operands.get((v, n), ()) for n, v in enumerate(graph.outputs, len(graph.nodes))]
    waits = products_that_wait(graph, plan)
    nodes = {graph.nodes[n].results: n for n in (*readers, *waits, *(i.node for i in plan.islands))}
    ties = {(v, *graph.nodes[n].results): s for (v, n), s in operands.items() if n in readers and graph.nodes[n].tie}
    gathered = exposed_changes(graph, plan)
    gradients, fused = gradients_of(graph), FusedWithProducts(graph, plan)
    gathered_beside = {
        (c.value, c.node) for c in plan.intermediates if c.node is not None and c.gathers(plan.mesh.shape)
    } - gathered.keys()
    islands = Islands(
        {i.node: (graph.nodes[i.node].kind, i) for i in plan.islands},
        {i.node for i in plan.islands if is_kernel(graph.nodes[i.node].kind)},
        weight_rings(graph, plan),
        sum_rings(graph, plan, gradients, fused),
        mesh,
        plan.mesh,
        graph.program.rules,
    )
    lowering = _Lowering(
        graph.ids,
        results,
        operands,
        nodes,
        ties,
        islands,
        gradients,
        gathered,
        gathered_beside,
        fused,
        {(c.value, c.node) for c in plan.intermediates if c.ahead and c.node is not None},
        {v for n in copied_beside_products(graph) for v in graph.nodes[n].results},
        waits,
        room_beside(plan),
    )
    jaxpr = lowering.jaxpr(graph.program.jaxpr, outputs)
    lowered = made_ahead(jaxpr, {*lowering.early.values(), *lowering.fetched.values()}, lowering.awaited())
    if plan.mesh.platform == "tpu":
        return fetched_in_turn(lowered, _layouts_on_host(lowered, plan, mesh))
    return place_before_reversal(lowered) if plan.mesh.platform == "gpu" else lowered


def _layouts_on_host(jaxpr: jx.Jaxpr, plan: PlanRecord, mesh: Mesh) -> dict[jx.Var, tuple[int, ...]]:
    """The arguments that the plan keeps in the host's memory unasked, with the order of their dimensions there."""
    found = dict[jx.Var, tuple[int, ...]]()
    for v, place in zip(jaxpr.invars, plan.inputs, strict=True):
        if place.offloaded:
            shape = NamedSharding(mesh, place.spec.partition_spec()).shard_shape(jx.aval(v).shape)
            if (order := least_padded(shape, plan.mesh.hardware.tile)) is not None:
                found[v] = order
    return found


class _Lowering:
    """Rewrites a jaxpr and those nested in it.

    Args:
      value_of: the graph's value number of each variable.
      result_shardings: shardings to constrain a value to, in turn, where it is defined.
      operand_shardings: the same where one node reads it: by value and node.
      node_of_results: nodes with operand constraints or an island, by the values that they define.
      tie_shardings: constraints on what enters, leaves or is carried around a nested jaxpr, by value before and after.
      islands: what runs on shards.
      gradients: values that no product reads.
      gathered: specs before and after of operands that products wait for, by value and node.
      gathered_beside: by value and node, the operands that are gathered beside other products.
      fused: what XLA computes with products.
      ahead: operands that loops gather an iteration ahead, by value and node.
      moved: values that are copied to the host's memory or from there beside products.
      waits: products of loops that begin when values of the next iteration have been fetched, by node.
      room: bytes per device for what rings keep beside what the plan counts.
    """

    def __init__(
        self,
        value_of: Mapping[jx.Var, int],
        result_shardings: Mapping[int, Sequence[NamedSharding]],
        operand_shardings: Mapping[tuple[int, int], Sequence[NamedSharding]],
        node_of_results: Mapping[tuple[int, ...], int],
        tie_shardings: Mapping[tuple[int, ...], Sequence[NamedSharding]],
        islands: Islands,
        gradients: Set[int],
        gathered: Mapping[tuple[int, int], Change],
        gathered_beside: Set[tuple[int, int]],
        fused: FusedWithProducts,
        ahead: Set[tuple[int, int]] = frozenset(),
        moved: Set[int] = frozenset(),
        waits: Mapping[int, Wait] = MappingProxyType({}),
        room: float = math.inf,
    ) -> None:
        self.ahead, self.early = ahead, dict[tuple[int, NamedSharding], jx.Var]()
        """`early`: by value and sharding, what these are when they are gathered."""
        self.waits, self.fetched, self._waiting = waits, dict[int, jx.Var](), dict[jx.Var, int]()
        """`fetched`: by value, what the loops' rows are when they are on the device."""
        self.value_of, self.node_of_results = value_of, node_of_results
        self.islands, self.gradients, self.moved, self.gathered_beside = islands, gradients, moved, gathered_beside
        self.fused = fused
        self.gradient_rings = GradientRings(
            self._node,
            islands.by_node,
            islands.sum_rings,
            self._makes_gradient,
            self._gathers_beside_products,
            islands.logical_mesh,
            room,
        )
        self.gradient_scatters = GradientScatters(
            self._node, islands.by_node, self._makes_gradient, islands.logical_mesh, room
        )
        self.gathers = OperandGathers(value_of, gathered, self._node, self._gather_ring)
        self.result_shardings, self.operand_shardings = result_shardings, operand_shardings
        self.tie_shardings, self.traits = tie_shardings, islands.rules.traits

    def jaxpr(
        self, jaxpr: jx.Jaxpr, outputs: Sequence[Sequence[NamedSharding]] = (), *, in_loop: bool = False
    ) -> jx.Jaxpr:
        """``jaxpr`` constrained; ``outputs`` are the shardings to constrain each of its results to, in turn.

        Args:
          in_loop: whether it is the body of a scan.
        """
        eqns: list[jx.JaxprEqn] = []
        now: dict[jx.Var, jx.Atom] = {}  # the constrained variable that replaces an original one from here on

        def constrain_result(var: jx.Var, like: jx.JaxprEqn, node: int | None = None) -> None:
            value = self.value_of.get(var, -1)
            in_place = self.operand_shardings.get((value, node), ()) if node is not None else ()
            shardings = (*in_place, *self.result_shardings.get(value, ()))
            if shardings:
                now[var] = self._constrain_through(now.get(var, var), shardings, like, eqns)

        if jaxpr.eqns:
            for var in jaxpr.invars:
                constrain_result(var, jaxpr.eqns[0])
        shared: dict[Gathered, jx.Var] = {}  # operands as rings have gathered them
        ring_end: jx.Atom | None = None  # what the last ring that gathers has made
        gradient: jx.Atom | None = None  # what the last ring that sums a gradient has made
        made_at, bundles = places_made(jaxpr), self.gathers.bundles(jaxpr)
        stacks = stacks_beside_copies(jaxpr, self._moves) if self.moved else set[jx.Var]()
        for bundle in self._placed(jaxpr, bundles) if in_loop else bundles:
            if isinstance(bundle, ScattersInTurn):
                operands = [self._operands(eqn, shared, now, eqns) for eqn in bundle.eqns]
                in_turn = functools.partial(self.gradient_scatters.on_shards, bundle)
                eqns += self._together(in_turn, bundle.eqns[0], bundle.eqns, operands)
                for eqn in bundle.eqns:
                    constrain_result(eqn.outvars[0], eqn, self._node(eqn))
                continue
            if isinstance(bundle, GradientsInTurn):
                eqns += self._in_turn(bundle, made_at, gradient, shared, now, eqns)
                gradient = bundle.rings[-1].outvars[0]
                for eqn in bundle.waiting:
                    constrain_result(eqn.outvars[0], eqn, self._node(eqn))
                continue
            if bundle.rings:
                operands = [
                    self._operands(eqn, shared, now, eqns, {ring.operand})
                    for eqn, ring in zip(bundle.eqns, bundle.rings, strict=True)
                ]
                gathered = [ring.operand for ring in bundle.rings]
                eqns += begun_after(ring_end, bundle.eqns[0], [*zip(operands, gathered, strict=True)])
                eqns += self._in_one_ring(bundle, operands, shared)
                ring_end = bundle.eqns[-1].outvars[0]
                for eqn in bundle.eqns:
                    constrain_result(eqn.outvars[0], eqn, self._node(eqn))
                continue
            (eqn,) = bundle.eqns
            node = self._node(eqn)
            in_rings = {ring.operand for ring in self.islands.weight_rings.get(node, ())} if node is not None else ()
            invars = self._operands(eqn, shared, now, eqns, in_rings)
            regions = jx.regions(eqn)
            if regions and not self._is_opaque(regions):
                entries = [(w.outside, invars[w.outside], r.body.invars[w.inside]) for r in regions for w in r.inputs]
                for i, outside, inside in entries:
                    if outside is invars[i] and not isinstance(outside, jx.Literal):
                        shardings = self._tie_shardings(eqn.invars[i], inside)
                        invars[i] = self._constrain_through(outside, shardings, eqn, eqns)
                is_scan = jx.scan_groups(eqn) is not None
                bodies = [self.jaxpr(r.body, self._body_result_shardings(eqn, r), in_loop=is_scan) for r in regions]
                if is_scan and stacks:
                    lanes = self.islands.logical_mesh.hardware.tile[1]
                    bodies = [in_one_layout(body, eqn, stacks, self._shard_shape, lanes) for body in bodies]
                eqn = jx.with_bodies(eqn, bodies)
            if self.traits(eqn.primitive).constrains:
                self._user_constraint(eqn, invars[0], now, eqns)
                continue
            if node in self.islands.sum_rings and self._makes_gradient(eqn):
                eqns += begun_after(gradient, eqn, [(invars, made_last(eqn, made_at))])
                gradient = eqn.outvars[0]
            if node is not None and node in self.islands.by_node:
                eqns += self.islands.alone(eqn, invars, node)
            else:
                eqns += self._equation(eqn, invars)
            for var in eqn.outvars:
                constrain_result(var, eqn, node)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        outvars = [
            a if isinstance(a, jx.Literal) else self._constrain_through(now.get(a, a), shardings, last, eqns)
            for a, shardings in zip(jaxpr.outvars, outputs or [()] * len(jaxpr.outvars), strict=True)
        ]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _node(self, eqn: jx.JaxprEqn) -> int | None:
        return self.node_of_results.get(tuple(self.value_of[v] for v in eqn.outvars))

    def _moves(self, eqn: jx.JaxprEqn) -> bool:
        """Whether it copies to the host's memory or from there beside products."""
        return not self.moved.isdisjoint([self.value_of.get(v, -1) for v in eqn.outvars])

    def _shard_shape(self, var: jx.Var) -> Sequence[int]:
        """Of a value on one device, as far as it is constrained."""
        shape, shardings = jx.aval(var).shape, self.result_shardings.get(self.value_of.get(var, -1), ())
        return shardings[-1].shard_shape(shape) if shardings else shape

    def _makes_gradient(self, eqn: jx.JaxprEqn) -> bool:
        """Whether no product reads what it makes."""
        return not self.gradients.isdisjoint([self.value_of[v] for v in eqn.outvars])

    def _gathers_beside_products(self, eqn: jx.JaxprEqn) -> bool:
        """Whether an operand is gathered while other products are computed."""
        read = [self.value_of[a] for a in eqn.invars if isinstance(a, jx.Var)]
        return any((v, self._node(eqn)) in self.gathered_beside for v in read)

    def _gather_ring(self, eqn: jx.JaxprEqn, operand: int, change: Change) -> GatherRing | None:
        """The ring in which a product gathers an operand, where its result has none."""
        node = self._node(eqn)
        if node is None or node not in self.islands.by_node or node in self.islands.sum_rings:
            return None
        kind, island = self.islands.by_node[node]
        mesh = self.islands.logical_mesh
        more = self.fused.reduced_seconds(self.value_of[eqn.outvars[0]], kind, island, mesh)
        if not self._makes_gradient(eqn):
            others = [a if n != operand else None for n, a in enumerate(eqn.invars)]
            read = [self.value_of[a] if isinstance(a, jx.Var) else 0 for a in others]
            more += sum(self.fused.stored_seconds(read, kind, island, mesh).values())
        return gather_ring(kind, operand, change, island, mesh, more)

    def _in_one_ring(
        self, bundle: Bundle, operands: Sequence[Sequence[jx.Atom]], shared: dict[Gathered, jx.Var]
    ) -> list[jx.JaxprEqn]:
        """Products that gather an operand in one ring; it is added to ``shared`` where others read it too."""
        like, operand = bundle.eqns[0], bundle.rings[0].operand
        change, key = self.gathers.change(like, operand), self.gathers.gathered(like, operand)
        assert change is not None
        assert key is not None
        if bundle.shared:
            shared[key] = jx.Var(like.invars[operand].aval)
        nodes = [self._node(eqn) or 0 for eqn in bundle.eqns]
        return self.islands.in_one_ring(bundle, nodes, operands, change, shared.get(key) if bundle.shared else None)

    def _placed(
        self, jaxpr: jx.Jaxpr, bundles: Sequence[Bundle]
    ) -> Iterator[Bundle | GradientsInTurn | ScattersInTurn]:
        """The ``bundles`` of the body of a loop, with gradients that are lowered together."""
        has_scatters = self.islands.logical_mesh.hardware.sparse_core_collectives
        return (self.gradient_scatters if has_scatters else self.gradient_rings).placed(jaxpr, bundles)

    def _together(
        self,
        on_shards: Callable[[Sequence[Sequence[Any]]], tuple[Any, ...]],
        like: jx.JaxprEqn,
        products: Sequence[jx.JaxprEqn],
        operands: Sequence[Sequence[jx.Atom]],
    ) -> list[jx.JaxprEqn]:
        """Gradients that are lowered together, of their operands on shards, with the source of ``like``."""
        found = [self.islands.by_node[self._node(eqn) or 0][1] for eqn in products]
        return self.islands.together(
            on_shards,
            like.replace(outvars=[eqn.outvars[0] for eqn in products]),
            operands,
            [island.in_specs for island in found],
            [island.reduced_specs[0] for island in found],
        )

    def _in_turn(
        self,
        together: GradientsInTurn,
        made_at: Mapping[jx.Var, int],
        last: jx.Atom | None,
        shared: Mapping[Gathered, jx.Var],
        now: Mapping[jx.Var, jx.Atom],
        eqns: list[jx.JaxprEqn],
    ) -> list[jx.JaxprEqn]:
        """Gradients that are lowered together, whose first ring begins when ``last`` is done, and what comes before."""
        operands = [self._operands(eqn, shared, now, eqns) for eqn in together.eqns]
        first, waiting = together.rings[0], (operands[len(together.in_parts)], together.waits[0])
        eqns += begun_after(last, first, [waiting])
        for eqn in together.before:
            invars = self._operands(eqn, shared, now, eqns)
            ready = together.last and now.get(together.last, together.last)
            eqns += begun_after(ready, eqn, [(invars, made_last(eqn, made_at))])
            eqns += self.islands.alone(eqn, invars, self._node(eqn) or 0)
            eqns += begun_after(eqn.outvars[0], first, [waiting])
        on_shards = functools.partial(self.gradient_rings.on_shards, together)
        return self._together(on_shards, first, together.eqns, operands)

    def _equation(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal]) -> list[jx.JaxprEqn]:
        """``eqn`` itself, in row-major layout where XLA for CPU would refuse another one."""
        eqn = eqn.replace(invars=invars)
        if self._moves(eqn):
            (result,) = eqn.outvars
            order = one_order(result, self._shard_shape(result), self.islands.logical_mesh.hardware.tile[1])
            if in_host_memory(result.aval):
                return sent(eqn, order)
            eqns, self.fetched[self.value_of[result]] = fetched(eqn, order)
            return eqns
        on_cpu = self.islands.mesh.devices.flat[0].platform == "cpu"
        if not on_cpu or not self.traits(eqn.primitive).row_major_on_cpu:
            return [eqn]
        same_op = jx.bind_on_shards(eqn, [])

        def in_row_major(*operands: Any) -> list[Any]:
            return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in same_op(*operands)]

        return jx.splice(in_row_major, eqn, invars)

    def _is_opaque(self, regions: tuple[jx.Region, ...]) -> bool:
        """Whether the nested jaxprs are not in the graph, because their function has a rule of its own."""
        variables = (v for r in regions for v in (*r.body.invars, *(o for e in r.body.eqns for o in e.outvars)))
        first = next(variables, None)
        return first is not None and first not in self.value_of

    def _body_result_shardings(self, eqn: jx.JaxprEqn, region: jx.Region) -> list[Sequence[NamedSharding]]:
        """Shardings to constrain each result of a nested jaxpr to, in turn, for the next iteration or the outer
        result.
        """
        found: list[Sequence[NamedSharding]] = [()] * len(region.body.outvars)
        leaving = [(w.inside, eqn.outvars[w.outside]) for w in region.outputs]
        for i, after in (*leaving, *((end, region.body.invars[start]) for end, start in region.carries)):
            found[i] = self._tie_shardings(region.body.outvars[i], after) or found[i]
        is_branch = len(jx.regions(eqn)) > 1 and not region.carries
        for w in region.outputs if is_branch else ():  # XLA needs equal shardings at the end of all branches
            outer = self.result_shardings.get(self.value_of[eqn.outvars[w.outside]], ())
            found[w.inside] = found[w.inside] or outer[-1:]
        return found

    def _tie_shardings(self, before: jx.Var | jx.Literal, after: jx.Var) -> Sequence[NamedSharding]:
        return (
            ()
            if isinstance(before, jx.Literal)
            else self.tie_shardings.get((self.value_of[before], self.value_of[after]), ())
        )

    def _operands(
        self,
        eqn: jx.JaxprEqn,
        shared: Mapping[Gathered, jx.Var],
        now: Mapping[jx.Var, jx.Atom],
        eqns: list[jx.JaxprEqn],
        in_rings: Container[int] = (),
    ) -> list[jx.Atom]:
        """The operands with the specs that ``eqn`` reads them with, but for those of these numbers, which rings
        gather."""
        node, found = self._node(eqn), list[jx.Atom]()
        for i, var in enumerate(eqn.invars):
            if isinstance(var, jx.Literal) or i in in_rings:
                found.append(var if isinstance(var, jx.Literal) else now.get(var, var))
            elif (key := self.gathers.gathered(eqn, i)) is not None and key in shared:
                found.append(shared[key])
            else:
                value, begin = self.value_of[var], len(eqns)
                shardings = [*self.operand_shardings.get((value, node), ())] if node is not None else []
                if (value, node) in self.ahead and (value, shardings[0]) in self.early:
                    found.append(self._constrain_through(self.early[value, shardings[0]], shardings[1:], eqn, eqns))
                    continue
                found.append(self._constrain_through(now.get(var, var), shardings, eqn, eqns))
                if (value, node) in self.ahead:
                    self.early[value, shardings[0]] = eqns[begin].outvars[0]
        if node is not None and node in self.waits:
            alone = [i for i in self.waits[node].operands if i not in in_rings and not isinstance(found[i], jx.Literal)]
            for i in alone[:1]:
                made, (found[i],) = jx.emit(jax.lax.optimization_barrier, eqn, found[i])
                self._waiting[made[-1].outvars[0]] = node
                eqns += made
        return found

    def awaited(self) -> dict[jx.Var, list[jx.Var]]:
        """What loops have fetched for the next iteration, by the result of the barrier before which it is there."""
        return {
            v: [self.fetched[x] for x in self.waits[n].fetched if x in self.fetched] for v, n in self._waiting.items()
        }

    def _constrain_through(
        self, var: jx.Atom, shardings: Sequence[NamedSharding], like: jx.JaxprEqn | None, eqns: list[jx.JaxprEqn]
    ) -> jx.Atom:
        """``var`` constrained to each of ``shardings`` in turn."""
        for sharding in shardings:
            fresh = jx.Var(var.aval)
            eqns.append(jx.constrain_variable(var, fresh, sharding, like))
            var = fresh
        return var

    def _user_constraint(
        self, eqn: jx.JaxprEqn, operand: jx.Atom, now: dict[jx.Var, jx.Atom], eqns: list[jx.JaxprEqn]
    ) -> None:
        """Replaces a constraint that the user wrote in the step by the plan's, over the plan's mesh."""
        (result,) = eqn.outvars
        shardings = self.result_shardings.get(self.value_of[result], ())
        if isinstance(operand, jx.Literal) or not shardings:  # a scalar: nothing to constrain
            now[result] = operand
            return
        eqns.append(
            jx.constrain_variable(
                self._constrain_through(operand, shardings[:-1], eqn, eqns), result, shardings[-1], eqn
            )
        )
