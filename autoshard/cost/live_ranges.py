"""Live ranges: which intermediates of a graph are buffers, and from which node to which, whatever their layout.

`autoshard.cost.liveness` says which values are materialized and when each is used last. On top of that, as XLA does,

- a product that is read only through one elementwise value is fused with it, where the compiler fuses products: the
  elementwise value is the buffer;
- an elementwise value, or a product that something is added to, is written in place of a source of the same size that
  nothing reads afterwards, unless a reduction was fused with that source;
- a floating-point value that only products read is stored in the bits that products read (`Hardware.operand_bits`);
- a result that replaces a donated argument is stored in that argument's buffer.

A buffer is a *candidate for on-chip memory* if every product from its definition to its last use reads it: XLA then
keeps it on chip, if it fits, rather than write it to device memory and read it back.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost.delayed_products import DelayedProduct, delayed_products
from autoshard.cost.liveness import Liveness
from autoshard.ir.graph import Graph

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LiveRanges:
    """Buffers and when they are live: row i is value ``values[i]``, live from node ``first[i]`` to ``last[i]``."""

    values: IntArray
    first: IntArray
    last: IntArray
    scale: npt.NDArray[np.float64]
    """Share of the value's bytes that the row's buffer has: less than 1 where it is stored in fewer bits."""
    gradients: IntArray
    """Values that the backward pass computes and the optimizer update reads."""
    residuals: IntArray
    """Rows that the forward pass defines and the backward pass reads."""
    on_chip_candidate: npt.NDArray[np.bool_]
    """Whether every product from a row's definition to its last use reads it."""
    in_place_products: Mapping[int, tuple[int, int]]
    """Products written in place of an array that is added to them: node -> (value of the sum, node that adds)."""
    overwritable_products: Mapping[tuple[int, int], tuple[int, ...]]
    """Elementwise values written in place of one of several product results: (value, node) -> those products. Where XLA
    fuses an all-gather into each of the products, none of the results can be overwritten."""
    sum_start: Mapping[int, int]
    """For each node of several steps, the node at which its first step can execute."""
    product_count: IntArray
    """[nodes]: number of products up to and including each node."""
    product_reads: Mapping[int, list[int]]
    """The rows that each product reads."""
    delayed_products: tuple[DelayedProduct, ...]
    """Products that XLA may schedule after their place in the program."""
    in_donated: frozenset[int]
    """Results that replace a donated argument, and are stored in its buffer."""


def find_live_ranges(graph: Graph) -> LiveRanges:
    """The live ranges of the intermediates of ``graph``; arguments are live throughout and not listed."""
    liveness = Liveness(graph)
    donated = {v for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if leaf.donated}
    reused = {liveness.root(graph.outputs[o]) for i, o in graph.program.carries if graph.inputs[i] in donated}
    moved = _fuse_into_products(liveness) if liveness.fuses_products else {}
    excluded = {0, *reused, *liveness.open_fusions}  # literals; donated buffers; products fused with what follows
    starts = {v: n for v, n in liveness.allocated_at.items() if n >= 0 and v not in excluded}
    in_place = _in_place_starts(liveness, starts)
    in_place_products = {starts[v]: (v, n - 1) for v, n in in_place.items() if graph.nodes[starts[v]].kind.flops}
    overwritable = _overwritable_products(liveness, starts, in_place)
    starts |= in_place
    bits = graph.program.mesh.hardware.operand_bits
    scale = {
        v: bits / x.bits for v in starts if (x := graph.values[v]).bits > bits and _only_read_by_products(liveness, v)
    }
    rows = [(v, n, max(liveness.last_use.get(v, n), n), scale.get(v, 1.0)) for v, n in starts.items()]
    index = {v: i for i, v in enumerate(starts)}
    rows += [(v, a, b, fewer / graph.values[v].bits) for (v, fewer), (a, b) in liveness.hoisted_converts.items()]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    values, first, last = (np.array(c, dtype=np.int64) for c in columns[:3])
    residuals = np.array(sorted(index[v] for v in liveness.residuals if v in index), dtype=np.int64)
    gradients = np.array(sorted(liveness.gradients), dtype=np.int64)
    products = np.cumsum([bool(n.kind.flops) for n in graph.nodes], dtype=np.int64)
    reads: dict[int, set[int]] = defaultdict(set)
    for v, readers in liveness.product_readers.items():
        if (i := index.get(moved.get(v, v))) is not None:
            for n in readers:
                reads[n].add(i)
    count = Counter(itertools.chain.from_iterable(reads.values()))
    candidates = [
        i < len(starts) and b < len(graph.nodes) and not graph.nodes[a].tie and products[b] - products[a] == count[i]
        for i, (_, a, b, _) in enumerate(rows)
    ]
    return LiveRanges(
        values=values,
        first=first,
        last=last,
        scale=np.array(columns[3], dtype=np.float64),
        gradients=gradients,
        residuals=residuals,
        on_chip_candidate=np.array(candidates, dtype=np.bool_),
        in_place_products=in_place_products,
        overwritable_products=overwritable,
        sum_start=liveness.sum_start,
        product_count=products,
        product_reads={n: sorted(by) for n, by in reads.items()},
        delayed_products=tuple(delayed_products(graph)),
        in_donated=frozenset(reused),
    )


def _fuse_into_products(liveness: Liveness) -> dict[int, int]:
    """Fuses each product that is read through one elementwise value with it: product's value -> the new buffer."""
    nodes, values, moved = liveness.graph.nodes, liveness.graph.values, dict[int, int]()
    products = [v for v, n in liveness.allocated_at.items() if n >= 0 and nodes[n].kind.flops]
    for v in [v for v in products if len(liveness.read_through[v]) == 1]:
        (w,) = liveness.read_through[v]
        n = liveness.allocated_at[v]
        if w not in liveness.computed_at or values[w].bytes > values[v].bytes:
            continue
        if liveness.enclosing_loops.get(n) != liveness.enclosing_loops.get(liveness.computed_at[w]):
            continue
        if w not in liveness.allocated_at:
            liveness.last_use[w] = liveness.last_use[v]
        liveness.allocated_at[w] = n
        moved[v] = w
        del liveness.allocated_at[v]
    return moved


def _in_place_starts(liveness: Liveness, starts: Mapping[int, int]) -> dict[int, int]:
    """Elementwise values that are written in place of a source: value -> the node from which it counts.

    Until then the source's live range covers the buffer. A source that a reduction is fused with is not overwritten.
    """
    taken, in_place = set[int](), dict[int, int]()
    for v, (n, _) in liveness.elementwise_from.items():
        free = (
            r for r in _dying_sources(liveness, starts, v) if r not in taken and r not in liveness.fused_with_reduction
        )
        if v in starts and (r := next(free, None)) is not None:
            taken.add(r)
            in_place[v] = n + 1
    return in_place


def _dying_sources(liveness: Liveness, starts: Mapping[int, int], v: int) -> list[int]:
    """The sources of elementwise value ``v`` that have its size and are used last where it is computed."""
    values, (n, sources) = liveness.graph.values, liveness.elementwise_from[v]
    return [r for r in sources if r in starts and liveness.last_use[r] == n and values[r].bytes == values[v].bytes]


def _overwritable_products(
    liveness: Liveness, starts: Mapping[int, int], in_place: Mapping[int, int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """`LiveRanges.overwritable_products`: of the values written in place, those with several sources to choose from."""
    nodes = liveness.graph.nodes
    products: dict[tuple[int, int], tuple[int, ...]] = {}
    for v, n in ((v, after - 1) for v, after in in_place.items() if liveness.fuses_products and starts[v] == after - 1):
        sources = _dying_sources(liveness, starts, v)
        defined_by = tuple(starts[r] for r in sources if r not in liveness.fused_with_reduction)
        if len(sources) > 1 and all(nodes[m].kind.flops for m in defined_by):
            products[v, n] = defined_by
    return products


def _only_read_by_products(liveness: Liveness, v: int) -> bool:
    """Whether ``v`` is a floating-point value that only products read."""
    return (
        v not in liveness.read_outside_products
        and v in liveness.last_use
        and liveness.graph.values[v].dtype.startswith("float")
    )
