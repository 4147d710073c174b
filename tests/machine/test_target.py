"""TPU slices: their mesh configs, their plans, and the errors where devices or compiler are missing.

None of this needs the extra ``tpu``; `tests/targets` has the tests that do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import ConfigError, MeshError
from autoshard.machine import tpu_slice
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh
from autoshard.machine.tpu_slice import TPUS, TpuSlice
from autoshard.runtime.plan import Plan

AXES = {"data": 4, "model": 4}
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def step(w, x):
    return w - 0.1 * (x.T @ (x @ w))


@pytest.fixture
def without_extra(monkeypatch):
    tpu_slice.topology_devices.cache_clear()
    monkeypatch.setattr(tpu_slice, "libtpu_installed", lambda: False)


@pytest.mark.parametrize(
    ("topology", "slices", "size"),
    [("v5e:4x4", 1, 16), ("v5e:16x16", 2, 512), ("v4:2x2x4", 1, 16), ("v5p:4x4x4", 1, 64), ("tpu7x:2x2x2", 1, 16)],
)
def test_number_of_devices_of_a_slice(topology, slices, size):
    assert TpuSlice(topology, slices).size == size


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5x:4x4", "no TPU is named 'v5x'; did you mean"),
        ("v5e", "a slice of v5e has 2 sides, as in 'v5e:4x4'"),
        ("v5e:4x4x4", "a slice of v5e has 2 sides"),
        ("v5p:4x4", "a slice of v5p has 3 sides, as in 'v5p:4x4x4'"),
        ("v5e:0x4", "a slice of v5e has 2 sides"),
    ],
)
def test_invalid_slices_are_refused(topology, message):
    with pytest.raises(MeshError, match=message):
        TpuSlice(topology)
    with pytest.raises(ConfigError, match=f"tpu: .*{message}"):
        MeshConfig(axes=AXES, tpu=topology)


def test_every_chip_has_a_table_with_clock_and_tiles():
    for name, chip in TPUS.items():
        mesh = resolve_mesh(MeshConfig(axes={"data": -1}, tpu=f"{name}:{'x'.join('2' * chip.grid_rank)}"))
        assert mesh.hardware.name == chip.hardware
        assert mesh.hardware.clock > 1e9
        assert mesh.hardware.tile == (8, 128)
        assert mesh.size == 2**chip.grid_rank * chip.devices_per_chip


def test_a_config_from_a_file(tmp_path):
    path = tmp_path / "mesh.yaml"
    path.write_text("axes: {data: -1, model: 4}\ntpu: v5e:4x4\n")
    mesh = resolve_mesh(path)
    assert (mesh.shape, mesh.target, mesh.hardware.name) == (AXES, TpuSlice("v5e:4x4"), "tpu-v5e")
    path.write_text("axes: {data: 3, model: 4}\ntpu: v5e:4x4\n")
    with pytest.raises(ConfigError, match="need 12 devices, not 16"):
        resolve_mesh(path)


def test_slices_are_along_the_first_axis_over_dcn():
    mesh = resolve_mesh(MeshConfig(axes={"data": -1, "model": 8}, tpu="v5e:4x4", slices=2))
    assert mesh.shape == {"data": 4, "model": 8}
    assert [mesh.slowest_link((a,)).name for a in mesh.axis_names] == ["dcn", "ici"]
    with pytest.raises(ConfigError, match="2 slices do not divide the first axis, of size 1"):
        MeshConfig(axes={"data": 1, "model": 32}, tpu="v5e:4x4", slices=2)
    with pytest.raises(ConfigError, match="2 slices need tpu:"):
        MeshConfig(axes=AXES, slices=2)
    with pytest.raises(ConfigError, match="has 16 devices, not 8"):
        MeshConfig(axes={"data": 8}, tpu="v5e:4x4", devices=8)


def test_planning_needs_no_compiler_and_the_plan_keeps_its_target(without_extra):
    jitted = autoshard.jit(step, mesh=MeshConfig(axes=AXES, tpu="v5e:4x4"), strategy="tp")
    plan = jitted.plan(X, X)
    assert "TPU v5e:4x4" in str(plan.mesh)
    assert Plan.from_json(plan.to_json()).mesh.target == TpuSlice("v5e:4x4")
    assert plan.memory.peak > 0


def test_compiling_without_the_extra_names_the_extra(without_extra):
    jitted = autoshard.jit(step, mesh=MeshConfig(axes=AXES, tpu="v5e:4x4"))
    with pytest.raises(MeshError, match=r"pip install 'autoshard\[tpu\]'"):
        jitted.lower(X, X)


def test_running_is_refused_before_anything_is_moved(without_extra):
    jitted = autoshard.jit(step, mesh=MeshConfig(axes=AXES, tpu="v5e:4x4"))
    x = jnp.ones((16, 16))
    for run in (
        lambda: jitted(x, x),
        lambda: jitted.plan(x, x).put(x, x),
        lambda: jitted.plan(x, x).init(lambda: x),
    ):
        with pytest.raises(MeshError, match="does not have the devices of TPU v5e:4x4"):
            run()
