"""The sharding constraints that make XLA follow a layout, and the equations that run in their local form (islands)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autoshard.cost.cost import CostModel
from autoshard.cost.memory import MemoryModel
from autoshard.cost.node_cost import NodeCost
from autoshard.cost.overlap.exposed_values import exposed_values
from autoshard.cost.overlap.rings import gathered_axis
from autoshard.cost.overlap.weights_and_gradients import gathered_ahead, loops_with_gradients
from autoshard.cost.reshard import reshard_path, spec_after_reduction
from autoshard.ir.graph import Graph, Node, Value
from autoshard.ir.program import Program
from autoshard.ir.propagate import Layout
from autoshard.ir.rule import halo_axes
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import ALL_GATHER, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Constraint, ConstraintReason, Island


def sharding_constraints(
    graph: Graph, layout: Layout, cost_model: CostModel, outputs: Sequence[Spec]
) -> tuple[Constraint, ...]:
    """The intermediates to constrain so that the partitioner follows ``layout`` and results have the specs ``outputs``.

    Constrained are: what the user pinned inside the step; results of products; results and operands that are resharded;
    values that a loop carries; operands and results of operations that XLA partitions wrongly by itself, or of all
    operations where the sizes of the mesh's axes do not divide one another; and values with waypoints on their way into
    or out of a region. A result of the step that is resharded with waypoints has a node number beyond the graph's.
    """
    found: dict[tuple[int, int | None], Constraint] = {}
    arguments, every = set(graph.inputs), not each_divides_next(graph.program.mesh.axis_sizes)

    def constrain(
        value: int,
        spec: Spec,
        n: int,
        reason: ConstraintReason,
        *,
        only_here: bool = False,
        before: Spec | None = None,
    ) -> None:
        node, v = graph.nodes[n], graph.values[value]
        if v.shape and v.bits and (only_here or value not in arguments):
            key = (value, n if only_here else None)
            before = None if before == spec else before
            waypoints = reshard_waypoints(before, spec, v, graph.program.mesh) if before is not None else ()
            found.setdefault(
                key, Constraint(value, spec, node.kind.op, node.source, v.shape, reason, key[1], before, waypoints)
            )

    begins, entries, mesh = dict[int, int](), set[int](), graph.program.mesh
    computed = {v for n in graph.nodes if any(graph.values[u].shape for u in n.operands) for v in n.results}
    for n, (node, run) in enumerate(zip(graph.nodes, cost_model.node_costs(layout), strict=True)):
        if node.tie and not node.trip_count:
            continue
        guarded = (node.kind.traits.mispartitioned_by_xla or every) and not node.tie
        on_shards = run.uses_local_form or _indexes_shards(node, run, graph.program)
        alone = on_shards and not halo_axes(node.kind.rule, run.in_specs, run.out_specs)
        if not (node.tie or guarded or run.resharded or node.kind.flops or any(v in graph.pins for v in node.results)):
            continue
        for v, need in zip(node.operands, run.in_specs, strict=True):
            spec = layout.specs[v]
            if node.tie:
                inside = spec_across_region(layout.specs[node.results[0]], need.rank)
                if reshard_waypoints(spec, inside, graph.values[v], graph.program.mesh):
                    constrain(v, inside, n, "resharded", only_here=True, before=spec)
            elif need != spec and node.results:
                constrain(v, need, n, "operand", only_here=True, before=spec)
                if v in computed:  # constants and iotas are computed as each use needs them
                    constrain(v, spec, n, "before_operand")
            elif guarded and v and not alone:
                constrain(v, need, n, "guarded_operand", only_here=True)
        for v, out_spec in zip(node.results, run.out_specs, strict=True):
            spec, value = layout.specs[v], graph.values[v]
            if on_shards:
                out_spec = spec_after_reduction(out_spec, spec, value.shape, value.bits, mesh, sliced=True)
            before = out_spec
            if node.tie and node.operands:  # a loop's results have the specs of its initial values
                (inside,) = node.operands
                if v < inside and v in entries:
                    begins[inside] = v
                elif v > inside:
                    entries.add(v)
                before = spec_across_region(layout.specs[begins.get(inside, inside)], spec.rank)
            stays = node.kind.flops or (v in computed and not out_spec.partial and not node.tie)
            if not alone and (out_spec != spec if guarded else stays and out_spec.dims != spec.dims):
                constrain(v, Spec(out_spec.dims), n, "as_computed", only_here=True)
            if v in graph.pins:
                constrain(v, spec, n, "pinned", before=before)
            elif out_spec != spec:
                constrain(v, spec, n, "resharded", before=out_spec)
            elif node.kind.flops:
                constrain(v, spec, n, "product")
            elif guarded and not alone:
                constrain(v, spec, n, "guarded_result")
            elif node.tie:
                constrain(v, spec, n, "carried", before=before)
    for o, (v, spec) in enumerate(zip(graph.outputs, outputs, strict=True)):
        before, value, leaf, n = layout.specs[v], graph.values[v], graph.program.outputs[o], len(graph.nodes) + o
        if waypoints := reshard_waypoints(before, spec, value, graph.program.mesh) if v else ():
            found[v, n] = Constraint(v, spec, "result", leaf.path, value.shape, "resharded", n, before, waypoints)
    return tuple(found.values())


def gathers_ahead(
    constraints: Sequence[Constraint], graph: Graph, model: MemoryModel, room: float
) -> tuple[tuple[Constraint, ...], int]:
    """``constraints``, those marked that gather rows of stacked weights an iteration ahead, and the bytes of each
    device that this takes: of the loop that gathers most, twice what it gathers in an iteration. Where iterations make
    gradients, a gather over links of several kinds would be in the way of their reductions over either.

    Args:
      room: bytes of each device. Loops that take more gather as they read.
    """
    loops, taken = gathered_ahead(graph), defaultdict[int, dict[tuple[int, Spec], int]](dict)
    if not loops:
        return tuple(constraints), 0
    mesh, busy = graph.program.mesh, loops_with_gradients(graph)
    for c in constraints:
        if c.node is not None and c.value in loops and c.resharded_from and _only_gathers(c.resharded_from, c.first):
            over = tuple(a for a in c.resharded_from.axes if a not in c.first.axes)
            if loops[c.value] in busy and len({mesh.slowest_link((a,)) for a in over}) > 1:
                continue
            taken[loops[c.value]][c.value, c.first] = model.size(c.value, c.first)
    sizes = {loop: 2 * sum(of_values.values()) for loop, of_values in taken.items()}
    fitting = {loop: size for loop, size in sizes.items() if size <= room}
    early = {key for loop in fitting for key in taken[loop]}
    marked = tuple(replace(c, ahead=c.node is not None and (c.value, c.first) in early) for c in constraints)
    return marked, max(fitting.values(), default=0)


def _only_gathers(before: Spec, after: Spec) -> bool:
    pairs = [*zip(before.dims, after.dims, strict=True)]
    return not before.partial and before != after and all(a[: len(b)] == b for a, b in pairs)


def reshard_waypoints(before: Spec, after: Spec, value: Value, mesh: LogicalMesh) -> tuple[Spec, ...]:
    """Intermediate specs to constrain where XLA (JAX 0.12) would otherwise gather the whole value, or all at once.

    It gathers it where an axis moves from one dimension to another and something else is sent besides. Where several
    dimensions are gathered, XLA for TPU does so at once, and then puts the whole value in order on each device, which
    takes up to as long as the gather. Where axes move whose sizes do not divide one another, it crashes on several such
    moves at once. It would all-reduce partial sums that are best scattered first. Some compilers turn an all-gather
    over all devices into an all-reduce of zero-padded shards, which sends twice as much: there the axes are gathered
    one by one.
    """
    moved = {a for d, e in zip(before.dims, after.dims, strict=True) if d != e for a in (*d, *e)}
    uneven = not each_divides_next([mesh.shape[a] for a in moved])
    old, new = ({a: d for d, axes in enumerate(s.dims) for a in axes} for s in (before, after))
    crossing = any(new.get(a, d) != d for a, d in old.items())
    several = sum(d != e[: len(d)] for d, e in zip(before.dims, after.dims, strict=True)) > 1
    as_all_reduce = len(mesh.nontrivial_axes) > 1 and mesh.size >= mesh.hardware.all_gather_as_all_reduce_from
    if not (uneven or crossing or several or before.partial or as_all_reduce):
        return ()
    moves = reshard_path(before, after, value.shape, value.bits, mesh)
    if as_all_reduce and [m.kind for m in moves] == [ALL_GATHER] and mesh.axes_size(moves[0].axes) == mesh.size:
        return tuple(_gather_axis_by_axis(before, after))
    sent = [m.kind for m in moves if m.bytes]
    moving = crossing and not {ALL_TO_ALL, COLLECTIVE_PERMUTE}.isdisjoint(sent)
    every = uneven or ((moving or several) and len(sent) > 1)
    found = dict.fromkeys(Spec(m.spec.dims) for m in moves if every or m.kind == REDUCE_SCATTER)
    return tuple(s for s in found if s.dims not in (before.dims, after.dims))


def _gather_axis_by_axis(before: Spec, after: Spec) -> Iterator[Spec]:
    """The specs in between where one dimension is gathered, one axis at a time, from the minormost."""
    (d,) = [d for d, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    for n in range(len(before.dims[d]) - 1, len(after.dims[d]), -1):
        yield before.with_dim(d, before.dims[d][:n])


def each_divides_next(sizes: Iterable[int]) -> bool:
    """Whether each of ``sizes`` divides the next larger one."""
    return all(large % small == 0 for small, large in itertools.pairwise(sorted(n for n in sizes if n > 1)))


def spec_across_region(outside: Spec, rank: int) -> Spec:
    """The spec on the other side of a region's boundary, where a value gains or loses its first dimension."""
    extra = rank - outside.rank
    return Spec(((),) * extra + outside.dims if extra >= 0 else outside.dims[-extra:])


def islands(graph: Graph, layout: Layout, cost_model: CostModel) -> tuple[Island, ...]:
    """The equations that run in their local form under ``layout``; of a pipeline also gathers and scatters that are
    split, as XLA (JAX 0.12) aborts where it splits them over some of the axes beside that of the stages; products of
    which XLA would wait for the gather of an operand; and what stretches an operand over dimensions that are split
    otherwise where the same operand is stretched again."""
    found, stretched = list[Island](), _stretched_otherwise(graph, layout)
    runs = cost_model.node_costs(layout)

    def resharded(n: int, value: int) -> tuple[Spec, Spec]:
        return layout.specs[value], runs[n].in_specs[graph.nodes[n].operands.index(value)]

    waits_for_gathers = graph.program.mesh.hardware.blocking_gathers
    exposed = exposed_values(graph, resharded) if waits_for_gathers else frozenset()
    for n, (node, run) in enumerate(zip(graph.nodes, runs, strict=True)):
        on_shards = node.kind.rule.local is not None and run.uses_local_form
        waits = any(
            v in exposed and gathered_axis(layout.specs[v], need)
            for v, need in zip(node.operands, run.in_specs, strict=True)
        )
        waits = waits and node.kind.rule.local is not None and node.kind.rule.local.fun is None
        whole = not any(s.partial for s in (*run.in_specs, *run.out_specs))
        if node.results and (
            on_shards or waits or (n in stretched and whole) or _indexes_shards(node, run, graph.program)
        ):
            reduced = _reduced_specs(run.out_specs, node.results, graph, layout)
            found.append(Island(n, run.local_axes, run.in_specs, run.out_specs, reduced, node.kind.op, node.source))
    return tuple(found)


def _stretched_otherwise(graph: Graph, layout: Layout) -> set[int]:
    """The elementwise operations that stretch an operand of size 1 over dimensions that are split, where another one
    stretches it to the same shape with other splits: XLA computes what is stretched once, and reshards it. None of a
    pipeline, whose layers are found by the operations that they are made of."""
    found: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Axes, ...]]] = defaultdict(dict)
    for n, node in enumerate(graph.nodes if graph.program.pipeline is None else ()):
        rule = node.kind.rule
        if not node.kind.traits.stretches or rule.kinds or rule.local:
            continue
        (made,), (result,) = rule.results, node.results
        for v, dims in zip(node.operands, rule.operands, strict=True):
            if v and len(dims) == len(made) and any(m and not d for d, m in zip(dims, made, strict=True)):
                splits = zip(dims, layout.specs[result].dims, strict=True)
                found[v, graph.values[result].shape][n] = tuple(axes for d, axes in splits if not d)
    return {
        n for by_node in found.values() if len(set(by_node.values())) > 1 for n, axes in by_node.items() if any(axes)
    }


def _indexes_shards(node: Node, run: NodeCost, program: Program) -> bool:
    """Whether each device of a pipeline's stage gathers from its shard, or scatters into it."""
    traits, specs = node.kind.traits, (*run.in_specs, *run.out_specs)
    if program.pipeline is None or node.kind.rule.local is not None or any(s.partial for s in run.in_specs):
        return False
    return any(s.axes for s in specs) if traits.scatters else traits.gathers and any(s.partial for s in run.out_specs)


def _reduced_specs(out_specs: Sequence[Spec], results: Sequence[int], graph: Graph, layout: Layout) -> tuple[Spec, ...]:
    """The specs that an island's results have once it reduced their partial values."""
    values, mesh = [graph.values[v] for v in results], graph.program.mesh
    return tuple(
        spec_after_reduction(spec, layout.specs[v], x.shape, x.bits, mesh, sliced=True)
        for spec, v, x in zip(out_specs, results, values, strict=True)
    )
