"""Merged axes: the same graph over a mesh of fewer axes, each a run of neighbouring axes of the actual mesh.

The number of specs of a value grows by a factor with each mesh axis. Neighbouring axes mostly shard the same dimensions
(two levels of one network, both for the batch), so a mesh of many axes is solved as meshes of few, one for each way to
merge neighbours; specs are expanded to the actual axes, and layouts merged where they can be expressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.ir.graph import Graph
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Axes, Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.machine.torus import Span
from autoshard.search.layout_problem import FactorAxes


@dataclass(frozen=True)
class MergedMesh:
    """A graph over merged axes, and what these stand for."""

    graph: Graph
    axes: Mapping[str, Axes]
    """For each merged axis, the actual axes, major to minor."""

    def expand_axes(self, axes: Axes) -> Axes:
        """The actual axes of merged ``axes``."""
        return tuple([a for axis in axes for a in self.axes[axis]])

    def expand_spec(self, spec: Spec) -> Spec:
        """``spec`` over the actual axes."""
        return Spec(tuple(map(self.expand_axes, spec.dims)))

    def expand_specs(self, specs: Mapping[int, Spec]) -> dict[int, Spec]:
        """Specs of values over the actual axes."""
        expanded = {spec: self.expand_spec(spec) for spec in set(specs.values())}
        return {v: expanded[spec] for v, spec in specs.items()}

    def expand_factor_axes(self, factor_axes: Mapping[int, FactorAxes]) -> dict[int, FactorAxes]:
        """Factor axes of nodes over the actual axes."""
        expanded = {fs: tuple((f, self.expand_axes(axes)) for f, axes in fs) for fs in set(factor_axes.values())}
        return {n: expanded[fs] for n, fs in factor_axes.items()}

    def merge_layout(self, layout: Layout) -> Layout | None:
        """A layout over the actual axes as one over merged axes; None where it uses one of a merged axis's axes without
        the others."""
        specs = {spec: _merge_spec(spec, self.axes) for spec in set(layout.specs)}
        strategies = {
            fs: _merge_spec(Spec(tuple(axes for _, axes in fs)), self.axes) for fs in set(layout.strategies.values())
        }
        merged_specs = {spec: s for spec, s in specs.items() if s is not None}
        merged_strategies = {
            fs: tuple((f, axes) for (f, _), axes in zip(fs, s.dims, strict=True))
            for fs, s in strategies.items()
            if s is not None
        }
        if len(merged_specs) + len(merged_strategies) < len(specs) + len(strategies):
            return None
        return Layout(
            tuple([merged_specs[s] for s in layout.specs]),
            {},
            strategies={n: merged_strategies[fs] for n, fs in layout.strategies.items()},
        )


def merged_meshes(graph: Graph, count: int) -> Iterator[MergedMesh]:
    """``graph`` over ``count`` merged axes, for every way to merge neighbours that can express the user's pins; if the
    mesh has no more axes than that, only the graph as it is."""
    mesh = graph.program.mesh
    axes = mesh.nontrivial_axes
    if len(axes) <= count:
        yield MergedMesh(graph, {a: (a,) for a in mesh.axis_names})
        return
    for cuts in itertools.combinations(range(1, len(axes)), count - 1):
        runs = [axes[i:j] for i, j in itertools.pairwise((0, *cuts, len(axes)))]
        merged = {"+".join(run): run for run in runs}
        pins = {v: _merge_spec(spec, merged) for v, spec in graph.pins.items()}
        expressible = {v: spec for v, spec in pins.items() if spec is not None}
        if len(expressible) == len(pins):
            program = replace(graph.program, mesh=_merge_mesh(mesh, merged))
            yield MergedMesh(replace(graph, program=program, pins=expressible), merged)


def _merge_mesh(mesh: LogicalMesh, merged: Mapping[str, Axes]) -> LogicalMesh:
    """The mesh of merged axes; each runs over the slowest link of its axes, or along all of them in a torus."""
    links = mesh.hardware.links

    def slowest(run: Axes) -> str:
        names = [mesh.axis_links[mesh.axis_names.index(a)] for a in run]
        return min(names, key=lambda name: links[name].bandwidth)

    sizes = tuple(map(mesh.axes_size, merged.values()))
    axis_links = tuple(map(slowest, merged.values())) if mesh.axis_links else ()
    torus = tuple(_along(run, mesh) for run in merged.values()) if mesh.torus else ()
    return LogicalMesh(tuple(merged), sizes, mesh.hardware, axis_links, torus=torus)


def _along(run: Axes, mesh: LogicalMesh) -> tuple[Span, ...]:
    """Where several axes run as one in a torus; empty where one of them runs elsewhere."""
    each = [mesh.along(a) for a in run if mesh.shape[a] > 1]
    return tuple(itertools.chain(*each)) if all(each) else ()


def _merge_spec(spec: Spec, merged: Mapping[str, Axes]) -> Spec | None:
    """``spec`` over merged axes, or None if some dimension has only part of one, or its axes in another order."""
    dims: list[Axes] = []
    for axes in spec.dims:
        names = tuple(name for name, run in merged.items() if set(run) <= set(axes))
        names = tuple(sorted(names, key=lambda name: axes.index(merged[name][0])))
        if tuple(a for name in names for a in merged[name]) != axes:
            return None
        dims.append(names)
    return Spec(tuple(dims))
