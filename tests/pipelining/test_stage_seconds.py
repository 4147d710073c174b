"""What stages take for what is no layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import MeshConfig

WIDTH = 64
MESH = MeshConfig(axes={"stage": 2, "model": 2}, hardware="h100", pipeline="stage")


def heavy(w: jax.Array, x: jax.Array) -> jax.Array:
    """Takes far longer than the layers of `output`."""
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x


def output(params: Any, x: jax.Array, shared: Any) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h * w + shared), None), x, params["layers"])[0]


def encoded(params: Any, x: jax.Array) -> jax.Array:
    return output(params, x, heavy(params["w"], x))


def before(params: Any, x: jax.Array) -> jax.Array:
    return output(params, heavy(params["w"], x), 0)


def after(params: Any, x: jax.Array) -> jax.Array:
    return heavy(params["w"], output(params, x, 0))


@pytest.mark.parametrize(("step", "shares"), [(encoded, (0.5, 0.5)), (before, (0.8, 0.2)), (after, (0.2, 0.8))])
def test_what_all_layers_read_runs_on_each_stage_and_else_on_the_first_or_the_last(step: Any, shares: Any) -> None:
    params = {
        "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "layers": jax.ShapeDtypeStruct((2, WIDTH), jnp.float32),
    }
    planned = autoshard.jit(step, mesh=MESH, microbatches=4, schedule="gpipe", memory_budget="80GB")
    pipeline = planned.plan(params, jax.ShapeDtypeStruct((1 << 20, WIDTH), jnp.float32)).pipeline
    assert pipeline is not None
    assert pipeline.layers == (1, 1)
    assert [s / sum(pipeline.seconds) for s in pipeline.seconds] == pytest.approx(shares, abs=0.15)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_stage_adds_up_the_gradients_of_its_own_layers_and_of_no_others(schedule: str) -> None:
    """What is outside of the loop does not grow with the micro-batches, each of which adds to all gradients."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum())(w)

    def outside(microbatches: int) -> float:
        mesh = MeshConfig(axes={"stage": 2}, hardware="h100", pipeline="stage")
        step = autoshard.jit(train, mesh=mesh, microbatches=microbatches, schedule=schedule)
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4096, 4096), (16, 4096))]
        plan = step.plan(*shapes)
        assert plan.pipeline is not None
        return plan.cost.seconds * (1 - plan.pipeline.bubble) - sum(plan.pipeline.seconds) / 2

    assert outside(16) < 2 * outside(2)
