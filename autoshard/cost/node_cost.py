"""Node costs: what one execution of a node takes under given specs of its operands and results, reshards included.

Of all strategies that the specs suggest, `cheapest_node_cost` takes the one with the least seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost.node_strategy import NodeStrategy, expressible_factors, node_strategy
from autoshard.cost.overlap.node_reshards import Resharded, seconds_waited_by
from autoshard.cost.reshard import combined_saving, reshard_collectives, reshard_seconds, spec_after_reduction
from autoshard.ir.graph import OpKind
from autoshard.ir.propagate import factor_axes
from autoshard.ir.spec import REDUCTION_KINDS, Axes, Spec
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import LogicalMesh

OperandPositions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cheapest strategy of nodes of one kind under given operand and result specs, with its cost."""

    in_specs: tuple[Spec, ...]
    """Spec in which each operand is read."""
    out_specs: tuple[Spec, ...]
    """Spec in which each result is produced, partial axes included, before it is resharded to the layout's spec."""
    compute_seconds: float
    """Compute seconds of one execution on one device."""
    seconds: float
    """Seconds of one execution, reshards of operands and results included."""
    collectives: tuple[Collective, ...] = ()
    """Halo exchanges and the collectives inside the local form."""
    local_axes: Axes = ()
    """Mesh axes that split the rule's `local` factor."""
    uses_local_form: bool = False
    """Whether the node runs as its rule's local form in a `shard_map` island; otherwise XLA partitions it."""
    resharded: bool = False
    """Whether ``in_specs`` and ``out_specs`` differ from the layout's specs."""
    stored_bytes: int = 0
    """As of the strategy."""
    hidden_seconds: float = 0.0
    """As of the strategy."""


def cheapest_node_cost(
    kind: OpKind, specs: tuple[Spec, ...], mesh: LogicalMesh, free_operands: OperandPositions = ()
) -> NodeCost:
    """The cheapest strategy for a node whose operands and results have ``specs``.

    Strategies that gather an operand, or move its axes to another factor, instead of reducing a partial result must
    send fewer bytes as well as take less time: a gather of a small value is slightly faster than a reduction, but XLA
    combines many small reductions into one.

    Args:
      specs: of the operands, then of the results.
      free_operands: positions of operands that cost nothing to reshard (`CostModel.free_to_reshard`).
    """
    state = [s.dims for s in specs]
    proposed = (factor_axes(kind, state, mesh.shape, first) for first in (None, *range(len(specs))))
    found = _deduplicated(expressible_factors(kind, assignment, mesh) for assignment in proposed)
    found = _deduplicated([*found, *(_in_place(kind, assignment) for assignment in found)])
    best = _cheapest_of(kind, specs, found, mesh, free_operands)
    if not any(k in REDUCTION_KINDS for _, k in kind.rule.kinds):
        return best
    reduced = [f for f, k in kind.rule.kinds if k in REDUCTION_KINDS]
    fewer = [({f}, assignment) for assignment in found for f in assignment]
    fewer += [(set(reduced), assignment) for assignment in found]
    smaller = _deduplicated({f: a for f, a in c.items() if f not in dropped} for dropped, c in fewer)
    other = _cheapest_of(kind, specs, smaller, mesh, free_operands)
    if other.seconds >= best.seconds:
        return best
    other_bytes, best_bytes = (_bytes_sent(kind, specs, cost, mesh, free_operands) for cost in (other, best))
    return other if other_bytes < best_bytes else best


def _cheapest_of(
    kind: OpKind,
    specs: tuple[Spec, ...],
    found: Sequence[Mapping[str, Axes]],
    mesh: LogicalMesh,
    free_operands: OperandPositions,
) -> NodeCost:
    """The cheapest of these assignments, their variants with idle axes reassigned, and those without the local form."""
    tried = {tuple(sorted(assignment.items())) for assignment in found}
    for assignment in found:
        tried |= {tuple(sorted(other.items())) for other in _reassign_idle_axes(kind, specs, assignment, mesh)}
    if kind.rule.local is not None:  # gather what the local form would split
        tried |= {tuple((f, axes) for f, axes in pairs if kind.rule.kind(f) != "local") for pairs in tried}
    strategies = (node_strategy(kind, dict(pairs), mesh) for pairs in sorted(tried))
    costs = (node_cost(kind, specs, s, mesh, free_operands) for s in strategies if s.feasible)
    return min(costs, key=lambda cost: cost.seconds)


def _deduplicated(assignments: Iterable[dict[str, Axes]]) -> list[dict[str, Axes]]:
    return list({tuple(sorted(a.items())): a for a in assignments}.values())


def _in_place(kind: OpKind, assignment: Mapping[str, Axes]) -> dict[str, Axes]:
    """The assignment in which the local factor is split in place (`Local.in_place`), where it can be."""
    in_place = kind.rule.local.in_place if kind.rule.local is not None else None
    return {in_place if in_place and kind.rule.kind(f) == "local" else f: axes for f, axes in assignment.items()}


def _reshards(
    specs: tuple[Spec, ...], run: NodeCost | NodeStrategy, free_operands: OperandPositions
) -> list[tuple[int, Spec, Spec]]:
    """The reshards of a node: (position among operands and results, source spec, destination spec)."""
    ends = [*zip(specs, run.in_specs, strict=False), *zip(run.out_specs, specs[len(run.in_specs) :], strict=True)]
    return [(i, a, b) for i, (a, b) in enumerate(ends) if a != b and i not in free_operands]


def _bytes_sent(
    kind: OpKind, specs: tuple[Spec, ...], run: NodeCost, mesh: LogicalMesh, free_operands: OperandPositions
) -> float:
    """Bytes that leave a device in one execution."""
    reshards = _reshards(specs, run, free_operands)
    issued = [c for i, a, b in reshards for c in reshard_collectives(a, b, kind.shapes[i], kind.sent_bits[i], mesh)]
    return sum(c.wire_bytes(mesh) for c in (*issued, *run.collectives))


def _reassign_idle_axes(
    kind: OpKind, specs: Sequence[Spec], assignment: Mapping[str, Axes], mesh: LogicalMesh
) -> Iterator[dict[str, Axes]]:
    """Assignments in which axes that would go unused split one more parallel factor.

    The axes of a dimension that the node cannot split are moved to one that it can, and back afterwards: two
    all-to-alls rather than an all-gather.
    """
    used = {a for axes in assignment.values() for a in axes}
    idle = tuple(dict.fromkeys(a for s in specs for a in s.axes if a not in used))
    for f, size in kind.factor_sizes if idle else ():
        axes = (*assignment.get(f, ()), *idle)
        if kind.rule.kind(f) == "parallel" and size % mesh.axes_size(axes) == 0:
            reassigned = expressible_factors(kind, {**assignment, f: axes}, mesh)
            if f in reassigned:
                yield reassigned


def node_cost(
    kind: OpKind,
    specs: tuple[Spec, ...],
    strategy: NodeStrategy,
    mesh: LogicalMesh,
    free_operands: OperandPositions = (),
) -> NodeCost:
    """The cost of a node whose operands and results have ``specs`` under this strategy."""
    moved: list[Resharded] = []
    for i, a, b in _reshards(specs, strategy, free_operands):
        seconds = reshard_seconds(a, b, kind.shapes[i], kind.sent_bits[i], mesh)
        moved.append(Resharded(i, a, b, seconds - combined_saving(a, b, kind.combined_count, mesh)))
    transfers = sum(seconds_waited_by(kind, moved, mesh))
    return NodeCost(
        strategy.in_specs,
        strategy.out_specs,
        strategy.compute_seconds,
        strategy.seconds(mesh) + transfers,
        strategy.collectives or (),
        strategy.local_axes,
        _uses_local_form(kind, specs, strategy, mesh),
        (*strategy.in_specs, *strategy.out_specs) != specs,
        strategy.stored_bytes,
        strategy.hidden_seconds,
    )


def _uses_local_form(kind: OpKind, specs: Sequence[Spec], strategy: NodeStrategy, mesh: LogicalMesh) -> bool:
    """Whether the local form runs (`Local.used_when`): by default where its factor is split or halos are exchanged, and
    always where the rule has neither."""
    if kind.rule.local is None:
        return False
    if kind.rule.local.used_when == "partial":
        return any(s.partial for s in strategy.out_specs)
    if kind.rule.local.used_when == "scattered":
        n = len(strategy.in_specs)
        ends = zip(strategy.out_specs, specs[n:], kind.shapes[n:], kind.bits[n:], strict=True)
        scattered = any(
            spec_after_reduction(made, target, shape, bits, mesh).dims != made.dims
            for made, target, shape, bits in ends
        )
        return scattered or any(strategy.in_specs[h.operand].dims[h.dim] for h in kind.rule.halos)
    kinds = dict(kind.rule.kinds)
    if "halo" in kinds.values():
        return any(specs[i].dims[d] for i, d, dim in kind.factored_dims if kinds.get(dim[0]) == "halo")
    return bool(strategy.local_axes) or kind.rule.local.used_when == "always" or "local" not in kinds.values()
