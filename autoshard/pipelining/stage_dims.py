"""Which dimensions of a step's values are split over the stages of its pipeline, outside of the loop."""

from __future__ import annotations

from collections import defaultdict

from autoshard import jaxpr as jx
from autoshard.ir.dim_classes import label_dims
from autoshard.ir.graph import Graph
from autoshard.ir.program import PipelineRequest
from autoshard.ir.spec import Spec
from autoshard.pipelining.chain import Chain, scan_groups


class StageDims:
    """Which dimensions of a graph's values are split over the stages: those of the layers, outside of the loop."""

    def __init__(self, graph: Graph, chain: Chain, request: PipelineRequest) -> None:
        self.axis, self.mesh, body = request.axis, request.mesh, chain.body
        self.inside = {
            graph.ids[v] for v in (*body.invars, *(o for e in jx.walk(body) for o in e.outvars)) if v in graph.ids
        }
        for e in jx.walk(body):
            self.inside |= {graph.ids[v] for r in jx.regions(e) for v in r.body.invars if v in graph.ids}
        self.inside -= {graph.ids[v] for v in chain.invariant if v in graph.ids}  # computed before the pipeline
        dims = label_dims(graph)
        stacked = [graph.ids[v] for v in stacked_weights(chain)]
        classes = {int(dims.label[dims.start[v]]) for v in stacked}
        self.layers = chain.layers
        self.dims: dict[int, tuple[int, ...]] = defaultdict(tuple)
        self.stacked_inside = set[int]()
        """The values of the loop with a row for each layer."""
        for number, label in enumerate(dims.label.tolist()):
            v = int(dims.owner[number])
            if label in classes and dims.sizes[number] == chain.layers:
                if v in self.inside:
                    self.stacked_inside.add(v)
                else:
                    self.dims[v] = (*self.dims[v], number - int(dims.start[v]))
        self.stored = not self.dims.keys().isdisjoint(graph.inputs)
        if not self.stored:  # stacked in the executable only
            self.dims.clear()

    def spec(self, spec: Spec, value: int) -> Spec:
        """``spec`` of a value with its first dimension of layers, if it has one, split over the stages."""
        for d in self.dims.get(value, ())[:1]:
            axes = spec.dims[d]
            if self.axis in spec.axes:
                return spec
            for split in ((self.axis, *axes), (self.axis,)):
                if self.layers % self.mesh.axes_size(split) == 0:
                    return spec.with_dim(d, split)
        return spec

    def share(self, value: int) -> float:
        """Of a value's bytes, what a stage has."""
        dims = self.dims.get(value, ())
        return 1 / self.mesh.shape[self.axis] if dims and self.layers % self.mesh.shape[self.axis] == 0 else 1.0


def stacked_weights(chain: Chain) -> list[jx.Var]:
    """The values with a row for each layer that the chain reads and that are the same in every iteration."""
    found: list[jx.Var] = []
    for eqn in filter(None, (chain.forward, chain.backward)):
        groups = scan_groups(eqn)
        xs = eqn.invars[groups.consts + groups.carry :]
        found += [a for a in xs if isinstance(a, jx.Var) and a in chain.invariant]
    return list(dict.fromkeys(found))
