"""Logical meshes: shapes, links and devices."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.errors import MeshError
from autoshard.machine.mesh import Hardware, Link, LogicalMesh

FAST = Link("fast", 4e11, 1e-6)
SLOW = Link("slow", 2e10, 5e-6)
CHIP = Hardware("chip", {"bfloat16": 1e15, "float32": 5e14}, 8e10, 3e12, {"fast": FAST, "slow": SLOW})


def test_shape_and_size():
    mesh = LogicalMesh(("data", "model"), (4, 2), CHIP)
    assert mesh.shape == {"data": 4, "model": 2}
    assert mesh.size == 8
    assert mesh.axes_size(()) == 1
    assert mesh.axes_size(("data", "model")) == 8
    assert str(mesh) == "(data=4, model=2) of chip"


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("a", "a"), (2, 2), "axis names repeat"),
        (("a",), (2, 2), r"axes \('a',\) but sizes \(2, 2\)"),
        (("a", "b"), (2, 0), "'b' has size 0"),
    ],
)
def test_invalid_meshes_are_refused(names, sizes, message):
    with pytest.raises(MeshError, match=message):
        LogicalMesh(names, sizes, CHIP)


def test_the_slowest_link_of_the_axes_decides():
    mesh = LogicalMesh(("pod", "chip"), (2, 4), CHIP, ("slow", "fast"))
    assert mesh.slowest_link(("chip",)) is FAST
    assert mesh.slowest_link(("pod", "chip")) is SLOW
    assert LogicalMesh(("a",), (2,), CHIP).slowest_link(("a",)) is FAST


def test_axes_are_slow_where_others_are_faster():
    mixed = LogicalMesh(("pod", "chip", "one"), (2, 4, 1), CHIP, ("slow", "fast", "slow"))
    assert mixed.slow_axes == ("pod",)
    alike = (("slow", "slow"), ("fast", "fast"))
    assert all(not LogicalMesh(("a", "b"), (2, 4), CHIP, links).slow_axes for links in alike)
    assert not LogicalMesh(("pod", "chip"), (1, 4), CHIP, ("slow", "fast")).slow_axes, (
        "no two devices are on the slow link"
    )
    assert not LogicalMesh((), (), CHIP).slow_axes


def test_peak_flops_of_an_unlisted_dtype_is_the_slowest():
    assert CHIP.peak_flops("bfloat16") == 1e15
    assert CHIP.peak_flops("float64") == 5e14


def test_devices_do_not_enter_comparison():
    bare = LogicalMesh(("a",), (2,), CHIP)
    placed = LogicalMesh(("a",), (2,), CHIP, devices=tuple(jax.devices()[2:4]))
    assert bare == placed
    assert hash(bare) == hash(placed)
    assert bare != LogicalMesh(("a",), (4,), CHIP)


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2), (1, 8), (1,), (3,)])
def test_concrete_and_abstract_mesh_have_auto_axes(sizes):
    names = tuple("abc"[: len(sizes)])
    mesh = LogicalMesh(names, sizes, CHIP)
    concrete = mesh.concrete()
    assert concrete.axis_names == names
    assert concrete.devices.shape == sizes
    assert len(set(concrete.devices.flat)) == mesh.size
    assert set(concrete.axis_types) == {AxisType.Auto}
    assert mesh.abstract_mesh().axis_sizes == sizes
    assert set(mesh.abstract_mesh().axis_types) == {AxisType.Auto}
    assert mesh.sharding(PartitionSpec("a")).mesh == concrete


def test_given_devices_are_kept():
    chosen = tuple(jax.devices()[:3:-1])
    assert tuple(LogicalMesh(("a", "b"), (2, 2), CHIP, devices=chosen).concrete().devices.flat) == chosen


def test_a_mesh_larger_than_the_machine_names_both_sizes():
    mesh = LogicalMesh(("a", "b"), (8, 4), CHIP)
    assert mesh.abstract_mesh().size == 32  # planning for it works
    with pytest.raises(MeshError, match=r"needs 32 devices and this process has 8 \(cpu\).*JAX_NUM_CPU_DEVICES=32"):
        mesh.concrete()


def test_the_order_of_links_enters_comparison():
    """The first is the default of an axis, so that meshes of both chips cost differently."""
    swapped = replace(CHIP, links={"slow": SLOW, "fast": FAST})
    assert LogicalMesh(("a",), (2,), swapped).slowest_link(("a",)) is SLOW
    assert LogicalMesh(("a",), (2,), swapped) != LogicalMesh(("a",), (2,), CHIP)
    assert swapped == replace(CHIP, links={"slow": SLOW, "fast": FAST})
    assert replace(CHIP, tile=(8, 128)) != CHIP != "chip"
