"""What stages take for what is no layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import MeshConfig

WIDTH, WIDE = 64, 4096
MESH = MeshConfig(axes={"stage": 2, "model": 2}, hardware="h100", pipeline="stage")
TPUS = MeshConfig(axes={"stage": 4}, tpu="v5p:2x2x1", pipeline="stage")


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


def seconds_of_stages(equation: str, shape: tuple[int, ...]) -> float:
    """Of a step of eight layers of one product in four micro-batches."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.einsum(equation, h, w)).reshape(h.shape), None

        return w - jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    step = autoshard.jit(train, mesh=TPUS, microbatches=4, schedule="gpipe", donate_argnums=0)
    plan = step.plan(*(jax.ShapeDtypeStruct(n, jnp.float32) for n in ((8, *shape), (1 << 13, shape[0]))))
    assert plan.pipeline is not None
    return sum(plan.pipeline.seconds)


def test_a_product_adds_up_the_gradient_that_it_makes_where_tpus_keep_its_layout() -> None:
    """Split into heads its last two dimensions are of one operand: it is laid out anew, and then added."""
    matrix, heads = (
        seconds_of_stages(*each) for each in (("bd,de->be", (WIDE, WIDE)), ("bd,dhe->bhe", (WIDE, 32, 128)))
    )
    read_and_written = 2 * 4 * 8 * WIDE**2 / TPUS.mesh().hardware.memory_rate
    assert heads - matrix == pytest.approx(4 * read_and_written, rel=0.1)
