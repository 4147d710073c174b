"""The same step, un-edited, on any mesh under any strategy: what one device computes.

Every model meets every mesh and every strategy, every mesh half of the strategies; `make combinations` runs all three
together.
Twenty steps in float32 are held to 1e-5 relative: the losses each, and every array of the final state (parameters,
optimizer moments, batch statistics, counters, random keys). An entry that is small beside the others of its array
carries their rounding error, so each array is also allowed 1e-5 of its largest entry. In float64 the same runs agree
to 1e-12, so what is left in float32 is the order of additions and nothing else.
"""

from __future__ import annotations

import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.search.strategies import PRESETS
from tests import models
from tests.combinations import latin

STEPS = 20
MESHES = {
    "8": {"data": 8},
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
    "1": {"data": 1},
    "1x8": {"data": 1, "model": 8},
}

COMBINATIONS = latin(models.ALL, MESHES, PRESETS)


@functools.cache
def on_one_device(model: models.Model, steps: int, x64: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with jax.enable_x64(x64):
        return models.train(model, (nnx.jit if model.mutates else jax.jit)(model.step), steps)


def check(model: models.Model, mesh: str, strategy: str, steps: int, rtol: float, *, x64: bool = False) -> None:
    losses, arrays = on_one_device(model, steps, x64)
    with jax.enable_x64(x64):
        step = autoshard.jit(model.step, mesh=MESHES[mesh], strategy=strategy)
        got_losses, got = models.train(model, step, steps)
    assert losses.dtype == (np.float64 if x64 else np.float32)
    assert losses[-1] < losses[0]
    chex.assert_trees_all_close(got_losses, losses, rtol=rtol, strict=True)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, arrays)
    for path, want in arrays.items():
        np.testing.assert_allclose(got[path], want, rtol=rtol, atol=rtol * np.abs(want).max(), err_msg=path)


def test_every_model_meets_every_mesh_and_every_strategy() -> None:
    for side in (MESHES, PRESETS):
        assert all(any({model, b} <= set(case) for case in COMBINATIONS) for model in models.ALL for b in side)
    for mesh in MESHES:
        assert len({strategy for _, on, strategy in COMBINATIONS if on == mesh}) >= len(PRESETS) // 2


@pytest.mark.parametrize(("model", "mesh", "strategy"), COMBINATIONS, ids=lambda x: getattr(x, "name", x))
def test_twenty_steps_are_those_of_one_device(model: models.Model, mesh: str, strategy: str):
    check(model, mesh, strategy, STEPS, 1e-5)


@pytest.mark.parametrize(
    ("model", "mesh", "strategy"),
    [(models.moe, "4x2", "fsdp_tp"), (models.conv, "8", "zero2"), (models.decoder, "2x2x2", "auto")],
    ids=lambda x: getattr(x, "name", x),
)
def test_float64_leaves_no_difference(model: models.Model, mesh: str, strategy: str):
    check(model, mesh, strategy, 8, 1e-12, x64=True)
