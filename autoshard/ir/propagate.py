"""Sharding propagation: from the specs of a few values to a `Layout`, a spec for every value, as a fixed point.

A split dimension proposes its axes to every dimension that shares a factor with it. The heaviest proposal is taken
first, where weight is the bytes of the value that it comes from: where two conflict, resharding the smaller value is
cheaper. So the result depends on sizes, never on the order of equations. Seeds come in levels of falling priority (the
user's pins first); each level reaches its fixed point before the next begins.

A dimension only ever gains axes, minor to those it has. Hence propagation terminates and is idempotent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autoshard.ir.graph import Graph, OpKind
from autoshard.ir.spec import Axes, DimAxes, Spec

Factors = dict[str, Axes]
"""Axes of each factor of one node."""
Origin = Literal["pinned", "chosen", "solved", "loading", "returned"] | int
"""What decided how a dimension is split: the user, the search, the solver, loading, the call that a result comes back
to, or the node of this number, which propagated it."""


@dataclass(frozen=True)
class Layout:
    """A spec for every value of a graph, and where each split came from."""

    specs: tuple[Spec, ...]
    origins: Mapping[tuple[int, int], Origin]
    """For a split dimension (value, dimension): what decided its split."""
    dropped: tuple[tuple[int, Spec, Spec], ...] = ()
    """Seeds that conflict with an earlier decision: value, seed, and the spec that the value had by then."""
    strategies: Mapping[int, tuple[tuple[str, Axes], ...]] = field(
        default_factory=dict[int, tuple[tuple[str, Axes], ...]]
    )
    """(factor, axes) pairs by node, where the search chose them. Any other node runs the cheapest strategy that its
    specs allow."""


def propagate(graph: Graph, levels: Sequence[Mapping[int, Spec]], hard: Mapping[int, Spec] | None = None) -> Layout:
    """The layout that follows from the user's pins and ``levels`` of seeds.

    Args:
      graph: the program.
      levels: specs by value, in falling priority; each is taken as far as it is compatible with earlier decisions.
      hard: specs by value that are final, like the user's pins.
    """
    final = {**(hard or {}), **graph.pins}
    run = _Propagation(graph, final)
    run.seed(final)
    dropped = [d for level in levels for d in run.seed(level)]
    known = {dims: Spec(dims) for dims in set(run.state)}
    return Layout(tuple([known[dims] for dims in run.state]), run.origins, tuple(dropped))


def factor_axes(
    kind: OpKind, state: Sequence[Sequence[Axes]], mesh: Mapping[str, int], first: int | None = None
) -> Factors:
    """The axes of each factor of a node that follow from its values' specs; in a conflict the largest value decides.

    ``state`` has the axes of each dimension of each operand and result. With ``first``, the value at that position
    decides before all others.
    """
    dims = kind.factored_dims if first is None else sorted(kind.factored_dims, key=lambda p: p.value != first)
    sizes, kinds = dict(kind.factor_sizes), dict(kind.rule.kinds)
    chosen: Factors = {}
    owner: dict[str, str] = {}
    for i, d, dim in dims:
        rest = state[i][d]
        for f in dim:
            if not rest or kinds.get(f) == "whole":
                break
            take, parts = 0, 1
            while take < len(rest) and sizes[f] % (parts * mesh[rest[take]]) == 0:
                parts *= mesh[rest[take]]
                take += 1
            axes = rest[:take]
            if kind.rule.local is not None and kind.rule.local.alongside == f:  # the local factor has the minor ones
                axes = tuple(itertools.takewhile(lambda a, f=f: owner.get(a, f) == f, axes))
            old = chosen.get(f, ())
            if len(axes) > len(old) and axes[: len(old)] == old and all(owner.get(a, f) == f for a in axes):
                chosen[f] = axes
                owner.update(dict.fromkeys(axes, f))
            if parts < sizes[f]:
                break
            rest = rest[take:]
    return chosen


def axes_of_dim(
    dim: Sequence[str], chosen: Mapping[str, Axes], sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> Axes:
    """The axes of a dimension with the factors ``dim``, where factors have the ``chosen`` axes."""
    axes: Axes = ()
    for f in dim:
        own = chosen.get(f, ())
        axes += own
        if math.prod(mesh[a] for a in own) < sizes[f]:
            break
    return axes


class Proposal(NamedTuple):
    """Axes that a node proposes to a dimension of one of its values."""

    value: int
    """Position among the node's operands and then its results."""
    dim: int
    axes: Axes
    weight: int
    """Bytes of the value that the axes come from."""


class _Propagation:
    """The state of one propagation: the axes of each dimension so far, and a priority queue of proposals."""

    def __init__(self, graph: Graph, final: Mapping[int, Spec]) -> None:
        self.graph, self.final, self.mesh = graph, final, graph.program.mesh.shape
        self.known = graph.kinds.proposals(graph.program.mesh)
        self.state: list[DimAxes] = [((),) * len(v.shape) for v in graph.values]
        self.origins: dict[tuple[int, int], Origin] = {}
        undecided = (v for v in range(1, len(graph.values)) if v not in final or v in graph.unconstrained_dims)
        self.active_nodes = {n for v in undecided for n in graph.uses[v]}
        """Nodes with a value whose spec is not final."""
        self.queue: list[tuple[int, int, int, Axes, int]] = []
        """(-weight, value, dimension, axes, proposing node)."""

    def seed(self, seeds: Mapping[int, Spec]) -> list[tuple[int, Spec, Spec]]:
        """Takes one level of seeds and propagates to the fixed point; returns conflicts as `Layout.dropped`."""
        dropped: list[tuple[int, Spec, Spec]] = []
        changed: list[int] = []
        for v, spec in seeds.items():
            final = self.final.get(v) is spec
            origin: Origin = "pinned" if final and v in self.graph.pins else "chosen"
            for d, axes in enumerate(spec.dims):
                if not axes:
                    continue
                if self.take(v, d, axes, origin, final=final):
                    changed.append(v)
                elif self.state[v][d] != axes:
                    dropped.append((v, spec, Spec(self.state[v])))
        for v in changed:
            self.visit(v)
        self.drain()
        return dropped

    def drain(self) -> None:
        while self.queue:
            _, v, d, axes, n = heapq.heappop(self.queue)
            if self.take(v, d, axes, n):
                self.visit(v)

    def take(self, v: int, d: int, axes: Axes, origin: Origin, *, final: bool = False) -> bool:
        """Splits dimension ``d`` of value ``v`` over ``axes`` if these extend its axes, are free and divide it."""
        dims = self.state[v]
        old = dims[d]
        if not (final or self.undecided(v, d)):
            return False
        if len(axes) <= len(old) or axes[: len(old)] != old:
            return False
        new = axes[len(old) :]
        if any(a in other for a in new for other in dims):
            return False
        if self.graph.values[v].shape[d] % math.prod(self.mesh[a] for a in axes):
            return False
        self.state[v] = (*dims[:d], axes, *dims[d + 1 :])
        self.origins[v, d] = origin
        return True

    def undecided(self, v: int, d: int) -> bool:
        """Whether the axes of dimension ``d`` of value ``v`` are not final."""
        return v not in self.final or d in self.graph.unconstrained_dims.get(v, ())

    def visit(self, v: int) -> None:
        """Queues the proposals of the nodes that read or make ``v``, whose axes have changed."""
        nodes, state, final, cache = self.graph.nodes, self.state, self.final, self.known
        for n in self.graph.uses[v]:
            if n not in self.active_nodes:
                continue
            values = nodes[n].values
            key = nodes[n].kind, *[state[u] for u in values]
            found = cache.get(key)
            if found is None:
                found = cache[key] = proposals(nodes[n].kind, key[1:], self.mesh)
            for i, d, axes, weight in found:
                u = values[i]
                if u and (u not in final or self.undecided(u, d)):
                    heapq.heappush(self.queue, (-weight, u, d, axes, n))


def proposals(kind: OpKind, state: Sequence[DimAxes], mesh: Mapping[str, int]) -> tuple[Proposal, ...]:
    """What a node proposes to its values, given the axes of their dimensions so far."""
    sizes = dict(kind.factor_sizes)
    chosen = factor_axes(kind, state, mesh)
    weights: dict[str, int] = {}
    for i, d, dim in kind.factored_dims:
        if state[i][d]:
            bytes_ = math.prod(kind.shapes[i]) * kind.bits[i] // 8
            for f in dim:
                weights[f] = max(weights.get(f, 0), bytes_)
    found: list[Proposal] = []
    for i, d, dim in kind.factored_dims:
        axes = axes_of_dim(dim, chosen, sizes, mesh)
        if len(axes) > len(state[i][d]):
            found.append(Proposal(i, d, axes, max(weights.get(f, 0) for f in dim)))
    return tuple(found)
