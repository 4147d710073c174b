"""lower: Program + PlanRecord -> a function whose intermediates are constrained as planned.

The program's equations are kept; after an equation whose result is pinned stands a sharding constraint, and
before one that reads a value differently from how it lies stands one on that operand. Constraints never
change a value. An equation that the plan runs in its local form becomes an island: a `jax.shard_map` of that form.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import layout as storage
from jax.sharding import Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.ir.annotate import annotate_p
from autoshard.ir.graph import Graph
from autoshard.ir.halo import with_halo
from autoshard.ir.rule import Rule, halo_axes
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island
from autoshard.plan.record import PlanRecord


def constrain(graph: Graph, plan: PlanRecord, mesh: Mesh) -> jx.Jaxpr:
    """The program's jaxpr with a constraint for each pin and an island for each local form, at every depth."""
    plan_pins = plan.intermediates
    shardings = {
        (p.value, p.node): [NamedSharding(mesh, s.partition_spec()) for s in (*p.waypoints, p.spec)] for p in plan_pins
    }
    results = {v: s for (v, n), s in shardings.items() if n is None}
    operands = {(v, n): s for (v, n), s in shardings.items() if n is not None}
    local = {i.node: (graph.nodes[i.node].kind.rule, i) for i in plan.islands}
    inner = {n for _, n in operands if n < len(graph.nodes)}
    numbers = {graph.nodes[n].results: n for n in (*inner, *local)}
    ends = [operands.get((v, n), ()) for n, v in enumerate(graph.outputs, len(graph.nodes))]
    borders = {(v, *graph.nodes[n].results): s for (v, n), s in operands.items() if n in inner and graph.nodes[n].tie}
    lowering = _Lowering(graph.ids, results, operands, numbers, borders, local, mesh, plan.mesh, graph.program.rules)
    return lowering.jaxpr(graph.program.jaxpr, ends)


class _Lowering:
    """Rewrites one jaxpr tree."""

    def __init__(
        self,
        ids: Mapping[jx.Var, int],
        results: Mapping[int, Sequence[NamedSharding]],
        operands: Mapping[tuple[int, int], Sequence[NamedSharding]],
        numbers: Mapping[tuple[int, ...], int],
        borders: Mapping[tuple[int, ...], Sequence[NamedSharding]],
        local: Mapping[int, tuple[Rule, Island]],
        mesh: Mesh,
        links: LogicalMesh,
        rules: Rules,
    ) -> None:
        self.ids, self.results, self.operands, self.node_of_results = ids, results, operands, numbers
        self.borders, self.local, self.mesh, self.logical_mesh, self.rules = borders, local, mesh, links, rules

    def jaxpr(self, jaxpr: jx.Jaxpr, ends: Sequence[Sequence[NamedSharding]] = ()) -> jx.Jaxpr:
        """``jaxpr`` constrained; ``ends`` are the places that each of its results is brought to in turn."""
        eqns: list[jx.JaxprEqn] = []
        now: dict[jx.Var, jx.Var] = {}

        def settle(var: jx.Var, like: jx.JaxprEqn, node: int | None = None) -> None:
            value = self.ids.get(var, -1)
            made = self.operands.get((value, node), ()) if node is not None else ()
            shardings = (*made, *self.results.get(value, ()))
            if shardings:
                now[var] = self._constrain_through(now.get(var, var), shardings, like, eqns)

        if jaxpr.eqns:
            for var in jaxpr.invars:
                settle(var, jaxpr.eqns[0])
        for eqn in jaxpr.eqns:
            node = self.node_of_results.get(tuple(self.ids[v] for v in eqn.outvars))
            invars = [a if isinstance(a, jx.Literal) else self._operand(a, node, eqn, now, eqns) for a in eqn.invars]
            regions = jx.regions(eqn)
            if regions and not self._is_opaque(regions):
                ways = [(w.outside, invars[w.outside], r.body.invars[w.inside]) for r in regions for w in r.inputs]
                for i, a, b in ways:
                    if a is invars[i] and not isinstance(a, jx.Literal):
                        invars[i] = self._constrain_through(a, self._border(eqn.invars[i], b), eqn, eqns)
                eqn = jx.with_bodies(eqn, [self.jaxpr(r.body, self._result_shardings(eqn, r)) for r in regions])
            if eqn.primitive is annotate_p or eqn.primitive is jx.CONSTRAINT:
                self._user_constraint(eqn, invars[0], now, eqns)
                continue
            eqns += self._island(eqn, invars, node) if node in self.local else self._unpartitioned(eqn, invars)
            for var in eqn.outvars:
                settle(var, eqn, node)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        outvars = [
            a if isinstance(a, jx.Literal) else self._constrain_through(now.get(a, a), shardings, last, eqns)
            for a, shardings in zip(jaxpr.outvars, ends or [()] * len(jaxpr.outvars), strict=True)
        ]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _island(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal], node: int | None) -> list[jx.JaxprEqn]:
        """The equations of ``eqn`` in its local form."""
        rule, island = self.local[node or 0]
        form, sizes = rule.local, self.mesh.shape
        assert form is not None
        edges = halo_axes(rule, island.in_specs, island.out_specs)
        if edges == set(sizes):
            return [eqn.replace(invars=invars)]
        needs, leaves = (
            tuple(_drop_axes(s, edges).partition_spec() for s in side)
            for side in (island.in_specs, island.reduced_specs)
        )
        itself = jx.bind_on_shards(
            eqn,
            [
                [n // math.prod(sizes[a] for a in axes) for n, axes in zip(jx.aval(v).shape, s.dims, strict=True)]
                for v, s in zip(eqn.outvars, island.out_specs, strict=True)
            ],
        )

        def part(*operands: Any) -> tuple[Any, ...]:
            operands = _extend_with_halos(operands, rule, island, sizes)
            out = itself(*operands) if form.fun is None else form.fun(island.axes, *operands)
            results = out if isinstance(out, tuple | list) else (out,)
            ends = zip(results, island.out_specs, island.reduced_specs, strict=True)
            return tuple(_reduce_partials(x, given, left, self.logical_mesh) for x, given, left in ends)

        whole = jax.shard_map(
            part, mesh=self.mesh, in_specs=needs, out_specs=leaves, check_vma=False, axis_names=set(sizes) - edges
        )
        return jx.splice(whole, eqn, invars)

    def _unpartitioned(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal]) -> list[jx.JaxprEqn]:
        """``eqn`` as it stands."""
        eqn = eqn.replace(invars=invars)
        row_major = self.rules.traits(eqn.primitive).row_major_on_cpu and self.mesh.devices.flat[0].platform == "cpu"
        if not row_major:
            return [eqn]
        itself = jx.bind_on_shards(eqn, [])

        def laid(*operands: Any) -> list[Any]:
            return [storage.with_layout_constraint(x, storage.Layout(tuple(range(x.ndim)))) for x in itself(*operands)]

        return jx.splice(laid, eqn, invars)

    def _is_opaque(self, regions: tuple[jx.Region, ...]) -> bool:
        """Whether the bodies are no part of the graph, because their function has a rule of its own."""
        variables = (v for r in regions for v in (*r.body.invars, *(o for e in r.body.eqns for o in e.outvars)))
        first = next(variables, None)
        return first is not None and first not in self.ids

    def _result_shardings(self, eqn: jx.JaxprEqn, region: jx.Region) -> list[Sequence[NamedSharding]]:
        """The places that each result of a body is brought to in turn, for the next turn or to leave."""
        ends: list[Sequence[NamedSharding]] = [()] * len(region.body.outvars)
        out = [(w.inside, eqn.outvars[w.outside]) for w in region.outputs]
        for end, to in (*out, *((end, region.body.invars[start]) for end, start in region.carries)):
            ends[end] = self._border(region.body.outvars[end], to) or ends[end]
        for w in (
            region.outputs if len(jx.regions(eqn)) > 1 and not region.carries else ()
        ):  # XLA wants branches to end alike
            ends[w.inside] = ends[w.inside] or self.results.get(self.ids[eqn.outvars[w.outside]], ())[-1:]
        return ends

    def _border(self, before: jx.Var | jx.Literal, after: jx.Var) -> Sequence[NamedSharding]:
        return () if isinstance(before, jx.Literal) else self.borders.get((self.ids[before], self.ids[after]), ())

    def _operand(
        self, var: jx.Var, node: int | None, eqn: jx.JaxprEqn, now: Mapping[jx.Var, jx.Var], eqns: list[jx.JaxprEqn]
    ) -> jx.Var:
        current = now.get(var, var)
        shardings = self.operands.get((self.ids[var], node), ()) if node is not None else ()
        return self._constrain_through(current, shardings, eqn, eqns)

    def _constrain_through(
        self, var: jx.Var, shardings: Sequence[NamedSharding], like: jx.JaxprEqn | None, eqns: list[jx.JaxprEqn]
    ) -> jx.Var:
        """``var`` brought to each of ``shardings`` in turn."""
        for sharding in shardings:
            fresh = jx.Var(var.aval)
            eqns.append(jx.constrain(var, fresh, sharding, like))
            var = fresh
        return var

    def _user_constraint(
        self, eqn: jx.JaxprEqn, operand: jx.Var | jx.Literal, now: dict[jx.Var, jx.Var], eqns: list[jx.JaxprEqn]
    ) -> None:
        """A pin written in the step: its place is taken by the constraint on the plan's mesh."""
        (result,) = eqn.outvars
        shardings = self.results.get(self.ids[result], ())
        if isinstance(operand, jx.Literal) or not shardings:  # a scalar: nothing to constrain
            now[result] = operand  # type: ignore[assignment]
            return
        eqns.append(
            jx.constrain(self._constrain_through(operand, shardings[:-1], eqn, eqns), result, shardings[-1], eqn)
        )


def _extend_with_halos(
    operands: Sequence[Any], rule: Rule, island: Island, sizes: Mapping[str, int]
) -> tuple[Any, ...]:
    """The parts with what they read of their neighbours, where that is not left to XLA."""
    found = list(operands)
    for halo in rule.halos:
        axes = island.in_specs[halo.operand].dims[halo.dim]
        if axes and rule.kind(rule.halo_factor(halo)) != "halo":
            rows = halo.window.halo_rows(math.prod(sizes[a] for a in axes))
            found[halo.operand] = with_halo(found[halo.operand], axes, halo.dim, *rows)
    return tuple(found)


def _drop_axes(spec: Spec, axes: Collection[str]) -> Spec:
    """``spec`` with some axes left out."""
    return Spec(tuple(tuple(a for a in d if a not in axes) for d in spec.dims), spec.partial)


def _reduce_partials(x: Any, given: Spec, left: Spec, mesh: LogicalMesh) -> Any:
    """The terms of a part's result, put together over the axes along which it is partial, and scattered as ``left``."""
    terms = dict(given.partial)
    for d, split in enumerate(left.dims):
        x = _reduce_scatter(x, d, [a for a in split if terms.pop(a, None)], mesh)
    for kind in dict.fromkeys(terms.values()):
        axes = tuple(a for a, k in terms.items() if k == kind)
        if kind in _REDUCERS:
            x = _REDUCERS[kind](x, axes)
        else:  # no collective does it
            parts = jax.lax.all_gather(x, axes)
            x = jnp.prod(parts, axis=0, dtype=x.dtype) if kind == "prod" else _BITWISE[kind].reduce(parts, axis=0)
    return x


def _reduce_scatter(x: Any, dim: int, axes: Sequence[str], mesh: LogicalMesh) -> Any:
    """The sum of terms over ``axes``, of which each device is left its part of dimension ``dim``.

    One axis after the other, the fastest first, so that slower ones carry less: what is to be scattered over two at
    once, XLA for TPU (JAX 0.12) reduces whole and cuts.
    """
    fastest = sorted(axes, key=lambda a: mesh.slowest_link((a,)).bandwidth, reverse=True)
    if fastest == axes:
        for axis in axes:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return x
    before, after, parts = x.shape[:dim], x.shape[dim + 1 :], [mesh.shape[a] for a in axes]
    x = x.reshape(*before, *parts, x.shape[dim] // math.prod(parts), *after)
    for axis in fastest:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim + axes.index(axis), tiled=True)
    return x.reshape(*before, x.shape[dim + len(axes)], *after)


_REDUCERS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
_BITWISE = {"and": jnp.bitwise_and, "or": jnp.bitwise_or}
