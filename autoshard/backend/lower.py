"""Lowers a plan: inserts its sharding constraints and `jax.shard_map` islands into the program's jaxpr.

Equations are kept. A constrained result is followed by `with_sharding_constraint`; an operand that an equation reads
with another spec is preceded by one; constraints are identities. An equation that the plan runs in its local form
becomes an island: a `jax.shard_map` of that form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.backend.gathers.early_gathers import gather_early
from autoshard.backend.gathers.reversed_kernels import place_before_reversal
from autoshard.backend.host_copies import beside_products
from autoshard.backend.kernel_rings import WeightRing, gathered_in_turn, reduced_in_turn, weight_rings
from autoshard.backend.on_shards import extend_with_halos, in_order, reduce_in_rings, reduce_partials
from autoshard.backend.ring_products import (
    Bundle,
    Change,
    Gathered,
    GatherRing,
    OperandGathers,
    Ring,
    begun_after,
    exposed_changes,
    gather_ring,
    gathered_products,
    product_ring,
)
from autoshard.cost.overlap import copied_beside_products, gradients_of, is_kernel
from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.rule import halo_axes
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island
from autoshard.plan.record import PlanRecord

MAX_FILLED = 0.95
"""Share of the memory that a plan may take with what a ring stores beside it: XLA leaves gaps."""


def constrain(graph: Graph, plan: PlanRecord, mesh: Mesh) -> jx.Jaxpr:
    """The program's jaxpr with the plan's constraints and islands, in nested jaxprs too."""
    shardings = {
        (c.value, c.node): [NamedSharding(mesh, s.partition_spec()) for s in (*c.waypoints, c.spec)]
        for c in plan.intermediates
    }
    results = {v: s for (v, n), s in shardings.items() if n is None}
    operands = {(v, n): s for (v, n), s in shardings.items() if n is not None}
    islands = {i.node: (graph.nodes[i.node].kind, i) for i in plan.islands}
    # Operand constraints number the program's results after the nodes: they are "read" by the caller.
    readers = {n for _, n in operands if n < len(graph.nodes)}
    outputs = [operands.get((v, n), ()) for n, v in enumerate(graph.outputs, len(graph.nodes))]
    nodes = {graph.nodes[n].results: n for n in (*readers, *islands)}
    ties = {(v, *graph.nodes[n].results): s for (v, n), s in operands.items() if n in readers and graph.nodes[n].tie}
    gathered = exposed_changes(graph, plan)
    rings, kernels = weight_rings(graph, plan), {n for n in islands if is_kernel(graph.nodes[n].kind)}
    gradients = gradients_of(graph)
    lowering = _Lowering(
        graph.ids,
        results,
        operands,
        nodes,
        ties,
        islands,
        kernels,
        gradients,
        gathered,
        rings,
        _sum_rings(graph, plan, gradients),
        mesh,
        plan.mesh,
        graph.program.rules,
        {(c.value, c.node) for c in plan.intermediates if c.ahead and c.node is not None},
        {v for n in copied_beside_products(graph) for v in graph.nodes[n].results},
    )
    lowered = gather_early(lowering.jaxpr(graph.program.jaxpr, outputs), {*lowering.early.values()})
    return place_before_reversal(lowered) if plan.mesh.platform == "gpu" else lowered


def _sum_rings(graph: Graph, plan: PlanRecord, gradients: Set[int]) -> dict[int, Ring]:
    """The rings in which products are summed, by node.

    XLA may compute an operand while one product reads it, as logits' cotangents, and stores it for those of a ring.
    Those of a gradient store all its parts besides: none where the operand may be too much.
    """
    found, sizes = dict[int, Ring](), plan.mesh.shape
    room = MAX_FILLED * plan.mesh.hardware.memory - plan.memory.peak
    for island in plan.islands:
        node = graph.nodes[island.node]
        stored = [b / spec.num_shards(sizes) for b, spec in zip(node.kind.bytes, island.in_specs, strict=False)]
        ring = product_ring(node.kind, island, plan.mesh)
        if ring is not None and (gradients.isdisjoint(node.results) or max(stored) <= room):
            found[island.node] = ring
    return found


class _Lowering:
    """Rewrites a jaxpr and those nested in it.

    Args:
      value_of: the graph's value number of each variable.
      result_shardings: shardings to constrain a value to, in turn, where it is defined.
      operand_shardings: the same where one node reads it: by value and node.
      node_of_results: nodes with operand constraints or an island, by the values that they define.
      tie_shardings: constraints on what enters, leaves or is carried around a nested jaxpr, by value before and after.
      islands: kind and island by node.
      kernels, gradients: nodes whose products run in a local form; values that no product reads.
      gathered: specs before and after of operands that products wait for, by value and node.
      weight_rings: weights that kernels gather in rings, by node.
      sum_rings: those in which products are summed, by node.
      mesh, logical_mesh: the mesh with devices, and with links.
      ahead: operands that loops gather an iteration ahead, by value and node.
      moved: values that are copied to the host's memory or from there beside products.
    """

    def __init__(
        self,
        value_of: Mapping[jx.Var, int],
        result_shardings: Mapping[int, Sequence[NamedSharding]],
        operand_shardings: Mapping[tuple[int, int], Sequence[NamedSharding]],
        node_of_results: Mapping[tuple[int, ...], int],
        tie_shardings: Mapping[tuple[int, ...], Sequence[NamedSharding]],
        islands: Mapping[int, tuple[OpKind, Island]],
        kernels: Set[int],
        gradients: set[int],
        gathered: Mapping[tuple[int, int], Change],
        weight_rings: Mapping[int, Sequence[WeightRing]],
        sum_rings: Mapping[int, Ring],
        mesh: Mesh,
        logical_mesh: LogicalMesh,
        rules: Rules,
        ahead: Set[tuple[int, int]] = frozenset(),
        moved: Set[int] = frozenset(),
    ) -> None:
        self.ahead, self.early = ahead, dict[tuple[int, NamedSharding], jx.Var]()
        """`early`: by value and sharding, what these are when they are gathered."""
        self.value_of, self.node_of_results = value_of, node_of_results
        self.islands, self.kernels, self.gradients, self.weight_rings = islands, kernels, gradients, weight_rings
        self.sum_rings, self.moved = sum_rings, moved
        self.gathers = OperandGathers(value_of, gathered, self._node, self._gather_ring)
        self.result_shardings, self.operand_shardings = result_shardings, operand_shardings
        self.tie_shardings, self.mesh, self.logical_mesh, self.rules = tie_shardings, mesh, logical_mesh, rules

    def jaxpr(self, jaxpr: jx.Jaxpr, outputs: Sequence[Sequence[NamedSharding]] = ()) -> jx.Jaxpr:
        """``jaxpr`` constrained; ``outputs`` are the shardings to constrain each of its results to, in turn."""
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
        made_at = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        for bundle in self.gathers.bundles(jaxpr):
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
            in_rings = {ring.operand for ring in self.weight_rings.get(node, ())} if node is not None else ()
            invars = self._operands(eqn, shared, now, eqns, in_rings)
            regions = jx.regions(eqn)
            if regions and not self._is_opaque(regions):
                entries = [(w.outside, invars[w.outside], r.body.invars[w.inside]) for r in regions for w in r.inputs]
                for i, outside, inside in entries:
                    if outside is invars[i] and not isinstance(outside, jx.Literal):
                        shardings = self._tie_shardings(eqn.invars[i], inside)
                        invars[i] = self._constrain_through(outside, shardings, eqn, eqns)
                eqn = jx.with_bodies(eqn, [self.jaxpr(r.body, self._body_result_shardings(eqn, r)) for r in regions])
            if self.rules.traits(eqn.primitive).constrains:
                self._user_constraint(eqn, invars[0], now, eqns)
                continue
            if self._sums_gradient(eqn, node):
                made = [made_at.get(a, -1) if isinstance(a, jx.Var) else -1 for a in eqn.invars]
                eqns += begun_after(gradient, eqn, [(invars, made.index(max(made)))])
                gradient = eqn.outvars[0]
            eqns += self._island(eqn, invars, node) if node in self.islands else self._equation(eqn, invars)
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

    def _sums_gradient(self, eqn: jx.JaxprEqn, node: int | None) -> bool:
        """Whether it is a product whose result, which no other product reads, is summed in a ring."""
        return node in self.sum_rings and not self.gradients.isdisjoint([self.value_of[v] for v in eqn.outvars])

    def _gather_ring(self, eqn: jx.JaxprEqn, operand: int, change: Change) -> GatherRing | None:
        """The ring in which a product gathers an operand, where its result has none."""
        node = self._node(eqn)
        if node is None or node not in self.islands or node in self.sum_rings:
            return None
        kind, island = self.islands[node]
        return gather_ring(kind, operand, change, island, self.logical_mesh)

    def _in_one_ring(
        self, bundle: Bundle, operands: Sequence[Sequence[jx.Atom]], shared: dict[Gathered, jx.Var]
    ) -> list[jx.JaxprEqn]:
        """Products as one `jax.shard_map` in which they gather an operand; it is added to ``shared`` where others read
        it too."""
        like, ring = bundle.eqns[0], bundle.rings[0]
        islands = [self.islands[self._node(eqn) or 0][1] for eqn in bundle.eqns]
        change, key = self.gathers.change(like, ring.operand), self.gathers.gathered(like, ring.operand)
        assert change is not None
        assert key is not None
        ops = [jx.bind_on_shards(eqn, []) for eqn in bundle.eqns]
        ins = [
            [change.before if i == r.operand else s for i, s in enumerate(island.in_specs)]
            for island, r in zip(islands, bundle.rings, strict=True)
        ]
        ends = list(itertools.accumulate(map(len, ins)))

        def on_shards(*flat: Any) -> tuple[Any, ...]:
            each = [flat[end - len(specs) : end] for end, specs in zip(ends, ins, strict=True)]
            alone = [lambda *parts, op=op: op(*parts)[0] for op in ops]
            made, whole = gathered_products(bundle.rings, alone, each, keep=bundle.shared)
            results = [
                reduce_partials(x, island.out_specs[0], island.reduced_specs[0], self.logical_mesh)
                for x, island in zip(made, islands, strict=True)
            ]
            return (*results, whole) if bundle.shared else tuple(results)

        outvars, outs = [eqn.outvars[0] for eqn in bundle.eqns], [island.reduced_specs[0] for island in islands]
        if bundle.shared:
            shared[key] = jx.Var(like.invars[ring.operand].aval)
            outvars, outs = [*outvars, shared[key]], [*outs, change.after]
        mapped = jax.shard_map(
            on_shards,
            mesh=self.mesh,
            in_specs=tuple(s.partition_spec() for specs in ins for s in specs),
            out_specs=tuple(s.partition_spec() for s in outs),
            check_vma=False,
        )
        return jx.splice(mapped, like.replace(outvars=outvars), [a for atoms in operands for a in atoms])

    def _island(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal], node: int | None) -> list[jx.JaxprEqn]:
        """``eqn`` as a `jax.shard_map` of its local form, over all axes but those with a halo left to XLA; a gather or
        a scatter that has none on shards."""
        kind, island = self.islands[node or 0]
        rule, local, sizes = kind.rule, kind.rule.local, self.mesh.shape
        left_to_xla = halo_axes(rule, island.in_specs, island.out_specs)
        if left_to_xla == set(sizes):
            return [eqn.replace(invars=invars)]
        rings, read = self.weight_rings.get(node or 0, ()), list(island.in_specs)
        for one in rings:
            read[one.operand] = one.before
        in_specs, out_specs = (
            tuple(s.without(left_to_xla).partition_spec() for s in side) for side in (read, island.reduced_specs)
        )
        placed = (*island.in_specs, *island.out_specs) if local is not None and local.takes_specs else island.axes
        indexed = self._indexed(eqn, island) if local is None else None
        same_op = jx.bind_on_shards(
            eqn,
            [
                [n // math.prod(sizes[a] for a in axes) for n, axes in zip(jx.aval(v).shape, s.dims, strict=True)]
                for v, s in zip(eqn.outvars, island.out_specs, strict=True)
            ],
        )

        ring = self.sum_rings.get(node or 0)
        in_turn = node in self.kernels and self.logical_mesh.hardware.blocking_reduce_scatters

        def on_shards(*operands: Any) -> tuple[Any, ...]:
            operands = extend_with_halos(gathered_in_turn(operands, rings), rule, island, sizes)
            if ring is not None:
                summed = ring.product(lambda *parts: jax.tree.leaves(same_op(*parts))[0], operands)
                summed = reduce_in_rings(summed, ring.left, ring.placed, self.logical_mesh)
                return (in_order(summed, ring.placed, island.reduced_specs[0], self.logical_mesh),)
            if local is None or local.fun is None:
                out = (indexed or same_op)(*operands)
            else:
                out = local.fun(placed, *operands)
            results = out if isinstance(out, tuple | list) else (out,)
            if in_turn:
                return reduced_in_turn(results, island.out_specs, island.reduced_specs, self.logical_mesh)
            specs = zip(results, island.out_specs, island.reduced_specs, strict=True)
            return tuple(reduce_partials(x, spec, reduced, self.logical_mesh) for x, spec, reduced in specs)

        mapped = jax.shard_map(
            on_shards,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
            axis_names=set(sizes) - left_to_xla,
        )
        return jx.splice(mapped, eqn, invars)

    def _indexed(self, eqn: jx.JaxprEqn, island: Island) -> Callable[..., Any] | None:
        """A gather or a scatter on shards; None of another operation."""
        split, traits = island.in_specs[0].dims, self.rules.traits(eqn.primitive)
        if traits.gathers:
            return jx.gather_on_shards(eqn, split)
        if traits.scatters:
            return jx.scatter_on_shards(eqn, split, [a for a, _ in island.out_specs[0].partial])
        return None

    def _equation(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal]) -> list[jx.JaxprEqn]:
        """``eqn`` itself, in row-major layout where XLA for CPU would refuse another one."""
        eqn = eqn.replace(invars=invars)
        if not self.moved.isdisjoint([self.value_of.get(v, -1) for v in eqn.outvars]):
            return beside_products(eqn)
        row_major = self.rules.traits(eqn.primitive).row_major_on_cpu and self.mesh.devices.flat[0].platform == "cpu"
        if not row_major:
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
        return found

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
