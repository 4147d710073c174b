"""Gradients computed in turn, the largest first, where SparseCores scatter them: the same numbers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.backend.lower import constrain
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from tests.scanned_layers import gradients_through, noted

LAYERS, ROWS, WIDTH = 3, 4096, 16
WIDTHS = {"narrow": 16, "wide": 96, "middle": 48}
"""Of what each product makes; layers read them in this order, so that gradients are made in the other one."""
ROW_SPLIT, WEIGHT_SPLIT = P("data"), P(None, "data")


def mesh(*, sparse_cores: bool = True, memory: float = 8e9) -> LogicalMesh:
    links = {"link": Link("link", 1e9, 1e-6)}
    hardware = Hardware(
        "cpu",
        {"float32": 1e11},
        memory,
        1e12,
        links,
        1e-6,
        hidden_collectives=0.9,
        sparse_core_collectives=sparse_cores,
    )
    return LogicalMesh(("data",), (8,), hardware)


def gradients(ws: Any, x: Any, *, scan: bool = True, effects: bool = False) -> Any:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        h = noted(h) if effects else h
        for name in WIDTHS:
            h = h + jnp.tanh(h @ w[name]) @ w[f"{name}_out"]
        return h, None

    return gradients_through(layer, ws, x, scan=scan)


def arguments() -> Any:
    def normal(seed: int, *shape: int) -> Any:
        return np.random.default_rng(seed).standard_normal(shape).astype("f4") / 4

    ws = {k: normal(n, LAYERS, WIDTH, width) for n, (k, width) in enumerate(WIDTHS.items())}
    outs = {f"{k}_out": normal(n + 3, LAYERS, width, WIDTH) for n, (k, width) in enumerate(WIDTHS.items())}
    return ws | outs, normal(6, ROWS, WIDTH)


def step(*, sparse_cores: bool = True, memory: float = 8e9, **options: Any) -> autoshard.Step:
    def run(ws: Any, x: Any) -> Any:
        return gradients(ws, x, **options)

    on = mesh(sparse_cores=sparse_cores, memory=memory)
    return autoshard.jit(run, mesh=on, in_shardings=(WEIGHT_SPLIT, ROW_SPLIT), out_shardings=WEIGHT_SPLIT)


def together(run: autoshard.Step) -> list[list[int]]:
    """Of each island of several products, the elements of what these make, in the order in which they are computed."""
    plan = run.plan(*arguments())
    lowered = constrain(plan.study.graph, plan, plan.jax_mesh)
    islands = [e for e in jx.walk(lowered) if e.primitive.name == "shard_map"]
    found = [
        [math.prod(e.outvars[0].aval.shape) for e in island.params["jaxpr"].eqns if e.primitive.name == "dot_general"]
        for island in islands
    ]
    return [sizes for sizes in found if len(sizes) > 1]


def test_gradients_are_the_same_and_each_scatter_is_as_planned() -> None:
    args, run = arguments(), step()
    for made, wanted in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(gradients(*args)), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)
    assert audit(run.lower(*args).compile(), run.plan(*args)).clean


def test_the_largest_is_computed_first() -> None:
    (sizes,) = together(step())
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 2 * len(WIDTHS)


def test_each_waits_for_the_product_before_it_and_for_the_scatter_before_that() -> None:
    text = step().lower(*arguments()).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line and ":2 " in line]
    n = 2 * len(WIDTHS)
    assert len(barriers) == (n - 1) + (n - 2)


@pytest.mark.parametrize(
    "options",
    [{"sparse_cores": False}, {"scan": False}, {"effects": True}],
    ids=["no SparseCores", "unrolled layers", "effects"],
)
def test_others_are_lowered_by_themselves(options: Any) -> None:
    """Of unrolled layers all would come at the end of the step; effects stay in their order."""
    assert together(step(**options)) == []


@pytest.mark.parametrize("fits", [True, False])
def test_nothing_is_put_off_where_its_operands_may_not_fit(fits: bool) -> None:
    plan = step().plan(*arguments())
    operands = 4 * ROWS // 8 * sum(2 * (WIDTH + width) for width in WIDTHS.values())
    memory = (plan.memory.peak + operands * (1.01 if fits else 0.99)) / 0.95
    assert bool(together(step(memory=memory))) == fits
