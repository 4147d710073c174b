"""Graph: a program as a flat list of nodes over numbered values, with a sharding rule on every node.

Nested jaxprs are flattened into it (`autoshard.ir.build_graph`). Where a value enters or leaves a region, or is carried
by a loop, there is a *tie*: a node whose rule is the identity. So propagation, cost and memory read one flat list and
know nothing of control flow. A node inside a loop has the loop's trip count.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule import Dim, Rule
from autoshard.ir.spec import Spec
from autoshard.ir.traits import Traits
from autoshard.machine.mesh import LogicalMesh

FORWARD, BACKWARD, PLAIN = "forward", "backward", "plain"


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program, unsharded."""

    shape: tuple[int, ...]
    bits: int
    """Bits per element."""
    dtype: str
    name: str = ""
    host: bool = False
    """Whether it is in the host's memory."""
    bytes: int = field(init=False, repr=False, compare=False)
    """Size in bytes."""

    @property
    def device_bytes(self) -> int:
        """Size in bytes of device memory."""
        return 0 if self.host else self.bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", -(-math.prod(self.shape) * self.bits // 8))


class FactoredDim(NamedTuple):
    """A dimension of an operand or result and the factors of its size."""

    value: int
    """Position among the operands and then the results."""
    dim: int
    factors: Dim
    """Major to minor."""


@dataclass(frozen=True, slots=True, eq=False)
class OpKind:
    """What nodes of the same operation, parameters, shapes and dtypes share.

    Interned (`OpKinds`) and compared by identity, so that what is computed for one node serves all.
    """

    op: str
    """Name of the primitive."""
    traits: Traits
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]
    """Of the operands, then the results."""
    bits: tuple[int, ...]
    """Bits per element of the operands, then the results."""
    product_dtype: str
    """Of the first two operands, not counting integers beside other numbers, the wider: a matrix product runs at its
    peak. Empty where ``flops`` is 0."""
    factor_sizes: tuple[tuple[str, int], ...]
    factored_dims: tuple[FactoredDim, ...]
    """Every dimension that has a factor; those of the largest value first."""
    flops: float
    """FLOPs of the unsharded operation, where it is a matrix product or the like; else 0."""
    convolution: jx.Convolution | None = None
    """The dimensions of a convolution."""
    tie: bool = False
    """Whether it is a value's way into or out of a region, or from one iteration to the next."""
    host_transfer: str = ""
    """Which way it copies its operand between the memories of device and host (`autoshard.machine.host_link`); empty
    where it does not."""
    copied_beside: float | None = None
    """Seconds of products beside which XLA copies it so (`autoshard.cost.overlap.host_copies`); None where it does
    not."""
    factor_bits: int | None = None
    """Bits of an element of its two factors that a product uses, at most; None where it uses all."""
    combined_count: int = 1
    """How many all-reduces XLA combines into one with this one's (`autoshard.ir.combined_reductions`)."""
    traffic: tuple[float, ...] | None = None
    """Bytes of device memory that its fusion reads by each byte of its operands, then writes by each of its results
    (`autoshard.cost.fusions`); None where it is in none."""
    beside: tuple[float, ...] | None = None
    """Of each operand and result: seconds of products beside which XLA can reshard it
    (`autoshard.cost.overlap.beside_products`); None where there are none."""
    on_fast_links: frozenset[int] = frozenset()
    """Positions, operands and then results, of which that holds only of what moves over no link of the slowest kind."""
    in_rings: frozenset[int] = frozenset()
    """Positions of which that holds only of what moves in rings beside this product."""
    bytes: tuple[float, ...] = field(init=False, repr=False)
    """Of the operands, then the results, unsharded."""
    sent_bits: tuple[int, ...] = field(init=False, repr=False)
    """``bits`` as they are resharded for it: XLA rounds an operand to what a product uses before it sends it."""
    sent_bytes: tuple[float, ...] = field(init=False, repr=False)
    """``bytes`` in these."""

    def __post_init__(self) -> None:
        sizes = tuple(math.prod(n) * b / 8 for n, b in zip(self.shapes, self.bits, strict=True))
        object.__setattr__(self, "bytes", sizes)
        sent_bits = tuple(min(b, self.factor_bits or b) if i < 2 else b for i, b in enumerate(self.bits))
        sent = tuple(math.prod(n) * b / 8 for n, b in zip(self.shapes, sent_bits, strict=True))
        object.__setattr__(self, "sent_bits", sent_bits)
        object.__setattr__(self, "sent_bytes", sent)


class OpKinds:
    """The `OpKind` objects of graphs that have one mesh and one set of rules, and what has been computed for them.

    A graph has its own, but for those of one planning, which differ in a few passes: these share one.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, OpKind] = {}
        """By `jx.eqn_key`, or by what distinguishes ties."""
        self._variants: dict[tuple[OpKind, tuple[tuple[str, Any], ...]], OpKind] = {}
        self._proposals: dict[LogicalMesh, dict[Any, Any]] = {}
        self._strategies: dict[LogicalMesh, dict[Any, Any]] = {}
        self._node_costs: dict[LogicalMesh, dict[Any, Any]] = {}

    def variant(self, kind: OpKind, **changes: Any) -> OpKind:
        """``kind`` with other values of some of its fields."""
        key = kind, tuple(changes.items())
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = replace(kind, **changes)
        return found

    def proposals(self, mesh: LogicalMesh) -> dict[Any, Any]:
        """Cache of `autoshard.ir.propagate.proposals` on ``mesh`` (a graph may have merged axes), by OpKind and the
        axes of its values."""
        return self._proposals.setdefault(mesh, {})

    def strategies(self, mesh: LogicalMesh) -> dict[Any, Any]:
        """Cache of `autoshard.search.node_costs` on ``mesh``: strategies of nodes by OpKind and the axes of its
        factors."""
        return self._strategies.setdefault(mesh, {})

    def node_costs(self, mesh: LogicalMesh) -> dict[Any, Any]:
        """Cache of `autoshard.cost.cost` on ``mesh``: node costs by OpKind, specs of its values, chosen strategy and
        operands that are free to reshard."""
        return self._node_costs.setdefault(mesh, {})


class Node(NamedTuple):
    """One operation of the graph. ``operands`` and ``results`` are value numbers; 0 stands for any literal."""

    kind: OpKind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trip_count: int = 1
    """Executions per call of the step; 0 of a tie that only asks for equal specs of two values and moves no data."""
    source: str = ""
    """``file:line`` of the user's code."""
    phase: str = PLAIN
    """Automatic differentiation: ``FORWARD``, ``BACKWARD``, or ``PLAIN`` outside differentiated functions."""
    literals: tuple[str, ...] = ()
    """Of the operands, those that are literals, in their order."""

    @property
    def values(self) -> tuple[int, ...]:
        """The operands, then the results."""
        return self.operands + self.results

    @property
    def tie(self) -> bool:
        return self.kind.tie


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A remark for the user of the plan."""

    text: str
    source: str = ""
    """``file:line`` of the user's code that it is about, or empty."""

    def __str__(self) -> str:
        return f"{self.source}: {self.text}" if self.source else self.text


@dataclass(frozen=True)
class Graph:
    """A program's values, and its nodes in order of execution."""

    program: Program
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    """Value numbers of the program's arguments."""
    outputs: tuple[int, ...]
    """Value numbers of the program's results."""
    ids: Mapping[jx.Var, int]
    """Value number of each variable, at any depth of the jaxpr."""
    pins: Mapping[int, Spec]
    """Specs that the user demands, by value: of arguments, results and values inside the step."""
    diagnostics: tuple[Diagnostic, ...] = ()
    unconstrained_dims: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """By pinned value: the dimensions that its pin leaves to the planner."""
    loops: tuple[tuple[int, int], ...] = ()
    """First and last node of every loop, the ties at its boundary included; an outer loop after its inner ones."""
    kinds: OpKinds = field(default_factory=OpKinds, compare=False, repr=False)
    """Those of its nodes, and of other graphs."""

    @functools.cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the numbers of the nodes that have it as operand or result."""
        uses: list[list[int]] = [[] for _ in self.values]
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys(node.values):
                uses[v].append(i)
        return tuple(map(tuple, uses))


def loop_constants(graph: Graph) -> list[int]:
    """Values inside of loops that are the same in every iteration, as they enter, of loops without loops inside."""
    found: list[int] = []
    for begin, end in graph.loops:
        if any(begin < b and e < end for b, e in graph.loops):
            continue
        ties = [n for n in graph.nodes[begin : end + 1] if n.tie]
        entries, inside = Counter(n.results[0] for n in ties if n.results), set[int]()
        for n in itertools.takewhile(lambda n: n.tie and len(n.results) == 1, graph.nodes[begin : end + 1]):
            (v,), (u,) = n.results, n.operands
            inside.add(v)
            if entries[v] == 1 and u and u not in inside and graph.values[v].shape == graph.values[u].shape:
                found.append(v)
    return found


def graph_lines(graph: Graph) -> Iterator[str]:
    """One line per node: number, results, operation, operands, trip count, rule, phase and source."""

    def value(v: int) -> str:
        return f"%{v}{list(graph.values[v].shape)}" if v else "lit"

    for i, n in enumerate(graph.nodes):
        times = f" x{n.trip_count}" if n.trip_count > 1 else ""
        left, right = (", ".join(map(value, vs)) for vs in (n.results, n.operands))
        op = n.kind.op + (" (tie)" if n.tie else "")
        yield f"{i:4} {left} = {op} {right}{times}  {n.kind.rule}  {n.phase}  {n.source}"
