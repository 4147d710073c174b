"""lives: which values of a program take room in memory, and from when to when; whatever their layout.

`autoshard.cost.liveness` says what is made and when it is read last. Of that,

- a product that is read through one value alone is computed with it, where the compiler fuses products: that value
  takes the room;
- what is computed element by element, or added to a product, is written over what it is computed from, if nothing reads
  that afterwards, and no reduction was made with it: of several, over one beside which nothing was gathered;
- a real number that products alone read has no more bits than they look at;
- a result that replaces a donated argument has that argument's room.

A value that every product between the one that makes it and the last that reads it reads is *handed on*: a compiler
that has memory on the chip to plan keeps it there, if it has the room, rather than send it to memory and back.
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
    """What takes room, and when: row i is value ``values[i]``, from node ``first[i]`` to ``last[i]``."""

    values: IntArray
    first: IntArray
    last: IntArray
    scale: npt.NDArray[np.float64]
    """What of the value's bytes a row takes: a copy in fewer bits takes less."""
    gradients: IntArray
    """Values that the backward pass hands to the update."""
    residuals: IntArray
    """Rows that the forward pass makes and the backward pass reads."""
    on_chip_candidate: npt.NDArray[np.bool_]
    """Whether a row is handed on."""
    in_place_products: Mapping[int, tuple[int, int]]
    """Of each product that is written over what it is added to: what becomes of it, and the node that adds."""
    overwritable_products: Mapping[tuple[int, int], tuple[int, ...]]
    """Of values computed element by element from several of their size, each with where: the products over whose
    results they can be written, unless something is gathered beside those products."""
    sum_start: Mapping[int, int]
    """When each sum of products has its first term."""
    product_count: IntArray
    """How many products there are up to each node."""
    product_reads: Mapping[int, list[int]]
    """The rows that each product reads."""
    delayed_products: tuple[DelayedProduct, ...]
    """Products that may be done later."""


def find_live_ranges(graph: Graph) -> LiveRanges:
    """Finds the rooms of ``graph``."""
    found = Liveness(graph)
    donated = {v for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if leaf.donated}
    reused = {found.root(graph.outputs[o]) for i, o in graph.program.carries if graph.inputs[i] in donated}
    joined = _fuse_readers(found) if found.fuses_products else {}
    held = {
        v: n for v, n in found.allocated_at.items() if n >= 0 and v not in reused and v not in found.open_fusions and v
    }
    since = _in_place_starts(found, held)
    over = {held[v]: (v, n - 1) for v, n in since.items() if graph.nodes[held[v]].kind.flops}
    anew = _overwritable_products(found, held, since)
    held |= since
    bits = graph.program.mesh.hardware.operand_bits
    scale = {v: bits / x.bits for v in held if (x := graph.values[v]).bits > bits and _only_read_by_products(found, v)}
    rows = [(v, n, max(found.last_use.get(v, n), n), scale.get(v, 1.0)) for v, n in held.items()]
    index = {v: i for i, v in enumerate(held)}
    rows += [(v, a, b, fewer / graph.values[v].bits) for (v, fewer), (a, b) in found.hoisted_converts.items()]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    values, first, last = (np.array(c, dtype=np.int64) for c in columns[:3])
    kept = np.array(sorted(index[v] for v in found.residuals if v in index), dtype=np.int64)
    grads = np.array(sorted(found.gradients), dtype=np.int64)
    products = np.cumsum([bool(n.kind.flops) for n in graph.nodes], dtype=np.int64)
    reads: dict[int, set[int]] = defaultdict(set)
    for v, readers in found.product_readers.items():
        if (i := index.get(joined.get(v, v))) is not None:
            for n in readers:
                reads[n].add(i)
    count = Counter(itertools.chain.from_iterable(reads.values()))
    handed = [
        i < len(held) and b < len(graph.nodes) and not graph.nodes[a].tie and products[b] - products[a] == count[i]
        for i, (_, a, b, _) in enumerate(rows)
    ]
    return LiveRanges(
        values=values,
        first=first,
        last=last,
        scale=np.array(columns[3], dtype=np.float64),
        gradients=grads,
        residuals=kept,
        on_chip_candidate=np.array(handed, dtype=np.bool_),
        in_place_products=over,
        overwritable_products=anew,
        sum_start=found.sum_start,
        product_count=products,
        product_reads={n: sorted(by) for n, by in reads.items()},
        delayed_products=tuple(delayed_products(graph)),
    )


def _fuse_readers(found: Liveness) -> dict[int, int]:
    """Moves the room of a product to the one value that it is read through; which has moved where."""
    nodes, values, moved = found.graph.nodes, found.graph.values, dict[int, int]()
    for v in [
        v for v, n in found.allocated_at.items() if n >= 0 and nodes[n].kind.flops and len(found.read_through[v]) == 1
    ]:
        (w,) = found.read_through[v]
        n = found.allocated_at[v]
        if w not in found.computed_at or values[w].bytes > values[v].bytes:
            continue
        if found.enclosing_loops.get(n) != found.enclosing_loops.get(found.computed_at[w]):
            continue
        if w not in found.allocated_at:
            found.last_use[w] = found.last_use[v]
        found.allocated_at[w] = n
        moved[v] = w
        del found.allocated_at[v]
    return moved


def _in_place_starts(found: Liveness, held: Mapping[int, int]) -> dict[int, int]:
    """From when the values take room of their own that are written over one that they are computed from, which no
    reduction is made with."""
    taken, since = set[int](), dict[int, int]()
    for v, (n, _) in found.elementwise_from.items():
        free = (r for r in _dying_sources(found, held, v) if r not in taken and r not in found.fused_with_reduction)
        if v in held and (r := next(free, None)) is not None:
            taken.add(r)
            since[v] = n + 1
    return since


def _dying_sources(found: Liveness, held: Mapping[int, int], v: int) -> list[int]:
    """Of what ``v`` is computed from: what takes as much room, and is not read afterwards."""
    values, (n, sources) = found.graph.values, found.elementwise_from[v]
    return [r for r in sources if r in held and found.last_use[r] == n and values[r].bytes == values[v].bytes]


def _overwritable_products(
    found: Liveness, held: Mapping[int, int], since: Mapping[int, int]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """What is written over one of several, and the products whose results may be it: each that is made by itself."""
    nodes = found.graph.nodes
    products: dict[tuple[int, int], tuple[int, ...]] = {}
    for v, n in ((v, after - 1) for v, after in since.items() if found.fuses_products and held[v] == after - 1):
        last = _dying_sources(found, held, v)
        made = tuple(held[r] for r in last if r not in found.fused_with_reduction)
        if len(last) > 1 and all(nodes[m].kind.flops for m in made):
            products[v, n] = made
    return products


def _only_read_by_products(found: Liveness, v: int) -> bool:
    """Whether products alone read ``v``, a real number."""
    return (
        v not in found.read_outside_products and v in found.last_use and found.graph.values[v].dtype.startswith("float")
    )
