"""What a device of a pipeline has in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.cost.memory import Memory
from tests.models import tokens
from tests.pipelined_steps import decoder_loss, decoder_params, train_state, trained

MESH = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")


def memory(schedule: str, layers: int) -> Memory:
    step = autoshard.jit(trained(decoder_loss), mesh=MESH, strategy="tp", microbatches=8, schedule=schedule)
    return step.plan(train_state(decoder_params(layers)), tokens(0)).memory


@pytest.mark.parametrize("layers", [4, 8])
def test_residuals_have_a_slot_for_each_micro_batch_in_flight(layers: int) -> None:
    """Layers read and write their rows of it where they are: none is there twice."""
    one, other = memory("gpipe", layers), memory("1f1b", layers)
    assert one.residuals / other.residuals == pytest.approx(8 / 4)
    assert one.peak - other.peak >= one.residuals - other.residuals


def test_gradients_are_added_up_where_they_are() -> None:
    """Of each layer by itself: neither what all layers add nor the new sums are there beside the sums."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2).mean()

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return params - grads, value

    planned = autoshard.jit(step, mesh=MESH, strategy="tp", microbatches=4, schedule="1f1b", donate_argnums=0)
    args = jax.ShapeDtypeStruct((16, 512, 512), jnp.float32), jax.ShapeDtypeStruct((8, 512), jnp.float32)
    found, weights = planned.plan(*args).memory, 16 * 512 * 512 * 4 // 8
    assert found.parameters == weights
    assert found.peak < 2.5 * weights
    placed = planned.lower(*args).compile().memory_analysis()
    assert placed.argument_size_in_bytes + placed.temp_size_in_bytes < 2.5 * weights
