"""Graph: a program as numbered values and nodes, with a rule on every node.

Nested programs are flat in it (`autoshard.ir.build_graph`). Where a value enters, leaves or goes round a region there is a
*tie*, a node whose rule is the identity, so that every algorithm above (propagation, cost, memory) reads one
flat list and knows nothing of control flow. A node inside a loop carries how often it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule import Dim, Rule
from autoshard.ir.spec import Spec
from autoshard.ir.traits import Traits

FORWARD, BACKWARD, PLAIN = "forward", "backward", "plain"


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program, whole."""

    shape: tuple[int, ...]
    bits: int
    """Bits per element."""
    dtype: str
    name: str = ""
    bytes: int = field(init=False, repr=False, compare=False)
    """Size in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", -(-math.prod(self.shape) * self.bits // 8))


@dataclass(frozen=True, slots=True, eq=False)
class OpKind:
    """What nodes that are alike share; interned, so that work on one serves all."""

    op: str
    traits: Traits
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]
    """Of the operands, then the results."""
    bits: tuple[int, ...]
    dtype: str
    factor_sizes: tuple[tuple[str, int], ...]
    factored_dims: tuple[tuple[int, int, Dim], ...]
    """(position among operands and results, dimension, factors), largest value first."""
    flops: float
    """Floating-point operations of the whole operation, where they are what costs; else 0."""
    tie: bool = False
    """Whether it stands for a value that goes into, out of or round a region."""
    combined_count: int = 1
    """How many results are sent by one collective, this one's among them."""
    bytes: tuple[float, ...] = field(init=False, repr=False)
    """Of the operands, then the results, whole."""

    def __post_init__(self) -> None:
        sizes = tuple(math.prod(n) * b / 8 for n, b in zip(self.shapes, self.bits, strict=True))
        object.__setattr__(self, "bytes", sizes)


class Node(NamedTuple):
    """One operation. ``operands`` and ``results`` are value numbers."""

    kind: OpKind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trip_count: int = 1
    """How often it runs; 0 of a tie that says of two values that they should lie alike, and moves nothing."""
    source: str = ""
    phase: str = PLAIN

    @property
    def values(self) -> tuple[int, ...]:
        """The operands, then the results."""
        return self.operands + self.results

    @property
    def tie(self) -> bool:
        return self.kind.tie


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something a user should know: where, and what."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}" if self.source else self.text


@dataclass(frozen=True)
class Graph:
    """A program's values and nodes, in order of execution."""

    program: Program
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ids: Mapping[jx.Var, int]
    pins: Mapping[int, Spec]
    """Values pinned by the user: arguments, results, and those inside the step."""
    diagnostics: tuple[Diagnostic, ...] = ()
    unconstrained_dims: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """Dimensions of pinned values that their pin leaves open."""
    loops: tuple[tuple[int, int], ...] = ()
    """First and last node of every loop, what goes in and comes out included; an outer loop after its inner ones."""
    proposal_cache: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, compare=False, repr=False)
    """Cache of `propagate.proposals` by (OpKind, axes of its values). Like every cache here it lives as long as the
    graph, is valid for its mesh alone, and starts empty in a copy that `dataclasses.replace` makes."""
    node_cost_cache: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, compare=False, repr=False)
    """Cache of `autoshard.cost.cost`: node costs by OpKind, specs of its values and chosen strategy."""

    @functools.cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the nodes that it is an operand or a result of."""
        uses: list[list[int]] = [[] for _ in self.values]
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys(node.values):
                uses[v].append(i)
        return tuple(map(tuple, uses))


def graph_lines(graph: Graph) -> Iterator[str]:
    """One line a node: what it does, to what, under which rule, and where it comes from."""

    def value(v: int) -> str:
        return f"%{v}{list(graph.values[v].shape)}" if v else "lit"

    for i, n in enumerate(graph.nodes):
        times = f" x{n.trip_count}" if n.trip_count > 1 else ""
        left, right = (", ".join(map(value, vs)) for vs in (n.results, n.operands))
        op = n.kind.op + (" (tie)" if n.tie else "")
        yield f"{i:4} {left} = {op} {right}{times}  {n.kind.rule}  {n.phase}  {n.source}"
