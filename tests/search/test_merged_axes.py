"""Meshes of many axes are solved as meshes of few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.ir.propagate import propagate
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import Link, LogicalMesh
from autoshard.search import solved_layouts
from autoshard.search.build_problem import build_problem
from autoshard.search.merged_axes import merged_meshes
from autoshard.search.search import search
from autoshard.search.solve import solve
from autoshard.search.solved_layouts import MIN_GAIN
from tests.programs import CHIP, graph, mesh, mlp_args, mlp_step

FOUR = mesh(a=2, b=4, c=2, d=2)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def gated(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down + x


def test_neighbours_are_merged_in_every_way():
    found = [v.graph.program.mesh.shape for v in merged_meshes(graph(product, ((64, 64), (64, 64)), FOUR), 3)]
    assert found == [{"a": 2, "b": 4, "c+d": 4}, {"a": 2, "b+c": 8, "d": 2}, {"a+b": 8, "c": 2, "d": 2}]


def test_a_mesh_of_few_axes_is_itself():
    g = graph(product, ((64, 64), (64, 64)), mesh(a=2, b=4))
    (merged,) = merged_meshes(g, 3)
    assert merged.graph is g
    assert merged.expand_spec(Spec((("a",), ("b",)))) == Spec((("a",), ("b",)))


def test_a_mesh_that_cannot_express_the_pins_is_left_out():
    g = graph(product, ((64, 64), (64, 64)), FOUR, in_shardings=(P(("a", "b"), "d"), P(None, "c")))
    (merged,) = merged_meshes(g, 3)
    assert list(merged.axes) == ["a+b", "c", "d"]
    assert [merged.graph.pins[v] for v in g.inputs] == [Spec((("a+b",), ("d",))), Spec(((), ("c",)))]
    assert all(merged.expand_spec(merged.graph.pins[v]) == g.pins[v] for v in g.inputs)
    swapped = graph(product, ((64, 64), (64, 64)), FOUR, in_shardings=(P(("b", "a")), P("d", "c")))
    assert not list(merged_meshes(swapped, 3))


def test_a_merged_axis_runs_over_its_slowest_link():
    links = {"near": Link("near", 1e11, 1e-6), "far": Link("far", 1e9, 1e-5)}
    over = ("far", "near", "near", "near")
    on = LogicalMesh(("a", "b", "c", "d"), (2, 2, 2, 2), replace(CHIP, links=links), over)
    found = [v.graph.program.mesh.axis_links for v in merged_meshes(graph(product, ((64, 64), (64, 64)), on), 3)]
    assert found == [("far", "near", "near"), ("far", "near", "near"), ("far", "near", "near")]
    (first, *_, last) = merged_meshes(graph(product, ((64, 64), (64, 64)), on), 2)
    assert first.graph.program.mesh.axis_links == last.graph.program.mesh.axis_links == ("far", "near")


def test_a_layout_is_merged_where_merged_axes_can_express_it():
    g = graph(product, ((64, 64), (64, 64)), FOUR)
    first, middle, last = merged_meshes(g, 3)
    merged_layout = propagate(first.graph, [{g.inputs[0]: Spec((("c+d",), ("a",)))}])
    merged_layout = replace(merged_layout, strategies={0: (("m", ("c+d",)),)})
    whole = replace(
        merged_layout,
        specs=tuple(map(first.expand_spec, merged_layout.specs)),
        strategies=first.expand_factor_axes(merged_layout.strategies),
    )
    found = first.merge_layout(whole)
    assert found is not None
    assert (found.specs, found.strategies) == (merged_layout.specs, merged_layout.strategies)
    assert whole.specs[g.inputs[0]] == Spec((("c", "d"), ("a",)))
    assert middle.merge_layout(whole) is last.merge_layout(whole) is None  # c without b, and a without b
    replaced = last.merge_layout(replace(whole, specs=(Spec((("c", "d"), ())),) * 4))
    assert replaced is not None
    assert (replaced.specs[0], replaced.strategies) == (Spec((("c", "d"), ())), {0: (("m", ("c", "d")),)})


def stacked(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x.sum()


CASES = {
    "product": (product, ((1024, 256), (256, 512))),
    "gated": (gated, ((512, 64), (64, 256), (64, 256), (256, 64))),
    "trained": (mlp_step, mlp_args(256, 64, 128)),
    "gradients": (jax.grad(stacked), (((256, 512), (512, 256), (256, 512)), (32, 256))),
}


@pytest.mark.parametrize("case", CASES)
def test_four_axes_do_no_worse_than_the_two_that_they_make(case: str) -> None:
    fun, args = CASES[case]
    best, s = search(graph(fun, args, FOUR))
    fewer, _ = search(graph(fun, args, mesh(ab=8, cd=4)))
    assert best.cost.seconds <= fewer.cost.seconds
    assert s.bound == 0  # of the whole mesh nothing is proven
    assert search(graph(fun, args, FOUR))[0].layout.specs == best.layout.specs


@pytest.mark.parametrize("case", CASES)
def test_refining_near_coarse_layouts_finds_what_solving_finer_meshes_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fun, args = CASES[case]
    g = graph(fun, args, mesh(a=2, b=2, c=2, d=2))

    def solved() -> float:
        return min(c.cost.seconds for choice, c in search(g)[1].tried.items() if choice.solved_number)

    refined = solved()
    assert refined <= min(solve(build_problem(v.graph).problem).cost for v in merged_meshes(g, 3)) * (1 + MIN_GAIN)
    monkeypatch.setattr(solved_layouts, "REFINEMENT_ROUNDS", 0)
    assert (solved() > refined * 1.03) == (case == "gradients")  # two axes are enough for the others


def deep(x: jax.Array, weights: jax.Array) -> jax.Array:
    for _ in range(1200):
        x = jnp.tanh(x)
    return x @ weights


@pytest.mark.parametrize("pins", [None, (P(("b", "a")), P("d", "c"))])
def test_a_program_too_large_to_be_searched_has_a_plan(pins: Any) -> None:
    g = graph(deep, ((64, 64), (64, 64)), FOUR, in_shardings=pins)
    best, s = search(g)
    assert all(best.layout.specs[v] == spec for v, spec in g.pins.items())
    assert any(choice.solved_number for choice in s.tried) == (pins is None)
    assert any(spec.axes for spec in best.layout.specs)
