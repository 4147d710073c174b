"""Where memory is short: what the planner adds so that a step fits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import MemoryBudgetError
from autoshard.machine.mesh import Hardware, Link, LogicalMesh

HARDWARE = Hardware("chip", {"float32": 1e12}, 8e9, 1e12, {"link": Link("link", 1e11, 1e-7)}, 1e-8)
MESH = LogicalMesh(("data",), (8,), HARDWARE)
BATCH, WIDTH, LAYERS = 8192, 64, 8


def train(state: Any, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.tanh(h @ w)) + h, None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    return state - 0.1 * jax.grad(loss)(state)


ARGUMENTS = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


def plan(**options: Any) -> Any:
    return autoshard.jit(train, mesh=MESH, donate_argnums=0, **options).plan(*ARGUMENTS)


def test_micro_batches_take_less_memory():
    whole, half, quarter = (plan(microbatches=n).memory.peak for n in (1, 2, 4))
    assert half < 0.6 * whole
    assert quarter < 0.6 * half


def test_what_fits_only_in_micro_batches_is_planned_so_without_being_asked():
    least = plan(passes=["recompute:full"]).memory.peak
    budget = int(0.5 * least)
    with pytest.raises(MemoryBudgetError):
        plan(microbatches=1, memory_budget=budget)
    found = plan(memory_budget=budget)
    assert found.passes[0].name == "microbatch"
    assert found.memory.peak <= budget
    (note,) = [str(d) for d in found.diagnostics if "microbatch" in str(d)]
    assert "was added: without it, none of" in note
    again = autoshard.jit(train, mesh=MESH, donate_argnums=0, strategy=found).plan(*ARGUMENTS)
    assert again.passes == found.passes
    assert again.in_specs == found.in_specs
