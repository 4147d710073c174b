"""Which dimensions of a step's values are split over the stages of its pipeline, outside of the loop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoshard import jaxpr as jx
from autoshard.cost.reshard import reshard_collectives, reshard_path
from autoshard.ir.dim_classes import label_dims
from autoshard.ir.graph import Graph
from autoshard.ir.program import PipelineRequest
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import LogicalMesh
from autoshard.pipelining.chain import Chain, find_chain, scan_groups


class StageDims:
    """Which dimensions of a graph's values are split over the stages: those of the layers, outside of the loop."""

    def __init__(self, graph: Graph, chain: Chain, request: PipelineRequest) -> None:
        self.axis, self.mesh, self.stage_mesh, body = request.axis, request.mesh, request.stage_mesh, chain.body
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
        self.values = {v: graph.values[v] for v in self.dims}
        self.stored = not self.dims.keys().isdisjoint(graph.inputs)
        if not self.stored:  # stacked in the executable only
            self.dims.clear()

    def spec(self, spec: Spec, value: int, *, moved: bool) -> Spec:
        """``spec`` of a value with its first dimension of layers, if it has one, split over the stages.

        Args:
          moved: whether stages run other layers than they store.
        """
        for d in self.dims.get(value, ())[:1]:
            return over_stages(spec, d, self.values[value].shape, self.axis, self.mesh, moved=moved)
        return spec

    def splits_as_planned(self, before: Spec, after: Spec, value: int) -> bool:
        """Whether a reshard that is planned over one stage's devices has the same steps over the whole mesh.

        It has not where a step splits the layers into more parts than a stage has layers.
        """
        dims = self.dims.get(value, ())
        if not dims or self.share(value) == 1.0:
            return True
        v = self.values[value]
        between = [m.spec for m in reshard_path(before, after, v.shape, v.bits, self.stage_mesh)[:-1]]
        return all(self.layers % self.mesh.axes_size((self.axis, *s.dims[dims[0]])) == 0 for s in between)

    def reshard(self, before: Spec, after: Spec, value: int) -> tuple[Collective, ...]:
        """The collectives over the whole mesh that a reshard planned over one stage's devices becomes."""
        v = self.values[value]
        src, dst = (self.spec(s, value, moved=False) for s in (before, after))
        return reshard_collectives(src, dst, v.shape, v.bits, self.mesh)

    def share(self, value: int) -> float:
        """Of a value's bytes, what a stage has."""
        dims = self.dims.get(value, ())
        return 1 / self.mesh.shape[self.axis] if dims and self.layers % self.mesh.shape[self.axis] == 0 else 1.0


def least_arguments(graph: Graph) -> float:
    """Bytes per device that the arguments of a step as a pipeline take at least: all but rows of layers that stages
    have of their own are split over the devices of a stage at most.

    Raises:
      PipelineError: as `find_chain`.
    """
    program, request = graph.program, graph.program.pipeline
    assert request is not None
    split = StageDims(graph, find_chain(program.jaxpr, program.name, program.rules), request)
    on_device = [v for v in graph.inputs if not graph.values[v].host]
    return sum(graph.values[v].bytes * split.share(v) for v in on_device) / request.stage_mesh.size


def over_stages(
    spec: Spec, dim: int, shape: Sequence[int], axis: str, mesh: LogicalMesh, *, moved: bool = False
) -> Spec:
    """``spec`` of a value of ``shape`` with dimension ``dim``, that of layers, split over ``axis`` where it can be.

    Axes that split the layers of a stage no further go to the largest other dimension that they divide, of equals the
    last, as does the same value with parts of a sum ahead: each device has as much of it as the plan says. So do all
    others where layers are ``moved`` between stages, which would else be moved over these axes too.
    """
    axes, layers = spec.dims[dim], shape[dim]
    if axis in spec.axes or layers % mesh.shape[axis]:
        return spec
    if not (moved and axes) and layers % mesh.axes_size((axis, *axes)) == 0:
        return spec.with_dim(dim, (axis, *axes))
    spec = spec.with_dim(dim, (axis,))
    for a in axes:
        fits = [d for d, n in enumerate(shape) if d != dim and n % mesh.axes_size((*spec.dims[d], a)) == 0]
        if fits:
            d = max(fits, key=lambda d: (shape[d], d))
            spec = spec.with_dim(d, (*spec.dims[d], a))
    return spec


def finest_split(shape: Sequence[int], dims: Sequence[Axes], sizes: Mapping[str, int]) -> list[Axes]:
    """``dims``, the axes that split each dimension of ``shape``, with those of ``sizes`` that split none: each on the
    first dimension that it divides. What goes over a slow link is sent so."""
    found = [*dims]
    for axis in [a for a, n in sizes.items() if n > 1 and not any(a in axes for axes in dims)]:
        parts = [math.prod(sizes.get(a, 1) for a in axes) for axes in found]
        fits = [d for d, n in enumerate(shape) if n % (parts[d] * sizes[axis]) == 0]
        if fits:
            found[fits[0]] = (*found[fits[0]], axis)
    return found


def stacked_weights(chain: Chain) -> list[jx.Var]:
    """The values with a row for each layer that the chain reads and that are the same in every iteration."""
    found: list[jx.Var] = []
    for eqn in filter(None, (chain.forward, chain.backward)):
        groups = scan_groups(eqn)
        xs = eqn.invars[groups.consts + groups.carry :]
        found += [a for a in xs if isinstance(a, jx.Var) and a in chain.invariant]
    return list(dict.fromkeys(found))
