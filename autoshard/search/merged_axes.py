"""merged: a program on a mesh of fewer axes, neighbours taken as one, and what is found there on the mesh as it is.

Each axis more makes a space several times as large. Axes that stand side by side mostly do the same (two levels of one
network, both for the batch), so a mesh of many is solved as meshes of few: one for each way to take neighbours in one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh

FactorAxes = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class MergedMesh:
    """A graph over a mesh of fewer axes."""

    graph: Graph
    axes: Mapping[str, Axes]
    """What each of its axes stands for, major to minor."""

    def expand_axes(self, axes: Axes) -> Axes:
        """These axes as those of the mesh itself."""
        return tuple([a for axis in axes for a in self.axes[axis]])

    def expand_spec(self, spec: Spec) -> Spec:
        """``spec`` over the mesh itself."""
        return Spec(tuple(map(self.expand_axes, spec.dims)))

    def expand_specs(self, specs: Mapping[int, Spec]) -> dict[int, Spec]:
        """Of each value its spec over the mesh itself."""
        known = {spec: self.expand_spec(spec) for spec in set(specs.values())}
        return {v: known[spec] for v, spec in specs.items()}

    def merge_layout(self, whole: Layout) -> Layout | None:
        """A layout over the mesh itself as one over these axes; None where it splits over a part of one."""
        specs = {spec: _merge_spec(spec, self.axes) for spec in set(whole.specs)}
        ways = {
            way: _merge_spec(Spec(tuple(axes for _, axes in way)), self.axes) for way in set(whole.strategies.values())
        }
        said = {spec: s for spec, s in specs.items() if s is not None}
        run = {
            w: tuple((f, axes) for (f, _), axes in zip(w, s.dims, strict=True))
            for w, s in ways.items()
            if s is not None
        }
        if len(said) + len(run) < len(specs) + len(ways):
            return None
        return Layout(
            tuple([said[s] for s in whole.specs]), {}, strategies={n: run[w] for n, w in whole.strategies.items()}
        )

    def expand_factor_axes(self, ways: Mapping[int, FactorAxes]) -> dict[int, FactorAxes]:
        """Of each node the axes of its factors, as those of the mesh itself."""
        known = {way: tuple((f, self.expand_axes(axes)) for f, axes in way) for way in set(ways.values())}
        return {n: known[way] for n, way in ways.items()}


def merged_meshes(graph: Graph, most: int) -> Iterator[MergedMesh]:
    """``graph`` over ``most`` axes, in every way to take neighbours together under which the user's pins can be said;
    as it is where it has no more."""
    mesh = graph.program.mesh
    axes = mesh.nontrivial_axes
    if len(axes) <= most:
        yield MergedMesh(graph, {a: (a,) for a in mesh.axis_names})
        return
    for cuts in itertools.combinations(range(1, len(axes)), most - 1):
        parts = [axes[i:j] for i, j in itertools.pairwise((0, *cuts, len(axes)))]
        names = {"+".join(part): part for part in parts}
        pins = {v: _merge_spec(spec, names) for v, spec in graph.pins.items()}
        said = {v: spec for v, spec in pins.items() if spec is not None}
        if len(said) == len(pins):
            program = replace(graph.program, mesh=_merge_mesh(mesh, names))
            yield MergedMesh(replace(graph, program=program, pins=said, proposal_cache={}, node_cost_cache={}), names)


def _merge_mesh(mesh: LogicalMesh, names: Mapping[str, Axes]) -> LogicalMesh:
    links = mesh.hardware.links

    def slowest(part: Axes) -> str:
        of = [mesh.axis_links[mesh.axis_names.index(a)] for a in part]
        return min(of, key=lambda name: links[name].bandwidth)

    sizes = tuple(map(mesh.axes_size, names.values()))
    over = tuple(map(slowest, names.values())) if mesh.axis_links else ()
    return LogicalMesh(tuple(names), sizes, mesh.hardware, over)


def _merge_spec(spec: Spec, names: Mapping[str, Axes]) -> Spec | None:
    """``spec`` over merged axes, or None where it splits a dimension over a part of one."""
    dims: list[Axes] = []
    for axes in spec.dims:
        found = tuple(name for name, part in names.items() if set(part) <= set(axes))
        found = tuple(sorted(found, key=lambda name: axes.index(names[name][0])))
        if tuple(a for name in found for a in names[name]) != axes:
            return None
        dims.append(found)
    return Spec(tuple(dims))
