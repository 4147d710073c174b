"""lives: which values of a program take room in memory, and from when to when; whatever their layout.

`autoshard.reading` says what is made and when it is read last. Of that,

- a product that is read through one value alone is computed with it, where the compiler fuses products: that value
  takes the room;
- what is computed element by element is written over what it is computed from, if nothing reads that afterwards;
- a real number that products alone read has no more bits than they look at;
- a result that replaces a donated argument has that argument's room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoshard.graph import Graph
from autoshard.reading import Reading

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rooms:
    """What takes room, and when: row i is value ``values[i]``, from node ``first[i]`` to ``last[i]``."""

    values: Numbers
    first: Numbers
    last: Numbers
    scale: npt.NDArray[np.float64]
    """What of the value's bytes a row takes: a copy in fewer bits takes less."""
    gradients: Numbers
    """Values that the backward pass hands to the update."""
    residuals: Numbers
    """Rows that the forward pass makes and the backward pass reads."""


def rooms(graph: Graph) -> Rooms:
    """Finds the rooms of ``graph``."""
    found = Reading(graph)
    donated = {v for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if leaf.donated}
    reused = {found.root(graph.outputs[o]) for i, o in graph.program.carries if graph.inputs[i] in donated}
    if found.fused:
        _join(found)
    held = {v: n for v, n in found.made.items() if n >= 0 and v not in reused and v not in found.open and v}
    held |= _in_place(found, held)
    bits = graph.program.mesh.hardware.operand_bits
    scale = {v: bits / x.bits for v in held if (x := graph.values[v]).bits > bits and _only_multiplied(found, v)}
    rows = [(v, n, max(found.last.get(v, n), n), scale.get(v, 1.0)) for v, n in held.items()]
    index = {v: i for i, v in enumerate(held)}
    rows += [(v, a, b, fewer / graph.values[v].bits) for (v, fewer), (a, b) in found.narrow.items()]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    values, first, last = (np.array(c, dtype=np.int64) for c in columns[:3])
    kept = np.array(sorted(index[v] for v in found.residuals if v in index), dtype=np.int64)
    grads = np.array(sorted(found.gradients), dtype=np.int64)
    return Rooms(values, first, last, np.array(columns[3], dtype=np.float64), grads, kept)


def _join(found: Reading) -> None:
    """Moves the room of a product to the one value that it is read through."""
    nodes, values = found.graph.nodes, found.graph.values
    for v in [v for v, n in found.made.items() if n >= 0 and nodes[n].kind.flops and len(found.via[v]) == 1]:
        (w,) = found.via[v]
        n = found.made[v]
        if w not in found.born or values[w].bytes > values[v].bytes:
            continue
        if found.loops.get(n) != found.loops.get(found.born[w]):
            continue
        if w not in found.made:
            found.last[w] = found.last[v]
        found.made[w] = n
        del found.made[v]


def _in_place(found: Reading, held: Mapping[int, int]) -> dict[int, int]:
    """From when the values take room of their own that are written over one that they are computed from."""
    values, taken, since = found.graph.values, set[int](), dict[int, int]()
    for v, (n, sources) in found.built.items():
        for r in sources if v in held else ():
            if r in held and r not in taken and found.last[r] == n and values[r].bytes == values[v].bytes:
                taken.add(r)
                since[v] = n + 1
                break
    return since


def _only_multiplied(found: Reading, v: int) -> bool:
    """Whether products alone read ``v``, a real number."""
    return v not in found.read_whole and v in found.last and found.graph.values[v].dtype.startswith("float")
