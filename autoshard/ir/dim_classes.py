"""Dimension classes: sets of dimensions, across the whole program, that should be split over the same mesh axes.

Two dimensions are in one class where the rule of some equation puts the same factor on both (the transitive closure of
that). Classes are what users call "batch", "heads" or "vocab": a layout is chosen and explained in terms of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from autoshard.ir.graph import BACKWARD, FORWARD, Graph, OpKind
from autoshard.jaxpr.paths import path_names

_CONTAINED = frozenset({"kernel", "raw_value", "value"})
"""Keys that name what a layer or variable contains: a class is named after the key before them."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DimClass:
    """A class of dimensions. Members are (value, dimension) pairs."""

    name: str
    size: int
    """Greatest number of parts that every member divides into."""
    inputs: tuple[tuple[int, int], ...]
    """Members that are dimensions of the program's arguments."""
    members: int
    """Number of all members."""
    weight: float
    """Bytes of all values with a member."""
    is_batch: bool = False
    """Whether it is of the batch."""
    starts: tuple[tuple[int, int], ...] = ()
    """Of the batch: members where the class begins inside the step, as a part of the dimensions in ``inputs``."""

    def __str__(self) -> str:
        return f"{self.name} ({self.size})"


@dataclass(frozen=True)
class ArgumentRoles:
    """Positions of the flat arguments of a training step by role. A step without state has a batch only."""

    parameters: frozenset[int]
    optimizer: frozenset[int]
    """Carried state that is no parameter."""
    batch: frozenset[int]
    """Not carried from call to call."""


def argument_roles(graph: Graph) -> ArgumentRoles:
    """The role of each argument.

    A parameter is a carried argument that a differentiated equation reads, at any depth of loops and branches, or of
    which it reads elements that were moved or cast before, as rows of layers; where nothing is differentiated, every
    carried argument is one.
    """
    carried = {i for i, _ in graph.program.carries}
    differentiated = {v for n in graph.nodes if n.phase in (FORWARD, BACKWARD) for v in n.operands}
    same: dict[int, list[int]] = defaultdict(list)  # by value: those that enter a region as it, or that it consists of
    for n in graph.nodes:
        traits = n.kind.traits
        if n.tie and n.trip_count:
            same[n.results[0]] += n.operands
        elif traits.moves_data or traits.casts:
            same[n.results[0]] += [v for v, shape in zip(n.operands, n.kind.shapes, strict=False) if shape]
    todo = [*differentiated]
    while todo:
        new = set(same[todo.pop()]) - differentiated
        differentiated |= new
        todo += new
    parameters = {i for i in carried if not differentiated or graph.inputs[i] in differentiated}
    everything = range(len(graph.inputs))
    return ArgumentRoles(frozenset(parameters), frozenset(carried - parameters), frozenset(set(everything) - carried))


class Dims(NamedTuple):
    """All dimensions of a graph's values, numbered value by value."""

    start: IntArray
    """[values]: the number of each value's first dimension."""
    owner: IntArray
    """[dimensions]: the value."""
    sizes: IntArray
    """[dimensions]"""
    label: IntArray
    """[dimensions]: the number of the class."""

    def pairs(self, numbers: IntArray) -> tuple[tuple[int, int], ...]:
        """Dimensions as (value, dimension) pairs."""
        owner = self.owner[numbers]
        return tuple(zip(owner.tolist(), (numbers - self.start[owner]).tolist(), strict=True))


class BatchClass(NamedTuple):
    """A class that belongs to the batch (`autoshard.ir.batch`)."""

    label: int
    arguments: IntArray
    """Dimensions of arguments that it is, or is a part of."""
    starts: IntArray
    """Its dimensions where it begins inside the step, as a part of those."""


def label_dims(graph: Graph) -> Dims:
    """The dimensions of ``graph`` with the class of each."""
    ranks = np.array([len(v.shape) for v in graph.values])
    start = np.cumsum(ranks) - ranks
    owner = np.repeat(np.arange(len(ranks)), ranks)
    sizes = np.fromiter((n for v in graph.values for n in v.shape), dtype=np.int64, count=len(owner))
    return Dims(start, owner, sizes, _class_labels(graph, start, len(owner)))


def dim_classes(graph: Graph, dims: Dims, batch: Sequence[BatchClass] = ()) -> tuple[DimClass, ...]:
    """The dimension classes with a dimension of an argument, in order of falling weight.

    Args:
      dims: those of ``graph``.
      batch: the classes of the batch. A dimension of an argument that such a class is a part of counts as its member.
    """
    label, of_batch = dims.label.copy(), {c.label: c for c in batch}
    for c in batch:
        label[c.arguments] = c.label
    large = np.flatnonzero(dims.sizes > 1)
    order = large[np.argsort(label[large], kind="stable")]
    weights = np.array([v.bytes for v in graph.values], dtype=object)
    is_argument = np.isin(dims.owner, graph.inputs)
    found: list[DimClass] = []
    for group in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        inputs = dims.pairs(group[is_argument[group]])
        if inputs:
            size = int(np.gcd.reduce(dims.sizes[group]))
            weight = float(weights[np.unique(dims.owner[group])].sum())
            c = of_batch.get(int(label[group[0]]))
            name, starts = (_name(graph, inputs), ()) if c is None else ("batch", dims.pairs(c.starts))
            found.append(DimClass(name, size, inputs, len(group), weight, c is not None, starts))
    return _with_distinct_names(sorted(found, key=lambda c: (-c.weight, c.inputs)))


def _class_labels(graph: Graph, start: IntArray, total: int) -> IntArray:
    """Class number of each dimension of each value, flat; ``start``: position of each value's first dimension."""
    values_by_kind: dict[OpKind, list[tuple[int, ...]]] = defaultdict(list)
    for node in graph.nodes:
        values_by_kind[node.kind].append(node.values)
    ends: list[tuple[IntArray, IntArray]] = []
    for kind, found in values_by_kind.items():
        first, kinds = dict[str, tuple[int, int]](), dict(kind.rule.kinds)
        at = start[np.array(found)]
        for i, d, (f, *_) in kind.factored_dims:
            if kinds.get(f) != "whole":
                j, e = first.setdefault(f, (i, d))
                ends.append((at[:, j] + e, at[:, i] + d))
    if not ends:
        return np.arange(total)
    rows, columns = (np.concatenate(side) for side in zip(*ends, strict=True))
    matrix = scipy.sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=(total, total))
    return scipy.sparse.csgraph.connected_components(matrix, directed=False)[1]


def _name(graph: Graph, inputs: tuple[tuple[int, int], ...]) -> str:
    v, d = max(inputs, key=lambda m: (graph.values[m[0]].bytes, -m[0]))
    names = path_names(graph.values[v].name)
    telling = [name for name in names if name not in _CONTAINED and not name.isdecimal()]
    return f"{telling[-1] if telling else names[0]}.{d}"


def _with_distinct_names(found: list[DimClass]) -> tuple[DimClass, ...]:
    seen: dict[str, int] = defaultdict(int)
    named: list[DimClass] = []
    for c in found:
        seen[c.name] += 1
        name = c.name if seen[c.name] == 1 else f"{c.name}'{seen[c.name]}"
        named.append(replace(c, name=name))
    return tuple(named)
