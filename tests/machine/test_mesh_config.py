"""Mesh configs: valid ones load; invalid ones are errors that name the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from pydantic import BaseModel

from autoshard.errors import ConfigError, MeshError
from autoshard.machine.mesh_config import (
    MeshConfig,
    fill_open_axis,
    mesh_config,
    resolve_mesh,
)
from autoshard.strict_config import Bytes, Config, load_yaml, parse_bytes

ROOT = Path(__file__).parents[2]
MESHES = sorted((ROOT / "configs/mesh").glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mesh.yaml"
        path.write_text(text)
        return path

    return write


# --- what ships ---


@pytest.mark.parametrize("path", MESHES, ids=lambda p: p.stem)
def test_every_shipped_mesh_resolves(path):
    config = MeshConfig.load(path)
    mesh = resolve_mesh(path)
    assert list(mesh.axis_names) == list(config.axes)
    target = config.target
    assert mesh.size == (target.size if target else config.devices or np.prod(list(config.axes.values())))
    assert mesh.hardware.name == (target.hardware if target else config.hardware)
    assert mesh == resolve_mesh(str(path)) == resolve_mesh(path.stem) == resolve_mesh(config)
    assert path.stem.endswith(f"-{mesh.size}")
    if config.memory_budget is not None:
        assert config.memory_budget < mesh.hardware.memory


# --- what is wrong is named ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {data: 4}\nhardwear: cpu\n", "mesh.yaml:2: hardwear: unknown key; did you mean 'hardware'?"),
        ("axes: {data: 4}\n\ndevices: 8\n", "mesh.yaml:3: devices: the axes data=4 need 4 devices, not 8"),
        ("axes: {a: 3, b: -1}\ndevices: 8\n", "mesh.yaml:2: devices: the axes a=3 x b=-1 .* 8 is no multiple of 3"),
        ("axes: {a: -1, b: 2, c: -1}\n", "mesh.yaml:1: axes: axes 'a', 'c' are all -1"),
        ("axes:\n  a: 0\n", "mesh.yaml:1: axes: axis 'a' has size 0"),
        ("axes:\n  a: 2\n  b: true\n", r"mesh.yaml:3: axes.b: should be a valid integer; it is True"),
        ("axes: {}\n", "mesh.yaml:1: axes: .*at least one axis"),
        ("devices: 8\n", "mesh.yaml:1: axes: this key is required"),
        ("axes: {a: 2}\nhardware: h10\n", "mesh.yaml:2: hardware: no hardware config is named 'h10'; .*'h100'"),
        ("axes: {a: 2}\nlinks: {b: shared}\n", "mesh.yaml:2: links: 'b' is no axis of this mesh; known: 'a'"),
        ("axes: {a: 2}\nlinks: {a: nvlnk}\nhardware: h100\n", "mesh.yaml:2: links: h100 has no link 'nvlnk'.*'nvlink'"),
        ("axes: {a: 2}\npins: {w: [b]}\n", "mesh.yaml:2: pins: 'b' is no axis of this mesh"),
        ("axes: {a: 2}\npins: {w: [a, a]}\n", "mesh.yaml:2: pins: the pin of 'w' uses a mesh axis twice"),
        ("axes: {a: 2}\npins:\n  w: [a, 3]\n", r"mesh.yaml:3: pins.w\[1\]: should be a valid string; it is 3"),
        ("axes: {a: 2}\nmemory_budget: 14Gib\n", "mesh.yaml:2: memory_budget: '14Gib' is not a size in bytes.* GiB"),
        ("axes: {a: 2}\naxes: {b: 2}\n", "mesh.yaml:2: axes: repeated key, first on line 1"),
        ("axes: {a: 2\ndevices: 2\n", r"mesh.yaml:\d: expected"),
        ("axes:\n\t- 1\n", "mesh.yaml:2: found character"),
        ("- 1\n", "mesh.yaml:1: expected keys and values, found list"),
        ("axes: auto\ndevices: 1073741824\n", "mesh.yaml:2: devices: should be less than or equal to 1048576"),
        ("axes: {a: 1048577}\n", "mesh.yaml:1: axes: axis 'a' has size 1048577; a mesh has 1,048,576 devices at most"),
        ("axes: {a: 4096, b: 4096}\n", "mesh.yaml:1: axes: the product of the axes is too large"),
        ("axes: auto\ntpu: v5e:99999x4\n", "mesh.yaml:2: tpu: .*has 2 sides"),
        ("axes: auto\ngpu: h100\nper_node: 1073741824\n", "mesh.yaml:3: per_node: should be less than"),
        ("", "mesh.yaml:1: axes: this key is required"),
    ],
)
def test_a_mistake_is_named_with_its_line(write, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve_mesh(write(text))


def test_every_mistake_is_reported_at_once(write):
    with pytest.raises(ConfigError) as caught:
        MeshConfig.load(write("axes: {a: 2}\nhardwear: cpu\ndevices: 3\n"))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["hardwear", "devices"]


def test_a_missing_file_suggests_what_is_near_alone(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*cpu-9.yaml: No such file.*did you mean 'cpu-8.yaml'"):
        resolve_mesh(ROOT / "configs/mesh/cpu-9.yaml")
    (tmp_path / "e6.yaml").touch()
    with pytest.raises(ConfigError, match="No such file or directory$"):  # the suffix alone is no likeness
        resolve_mesh(tmp_path / "nope.yaml")


def test_a_directory_is_no_config():
    with pytest.raises(ConfigError, match="cannot read .*: Is a directory"):
        MeshConfig.load(ROOT / "configs")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="no mesh config is named 'cpu8'; did you mean 'cpu-8'"):
        resolve_mesh("cpu8")


def test_a_config_made_in_python_is_checked_too():
    with pytest.raises(ConfigError, match="MeshConfig: hardwear: unknown key; did you mean 'hardware'"):
        MeshConfig(axes={"a": 2}, hardwear="cpu")


class _Layer(Config):
    width: int
    rate: float = 0.0


class _Model(Config):
    layers: list[_Layer]
    named: dict[str, _Layer]


def test_nested_entries_are_named_by_their_path(write):
    path = write("layers:\n  - width: 3\n    rate: 1e-5\n  - widht: 4\nnamed:\n  head: {width: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, _Model)
    assert str(caught.value).replace(str(path), "F").splitlines() == [
        "F:4: layers[1].widht: unknown key; did you mean 'width'?",
        "F:4: layers[1].width: this key is required",
        "F:6: named.head.width: should be a valid integer, unable to parse string as an integer; it is 'x'",
    ]


@pytest.mark.parametrize("number", ["1e-5", "1E5", "2.5e12", "-3e+2", "1.0", "7"])
def test_numbers_are_read_as_people_write_them(write, number):
    class Loose(BaseModel):
        value: object

    value = load_yaml(write(f"value: {number}\n"), Loose).value
    assert value == float(number)
    assert not isinstance(value, str)


def test_yaml_never_makes_python_objects(write):
    with pytest.raises(ConfigError, match="mesh.yaml:1: the tag .*python/object.* is not read"):
        MeshConfig.load(write("axes: !!python/object/apply:os.getcwd []\n"))


# --- sizes in bytes ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("14GiB", 14 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 MB", 1_500_000),
        (512, 512),
        ("2e9", 2 * 10**9),
        ("1KiB", 1024),
    ],
)
def test_byte_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.2.3GB", "-1GB", "14 gib", "0", True, None, "0.1", "1e-3 B"])
def test_invalid_byte_sizes(text):
    with pytest.raises(ValueError, match="size in bytes|less than one byte"):
        parse_bytes(text)


def test_byte_sizes_in_a_config(write):
    class Budget(Config):
        budget: Bytes | None = None

    assert load_yaml(write("budget: 1GiB\n"), Budget).budget == 2**30
    assert load_yaml(write("budget:\n"), Budget).budget is None


# --- every form in which a user may give a mesh ---


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_fill_open_axis_finds_the_open_size(sizes, data):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    devices = int(np.prod(sizes))
    open_axis = data.draw(st.sampled_from(sorted(axes)))
    assert (
        fill_open_axis(axes | {open_axis: -1}, devices)
        == axes
        == fill_open_axis(axes, devices)
        == fill_open_axis(axes, None)
    )
    with pytest.raises(ValueError, match=f"need {devices} devices, not {devices + 1}"):
        fill_open_axis(axes, devices + 1)


def test_axis_sizes():
    assert resolve_mesh({"data": 2, "model": -1}).shape == {"data": 2, "model": 4}
    assert resolve_mesh({"x": 6}).size == 6
    assert resolve_mesh(None).shape == {"data": 8}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"a": -1, "b": -1}, "axes 'a', 'b' are all -1"),
        ({"a": 3, "b": -1}, "8 is no multiple of 3"),
        ({"a": -2}, "size -2"),
        ({}, "at least one axis"),
    ],
)
def test_impossible_axis_sizes(axes, message):
    with pytest.raises(MeshError, match=message):
        resolve_mesh(axes)


def test_a_jax_mesh_keeps_its_devices_and_order():
    devices = np.asarray(jax.devices()[::-1][:4]).reshape(2, 2)
    mesh = resolve_mesh(Mesh(devices, ("rows", "columns")))
    assert mesh.shape == {"rows": 2, "columns": 2}
    assert mesh.devices == tuple(devices.flat)
    assert (mesh.concrete().devices == devices).all()
    assert mesh.hardware.name == "cpu"


@dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device; JAX numbers what NVLink joins as slices."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("axes", "links"),
    [
        ({"data": 2, "model": 8}, ["infiniband", "nvlink"]),
        ({"data": 16}, ["infiniband"]),
        ({"stage": 1, "data": 4, "model": 4}, ["nvlink", "infiniband", "nvlink"]),
        ({"data": 4, "model": 2}, ["nvlink", "nvlink"]),  # on some of them: which, is not known
    ],
)
def test_links_of_gpus_that_are_there_go_by_their_nodes(monkeypatch, axes, links):
    there = [Gpu(n, n // 8) for n in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: there[::-1])
    mesh = resolve_mesh(axes)
    assert [mesh.slowest_link((a,)).name for a in axes] == links
    every = MeshConfig(axes=axes, links=dict.fromkeys(axes, "nvlink")).mesh()
    assert every.slowest_link(tuple(axes)).name == "nvlink"
    if mesh.size == 16:
        grid: Any = np.array(there).reshape([*axes.values()])
        assert resolve_mesh(Mesh(grid, tuple(axes))) == mesh
        shapes = MeshConfig(axes="auto", devices=16).meshes()
        assert all(shape.axis_names[0] == "pod" and shape.axis_sizes[0] == 2 for shape in shapes)


def test_an_abstract_mesh_has_no_devices():
    mesh = resolve_mesh(AbstractMesh((64, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2))
    assert mesh.shape == {"a": 64, "b": 2}
    assert mesh.devices is None


def test_a_logical_mesh_is_returned_as_it_is():
    mesh = resolve_mesh("h100-8")
    assert resolve_mesh(mesh) is mesh


def test_something_else_is_refused():
    with pytest.raises(MeshError, match="not int"):
        resolve_mesh(8)  # type: ignore[arg-type]


def test_mesh_config_of_every_form_of_mesh(write):
    path = write("axes: {a: 2, b: 2}\nmemory_budget: 1GB\npins:\n  '*.w': [[a, b], null]\n  x: [a]\n")
    config = mesh_config(path)
    assert config is not None
    assert config.memory_budget == 10**9
    assert config.specs() == {"*.w": PartitionSpec(("a", "b"), None), "x": PartitionSpec("a")}
    assert mesh_config(config) is config
    assert mesh_config({"a": 2}) == MeshConfig(axes={"a": 2})
    assert mesh_config(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))) is None
    assert mesh_config(None) is None


def test_links_reach_the_mesh(write):
    mesh = resolve_mesh(write("axes: {a: 2, b: 8, c: 2}\nhardware: h100\nlinks: {a: infiniband}\n"))
    assert mesh.axis_links == ("infiniband", "nvlink", "nvlink")
    assert mesh.slowest_link(("b", "c")).name == "nvlink"
    assert mesh.slowest_link(("a", "b")).name == "infiniband"
