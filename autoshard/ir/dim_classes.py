"""Dimension classes: sets of dimensions, across the whole program, that should be split over the same mesh axes.

Two dimensions are in one class where the rule of some equation puts the same factor on both (the transitive closure of
that). Classes are what users call "batch", "heads" or "vocab": a layout is chosen and explained in terms of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from autoshard.ir.graph import BACKWARD, FORWARD, Graph, OpKind
from autoshard.jaxpr.paths import path_names

_CONTAINED = frozenset({"kernel", "raw_value", "value"})
"""Keys that name what a layer or variable contains: a class is named after the key before them."""


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
    """Whether a member is the first dimension of an argument that is not carried from call to call."""

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

    A parameter is a carried argument that a differentiated equation reads; where nothing is differentiated, every
    carried argument is one.
    """
    carried = {i for i, _ in graph.program.carries}
    phases = [{graph.nodes[n].phase for n in graph.uses[v]} for v in graph.inputs]
    trained = any(FORWARD in p or BACKWARD in p for p in phases)
    parameters = {i for i in carried if not trained or phases[i] & {FORWARD, BACKWARD}}
    everything = range(len(graph.inputs))
    return ArgumentRoles(frozenset(parameters), frozenset(carried - parameters), frozenset(set(everything) - carried))


def dim_classes(graph: Graph) -> tuple[DimClass, ...]:
    """The dimension classes with a dimension of an argument, in order of falling weight."""
    values = graph.values
    ranks = np.array([len(v.shape) for v in values])
    start = np.cumsum(ranks) - ranks
    owner = np.repeat(np.arange(len(values)), ranks)
    sizes = np.fromiter((n for v in values for n in v.shape), dtype=np.int64, count=len(owner))
    label = _class_labels(graph, start, len(owner))
    large = np.flatnonzero(sizes > 1)
    order = large[np.argsort(label[large], kind="stable")]
    weights = np.array([v.bytes for v in values], dtype=object)
    args, batch = set(graph.inputs), {graph.inputs[i] for i in argument_roles(graph).batch}
    is_argument = np.isin(owner, list(args))
    found: list[DimClass] = []
    for group in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        of_args = group[is_argument[group]]
        inputs = tuple(zip(owner[of_args].tolist(), (of_args - start[owner[of_args]]).tolist(), strict=True))
        if inputs:
            size = int(np.gcd.reduce(sizes[group]))
            weight = float(weights[np.unique(owner[group])].sum())
            is_batch = any(v in batch and d == 0 for v, d in inputs)
            name = "batch" if is_batch else _name(graph, inputs)
            found.append(DimClass(name, size, inputs, len(group), weight, is_batch))
    return _with_distinct_names(sorted(found, key=lambda c: (-c.weight, c.inputs)))


def batch_dims(graph: Graph) -> frozenset[tuple[int, int]]:
    """Every (value, dimension) in the class of the first dimension of a batch argument."""
    ranks = np.array([len(v.shape) for v in graph.values])
    start = np.cumsum(ranks) - ranks
    owner = np.repeat(np.arange(len(ranks)), ranks)
    label = _class_labels(graph, start, len(owner))
    firsts = [start[graph.inputs[i]] for i in argument_roles(graph).batch if graph.values[graph.inputs[i]].shape]
    found = np.flatnonzero(np.isin(label, label[firsts]))
    return frozenset((int(owner[k]), int(k - start[owner[k]])) for k in found)


def _class_labels(graph: Graph, start: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Class number of each dimension of each value, flat; ``start``: position of each value's first dimension."""
    values_by_kind: dict[OpKind, list[tuple[int, ...]]] = defaultdict(list)
    for node in graph.nodes:
        values_by_kind[node.kind].append(node.values)
    ends: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
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
