"""Mesh configs: a mesh, its target, memory budget and pins as YAML; and any form of mesh as a `LogicalMesh`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from pydantic import Field, StrictInt, ValidationInfo, field_validator

from autoshard.errors import ConfigError, MeshError, nearest
from autoshard.machine.gpu_cluster import GpuCluster
from autoshard.machine.hardware import hardware_of, load_hardware
from autoshard.machine.mesh import Hardware, LogicalMesh
from autoshard.machine.mesh_shapes import INNER_AXES, OUTER_AXIS, mesh_shapes
from autoshard.machine.target import Target, crosses, crossing_axes, require_fit
from autoshard.machine.torus import Span, device_spans, spans
from autoshard.machine.tpu_slice import TpuSlice, group_of, slice_of
from autoshard.strict_config import Bytes, Config, find_config

type MeshLike = Mesh | AbstractMesh | LogicalMesh | MeshConfig | Mapping[str, int] | str | os.PathLike[str] | None

AUTO: Final = "auto"
"""In place of axes, or of one: left to planning."""
MAX_DEVICES = 2**20
"""Of a mesh, and so of each of its axes."""

type Count = Annotated[StrictInt, Field(ge=1, le=MAX_DEVICES)]
type Pins = dict[str, tuple[str | tuple[str, ...] | None, ...]]


class MeshConfig(Config):
    """A mesh as YAML or keyword arguments: its axes, what machine they are on, and limits that a plan must respect.

    Raises:
      ConfigError: an unknown key, or values that make no mesh; names each.

    Example:
      >>> config = autoshard.MeshConfig(axes={"data": -1, "model": 2}, devices=8, hardware="tpu-v5e")
      >>> print(config.mesh())
      (data=4, model=2) of tpu-v5e
      >>> config.min_devices, len(config.meshes())
      (8, 1)
      >>> tpu = autoshard.MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4")
      >>> print(tpu.target, tpu.stage_axes(tpu.mesh()))
      TPU v5e:4x4 (None,)
      >>> autoshard.MeshConfig(axes={"data": 8}, pins={"params*": [None, "data"]}).specs()
      {'params*': P(None, 'data')}
    """

    axes: dict[str, StrictInt] | Literal["auto"]
    """Size of each axis, in order; one may be -1, which takes the remaining devices. ``auto``: planning chooses among
    the shapes of `autoshard.machine.mesh_shapes`."""
    devices: Count | None = None
    """Number of devices, the product of the axes; None: all of `jax.devices`."""
    tpu: str | None = None
    """TPU slice to compile for, present or not: chip and chip grid, ``v5e:4x4``. It implies devices and hardware."""
    slices: Count = Field(default=1, validate_default=True)
    """Number of such slices, consecutive along the first axis."""
    gpu: str | None = None
    """GPU to compile for, present or not: ``a100``, ``b200``, ``h100`` or ``h200``. It implies devices and hardware."""
    nodes: Count = 1
    """Number of nodes of such GPUs, consecutive along the first axis, or along as many of the first as it takes."""
    per_node: Count = Field(default=8, validate_default=True)
    """GPUs per node."""
    hardware: str | None = None
    """Hardware table: a name in `configs/hardware/` or a path; None: the one for this process's chip."""
    links: dict[str, str] = Field(default_factory=dict)
    """Interconnect by axis, a name in the hardware table; other axes use the table's first, or between slices or nodes
    the one that joins these."""
    pipeline: str | None = None
    """The axis whose devices are the stages of a pipeline, on which the chain of layers of a step runs in
    micro-batches; ``auto``: planning takes the one with which the step is fastest, or none; None: none."""
    memory_budget: Bytes | None = None
    """Bytes per device that a plan may use; None: the chip's memory."""
    pins: Pins = Field(default_factory=dict)
    """PartitionSpec entries by argument-path glob: shardings that planning never overrules."""

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in type(self).model_fields if name in self.model_fields_set
        )
        return f"MeshConfig({given})"

    @field_validator("axes")
    @classmethod
    def _sizes(cls, axes: dict[str, int] | Literal["auto"]) -> dict[str, int] | Literal["auto"]:
        if axes == "auto":
            return axes
        if not axes:
            raise ValueError("a mesh needs at least one axis; give axis sizes, or 'auto'")
        for name, size in axes.items():
            if size < 1 and size != -1:
                raise ValueError(f"axis {name!r} has size {size}; sizes are 1 or more, or -1 for the remaining devices")
            if size > MAX_DEVICES:
                raise ValueError(f"axis {name!r} has size {size}; a mesh has {MAX_DEVICES:,} devices at most")
        free = [repr(name) for name, size in axes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"axes {', '.join(free)} are all -1; only one size may be, give the others")
        if math.prod(size for size in axes.values() if size != -1) > MAX_DEVICES:
            raise ValueError(f"the product of the axes is too large; a mesh has {MAX_DEVICES:,} devices at most")
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
            raise ValueError(f"{slices} slices need tpu:, the chip and chip grid of each, such as 'v5e:4x4'")
        if tpu is not None:
            _check_target(TpuSlice(tpu, slices), "slices", info)
        return slices

    @field_validator("per_node")
    @classmethod
    def _clustered(cls, per_node: int, info: ValidationInfo) -> int:
        gpu, nodes = info.data.get("gpu"), info.data.get("nodes", 1)
        if gpu is None and nodes > 1:
            raise ValueError(f"{nodes} nodes need gpu:, the chip, such as 'h100'")
        if gpu is not None:
            if info.data.get("tpu") is not None:
                raise ValueError("tpu: and gpu: exclude each other: give one of them")
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

    @field_validator("pipeline")
    @classmethod
    def _staged(cls, pipeline: str | None, info: ValidationInfo) -> str | None:
        if pipeline not in (None, AUTO) and info.data.get("axes") == AUTO:
            raise ValueError(f"pipeline: {pipeline!r} needs axes with sizes, not axes: auto")
        if pipeline not in (None, AUTO):
            _check_axes([pipeline], info)
        return pipeline

    @field_validator("pins")
    @classmethod
    def _pinned(cls, pins: Pins, info: ValidationInfo) -> Pins:
        for pattern, entries in pins.items():
            used = [a for entry in entries for a in ((entry,) if isinstance(entry, str) else entry or ())]
            _check_axes(used, info)
            if len(set(used)) < len(used):
                raise ValueError(f"the pin of {pattern!r} uses a mesh axis twice: {entries}")
        return pins

    def specs(self) -> dict[str, PartitionSpec]:
        """The pins as `PartitionSpec`s, by argument-path glob."""
        return {pattern: PartitionSpec(*entries) for pattern, entries in self.pins.items()}

    @property
    def min_devices(self) -> int:
        """Fewest devices that fit the config: ``devices``, or else the product of the axes whose size is given."""
        given = {} if self.axes == "auto" else self.axes
        return self.devices or math.prod(size for size in given.values() if size != -1)

    def mesh(self) -> LogicalMesh:
        """The mesh that this describes; devices are looked for only when it is to run.

        Raises:
          ConfigError: ``axes`` is ``auto``; no hardware table for this process's chip; or the table lacks a link.
          MeshError: the sizes of the axes do not fit the number of devices.
        """
        if self.axes == "auto":
            raise ConfigError("axes: auto is resolved by planning a step; give axis sizes, or a plan")
        try:
            axes = fill_open_axis(self.axes, self._num_devices(ask_jax=-1 in self.axes.values()))
        except ValueError as error:
            raise MeshError(str(error)) from None
        return self._over(axes)

    def meshes(self) -> list[LogicalMesh]:
        """The meshes to choose among: the one described, or with ``axes: auto`` every shape of the devices.

        Raises:
          As `mesh`.
        """
        if self.axes != "auto":
            return [self.mesh()]
        devices = self._num_devices(ask_jax=True) or 1
        here = self._devices_here(devices)
        machine = slice_of(here) if here else self.target
        groups = len({*map(group_of, here)}) if here else machine.num_groups if machine else 1
        return [self._over(shape) for shape in mesh_shapes(devices, groups, machine.chip_grid if machine else None)]

    def stage_axes(self, mesh: LogicalMesh) -> tuple[str | None, ...]:
        """The axes of ``mesh`` that may be the stages of a pipeline; None: without one."""
        return (None, *mesh.nontrivial_axes) if self.pipeline == AUTO else (self.pipeline,)

    @property
    def target(self) -> Target | None:
        """The machine to compile for, where ``tpu`` or ``gpu`` names one."""
        if self.gpu:
            return GpuCluster(self.gpu, self.nodes, self.per_node)
        return TpuSlice(self.tpu, self.slices) if self.tpu else None

    def _num_devices(self, *, ask_jax: bool) -> int | None:
        """Number of devices of the config; where it has none, JAX's if ``ask_jax``, else None."""
        if self.target:
            return self.target.size
        return jax.device_count() if self.devices is None and ask_jax else self.devices

    def _devices_here(self, number: int) -> list[Any]:
        """JAX's devices, where the config names neither target nor hardware table, and there are so many; else none."""
        here = [] if self.target or self.hardware else sorted(jax.devices(), key=lambda d: d.id)
        return here if len(here) == number else []

    def _over(self, axes: Mapping[str, int]) -> LogicalMesh:
        sizes = [*axes.values()]
        here = self._devices_here(math.prod(sizes))
        machine = slice_of(here) if here else self.target
        # JAX itself places a mesh on one slice, and on GPUs.
        target = machine if machine is not None and machine.num_groups > 1 else self.target
        table = self.hardware or (target.hardware if target else None)
        hardware = load_hardware(table) if table else hardware_of(jax.devices()[0].device_kind)
        chosen = {name: link for name, link in self.links.items() if name in axes}
        if target and target.num_groups > 1:
            require_fit(target, sizes)
            crossing = [*axes][: crossing_axes(target, sizes)]
            chosen = {**dict.fromkeys(crossing, target.cross_group_link), **chosen}
        elif here:
            chosen = {**dict(zip(axes, _links_of(np.array(here).reshape(sizes), hardware), strict=False)), **chosen}
        try:
            _check_links(chosen.values(), hardware)
        except ValueError as error:
            raise ConfigError(f"links: {error}") from None
        first = next(iter(hardware.links))
        links = tuple(chosen.get(name, first) for name in axes) if chosen else ()
        torus: tuple[tuple[Span, ...], ...] = ()
        if isinstance(machine, TpuSlice) and machine.size == math.prod(sizes):
            each = zip(axes, spans(machine, sizes), strict=True)
            torus = tuple(() if name in chosen else along for name, along in each)
        return LogicalMesh(tuple(axes), tuple(axes.values()), hardware, links, target=target, torus=torus)


def fill_open_axis(axes: Mapping[str, int], devices: int | None) -> dict[str, int]:
    """``axes`` with a size of -1 replaced so that the product is ``devices``; unchanged where that is None.

    Raises:
      ValueError: the product cannot be ``devices``; the message names both numbers.
    """
    fixed = math.prod(size for size in axes.values() if size != -1)
    if devices is None:
        return dict(axes)
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if -1 not in axes.values() and fixed != devices:
        raise ValueError(f"the axes {shown} need {fixed} devices, not {devices}; one size may be -1 to take the rest")
    if devices % fixed:
        raise ValueError(f"the axes {shown} do not fit {devices} devices: {devices} is no multiple of {fixed}")
    return {name: devices // fixed if size == -1 else size for name, size in axes.items()}


def _check_target(target: Target, groups: str, info: ValidationInfo) -> None:
    axes, devices = info.data.get("axes"), info.data.get("devices")
    if devices is not None and devices != target.size:
        raise ValueError(f"{target} has {target.size} devices, not {devices}; leave `devices` out")
    if isinstance(axes, dict):
        first, *others = fill_open_axis(axes, target.size).values()
        if not crossing_axes(target, (first, *others)):
            raise ValueError(f"{target.num_groups} {groups} do not divide the first axis, of size {first}")


def _check_axes(names: Iterable[str], info: ValidationInfo) -> None:
    axes: dict[str, int] | Literal["auto"] | None = info.data.get("axes")
    known = (OUTER_AXIS, *INNER_AXES) if axes == "auto" else axes
    for name in names:
        if known is not None and name not in known:  # None: `axes` itself is invalid and reported
            raise ValueError(f"{name!r} is no axis of this mesh{nearest(name, known)}")


def _check_links(names: Iterable[str], hardware: Hardware) -> None:
    for name in names:
        if name not in hardware.links:
            raise ValueError(f"{hardware.name} has no link {name!r}{nearest(name, hardware.links)}")


def _links_of(devices: np.ndarray, hardware: Hardware) -> tuple[str, ...]:
    """Of each axis of an array of devices the interconnect: across slices or nodes the slowest of the hardware table,
    within them its first; empty where no axis is across."""
    inside, across = next(iter(hardware.links)), min(hardware.links.values(), key=lambda link: link.bandwidth).name
    crossing = crosses(devices)
    return tuple(across if crossed else inside for crossed in crossing) if any(crossing) else ()


def mesh_config(mesh: MeshLike) -> MeshConfig | None:
    """``mesh`` as a `MeshConfig` where it is one, axis sizes, a path, or a shipped name such as ``"cpu-8"``; else None.

    Raises:
      ConfigError: a missing or invalid file.
      MeshError: impossible axis sizes.
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
    """The mesh config in the file ``name``, or that ships as ``name``, such as ``"cpu-8"``.

    Raises:
      ConfigError: a missing or invalid file.
    """
    return MeshConfig.load(find_config("mesh", name))


def resolve_mesh(mesh: MeshLike) -> LogicalMesh:
    """The `LogicalMesh` of whatever a user may pass as ``mesh=``; None is one axis ``data`` over all devices.

    A `jax.sharding.Mesh` keeps its devices; for any other they are looked for when it is to run.

    Raises:
      ConfigError: a missing or invalid file, or a chip without a hardware table.
      MeshError: axes, sizes and devices that do not fit each other.
    """
    if isinstance(mesh, LogicalMesh):
        return mesh
    config = mesh_config({"data": -1} if mesh is None else mesh)
    if config is not None:
        return config.mesh()
    if isinstance(mesh, Mesh):
        devices, torus = tuple(mesh.devices.flat), device_spans(mesh.devices, crosses(mesh.devices))
        hardware, torus = hardware_of(devices[0].device_kind), torus if any(torus) else ()
        links = _links_of(mesh.devices, hardware)
        return LogicalMesh(mesh.axis_names, mesh.axis_sizes, hardware, links, torus=torus, devices=devices)
    if isinstance(mesh, AbstractMesh):
        described = mesh.abstract_device
        kind = described.device_kind if described is not None else jax.devices()[0].device_kind
        return LogicalMesh(mesh.axis_names, mesh.axis_sizes, hardware_of(kind))
    raise MeshError(
        "mesh= takes a Mesh, an AbstractMesh, a mapping from axis names to sizes, a path, a MeshConfig or None, "
        f"not {type(mesh).__name__}"
    )
