"""Node strategies: how a node runs under one assignment of mesh axes to the factors of its rule.

An assignment fixes the specs in which operands are read and results produced, the compute seconds of one execution, and
the collectives inside it (halo exchanges, and those of a local form). What reshards around the node cost is
`autoshard.cost.cost`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cost.convolution import tile_padding
from autoshard.ir.graph import OpKind
from autoshard.ir.halo import rows_per_hop
from autoshard.ir.propagate import axes_of_dim
from autoshard.ir.rule import CollectiveBytes, LocalAlgorithm, LocalWork
from autoshard.ir.spec import REDUCTION_KINDS, Axes, Spec
from autoshard.machine.collective import COLLECTIVE_PERMUTE, Collective, collective_seconds
from autoshard.machine.host_link import seconds_waited_for_copies
from autoshard.machine.mesh import LogicalMesh


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """How nodes of one kind run under one assignment of mesh axes to factors."""

    in_specs: tuple[Spec, ...]
    """Spec in which each operand is read."""
    out_specs: tuple[Spec, ...]
    """Spec in which each result is produced, partial axes included."""
    compute_seconds: float
    """Compute seconds of one execution on one device."""
    collectives: tuple[Collective, ...] | None = ()
    """Halo exchanges and the collectives inside the local form; None where the local form does not support this many
    parts, or would leave a result partial."""
    local_axes: Axes = ()
    """Mesh axes that split the rule's `local` factor."""
    stored_bytes: int = 0
    """Bytes of one device that one step of the operation writes and another reads (`LocalWork`)."""
    hidden_seconds: float = 0.0
    """Seconds of ``collectives`` in one execution that run beside what the operation computes."""

    @property
    def feasible(self) -> bool:
        """Whether the node can run so."""
        return self.collectives is not None

    def seconds(self, mesh: LogicalMesh) -> float:
        """Seconds of one execution: compute and ``collectives``, without reshards of operands and results."""
        return self.compute_seconds + _total_seconds(self.collectives, mesh) - self.hidden_seconds


def expressible_factors(kind: OpKind, assignment: Mapping[str, Axes], mesh: LogicalMesh) -> dict[str, Axes]:
    """``assignment`` without the factors whose split no spec can express.

    In a dimension merged from several factors, a minor factor can only be split where every more major one is split
    down to parts of one.
    """
    kept, compound = dict(assignment), [dim for _, _, dim in kind.factored_dims if len(dim) > 1]
    sizes = dict(kind.factor_sizes) if compound else {}
    for _ in compound:  # a factor dropped for one dimension may block another one
        for dim in compound:
            parts = [mesh.axes_size(kept.get(f, ())) == sizes[f] for f in dim]
            for f in dim[parts.index(False) + 1 :] if not all(parts) else ():
                kept.pop(f, None)
    return kept


def node_strategy(kind: OpKind, assignment: Mapping[str, Axes], mesh: LogicalMesh) -> NodeStrategy:
    """The strategy of a node whose factors are split as ``assignment`` says: factor -> mesh axes."""
    sizes, kinds, shape = dict(kind.factor_sizes), dict(kind.rule.kinds), mesh.shape

    split = _with_axes_alongside(kind, assignment)

    def spec(dims: Sequence[Sequence[str]]) -> Spec:
        return Spec(
            tuple(
                [axes_of_dim(d, split, sizes, shape) if len(d) > 1 else split.get(d[0], ()) if d else () for d in dims]
            )
        )

    in_specs = tuple(map(spec, kind.rule.operands))
    partial = tuple(
        sorted([(a, kinds[f]) for f, axes in assignment.items() if kinds.get(f) in REDUCTION_KINDS for a in axes])
    )
    out_specs = tuple(map(spec, kind.rule.results))
    if partial:  # a result that has the reduced factor as a dimension is not partial over it
        out_specs = tuple([Spec(s.dims, tuple([p for p in partial if p[0] not in s.axes])) for s in out_specs])
    algorithm = local_algorithm(kind, in_specs, out_specs, mesh)
    collectives = _strategy_collectives(kind, in_specs, out_specs, assignment, mesh, algorithm)
    if (local := _local_axes(kind, assignment)) and kind.rule.local is not None:
        other = kind.rule.local.alongside
        if sizes[other] % mesh.axes_size(split.get(other, ())) if other else any(s.partial for s in out_specs):
            collectives = None
        if kind.rule.local.in_place in assignment:
            collectives = None
    work = kind.rule.local.work if kind.rule.local is not None else None
    if kind.traits.grouped_product and mesh.hardware.grouped_products:
        work = None
    own = work({f: mesh.axes_size(axes) for f, axes in assignment.items()}) if work is not None else None
    seconds = _strategy_compute_seconds(kind, in_specs, out_specs, assignment, mesh, own, algorithm)
    stored, rounds = (own.bytes, own.rounds) if own is not None else (0, 1)
    hidden = _hidden_beside_other_rounds(rounds, seconds, collectives, mesh)
    if algorithm is not None:
        hidden = _hidden_hops(algorithm, seconds, local, mesh)
    return NodeStrategy(in_specs, out_specs, seconds, collectives, local, stored, hidden)


def local_algorithm(
    kind: OpKind, in_specs: Sequence[Spec], out_specs: Sequence[Spec], mesh: LogicalMesh
) -> LocalAlgorithm | None:
    """The algorithm of least seconds of a rule's local form, under these specs of a node's operands and results; None
    where it has no choice, or its factor is not split.

    The lowering asks again for the specs of the plan.
    """
    local = kind.rule.local
    if local is None or local.algorithms is None:
        return None
    ends = list(zip((*kind.rule.operands, *kind.rule.results), (*in_specs, *out_specs), strict=True))
    split = {f: axes for dims, s in ends for dim, axes in zip(dims, s.dims, strict=True) for f in dim[:1] if axes}
    over = _local_axes(kind, split)
    if not over:
        return None
    sizes = [b / s.num_shards(mesh.shape) for b, (_, s) in zip(kind.bytes, ends, strict=True)]
    parts = math.prod(mesh.axes_size(axes) for axes in split.values())

    def seconds(algorithm: LocalAlgorithm) -> float:
        compute = compute_seconds(kind, sizes, parts / algorithm.work, mesh)
        compute += algorithm.moved / mesh.hardware.memory_rate
        sent = _total_seconds(_over(algorithm.sent, over, mesh), mesh)
        return compute + sent - _hidden_hops(algorithm, compute, over, mesh)

    return min(local.algorithms(mesh.axes_size(over), [math.ceil(n) for n in sizes]), key=seconds)


def _hidden_hops(algorithm: LocalAlgorithm, compute: float, axes: Axes, mesh: LogicalMesh) -> float:
    """Seconds of what an algorithm sends from round to round that run beside what the other rounds compute."""
    hops = _total_seconds(_over(algorithm.hops, axes, mesh), mesh)
    return (1 - 1 / algorithm.rounds) * min(mesh.hardware.hidden_collectives * hops, compute)


def _over(sent: CollectiveBytes, axes: Axes, mesh: LogicalMesh) -> tuple[Collective, ...]:
    return tuple(Collective(kind, _in_mesh_order(axes, mesh), size) for kind, size in sent)


def _hidden_beside_other_rounds(
    rounds: int, compute: float, collectives: tuple[Collective, ...] | None, mesh: LogicalMesh
) -> float:
    """Seconds of the collectives of an operation in rounds that run beside the products of other rounds: the first one
    waits for what it is sent, and the last one's results are waited for."""
    if rounds == 1 or mesh.size > mesh.hardware.async_all_to_all_up_to:
        return 0.0
    sent = mesh.hardware.hidden_collectives * _total_seconds(collectives, mesh)
    return (1 - 1 / rounds) * min(sent, compute)


def _total_seconds(collectives: Iterable[Collective] | None, mesh: LogicalMesh) -> float:
    return sum(collective_seconds(c.kind, c.axes or (), c.bytes, mesh) for c in collectives or ())


def _strategy_collectives(
    kind: OpKind,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    assignment: Mapping[str, Axes],
    mesh: LogicalMesh,
    algorithm: LocalAlgorithm | None,
) -> tuple[Collective, ...] | None:
    """Halo exchanges and, where the local factor is split, the collectives of the local form; None where the local form
    does not support the split."""
    local = _local_axes(kind, assignment)
    halos = [(halo, axes) for halo in kind.rule.halos if (axes := assignment.get(kind.rule.halo_factor(halo), ()))]
    if not halos and not local:
        return ()
    sizes = [math.ceil(b / s.num_shards(mesh.shape)) for b, s in zip(kind.bytes, (*in_specs, *out_specs), strict=True)]
    found: list[Collective] = []
    for halo, axes in halos:
        parts, size = mesh.axes_size(axes), sizes[halo.operand]
        own, sides = halo.window.input_size // parts, halo.window.halo_rows(parts)
        sent = [math.ceil(size * n / own) for rows in sides for n in rows_per_hop(rows, own)]
        found += [Collective(COLLECTIVE_PERMUTE, _in_mesh_order(axes, mesh), n) for n in sent]
        sizes[halo.operand] = math.ceil(size * (own + sum(sides)) / own)
    if not local or kind.rule.local is None:
        return tuple(found)
    moves = algorithm.sent if algorithm is not None else kind.rule.local.collectives(mesh.axes_size(local), sizes)
    return None if moves is None else (*found, *_over(moves, local, mesh))


def _local_axes(kind: OpKind, assignment: Mapping[str, Axes]) -> Axes:
    """The mesh axes that split the rule's `local` factor."""
    return next((axes for f, axes in assignment.items() if kind.rule.kind(f) == "local"), ())


def _with_axes_alongside(kind: OpKind, assignment: Mapping[str, Axes]) -> Mapping[str, Axes]:
    """``assignment`` with the axes of the local factor on the factor that is split alongside it too; or, where it is
    split in place, with these axes."""
    local = kind.rule.local
    if local is None or local.alongside is None:
        return assignment
    if in_place := assignment.get(local.in_place or "", ()):
        return {**assignment, next(f for f, k in kind.rule.kinds if k == "local"): in_place}
    return {**assignment, local.alongside: assignment.get(local.alongside, ()) + _local_axes(kind, assignment)}


def _in_mesh_order(axes: Axes, mesh: LogicalMesh) -> Axes:
    return tuple(a for a in mesh.axis_names if a in axes)


def _strategy_compute_seconds(
    kind: OpKind,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    assignment: Mapping[str, Axes],
    mesh: LogicalMesh,
    own: LocalWork | None,
    algorithm: LocalAlgorithm | None,
) -> float:
    local = [b / s.num_shards(mesh.shape) for b, s in zip(kind.bytes, (*in_specs, *out_specs), strict=True)]
    parts: float = math.prod(mesh.axes_size(a) for a in assignment.values())
    if own is not None and own.flops:
        local += [own.bytes] * 2  # written and read
        parts = kind.flops / own.flops
    if algorithm is not None:
        parts /= algorithm.work
    if kind.convolution is not None:
        shapes = [
            [math.ceil(n / mesh.axes_size(axes)) for n, axes in zip(shape, spec.dims, strict=True)]
            for shape, spec in zip(kind.shapes, (*in_specs, *out_specs), strict=True)
        ]
        features_read = kind.shapes[1][kind.convolution.rhs[1]]
        parts /= tile_padding(kind.convolution, shapes, features_read, mesh.hardware)
    moved = ((own.moved if own else 0) + (algorithm.moved if algorithm else 0)) / mesh.hardware.memory_rate
    return compute_seconds(kind, local, parts, mesh) + moved + _halo_copy_seconds(kind, in_specs, assignment, mesh)


def _halo_copy_seconds(
    kind: OpKind, in_specs: Sequence[Spec], assignment: Mapping[str, Axes], mesh: LogicalMesh
) -> float:
    """Seconds to put operands and their halos together on one device, one dimension after the other: what is sent is
    cut out, and the whole operand, which else may be fused, is written and read once more."""
    hardware, seconds, grown = mesh.hardware, 0.0, dict[int, float]()
    for halo in kind.rule.halos:
        axes, operand = assignment.get(kind.rule.halo_factor(halo), ()), halo.operand
        if not axes:
            continue
        parts = mesh.axes_size(axes)
        own, sides = halo.window.input_size // parts, halo.window.halo_rows(parts)
        sent = sum(len(rows_per_hop(rows, own)) for rows in sides)
        if sent:
            bits = kind.sent_bits[operand] / kind.bits[operand]
            local = grown.get(operand, kind.bytes[operand] / in_specs[operand].num_shards(mesh.shape))
            seconds += 2 * local * bits / hardware.memory_rate + sent * hardware.overhead
            grown[operand] = local * (own + sum(sides)) / own
    return seconds


def compute_seconds(
    kind: OpKind,
    local: Sequence[Any],
    parts: Any,
    mesh: LogicalMesh,
    minimum: Callable[[Sequence[Any]], Any] = min,
    maximum: Callable[[Sequence[Any]], Any] = max,
) -> Any:
    """Compute seconds of one execution of a node on one device.

    Args:
      local: bytes per device of each operand, of each result, and then of what the operation stores between its steps.
      parts: product of the sizes of all axes that split the node's factors.
      minimum: reduces a sequence of numbers; elementwise where ``local`` and ``parts`` are arrays.
      maximum: the same for the maximum.
    """
    hardware = mesh.hardware
    if kind.traits.fused_into_consumer or not kind.shapes:
        return 0.0
    if kind.tie:  # slices of a stacked operand or result of a loop are copied, as are transfers; others move nothing
        if kind.host_transfer:
            if kind.copied_beside is not None:
                return seconds_waited_for_copies(minimum(local), kind.copied_beside, mesh)
            return minimum(local) / hardware.host_bandwidth if hardware.host_bandwidth else 0.0
        row, made = len(kind.shapes[0]), len(kind.shapes[-1])
        # A stack is cleared before the loop. What writes a row reads it, where it is not fused into what makes it.
        times = 3 if made > row and not hardware.fused_products else 1
        return times * minimum(local) / hardware.memory_rate if made != row else 0.0
    operands = len(kind.rule.operands)
    traffic = kind.traffic or (float(bool(kind.flops)),) * operands + (1.0,) * len(kind.rule.results)
    steps = sum(local[len(traffic) :])  # what one step of an operation writes and another reads
    memory = sum([size * share for size, share in zip(local, traffic, strict=False) if share], steps)
    memory = memory / hardware.memory_rate
    if not kind.flops:
        return memory
    rate = hardware.product_rate(kind.product_dtype, convolution=kind.convolution is not None)
    return maximum([kind.flops / parts / rate, memory, hardware.overhead])
