"""Seconds of what stages run, from the charges of a step's loop on one stage's devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard import jaxpr as jx
from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout
from autoshard.pipelining.chain import Chain
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stage_dims import StageDims
from autoshard.pipelining.stages import Stages
from autoshard.schedule.slots import Operation
from autoshard.search.candidates import Search


@dataclass(frozen=True)
class StageSeconds:
    """Seconds on one stage's devices: of a layer and of what is around the layers, for one micro-batch."""

    forward: float
    backward: float
    """Where it is split, of its first part."""
    weights: float
    """Of its second part."""
    before: float
    last: float
    first: float
    outside: float
    """Of a call, outside of the loop."""
    compute_share: float

    @classmethod
    def of(
        cls, graph: Graph, layout: Layout, models: Search, chain: Chain, split: StageDims, *, splits: bool
    ) -> StageSeconds:
        region = dict(_regions(graph, chain))
        if splits:
            late = split_backward(chain.backward).of_weights.eqns
            made = (v for e in late for v in (*e.outvars, *(u for r in jx.regions(e) for u in _defined(r.body))))
            region |= {graph.ids[v]: "weights" for v in made if v in graph.ids}
        found, compute, everything = defaultdict[str, float](float), 0.0, 0.0
        for charge in models.cost_model.charges(layout):
            seconds = charge.compute + sum(t.seconds for t in charge.transfers)
            node = graph.nodes[charge.node] if charge.node < len(graph.nodes) else None
            results = () if node is None else node.results
            where = next((region[v] for v in results if v in region), "outside")
            share = min((split.share(v) for v in results), default=1.0) if where == "outside" else 1.0
            found[where] += seconds * share
            compute, everything = compute + charge.compute, everything + seconds
        count = chain.groups.length
        return cls(
            found["forward"] / count / chain.layers,
            found["backward"] / count / chain.layers,
            found["weights"] / count / chain.layers,
            found["before"] / count,
            found["last"] / count,
            found["first"] / count,
            found["outside"],
            compute / everything if everything else 1.0,
        )

    def of_layers(self) -> dict[Operation, float]:
        """Of each operation on a layer."""
        back = self.backward
        return {
            Operation.FORWARD: self.forward,
            Operation.BACKWARD: back,
            Operation.INPUT_GRADIENT: back,
            Operation.WEIGHT_GRADIENT: self.weights,
        }

    def of_part(self, operation: Operation, part: int, layers: int, parts: int) -> float:
        """Of one operation of a part of the model, for a micro-batch."""
        if operation is Operation.FORWARD:
            return layers * self.forward + self.before * (part == 0)
        if operation is Operation.WEIGHT_GRADIENT:
            return layers * self.weights
        return layers * self.backward + self.last * (part == parts - 1) + self.first * (part == 0)

    def of_slot(self, stages: Stages, stage: int, slot: object) -> float:
        """Of what a stage runs at a tick; 0 where it is idle."""
        if slot is None:
            return 0.0
        operation, chunk, _ = slot  # pyright: ignore[reportGeneralTypeIssues]
        part = stages.schedule.placement[chunk][stage]
        return self.of_part(operation, part, stages.layers[part], len(stages.layers))


def _regions(graph: Graph, chain: Chain) -> Iterator[tuple[int, str]]:
    """The values made in the loop, each with where it is: in the chain's scans, or around them at which stage."""
    for eqn in chain.body.eqns:
        where = "forward" if eqn is chain.forward else "backward" if eqn is chain.backward else ""
        if not where:
            places = chain.where(eqn.outvars[0]) if eqn.outvars and eqn.outvars[0] in chain.places else frozenset()
            where = next(iter(sorted(places)), "outside" if chain.invariant.issuperset(eqn.outvars) else "before")
        made = [*eqn.outvars, *(v for r in jx.regions(eqn) for v in _defined(r.body))]
        yield from ((graph.ids[v], where) for v in made if v in graph.ids)


def _defined(jaxpr: jx.Jaxpr) -> Iterator[jx.Var]:
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for r in jx.regions(eqn):
            yield from _defined(r.body)
