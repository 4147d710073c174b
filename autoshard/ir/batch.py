"""The batch: which dimensions of a step's arguments are examples that are computed independently of each other.

It is the dimension class (`autoshard.ir.dim_classes`) along which the forward computation is parallel for the most
*work*: the product of the sizes of an operation's factors, times its executions, over operations that join several
arguments. Where an operation contracts a class in a product, exchanges its halos or keeps it whole, that work counts
against it; a plain reduction counts neither way. Of equals it is the class that the backward part contracts more, then
the one whose dimensions come first.

Which classes qualify, the first of these that any do:

1. Where the step carries state: those that every array has that is not carried, and no carried one.
2. Those that are not mixed more than they are parallel, and are parallel in `MIN_SHARE` of the work of products; in a
   differentiated step only those of an array that is not carried, and of no carried one.
3. Those that carried arrays have too, such as a recurrent state, with `MIN_CARRIED_SHARE` of all work.

Where the step carries state, the batch has further classes, that no carried array has and that are parallel in
`MIN_SHARE` of all work without one of those found before: the texts beside the images.

A class may begin inside the step, where a dimension of an argument is reshaped into micro-batches and examples: then
that dimension counts as the batch's. What has no dimension of the batch and is not carried is a *frozen* parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.ir.dim_classes import BatchClass, DimClass, Dims, IntArray, argument_roles, dim_classes, label_dims
from autoshard.ir.graph import BACKWARD, FORWARD, Graph, Node, OpKind
from autoshard.ir.spec import REDUCTION_KINDS

MIN_SHARE = 0.1
"""Least share of the forward work in which a class of the batch is parallel."""
MIN_CARRIED_SHARE = 0.5
"""The same for a class that arrays have which are carried from call to call."""
DIGITS = 9
"""Digits to which shares of work are compared."""
FloatArray = npt.NDArray[np.float64]
Part = tuple[int, int]
"""Classes: of a dimension that is divided, and of a part of it."""


def classes_with_batch(graph: Graph) -> tuple[DimClass, ...]:
    """The dimension classes with a dimension of an argument, those of the batch marked, in order of falling weight."""
    dims = label_dims(graph)
    return dim_classes(graph, dims, find_batch(graph, dims))


def batch_dims(graph: Graph) -> frozenset[tuple[int, int]]:
    """Every (value, dimension) of the batch."""
    dims = label_dims(graph)
    found = find_batch(graph, dims)
    members = np.flatnonzero(np.isin(dims.label, [c.label for c in found]))
    return frozenset(pair for numbers in (members, *(c.arguments for c in found)) for pair in dims.pairs(numbers))


def frozen_arguments(graph: Graph, classes: Iterable[DimClass]) -> frozenset[int]:
    """Positions of the flat arguments that are frozen parameters; none where there is no batch.

    ``classes``: all of ``graph``.
    """
    data = {v for c in classes if c.is_batch for v, _ in c.inputs}
    shapes = {i: graph.values[graph.inputs[i]].shape for i in argument_roles(graph).batch}
    return frozenset(i for i, shape in shapes.items() if data and shape and graph.inputs[i] not in data)


class _Work(NamedTuple):
    """The work of the nodes of all kinds that have as many factors, with the same signs."""

    each: FloatArray
    """[nodes]: product of the sizes of all factors, times executions."""
    labels: IntArray
    """[nodes, factors]: classes, those with the lowest sign first."""
    signs: tuple[int, ...]
    """[factors]: 1 where the operation is parallel along the factor, 0 where it reduces it, -1 where it mixes it."""
    is_product: bool

    def along(self, classes: int, without: Collection[int] = ()) -> FloatArray:
        """[classes]: work that is parallel along each, less work that mixes it, of nodes with no class ``without``."""
        found = np.zeros(classes)
        counted = ~np.isin(self.labels, list(without)).any(axis=1)
        for k, sign in enumerate(self.signs):
            first = counted & (self.labels[:, :k] != self.labels[:, k : k + 1]).all(axis=1)
            np.add.at(found, self.labels[first, k], sign * self.each[first])
        return found


def find_batch(graph: Graph, dims: Dims) -> list[BatchClass]:
    """The classes of the batch; none where none qualifies.

    ``dims``: the dimensions of ``graph``.
    """
    classes = int(dims.label.max(initial=-1)) + 1
    is_argument = np.isin(dims.owner, graph.inputs) & (dims.sizes > 1)
    carried = {graph.inputs[i] for i, _ in graph.program.carries}
    data = {v for v in graph.inputs if v not in carried and max(graph.values[v].shape, default=1) > 1}
    trained = any(n.phase == FORWARD for n in graph.nodes)
    before = [n for n in graph.nodes if not n.tie and n.phase != BACKWARD]
    parts = _parts(before, dims)
    joining = _joining_results(graph)
    forward = [n for n in before if n.phase == FORWARD or not trained]
    works = _works([n for n in forward if joining.issuperset(n.results)] or forward, dims)
    backward = _works([n for n in graph.nodes if not n.tie and n.phase == BACKWARD], dims)

    def along(found: Sequence[_Work], without: Collection[int] = ()) -> FloatArray:
        return sum((w.along(classes, without) for w in found), np.zeros(classes))

    def owners(values: Collection[int]) -> IntArray:
        """[classes]: how many of these values have a dimension of the class, or one that is divided into it."""
        of = np.flatnonzero((dims.sizes > 1) & np.isin(dims.owner, [*values]))
        found: dict[int, set[int]] = defaultdict(set)
        for v, label in zip(dims.owner[of].tolist(), dims.label[of].tolist(), strict=True):
            found[label].add(v)
        for whole, part in parts:
            found[part] |= found[whole]
        counts = np.zeros(classes, dtype=np.int64)
        counts[[*found]] = [*map(len, found.values())]
        return counts

    data_owners = owners(data or graph.inputs)
    of_data, of_all_data = data_owners > 0, data_owners == max(1, len(data))
    given, is_carried = owners(graph.inputs) > 0, owners(carried) > 0
    work, products = _total(works), [w for w in works if w.is_product]
    share, against = (np.round(along(side) / max(1.0, work), DIGITS) for side in (works, backward))
    seen = np.isin(range(classes), np.concatenate([w.labels.ravel() for w in works] or [dims.label[:0]]))
    independent = seen & (share >= 0) & (along(products) >= MIN_SHARE * _total(products))
    tiers = [
        seen & of_all_data & ~is_carried & bool(carried and data),
        independent & (of_data & ~is_carried if trained else given),
        independent & of_data & (share >= MIN_CARRIED_SHARE),
    ]
    candidates = next((found for tier in tiers if len(found := np.flatnonzero(tier))), None)
    if candidates is None:
        return []
    position = np.bincount(dims.label, np.arange(len(dims.label)) - dims.start[dims.owner], classes)
    position /= np.maximum(1, np.bincount(dims.label, minlength=classes))
    found = [min(candidates.tolist(), key=lambda c: (-share[c], is_carried[c], against[c], position[c], c))]
    while carried:
        left = np.round(along(works, found) / max(1.0, work), DIGITS)
        others = np.flatnonzero(seen & of_data & ~is_carried & (left >= MIN_SHARE))
        if not len(others):
            break
        found.append(min(others.tolist(), key=lambda c, left=left: (-left[c], position[c], c)))

    def batch_class(label: int) -> BatchClass:
        size = np.gcd.reduce(dims.sizes[dims.label == label])
        divided = np.isin(dims.label, [whole for whole, part in parts if part == label]) & (dims.sizes % size == 0)
        starts = [n for (_, part), numbers in parts.items() if part == label for n in numbers]
        arguments = np.flatnonzero(is_argument & ((dims.label == label) | divided))
        return BatchClass(label, arguments, np.unique(np.array(starts, dtype=np.int64)))

    return [batch_class(label) for label in found]


def _total(works: Iterable[_Work]) -> float:
    return sum(float(w.each.sum()) for w in works)


def _joining_results(graph: Graph) -> set[int]:
    """The values that are computed from more than one argument."""
    only: dict[int, int] = {v: v for v in graph.inputs}
    joining: set[int] = set()
    for n in graph.nodes:
        of = {only[v] for v in n.operands if v in only}
        if len(of) > 1 or not joining.isdisjoint(n.operands):
            joining.update(n.results)
        elif of:
            only.update(dict.fromkeys(n.results, of.pop()))
    return joining


def _by_kind(nodes: Iterable[Node]) -> Mapping[OpKind, list[Node]]:
    found: dict[OpKind, list[Node]] = defaultdict(list)
    for n in nodes:
        found[n.kind].append(n)
    return found


def _works(nodes: Iterable[Node], dims: Dims) -> list[_Work]:
    by_signs: dict[tuple[tuple[int, ...], bool], list[tuple[FloatArray, IntArray]]] = defaultdict(list)
    for kind, found in _by_kind(nodes).items():
        columns = sorted(_signs(kind, len(found[0].operands)), key=lambda column: column[2])
        signs = tuple(sign for *_, sign in columns)
        by_signs[signs, kind.flops > 0].append(_work(kind, found, columns, dims))
    works: list[_Work] = []
    for (signs, is_product), found in by_signs.items():
        each, labels = zip(*found, strict=True)
        works.append(_Work(np.concatenate(each), np.concatenate(labels), signs, is_product))
    return works


def _work(
    kind: OpKind, nodes: Sequence[Node], columns: Sequence[tuple[int, int, int]], dims: Dims
) -> tuple[FloatArray, IntArray]:
    """`_Work.each` and `_Work.labels` of the nodes of one kind, with what `_signs` yields as ``columns``."""
    at = dims.start[np.array([n.values for n in nodes], dtype=np.int64).reshape(len(nodes), -1)]
    labels = [dims.label[at[:, i] + d] for i, d, _ in columns]
    factors = kind.rule.factors
    work = float(np.prod([float(n) for f, n in kind.factor_sizes if f in factors]))
    return (
        work * np.array([n.trip_count for n in nodes]),
        np.stack(labels, axis=1) if labels else np.zeros((len(nodes), 0), dtype=np.int64),
    )


def _signs(kind: OpKind, operands: int) -> Iterator[tuple[int, int, int]]:
    """Position, dimension and sign of every factor of a kind, and of every dimension that has none."""
    sizes, kinds = dict(kind.factor_sizes), dict(kind.rule.kinds)
    factors = {(i, d): dim for i, d, dim in kind.factored_dims}
    made = {f for (i, _), dim in factors.items() if i >= operands for f in dim}
    summed_later = kind.rule.local.parallel if kind.rule.local else frozenset[str]()
    seen: set[str] = set()
    for i, shape in enumerate(kind.shapes):
        for d, n in enumerate(shape):
            f = factors.get((i, d), ("",))[0]
            if n == 1 or f in seen:
                continue
            if not f:
                yield i, d, -1
                continue
            seen.add(f)
            reduced = kinds.get(f) in REDUCTION_KINDS
            parallel = (f in summed_later or (f not in kinds and f in made)) and sizes[f] > 1
            yield i, d, 1 if parallel else 0 if f not in kinds or (reduced and not kind.flops) else -1


def _parts(nodes: Iterable[Node], dims: Dims) -> Mapping[Part, list[int]]:
    """Where operations divide a dimension into several: the dimensions of results that are parts of it, but the major
    one, which has the same class."""
    found: dict[Part, list[int]] = defaultdict(list)
    for kind, same in _by_kind(nodes).items():
        operands = len(same[0].operands)
        results = {dim[0]: (i, d) for i, d, dim in kind.factored_dims if i >= operands and len(dim) == 1}
        divided = [
            (i, d, results[f]) for i, d, dim in kind.factored_dims if i < operands for f in dim[1:] if f in results
        ]
        for i, d, (j, e) in divided:
            for n in same:
                whole, part = dims.start[n.values[i]] + d, int(dims.start[n.values[j]] + e)
                found[int(dims.label[whole]), int(dims.label[part])].append(part)
    return found
