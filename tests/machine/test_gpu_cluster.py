"""GPU clusters: their mesh configs, their plans, and the errors where devices or compiler are missing.

None of this needs the extra ``gpu``; `tests/targets` has the tests that do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import ConfigError, MeshError
from autoshard.machine import gpu_cluster as clusters
from autoshard.machine.gpu_cluster import GPUS, GpuCluster, target_config, topology_devices
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh
from autoshard.runtime.plan import Plan

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
TWO = MeshConfig(axes={"data": -1, "model": 8}, gpu="h100", nodes=2)


def step(w, x):
    return w - 0.1 * (x.T @ (x @ w))


def test_the_first_axis_crosses_nodes_over_infiniband():
    mesh = resolve_mesh(TWO)
    assert (mesh.shape, mesh.hardware.name, mesh.target) == ({"data": 2, "model": 8}, "h100", GpuCluster("h100", 2, 8))
    assert [mesh.slowest_link((a,)).name for a in mesh.axis_names] == ["infiniband", "nvlink"]
    one = resolve_mesh(MeshConfig(axes={"data": 4, "model": 2}, gpu="b200"))
    assert [one.slowest_link((a,)).name for a in one.axis_names] == ["nvlink", "nvlink"]
    chosen = resolve_mesh(TWO.model_copy(update={"links": {"data": "nvlink"}}))
    assert chosen.slowest_link(("data",)).name == "nvlink"


def test_nodes_are_along_as_many_axes_as_it_takes():
    mesh = resolve_mesh(MeshConfig(axes={"stage": 2, "data": 4, "model": 4}, gpu="h100", nodes=4))
    assert [mesh.slowest_link((a,)).name for a in mesh.axis_names] == ["infiniband", "infiniband", "nvlink"]
    with pytest.raises(ConfigError, match="4 nodes do not divide the first axis, of size 3"):
        MeshConfig(axes={"stage": 3, "data": 4, "model": 4}, gpu="h100", nodes=4, per_node=12)


def test_with_auto_axes_nodes_are_an_axis_of_their_own():
    assert all(
        mesh.axis_names[0] == "pod" and mesh.axis_sizes[0] == 2
        for mesh in MeshConfig(axes="auto", gpu="h100", nodes=2).meshes()
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"gpu": "h1000"}, "no such GPU; did you mean 'h100'"),
        ({"nodes": 2}, "2 nodes need gpu:"),
        ({"gpu": "h100", "devices": 4, "axes": {"data": 4}}, "8 H100 has 8 devices, not 4"),
        (
            {"gpu": "h100", "nodes": 3, "axes": {"data": 8, "model": 3}},
            "3 nodes do not divide the first axis, of size 8",
        ),
        ({"gpu": "h100", "tpu": "v5e:4x4", "axes": {"data": -1}}, "tpu: and gpu: exclude each other"),
        ({"gpu": "h100", "axes": {"data": 3}}, "need 3 devices, not 8"),
    ],
)
def test_invalid_clusters_are_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**{"axes": {"data": 4, "model": 2}, **entries})


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_hardware_table_that_agrees_with_its_target_config(name):
    table, chip = load_hardware(name), GPUS[name]
    assert set(table.links) == {"nvlink", "infiniband"}
    assert chip.bandwidth == pytest.approx(table.bandwidth, rel=0.05)
    assert 0 < chip.memory - table.memory < 0.08 * table.memory  # a card holds more than it is sold by
    # The tensor cores of a multiprocessor do a power of two of FLOP per cycle, at about the clock given.
    flops = table.peak_flops("bfloat16") / chip.multiprocessors / (chip.clock_ghz * 1e9)
    assert 0.9 < flops / {8: 2048, 9: 4096, 10: 8192}[chip.compute_capability] < 1.001
    assert f"core_count: {chip.multiprocessors}\n" in target_config(chip)


def test_planning_needs_no_compiler_and_the_plan_keeps_its_target(monkeypatch):
    monkeypatch.setattr(clusters, "compile_requirements", lambda: {"ptxas": False})
    plan = autoshard.jit(step, mesh=TWO, strategy="tp").plan(X, X)
    assert str(plan.mesh) == "(data=2, model=8) of 2 x 8 H100"
    assert Plan.from_json(plan.to_json()).mesh.target == GpuCluster("h100", 2, 8)


def test_compiling_without_the_extra_names_the_extra(monkeypatch):
    topology_devices.cache_clear()
    monkeypatch.setattr(
        clusters, "compile_requirements", lambda: {"jax-cuda13-plugin": True, "ptxas": False, "libdevice": False}
    )
    jitted = autoshard.jit(step, mesh=TWO, strategy="tp")
    with pytest.raises(MeshError, match=r"missing: ptxas, libdevice\): pip install 'autoshard\[gpu\]'"):
        jitted.lower(X, X)


def test_running_is_refused():
    jitted, x = autoshard.jit(step, mesh=TWO, strategy="tp"), jnp.ones((16, 16))
    with pytest.raises(MeshError, match="does not have the devices of 2 x 8 H100"):
        jitted(x, x)
