"""memory: bytes per device over one call of the step.

Arguments are there from beginning to end, donated ones until their result is written in their place. Values in
between live from the node that makes them to the last that reads them; what XLA folds into its users (views,
and pointwise results read once) takes no room. A loop's body counts once, its stacked results whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from autoshard.cost import VIEWS
from autoshard.dims import roles
from autoshard.graph import BACKWARD, FORWARD, PLAIN, Graph
from autoshard.propagate import Layout


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    """Values that the backward pass hands to the update."""
    residuals: int
    """Values that the forward pass keeps for the backward pass."""
    temporaries: int
    """What else is alive when memory peaks, results that are not donated included."""
    peak: int

    def items(self) -> list[tuple[str, int]]:
        """Name and bytes of each part, then of the peak."""
        return list(asdict(self).items())


def memory(graph: Graph, layout: Layout) -> Memory:
    """Bytes per device of one call under ``layout``."""
    return Lives(graph).memory(layout)


class Lives:
    """From when to when each value of a graph takes room; under any layout."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.mesh = graph, graph.program.mesh.shape
        self.bytes = np.array([v.bytes if v.shape else 0 for v in graph.values])
        self.values, self.first, self.last, self.gradients, self.residuals = _lives(graph)

    def sizes(self, layout: Layout) -> npt.NDArray[np.int64]:
        """Bytes per device of every value; scalars count as nothing."""
        known: dict[int, int] = {}
        shards = [known.get(id(s)) or known.setdefault(id(s), s.shards(self.mesh)) for s in layout.specs]
        return -(-self.bytes // np.array(shards))

    def over_time(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bytes of values in between that are alive while each node runs."""
        change = np.zeros(len(self.graph.nodes) + 2, dtype=np.int64)
        np.add.at(change, self.first, sizes[self.values])
        np.subtract.at(change, self.last + 1, sizes[self.values])
        return np.cumsum(change)

    def alive(self, node: int) -> list[int]:
        """The values in between that are alive while ``node`` runs."""
        return [int(v) for v in self.values[(self.first <= node) & (node <= self.last)]]

    def memory(self, layout: Layout) -> Memory:
        """Bytes per device of one call under ``layout``."""
        size = self.sizes(layout)
        role = roles(self.graph)
        parameters, optimizer, inputs = (
            int(sum(size[self.graph.inputs[i]] for i in part)) for part in (role.parameters, role.optimizer, role.batch)
        )
        held = int(self.over_time(size).max())
        kept = int(size[self.residuals].sum())
        grads = int(size[self.gradients].sum())
        peak = parameters + optimizer + inputs + held
        return Memory(parameters, optimizer, inputs, grads, kept, max(0, held - kept), peak)


def _lives(graph: Graph) -> tuple[npt.NDArray[np.int64], ...]:
    """The values in between that take room, the nodes that make them and read them last; gradients; residuals."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    readers: dict[int, int] = {}
    inputs = set(graph.inputs)
    gradients: set[int] = set()
    residuals: set[int] = set()
    alias: dict[int, int] = {}

    def root(v: int) -> int:
        while v in alias:
            v = alias[v]
        return v

    for n, node in enumerate(graph.nodes):
        if node.tie and not node.times:
            continue
        for v in node.operands:
            r = root(v)
            last[r] = n
            readers[v] = readers.get(v, 0) + 1
            phase = graph.nodes[made[r]].phase if r in made else None
            if phase == FORWARD and node.phase == BACKWARD:
                residuals.add(r)
            elif phase == BACKWARD and node.phase == PLAIN and graph.values[r].shape:
                gradients.add(r)
        views = node.kind.op in VIEWS or (node.tie and len(node.operands) == 1)
        for v in node.results:
            if v in made or v in inputs or v in alias:
                continue  # a loop's carry, tied again at the end of its body
            same = views and node.operands and graph.values[node.operands[0]].shape == graph.values[v].shape
            if same and not graph.values[v].bits > graph.values[node.operands[0]].bits:
                alias[v] = node.operands[0]
                continue
            made[v] = n
    for v in graph.outputs:
        last[root(v)] = len(graph.nodes)
    donated = {v for v, leaf in zip(graph.inputs, graph.program.inputs, strict=True) if leaf.donated}
    reused = {root(graph.outputs[o]) for i, o in graph.program.carries if graph.inputs[i] in donated}
    room = {v: n for v, n in made.items() if v not in reused and not _fused(graph, n, readers.get(v, 0))}

    ends = {v: max(last.get(v, n), n) for v, n in room.items()}
    parts = (room, room.values(), ends.values(), sorted(gradients), sorted(residuals & set(room)))
    return tuple(np.fromiter(part, dtype=np.int64) for part in parts)


def _fused(graph: Graph, n: int, readers: int) -> bool:
    node = graph.nodes[n]
    if node.kind.op in VIEWS:
        return True
    pointwise = not node.kind.flops and not node.kind.rule.kinds and not node.tie and not node.kind.rule.reason
    return pointwise and readers <= 1
