"""lower: Program + Plan -> a function whose intermediates are constrained as planned.

The program's equations are kept; after an equation whose result is pinned stands a sharding constraint, and
before one that reads a value differently from how it lies stands one on that operand. Constraints never
change a value. An equation that the plan runs in its local form becomes an island: a `jax.shard_map` of that form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import layout as storage
from jax.sharding import Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.annotate import annotate_p
from autoshard.cost import Costing
from autoshard.graph import Graph, Value
from autoshard.mesh import LogicalMesh
from autoshard.plan import Island, Pin, Plan
from autoshard.propagate import Layout
from autoshard.reshard import path
from autoshard.rule import Rule
from autoshard.spec import Spec

GUARDED = frozenset(
    {
        "conv_general_dilated",
        "dynamic_update_slice",
        "fft",
        "gather",
        "pad",
        "reduce",
        "reduce_and",
        "reduce_or",
        "reduce_window",
        "reduce_xor",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
        "select_and_gather_add",
    }
)
"""Operations that XLA (JAX 0.12) gives wrong numbers for, or dies of, where it splits them on its own: what they read
and make is pinned whether or not it lies so already."""

ROW_MAJOR = frozenset({"fft"})
"""Operations that XLA's compiler for CPU (JAX 0.12) may lay out otherwise and then refuses."""


def pins(graph: Graph, layout: Layout, costing: Costing, outputs: Sequence[Spec]) -> tuple[Pin, ...]:
    """The intermediates to constrain so that the partitioner follows ``layout`` and leaves results as ``outputs``.

    They are: what the user pinned inside the step; results of products, and whatever a transfer brings to its
    place; operands that an equation needs otherwise than they lie; what a loop carries; all around operations that
    XLA must not split on its own; and the stops of a result on the way to where it is wanted, under the numbers that
    follow those of the nodes.
    """
    found: dict[tuple[int, int | None], Pin] = {}
    ends = set(graph.inputs)

    def pin(value: int, spec: Spec, n: int, why: str, *, operand: bool = False, before: Spec | None = None) -> None:
        node, v = graph.nodes[n], graph.values[value]
        if v.shape and v.bits and (operand or value not in ends):
            key = (value, n if operand else None)
            via = stops(before, spec, v, graph.program.mesh) if before is not None else ()
            found.setdefault(key, Pin(value, spec, node.kind.op, node.source, v.shape, why, key[1], via))

    for n, node in enumerate(graph.nodes):
        if node.tie and not node.times:
            continue
        run, guarded = costing.run(n, layout.specs), node.kind.op in GUARDED
        for v, need in zip(node.operands, run.needs, strict=True):
            if need != layout.specs[v] and not node.tie and node.results:
                lies = layout.specs[v]
                pin(v, need, n, f"needed so by {node.kind.op}, lies as {lies}", operand=True, before=lies)
            elif guarded and v and not run.island:
                pin(v, need, n, f"kept so for {node.kind.op}", operand=True)
        for v, give in zip(node.results, run.gives, strict=True):
            spec = layout.specs[v]
            if not run.island and (give != spec if guarded else node.kind.flops and give.dims != spec.dims):
                pin(v, Spec(give.dims), n, f"made so by {node.kind.op}", operand=True)
            if v in graph.pins:
                pin(v, spec, n, "pinned in the step", before=give)
            elif give != spec:
                pin(v, spec, n, f"brought there from {give}", before=give)
            elif node.kind.flops:
                pin(v, spec, n, "result of a product")
            elif guarded and not run.island:
                pin(v, spec, n, f"kept so after {node.kind.op}")
            elif node.tie:
                pin(v, spec, n, f"carried by {node.kind.op}")
    for o, (v, want) in enumerate(zip(graph.outputs, outputs, strict=True)):
        value, leaf, n = graph.values[v], graph.program.outputs[o], len(graph.nodes) + o
        if via := stops(layout.specs[v], want, value, graph.program.mesh) if v else ():
            why = f"brought there from {layout.specs[v]}"
            found[v, n] = Pin(v, want, "result", leaf.path, value.shape, why, n, via)
    return tuple(found.values())


def stops(before: Spec, after: Spec, value: Value, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """The specs on the way between two, where axes move whose sizes do not divide one another: XLA (JAX 0.12) dies of
    several such moves at once."""
    moved = {a for d, e in zip(before.dims, after.dims, strict=True) if d != e for a in (*d, *e)}
    sizes = sorted({mesh.shape[a] for a in moved if mesh.shape[a] > 1})
    if all(large % small == 0 for small, large in itertools.pairwise(sizes)):
        return ()
    moves = path(before, after, value.shape, value.bits, mesh)
    way = dict.fromkeys(Spec(m.spec.dims) for m in moves)
    return tuple(s for s in way if s.dims not in (before.dims, after.dims))


def islands(graph: Graph, layout: Layout, costing: Costing) -> tuple[Island, ...]:
    """The equations that run in their local form under ``layout``."""
    runs = ((n, node, costing.run(n, layout.specs)) for n, node in enumerate(graph.nodes) if node.kind.rule.local)
    return tuple(
        Island(n, r.axes, r.needs, r.gives, node.kind.op, node.source)
        for n, node, r in runs
        if r.island and node.results
    )


def constrained(graph: Graph, plan: Plan, mesh: Mesh) -> jx.Jaxpr:
    """The program's jaxpr with a constraint for each pin and an island for each local form, at every depth."""
    plan_pins = plan.intermediates
    shardings = {
        (p.value, p.node): [NamedSharding(mesh, s.partition_spec()) for s in (*p.via, p.spec)] for p in plan_pins
    }
    results = {v: s for (v, n), s in shardings.items() if n is None}
    operands = {(v, n): s for (v, n), s in shardings.items() if n is not None}
    local = {i.node: (graph.nodes[i.node].kind.rule, i) for i in plan.islands}
    inner = (n for _, n in operands if n < len(graph.nodes))
    numbers = {graph.nodes[n].results: n for n in (*inner, *local)}
    ends = [operands.get((v, n), ()) for n, v in enumerate(graph.outputs, len(graph.nodes))]
    return _Lowering(graph.ids, results, operands, numbers, local, mesh).jaxpr(graph.program.jaxpr, ends)


class _Lowering:
    """Rewrites one jaxpr tree."""

    def __init__(
        self,
        ids: Mapping[jx.Var, int],
        results: Mapping[int, Sequence[NamedSharding]],
        operands: Mapping[tuple[int, int], Sequence[NamedSharding]],
        numbers: Mapping[tuple[int, ...], int],
        local: Mapping[int, tuple[Rule, Island]],
        mesh: Mesh,
    ) -> None:
        self.ids, self.results, self.operands, self.numbers = ids, results, operands, numbers
        self.local, self.mesh = local, mesh

    def jaxpr(self, jaxpr: jx.Jaxpr, ends: Sequence[Sequence[NamedSharding]] = ()) -> jx.Jaxpr:
        """``jaxpr`` constrained; ``ends`` are the places that each of its results is brought to in turn."""
        eqns: list[jx.JaxprEqn] = []
        now: dict[jx.Var, jx.Var] = {}

        def settle(var: jx.Var, like: jx.JaxprEqn, node: int | None = None) -> None:
            value = self.ids.get(var, -1)
            made = self.operands.get((value, node), ()) if node is not None else ()
            shardings = (*made, *self.results.get(value, ()))
            if shardings:
                now[var] = self._through(now.get(var, var), shardings, like, eqns)

        if jaxpr.eqns:
            for var in jaxpr.invars:
                settle(var, jaxpr.eqns[0])
        for eqn in jaxpr.eqns:
            node = self.numbers.get(tuple(self.ids[v] for v in eqn.outvars))
            invars = [a if isinstance(a, jx.Literal) else self._operand(a, node, eqn, now, eqns) for a in eqn.invars]
            regions = jx.regions(eqn)
            if regions and not self._sealed(regions):
                eqn = jx.with_bodies(eqn, [self.jaxpr(r.body) for r in regions])
            if eqn.primitive is annotate_p or eqn.primitive is jx.CONSTRAINT:
                self._pinned(eqn, invars[0], now, eqns)
                continue
            eqns += self._island(eqn, invars, node) if node in self.local else self._itself(eqn, invars)
            for var in eqn.outvars:
                settle(var, eqn, node)
        last = jaxpr.eqns[-1] if jaxpr.eqns else None
        outvars = [
            a if isinstance(a, jx.Literal) else self._through(now.get(a, a), shardings, last, eqns)
            for a, shardings in zip(jaxpr.outvars, ends or [()] * len(jaxpr.outvars), strict=True)
        ]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _island(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal], node: int | None) -> list[jx.JaxprEqn]:
        """The equations of ``eqn`` in its local form."""
        rule, island = self.local[node or 0]
        form, sizes = rule.local, self.mesh.shape
        assert form is not None
        ways = ((rule.operands, island.needs), (rule.results, island.gives))
        edges = {
            a
            for side, specs in ways
            for dims, s in zip(side, specs, strict=True)
            for dim, axes in zip(dims, s.dims, strict=True)
            if dim and rule.kind(dim[0]) == "halo"
            for a in axes
        }
        if edges == set(sizes):
            return [eqn.replace(invars=invars)]
        needs, gives = (tuple(_without(s, edges).partition_spec() for s in specs) for _, specs in ways)
        itself = jx.on_part(
            eqn,
            [
                [n // math.prod(sizes[a] for a in axes) for n, axes in zip(jx.aval(v).shape, s.dims, strict=True)]
                for v, s in zip(eqn.outvars, island.gives, strict=True)
            ],
        )

        def part(*operands: Any) -> tuple[Any, ...]:
            out = itself(*operands) if form.fun is None else form.fun(island.axes, *operands)
            results = out if isinstance(out, tuple | list) else (out,)
            return tuple(_combined(x, s) for x, s in zip(results, island.gives, strict=True))

        whole = jax.shard_map(
            part, mesh=self.mesh, in_specs=needs, out_specs=gives, check_vma=False, axis_names=set(sizes) - edges
        )
        return jx.splice(whole, eqn, invars)

    def _itself(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal]) -> list[jx.JaxprEqn]:
        """``eqn`` as it stands."""
        eqn = eqn.replace(invars=invars)
        if eqn.primitive.name not in ROW_MAJOR or self.mesh.devices.flat[0].platform != "cpu":
            return [eqn]
        itself = jx.on_part(eqn, [])

        def laid(*operands: Any) -> list[Any]:
            return [storage.with_layout_constraint(x, storage.Layout(tuple(range(x.ndim)))) for x in itself(*operands)]

        return jx.splice(laid, eqn, invars)

    def _sealed(self, regions: tuple[jx.Region, ...]) -> bool:
        """Whether the bodies are no part of the graph, because their function has a rule of its own."""
        variables = (v for r in regions for v in (*r.body.invars, *(o for e in r.body.eqns for o in e.outvars)))
        first = next(variables, None)
        return first is not None and first not in self.ids

    def _operand(
        self, var: jx.Var, node: int | None, eqn: jx.JaxprEqn, now: Mapping[jx.Var, jx.Var], eqns: list[jx.JaxprEqn]
    ) -> jx.Var:
        current = now.get(var, var)
        shardings = self.operands.get((self.ids[var], node), ()) if node is not None else ()
        return self._through(current, shardings, eqn, eqns)

    def _through(
        self, var: jx.Var, shardings: Sequence[NamedSharding], like: jx.JaxprEqn | None, eqns: list[jx.JaxprEqn]
    ) -> jx.Var:
        """``var`` brought to each of ``shardings`` in turn."""
        for sharding in shardings:
            fresh = jx.Var(var.aval)
            eqns.append(jx.constrain(var, fresh, sharding, like))
            var = fresh
        return var

    def _pinned(
        self, eqn: jx.JaxprEqn, operand: jx.Var | jx.Literal, now: dict[jx.Var, jx.Var], eqns: list[jx.JaxprEqn]
    ) -> None:
        """A pin written in the step: its place is taken by the constraint on the plan's mesh."""
        (result,) = eqn.outvars
        shardings = self.results.get(self.ids[result], ())
        if isinstance(operand, jx.Literal) or not shardings:  # a scalar: nothing to constrain
            now[result] = operand  # type: ignore[assignment]
            return
        eqns.append(jx.constrain(self._through(operand, shardings[:-1], eqn, eqns), result, shardings[-1], eqn))


def _without(spec: Spec, axes: Collection[str]) -> Spec:
    """``spec`` with some axes left out."""
    return Spec(tuple(tuple(a for a in d if a not in axes) for d in spec.dims), spec.partial)


def _combined(x: Any, spec: Spec) -> Any:
    """The terms of a part's result, put together over the axes along which it is partial."""
    for axis, kind in spec.partial:
        if kind in _REDUCERS:
            x = _REDUCERS[kind](x, axis)
        else:  # no collective does it
            terms = jax.lax.all_gather(x, axis)
            x = jnp.prod(terms, axis=0, dtype=x.dtype) if kind == "prod" else _BITS[kind].reduce(terms, axis=0)
    return x


_REDUCERS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
_BITS = {"and": jnp.bitwise_and, "or": jnp.bitwise_or}
