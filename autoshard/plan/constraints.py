"""pins: the intermediates of a layout that are constrained, and the equations that run in their local form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from autoshard.cost.cost import CostModel
from autoshard.cost.reshard import spec_after_reduction, reshard_path
from autoshard.ir.graph import Graph, Value
from autoshard.ir.propagate import Layout
from autoshard.ir.rule import halo_axes
from autoshard.ir.spec import Spec
from autoshard.machine.collective import ALL_GATHER, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island, Constraint

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


def sharding_constraints(graph: Graph, layout: Layout, costing: CostModel, outputs: Sequence[Spec]) -> tuple[Constraint, ...]:
    """The intermediates to constrain so that the partitioner follows ``layout`` and leaves results as ``outputs``.

    They are: what the user pinned inside the step; results of products, and whatever a transfer brings to its
    place; operands that an equation needs otherwise than they lie; what a loop carries; all around operations that
    XLA must not split on its own, or all, where the sizes of the mesh's axes do not divide one another; and the stops
    of a value on the way into or out of a region, and of a result, under the numbers that follow those of the nodes.
    """
    found: dict[tuple[int, int | None], Constraint] = {}
    ends, every = set(graph.inputs), not each_divides_next(graph.program.mesh.axis_sizes)

    def pin(value: int, spec: Spec, n: int, why: str, *, operand: bool = False, before: Spec | None = None) -> None:
        node, v = graph.nodes[n], graph.values[value]
        if v.shape and v.bits and (operand or value not in ends):
            key = (value, n if operand else None)
            via = reshard_waypoints(before, spec, v, graph.program.mesh) if before is not None else ()
            found.setdefault(key, Constraint(value, spec, node.kind.op, node.source, v.shape, why, key[1], via))

    begins, entries = dict[int, int](), set[int]()
    computed = {v for n in graph.nodes if any(graph.values[u].shape for u in n.operands) for v in n.results}
    for n, (node, run) in enumerate(zip(graph.nodes, costing.node_costs(layout), strict=True)):
        if node.tie and not node.trip_count:
            continue
        guarded = (node.kind.op in GUARDED or every) and not node.tie
        alone = run.uses_local_form and not halo_axes(node.kind.rule, run.in_specs, run.out_specs)
        if not (node.tie or guarded or run.resharded or node.kind.flops or any(v in graph.pins for v in node.results)):
            continue
        for v, need in zip(node.operands, run.in_specs, strict=True):
            if node.tie:
                lies, inside = layout.specs[v], spec_across_region(layout.specs[node.results[0]], need.rank)
                if reshard_waypoints(lies, inside, graph.values[v], graph.program.mesh):
                    pin(v, inside, n, f"brought there from {lies}", operand=True, before=lies)
            elif need != layout.specs[v] and node.results:
                lies = layout.specs[v]
                pin(v, need, n, f"needed so by {node.kind.op}, lies as {lies}", operand=True, before=lies)
                if v in computed:  # what is made of nothing is made where it is read
                    pin(v, lies, n, f"lies so before {node.kind.op}")
            elif guarded and v and not alone:
                pin(v, need, n, f"kept so for {node.kind.op}", operand=True)
        for v, give in zip(node.results, run.out_specs, strict=True):
            spec, value = layout.specs[v], graph.values[v]
            give = spec_after_reduction(give, spec, value.shape, value.bits, graph.program.mesh) if run.uses_local_form else give
            before = give
            if node.tie and node.operands:  # a loop's results lie as what it begins with
                (inside,) = node.operands
                if v < inside and v in entries:
                    begins[inside] = v
                elif v > inside:
                    entries.add(v)
                before = spec_across_region(layout.specs[begins.get(inside, inside)], spec.rank)
            held = node.kind.flops or (v in computed and not give.partial and not node.tie)
            if not alone and (give != spec if guarded else held and give.dims != spec.dims):
                pin(v, Spec(give.dims), n, f"made so by {node.kind.op}", operand=True)
            if v in graph.pins:
                pin(v, spec, n, "pinned in the step", before=before)
            elif give != spec:
                pin(v, spec, n, f"brought there from {give}", before=give)
            elif node.kind.flops:
                pin(v, spec, n, "result of a product")
            elif guarded and not alone:
                pin(v, spec, n, f"kept so after {node.kind.op}")
            elif node.tie:
                pin(v, spec, n, f"carried by {node.kind.op}", before=before)
    for o, (v, want) in enumerate(zip(graph.outputs, outputs, strict=True)):
        value, leaf, n = graph.values[v], graph.program.outputs[o], len(graph.nodes) + o
        if via := reshard_waypoints(layout.specs[v], want, value, graph.program.mesh) if v else ():
            why = f"brought there from {layout.specs[v]}"
            found[v, n] = Constraint(v, want, "result", leaf.path, value.shape, why, n, via)
    return tuple(found.values())


def reshard_waypoints(before: Spec, after: Spec, value: Value, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """The specs on the way between two that XLA (JAX 0.12) does not find.

    Where axes move whose sizes do not divide one another, it dies of several such moves at once; where an axis goes
    from one dimension to another and more is sent besides, it gathers the whole value and takes from that; and terms
    that are scattered first it would reduce whole. A gather over all devices some compilers make a reduction, of what
    each has among zeros, which sends twice as much: there one axis comes after the other.
    """
    moved = {a for d, e in zip(before.dims, after.dims, strict=True) if d != e for a in (*d, *e)}
    uneven = not each_divides_next([mesh.shape[a] for a in moved])
    there = [{a: d for d, axes in enumerate(s.dims) for a in axes} for s in (before, after)]
    crossing = any(there[1].get(a, d) != d for a, d in there[0].items())
    summed = len(mesh.split_axes) > 1 and mesh.size >= mesh.hardware.all_gather_as_all_reduce_from
    if not (uneven or crossing or before.partial or summed):
        return ()
    moves = reshard_path(before, after, value.shape, value.bits, mesh)
    if summed and len(moves) == 1 and mesh.axes_size(moves[0].axes) == mesh.size and moves[0].kind == ALL_GATHER:
        return tuple(_gather_axis_by_axis(before, after))
    sent = [m.kind for m in moves if m.bytes]
    every = uneven or (crossing and len(sent) > 1 and not {ALL_TO_ALL, COLLECTIVE_PERMUTE}.isdisjoint(sent))
    way = dict.fromkeys(Spec(m.spec.dims) for m in moves if every or m.kind == REDUCE_SCATTER)
    return tuple(s for s in way if s.dims not in (before.dims, after.dims))


def _gather_axis_by_axis(before: Spec, after: Spec) -> Iterator[Spec]:
    """The specs between two of which the second splits one dimension over fewer axes: these go one by one."""
    (d,) = [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    for n in range(len(before.dims[d]) - 1, len(after.dims[d]), -1):
        yield before.with_dim(d, before.dims[d][:n])


def each_divides_next(sizes: Iterable[int]) -> bool:
    """Whether each of ``sizes`` divides the next larger one."""
    return all(large % small == 0 for small, large in itertools.pairwise(sorted(n for n in sizes if n > 1)))


def spec_across_region(outside: Spec, rank: int) -> Spec:
    """How a value lies on the other side of a region's border, where it gains or loses a first dimension."""
    return Spec(
        outside.dims[outside.rank - rank :] if outside.rank > rank else ((),) * (rank - outside.rank) + outside.dims
    )


def islands(graph: Graph, layout: Layout, costing: CostModel) -> tuple[Island, ...]:
    """The equations that run in their local form under ``layout``."""
    runs = ((n, node, costing.node_costs(layout)[n]) for n, node in enumerate(graph.nodes) if node.kind.rule.local)
    return tuple(
        Island(n, r.local_axes, r.in_specs, r.out_specs, _reduced_specs(r.out_specs, node.results, graph, layout), node.kind.op, node.source)
        for n, node, r in runs
        if r.uses_local_form and node.results
    )


def _reduced_specs(gives: Sequence[Spec], results: Sequence[int], graph: Graph, layout: Layout) -> tuple[Spec, ...]:
    """What results become in the island that gives them."""
    values, mesh = [graph.values[v] for v in results], graph.program.mesh
    return tuple(
        spec_after_reduction(give, layout.specs[v], x.shape, x.bits, mesh)
        for give, v, x in zip(gives, results, values, strict=True)
    )
