"""Meshes as people write them in YAML, and what planning makes of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Literal

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from pydantic import Field, StrictInt, ValidationInfo, field_validator

from autoshard.errors import ConfigError, MeshError, nearest
from autoshard.machine.gpu_cluster import GpuCluster
from autoshard.machine.hardware import hardware_of, load_hardware
from autoshard.machine.mesh import Hardware, LogicalMesh
from autoshard.machine.mesh_shapes import INNER_AXES, OUTER_AXIS, mesh_shapes
from autoshard.machine.target import Target
from autoshard.machine.tpu_slice import TpuSlice
from autoshard.strict_config import Bytes as Bytes
from autoshard.strict_config import Config as Config
from autoshard.strict_config import find_config
from autoshard.strict_config import load_yaml as load_yaml
from autoshard.strict_config import parse_bytes as parse_bytes

type MeshLike = Mesh | AbstractMesh | LogicalMesh | MeshConfig | Mapping[str, int] | str | os.PathLike[str] | None

type Pins = dict[str, tuple[str | tuple[str, ...] | None, ...]]


class MeshConfig(Config):
    """A mesh in words: its axes in order, what they run on, and what planning must respect."""

    axes: dict[str, StrictInt] | Literal["auto"]
    """Size of each axis, in order; one may be -1, and takes the devices that the others leave. ``auto``: planning
    chooses among the meshes that `autoshard.machine.mesh_shapes` sees in the devices."""
    devices: StrictInt | None = Field(default=None, ge=1)
    """How many devices the axes must make up; None means all that JAX shows."""
    tpu: str | None = None
    """A slice of TPUs to compile for, here or not: chip and sides, ``v5e:4x4``. It gives devices and hardware."""
    slices: StrictInt = Field(default=1, ge=1, validate_default=True)
    """How many such slices there are, one after the other along the first axis."""
    gpu: str | None = None
    """GPUs to compile for, here or not: ``a100``, ``b200``, ``h100`` or ``h200``. They give devices and hardware."""
    nodes: StrictInt = Field(default=1, ge=1)
    """How many nodes of such GPUs there are, one after the other along the first axis."""
    per_node: StrictInt = Field(default=8, ge=1, validate_default=True)
    """How many such GPUs a node has."""
    hardware: str | None = None
    """A name in `configs/hardware/` or a path; None means the chip that this process runs on."""
    links: dict[str, str] = Field(default_factory=dict)
    """The link that an axis runs over, by its name in the hardware table; the rest use the table's first."""
    memory_budget: Bytes | None = None
    """Bytes per device that a plan may use; None means the chip's memory."""
    pins: Pins = Field(default_factory=dict)
    """Argument-path glob to PartitionSpec entries: layouts that planning never overrules."""

    @field_validator("axes")
    @classmethod
    def _sizes(cls, axes: dict[str, int] | Literal["auto"]) -> dict[str, int] | Literal["auto"]:
        if axes == "auto":
            return axes
        if not axes:
            raise ValueError("a mesh has an axis or more; give their sizes, or 'auto'")
        for name, size in axes.items():
            if size < 1 and size != -1:
                raise ValueError(f"axis {name!r} has size {size}; a size is 1 or more, or -1 for what is left")
        free = [repr(name) for name, size in axes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"axes {', '.join(free)} are all -1; one size can be left open, give the others")
        return axes

    @field_validator("devices")
    @classmethod
    def _product(cls, devices: int | None, info: ValidationInfo) -> int | None:
        if devices is not None and isinstance(info.data.get("axes"), dict):
            fill_open_axis(info.data["axes"], devices)
        return devices

    @field_validator("tpu")
    @classmethod
    def _slice(cls, tpu: str | None) -> str | None:
        try:
            return None if tpu is None else TpuSlice(tpu).topology
        except MeshError as error:
            raise ValueError(str(error)) from None

    @field_validator("slices")
    @classmethod
    def _sliced(cls, slices: int, info: ValidationInfo) -> int:
        tpu = info.data.get("tpu")
        if tpu is None and slices > 1:
            raise ValueError("slices are of TPUs; say which with tpu:")
        if tpu is not None:
            _check_target(TpuSlice(tpu, slices), "slices", info)
        return slices

    @field_validator("per_node")
    @classmethod
    def _clustered(cls, per_node: int, info: ValidationInfo) -> int:
        gpu, nodes = info.data.get("gpu"), info.data.get("nodes", 1)
        if gpu is None and nodes > 1:
            raise ValueError("nodes are of GPUs; say which with gpu:")
        if gpu is not None:
            if info.data.get("tpu") is not None:
                raise ValueError("a mesh is of TPUs or of GPUs: give tpu: or gpu:")
            try:
                cluster = GpuCluster(gpu, nodes, per_node)
            except MeshError as error:
                raise ValueError(str(error)) from None
            _check_target(cluster, "nodes", info)
        return per_node

    @field_validator("hardware")
    @classmethod
    def _table(cls, hardware: str | None) -> str | None:
        if hardware is not None:
            try:
                load_hardware(hardware)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return hardware

    @field_validator("links")
    @classmethod
    def _linked(cls, links: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        _check_axes(links, info)
        if info.data.get("hardware"):
            _check_links(links.values(), load_hardware(info.data["hardware"]))
        return links

    @field_validator("pins")
    @classmethod
    def _pinned(cls, pins: Pins, info: ValidationInfo) -> Pins:
        for pattern, entries in pins.items():
            used = [a for entry in entries for a in ((entry,) if isinstance(entry, str) else entry or ())]
            _check_axes(used, info)
            if len(set(used)) < len(used):
                raise ValueError(f"the pin of {pattern!r} names a mesh axis twice: {entries}")
        return pins

    def specs(self) -> dict[str, PartitionSpec]:
        """The pins as `PartitionSpec`, by argument-path glob."""
        return {pattern: PartitionSpec(*entries) for pattern, entries in self.pins.items()}

    @property
    def min_devices(self) -> int:
        """The fewest devices that it can be had with, as far as it says."""
        given = {} if self.axes == "auto" else self.axes
        return self.devices or math.prod(size for size in given.values() if size != -1)

    def mesh(self) -> LogicalMesh:
        """The mesh that this describes. Its devices are looked for only when it is to run.

        Raises:
          ConfigError: planning is to choose the mesh; no hardware table fits this process, or the table lacks a link.
          MeshError: the axis of size -1 cannot take the devices that are left.
        """
        if self.axes == "auto":
            raise ConfigError("axes: auto is answered by planning a step; give the axes' sizes, or a plan")
        try:
            axes = fill_open_axis(self.axes, self._count(open_=-1 in self.axes.values()))
        except ValueError as error:
            raise MeshError(str(error)) from None
        return self._over(axes)

    def meshes(self) -> list[LogicalMesh]:
        """The meshes to choose among: the one described, or with ``axes: auto`` all that the devices can be seen as.

        Raises:
          As `mesh`.
        """
        if self.axes != "auto":
            return [self.mesh()]
        sides = self.target.chip_grid if self.target else None
        groups = self.target.num_groups if self.target else 1
        return [self._over(shape) for shape in mesh_shapes(self._count(open_=True) or 1, groups, sides)]

    @property
    def target(self) -> Target | None:
        """What to compile for, where the mesh names it."""
        if self.gpu:
            return GpuCluster(self.gpu, self.nodes, self.per_node)
        return TpuSlice(self.tpu, self.slices) if self.tpu else None

    def _count(self, *, open_: bool) -> int | None:
        """How many devices there are, as far as that is said or ``open_``, to be seen."""
        if self.target:
            return self.target.size
        return jax.device_count() if self.devices is None and open_ else self.devices

    def _over(self, axes: Mapping[str, int]) -> LogicalMesh:
        target = self.target
        table = self.hardware or (target.hardware if target else None)
        hardware = load_hardware(table) if table else hardware_of(jax.devices()[0].device_kind)
        chosen = {name: link for name, link in self.links.items() if name in axes}
        if target and target.num_groups > 1:  # the first axis crosses from one to the next
            chosen = {next(iter(axes)): target.cross_group_link, **chosen}
        try:
            _check_links(chosen.values(), hardware)
        except ValueError as error:
            raise ConfigError(f"links: {error}") from None
        first = next(iter(hardware.links))
        links = tuple(chosen.get(name, first) for name in axes) if chosen else ()
        return LogicalMesh(tuple(axes), tuple(axes.values()), hardware, links, target=target)


def fill_open_axis(axes: Mapping[str, int], devices: int | None) -> dict[str, int]:
    """``axes`` with a size of -1 replaced so that the product is ``devices``.

    Raises:
      ValueError: the product misses ``devices``; the message names both numbers.
    """
    fixed = math.prod(size for size in axes.values() if size != -1)
    if devices is None:
        return dict(axes)
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if -1 not in axes.values() and fixed != devices:
        raise ValueError(f"the axes {shown} make {fixed} devices, not {devices}; let one size be -1 to fill it in")
    if devices % fixed:
        raise ValueError(f"the axes {shown} take devices by the {fixed}, and {devices} is no multiple of {fixed}")
    return {name: devices // fixed if size == -1 else size for name, size in axes.items()}


def _check_target(target: Target, groups: str, info: ValidationInfo) -> None:
    axes, devices = info.data.get("axes"), info.data.get("devices")
    if devices is not None and devices != target.size:
        raise ValueError(f"{target} has {target.size} devices, not {devices}; leave `devices` out")
    if isinstance(axes, dict):
        first = next(iter(fill_open_axis(axes, target.size).values()))
        if first % target.num_groups:
            raise ValueError(f"{target.num_groups} {groups} do not divide the first axis, of size {first}")


def _check_axes(names: Iterable[str], info: ValidationInfo) -> None:
    axes: dict[str, int] | Literal["auto"] | None = info.data.get("axes")
    known = (OUTER_AXIS, *INNER_AXES) if axes == "auto" else axes
    for name in names:
        if known is not None and name not in known:  # None: the axes are wrong themselves, and say so
            raise ValueError(f"{name!r} is no axis of this mesh{nearest(name, known)}")


def _check_links(names: Iterable[str], hardware: Hardware) -> None:
    for name in names:
        if name not in hardware.links:
            raise ValueError(f"{hardware.name} has no link {name!r}{nearest(name, hardware.links)}")


def mesh_config(mesh: MeshLike) -> MeshConfig | None:
    """The config behind ``mesh``: a MeshConfig, axis sizes, a path, or a shipped name such as ``"cpu-8"``; else None.

    Raises:
      ConfigError: a file that is missing or wrong.
      MeshError: axis sizes that no mesh can have.
    """
    if isinstance(mesh, MeshConfig):
        return mesh
    if isinstance(mesh, Mapping):
        try:
            return MeshConfig(axes=dict(mesh))
        except ConfigError as error:
            raise MeshError(str(error)) from None
    return load_mesh_config(mesh) if isinstance(mesh, str | os.PathLike) else None


def load_mesh_config(name: str | os.PathLike[str]) -> MeshConfig:
    """The mesh config of a file, or a shipped one such as ``"cpu-8"``.

    Raises:
      ConfigError: a file that is missing or wrong.
    """
    return MeshConfig.load(find_config("mesh", name))


def resolve_mesh(mesh: MeshLike) -> LogicalMesh:
    """What a user gives as a mesh, as planning uses it; None is one axis ``data`` over all devices.

    A `jax.sharding.Mesh` keeps its devices; every other mesh finds them when it is to run.

    Raises:
      ConfigError: a file that is missing or wrong, or a chip without a hardware table.
      MeshError: axes, sizes and devices that do not agree.
    """
    if isinstance(mesh, LogicalMesh):
        return mesh
    config = mesh_config({"data": -1} if mesh is None else mesh)
    if config is not None:
        return config.mesh()
    if isinstance(mesh, Mesh):
        devices = tuple(mesh.devices.flat)
        return LogicalMesh(mesh.axis_names, mesh.axis_sizes, hardware_of(devices[0].device_kind), devices=devices)
    if isinstance(mesh, AbstractMesh):
        described = mesh.abstract_device
        kind = described.device_kind if described is not None else jax.devices()[0].device_kind
        return LogicalMesh(mesh.axis_names, mesh.axis_sizes, hardware_of(kind))
    raise MeshError(
        "a mesh is a Mesh, an AbstractMesh, axis sizes by name, a path, a MeshConfig or None, "
        f"not {type(mesh).__name__}"
    )
