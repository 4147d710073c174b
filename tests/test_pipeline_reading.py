"""Compiled pipelines as the benchmarks read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import MeshConfig
from autoshard.backend.estimate import estimate
from benchmarks.pipeline_reading import staged_seconds, step_seconds


def loss(params: Any, x: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2).mean()


def read(microbatches: int, pipeline: str | None) -> tuple[float, float]:
    """Seconds with the time that stages are idle, and without."""
    mesh = MeshConfig(axes={"stage": 4, "model": 2}, pipeline=pipeline)
    options: Any = {"microbatches": microbatches, "schedule": "gpipe"} if pipeline else {}
    step = autoshard.jit(jax.grad(loss), mesh=mesh, strategy="tp", **options)
    args = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32), jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    return step_seconds(compiled.as_text() or "", plan), estimate(compiled, plan.mesh).scheduled


def test_stages_that_run_one_after_the_other_take_as_long_as_all_together() -> None:
    """Of two micro-batches stages are idle at 3 of 5 ticks, of eight at 3 of 11."""
    alone, busy = read(2, "stage")
    assert busy * 2 < alone < busy * 5 / 2  # what stands before and after the layers is of one stage
    together, busy = read(8, "stage")
    assert busy * 8 / 11 < together < busy * 2


def test_without_a_pipeline_it_is_the_estimate() -> None:
    found, expected = read(1, None)
    assert found == expected


def test_another_program_is_refused() -> None:
    mesh = MeshConfig(axes={"stage": 4, "model": 2}, pipeline="stage")
    step = autoshard.jit(jax.grad(loss), mesh=mesh, microbatches=4, schedule="gpipe")
    plan = step.plan(jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    with pytest.raises(ValueError, match="no conditional with the ticks"):
        staged_seconds("ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n", plan)
