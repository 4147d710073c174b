"""The layout problem's optimum costs what its layout is priced at."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from autoshard.cost.cost import CostModel
from autoshard.ir.graph import Graph
from autoshard.ir.program import PipelineRequest
from autoshard.machine.mesh_config import MeshConfig
from autoshard.search.build_problem import build_problem
from autoshard.search.candidates import Search
from autoshard.search.solve import solve
from autoshard.search.solved_layouts import solve_layouts
from tests.programs import graph, mesh, mlp_args, mlp_step


def gated(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down + x


def updated(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Momentum: a weight, its state and its gradient, which can have different specs."""
    m = 0.9 * m + jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - 0.1 * m, m


def looped(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def offloaded(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keeps a value in the host's memory for a while, and returns one there, another by a pin."""
    kept = jax.device_put(jnp.tanh(x @ w), jax.memory.Space.Host)
    y = jnp.sin(x @ w)
    y = (jax.device_put(kept, jax.memory.Space.Device) * y) @ w.T
    return y, jax.device_put(y * 2, jax.memory.Space.Host), y.T


def layers_step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """A step of scanned layers, whose weights are gathered beside the products before them."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None

        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


CASES = {
    "offloaded": (offloaded, ((64, 128), (128, 256))),
    "gated": (gated, ((32, 64), (64, 256), (64, 256), (256, 64))),
    "updated": (updated, ((512, 256), (512, 256), (64, 512))),
    "looped": (looped, ((64, 128), (6, 128, 128))),
    "trained": (mlp_step, None),
    "layers": (layers_step, ({"down": (6, 2048, 512), "up": (6, 512, 2048)}, (4096, 512))),
}
HIDING = ("layers", "trained")
"""On a chip that gathers weights beside products."""


def program(case: str, axes: dict[str, int]) -> Graph:
    (fun, shapes), on = CASES[case], mesh(**axes)
    if case in HIDING:
        on = replace(on, hardware=replace(on.hardware, hidden_collectives=0.75))
    to_host = NamedSharding(on.abstract_mesh(), PartitionSpec("a"), memory_kind="pinned_host")
    pins = {"out_shardings": (None, None, to_host)} if case == "offloaded" else {}
    return CostModel(graph(fun, shapes or mlp_args(256, 64, 128), on, **pins)).graph


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_solution_costs_what_its_layout_is_priced_at(case: str, axes: dict[str, int]) -> None:
    """The solver adds up tables, the cost model prices a layout node by node: two implementations of one cost."""
    g = program(case, axes)
    solution = solve(build_problem(g).problem)
    s = Search(g, math.inf)
    priced = s.price(next(solve_layouts(s))).cost
    assert priced.seconds == pytest.approx(solution.cost, rel=1e-5)  # scalars are in no table
    assert s.bound <= priced.seconds
    assert (priced.hidden > 0) == (case == "layers")


@pytest.mark.parametrize("staged", [True, False], ids=["stage", "whole"])
def test_layouts_are_searched_for_with_what_goes_in_rings(staged: bool) -> None:
    """On a chip that waits for gathers. The bound is of what the reader hides that hides most."""
    (fun, _), on = CASES["layers"], mesh(a=2, b=4)
    chip = replace(on.hardware, blocking_gathers=True, blocking_reduce_scatters=True)
    found = []
    for hardware in (replace(chip, hidden_collectives=0.9), chip):
        g = graph(
            fun, ({"down": (6, 4096, 2048), "up": (6, 2048, 4096)}, (16384, 2048)), replace(on, hardware=hardware)
        )
        request = PipelineRequest(on, "a") if staged else None
        s = Search(replace(g, program=replace(g.program, pipeline=request)), math.inf)
        found.append((s, s.price(next(solve_layouts(s)))))
    (hiding, known), (_, unknown) = found
    assert known.cost.hidden > 0
    assert 0 < hiding.bound <= known.cost.seconds
    assert known.cost.seconds < 0.99 * hiding.cost_model.cost(unknown.layout).seconds


def test_what_waits_on_the_host_beside_products_is_in_the_bound_as_in_the_price() -> None:
    """Each device hides as many seconds of its own share as products last, not a share of them."""

    def train(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            layer = lambda h, p: (h + jax.nn.gelu(h @ p["up"]) @ p["down"], None)  # noqa: E731
            return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    up, down, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((8, 2048, 8192), (8, 8192, 2048), (8192, 2048)))
    on = MeshConfig(axes={"data": 8}, tpu="v5e:2x4")
    plan = autoshard.jit(train, mesh=on, donate_argnums=0, recompute={"*.up": "host"}).plan({"up": up, "down": down}, x)
    assert plan.cost.host > 0
    assert plan.bound <= plan.cost.seconds <= 1.001 * plan.bound
