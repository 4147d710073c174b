"""Bytes that a device of a pipeline needs, from the buffers of a step's loop on one stage's devices.

Outside of the loop over micro-batches a device has its own layers' share of what has a row for each layer. In the loop
it has, beside what a micro-batch needs, slots for what it received, and for what its forwards leave for their
backwards, of its own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard import jaxpr as jx
from autoshard.cost.memory import Buffers, MemoryModel
from autoshard.ir.graph import Graph
from autoshard.pipelining.chain import Chain, scan_groups
from autoshard.pipelining.segment import stacked_results
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stage_dims import StageDims, stacked_weights
from autoshard.pipelining.stage_seconds import equations_that_add
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.tick_tables import TickTables
from autoshard.schedule.row_moves import RowMoves
from autoshard.search.candidates import Candidate


class StageBytes(NamedTuple):
    """Of the device that needs most."""

    peak: int
    residuals: int
    """Of it, slots for what forwards leave for their backwards."""


class StageMemory:
    """The memory of a layout as pipelines of several schedules."""

    def __init__(self, graph: Graph, best: Candidate, model: MemoryModel, chain: Chain, split: StageDims) -> None:
        self.graph, self.specs, self.model, self.chain, self.split = graph, best.layout.specs, model, chain, split
        inside = [n for n, node in enumerate(graph.nodes) if not split.inside.isdisjoint(node.results)]
        self.loop = slice(min(inside), max(inside) + 1)
        found = model.buffers(best.layout, all_gather_fusion_disabled=best.all_gather_fusion_disabled)
        self.buffers, values = self._with_hoisted(found), found.values.tolist()
        self.residuals = set(self._ids(self._read_by_backward()))
        self.layered = np.array([v in split.stacked_inside for v in values])
        added = set(self._ids(self._added_by_layers()))
        shares = {v: 0.0 if v in self.residuals or v in added else split.share(v) for v in set(values)}
        self.share = np.array([shares[v] for v in values])
        self.layered &= ~np.isin(found.values, [*added])
        self.arguments = sum(self._bytes(v) * split.share(v) for v in graph.inputs)

    def _with_hoisted(self, found: Buffers) -> Buffers:
        """``found``, with what is resharded for each micro-batch held from before the loop to its end."""
        added = np.arange(len(found.values)) >= len(self.model.live_ranges.values)
        hoisted = added & np.isin(found.values, self._ids([*self.chain.invariant]))
        first = np.where(hoisted, np.minimum(found.first, self.loop.start), found.first)
        last = np.where(hoisted, np.maximum(found.last, self.loop.stop - 1), found.last)
        return found._replace(first=first, last=last)

    def _read_by_backward(self) -> list[jx.Var]:
        """What forwards make for backwards, with a row for each layer."""
        if self.chain.backward is None:
            return []
        groups = scan_groups(self.chain.backward)
        rows = self.chain.backward.invars[groups.consts + groups.carry :]
        return [a for a in dict.fromkeys(rows) if isinstance(a, jx.Var) and self.chain.where(a)]

    def _added_by_layers(self) -> list[jx.Var]:
        """What each layer adds to the sums with a row for each, where nothing else reads it, never of all layers at
        once; and those sums as an iteration leaves them: it writes them where they were."""
        chain = self.chain
        layered = {i for i, a in chain.sums.items() if isinstance(a, jx.Var) and a in chain.per_layer}
        found = [e.outvars[0] for e, i in equations_that_add(chain).items() if i in layered]
        for place in chain.scans:
            whole = stacked_results(chain, place)
            found += [v for v in chain.per_layer if chain.where(v) == frozenset({place}) and v not in whole]
        return found

    def _ids(self, variables: Sequence[jx.Var]) -> list[int]:
        return [self.graph.ids[v] for v in variables if v in self.graph.ids]

    def _bytes(self, v: int) -> int:
        return self.model.size(v, self.specs[v]) if v else 0

    def of(self, stages: Stages, tables: TickTables) -> StageBytes:
        """The memory of the stage that needs most."""
        most = max(stages.layers)
        share = np.where(self.layered, most / self.chain.layers, self.share)
        scaled = self.buffers._replace(bytes=(self.buffers.bytes * share).astype(np.int64))
        usage, on_chip = self.model.usage_of(scaled)
        usage = usage - on_chip
        saved = sum(map(self._bytes, self.residuals))
        residuals = saved * most * tables.slots[2] / self.chain.layers
        held = residuals + self._slots(tables) + self._kept(stages, tables) + self._sums() + self._entered(most)
        usage[self.loop] += round(held)
        if stages.moves_layers:
            sums = [self.chain.loop.outvars[i] for i in self.chain.sums]
            usage[max(self.loop.start - 1, 0)] += self._moved(stacked_weights(self.chain), stages.before)
            usage[min(self.loop.stop, len(usage) - 1)] += self._moved(sums, stages.after)
        return StageBytes(round(self.arguments) + int(usage.max()), round(residuals))

    def _entered(self, most: int) -> float:
        """Of what is resharded as it enters the loop; weights, of the ``most`` layers that a stage runs."""
        groups, found = self.chain.groups, 0.0
        stacked = {*self._ids(stacked_weights(self.chain))}
        pairs = zip(self.chain.loop.invars[: groups.consts], self.chain.body.invars[: groups.consts], strict=True)
        for outer, inner in pairs:
            a, b = self.graph.ids.get(outer) if isinstance(outer, jx.Var) else None, self.graph.ids.get(inner)
            if a and b and self.specs[a] != self.specs[b]:
                found += self._bytes(b) * (most / self.chain.layers if b in stacked else 1)
        return found

    def _slots(self, tables: TickTables) -> int:
        """Of what came from other stages, and of the last part's results."""
        chain = self.chain
        sides = (chain.forward, tables.slots[0] + tables.slots[4]), (chain.backward, tables.slots[1])
        carried = ((eqn.outvars[: scan_groups(eqn).carry], count) for eqn, count in sides if eqn is not None)
        return sum(self._bytes(v) * count for variables, count in carried for v in self._ids(variables))

    def _sums(self) -> int:
        """Of what only the first or the last stage adds to, once more: a branch does not write it in place."""
        layered, outs = self.chain.per_layer, self.chain.loop.outvars
        ends = [outs[i] for i, a in self.chain.sums.items() if isinstance(a, jx.Var) and a not in layered]
        return sum(map(self._bytes, self._ids(ends)))

    def _kept(self, stages: Stages, tables: TickTables) -> int:
        """Of what the first part of a backward leaves for the second."""
        if self.chain.backward is None or not stages.schedule.splits_backward:
            return 0
        kept = self._ids(split_backward(self.chain.backward).kept)
        return sum(map(self._bytes, kept)) * max(stages.layers) * tables.slots[3]

    def _moved(self, variables: Sequence[jx.Var], moves: RowMoves) -> int:
        """Of rows that arrive before the loop, for a stage to run them, and after it, for it to store them."""
        layered = [v for v in self._ids(variables) if self.split.share(v) < 1]
        return sum(map(self._bytes, layered)) * moves.sent // self.chain.layers
