"""The same step, un-edited, on any mesh under any strategy: what one device computes.

Twenty steps in float32 are held to 1e-5 relative: the losses each, and every array of the final state (parameters,
optimizer moments, batch statistics, counters, random keys). An entry that is small beside the others of its array
carries their rounding error, so each array is also allowed 1e-5 of its largest entry. In float64 the same runs agree
to 1e-12, so what is left in float32 is the order of additions and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import autoshard
from autoshard.search.strategies import PRESETS
from tests import models

STEPS = 20
MESHES = {
    "8": {"data": 8},
    "4x2": {"data": 4, "model": 2},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
    "1": {"data": 1},
    "1x8": {"data": 1, "model": 8},
}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Programs that come out the same, as fsdp and zero3 do, are compiled once for all of these tests."""
    base = tmp_path_factory.getbasetemp()
    settings = {
        "jax_compilation_cache_dir": str((base if worker_id == "master" else base.parent) / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.cache
def on_one_device(model: models.Model, steps: int, x64: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with jax.enable_x64(x64):
        return models.train(model, (nnx.jit if model.mutates else jax.jit)(model.step), steps)


def check(model: models.Model, mesh: str, strategy: str, steps: int, rtol: float, *, x64: bool = False) -> None:
    losses, arrays = on_one_device(model, steps, x64)
    with jax.enable_x64(x64):
        step = autoshard.jit(model.step, mesh=MESHES[mesh], strategy=strategy)
        got_losses, got = models.train(model, step, steps)
    assert losses.dtype == got_losses.dtype == (np.float64 if x64 else np.float32)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(got_losses, losses, rtol=rtol, atol=0)
    assert got.keys() == arrays.keys()
    for path, want in arrays.items():
        assert got[path].dtype == want.dtype
        np.testing.assert_allclose(got[path], want, rtol=rtol, atol=rtol * np.abs(want).max(), err_msg=path)


@pytest.mark.parametrize("strategy", PRESETS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", models.ALL, ids=lambda m: m.name)
def test_twenty_steps_are_those_of_one_device(model: models.Model, mesh: str, strategy: str):
    check(model, mesh, strategy, STEPS, 1e-5)


@pytest.mark.parametrize(
    ("model", "mesh", "strategy"),
    [(models.moe, "4x2", "fsdp_tp"), (models.conv, "8", "zero2"), (models.decoder, "2x2x2", "auto")],
    ids=lambda x: getattr(x, "name", x),
)
def test_float64_leaves_no_difference(model: models.Model, mesh: str, strategy: str):
    check(model, mesh, strategy, 8, 1e-12, x64=True)
