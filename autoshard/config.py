"""Meshes and hardware as people write them in YAML, and what planning makes of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import jax
from etils import epath
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from pydantic import Field, StrictInt, ValidationInfo, field_validator

from autoshard.errors import ConfigError, MeshError, nearest
from autoshard.mesh import Hardware, Link, LogicalMesh
from autoshard.strict import Bytes as Bytes
from autoshard.strict import Config as Config
from autoshard.strict import load_yaml as load_yaml
from autoshard.strict import parse_bytes as parse_bytes
from autoshard.target import Target

type MeshLike = Mesh | AbstractMesh | LogicalMesh | MeshConfig | Mapping[str, int] | str | os.PathLike[str] | None

type Pins = dict[str, tuple[str | tuple[str, ...] | None, ...]]

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "int8"]

# --- hardware ----------------------------------------------------------------------------------------------------


class LinkConfig(Config):
    """One kind of interconnect: ``bandwidth`` in bytes/s per device and direction, ``latency`` in seconds."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class HardwareConfig(Config):
    """One chip, as `configs/hardware/NAME.yaml` describes it."""

    device_kinds: tuple[str, ...] = ()
    """What `jax.Device.device_kind` says on this chip; an exact match chooses the table."""
    flops: dict[Dtype, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Peak FLOP/s of a matrix product, by the dtype of its operands."""
    memory: Bytes
    bandwidth: float = Field(gt=0)
    """Bytes/s between the chip and its memory."""
    links: dict[str, LinkConfig] = Field(min_length=1)
    """The first is the one that an axis runs over unless the mesh says otherwise."""
    overhead: float = Field(default=0.0, ge=0)
    """Seconds that one kernel costs however small it is."""
    operand_bits: int = Field(default=64, ge=1)
    """Most bits of an operand that a matrix product looks at, at JAX's default precision."""
    tile: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1, 1)
    """Rows and columns of the tiles that arrays are stored by, where the chip has such."""
    clock: float = Field(default=0.0, ge=0)
    """Cycles/s in which the chip's compiler estimates; left out where it does not."""

    def hardware(self, name: str) -> Hardware:
        """The table as planning uses it."""
        links = {key: Link(key, link.bandwidth, link.latency) for key, link in self.links.items()}
        flops: dict[str, float] = {**self.flops}
        return Hardware(
            name, flops, self.memory, self.bandwidth, links, self.overhead, self.operand_bits, self.tile, self.clock
        )


def load_hardware(name: str) -> Hardware:
    """The hardware table ``name`` of those that ship with autoshard, or the one in the file ``name``.

    Raises:
      ConfigError: no such table or file, or an entry in it that is impossible.
    """
    path = _find("hardware", name)
    return HardwareConfig.load(path).hardware(path.stem)


def hardware_of(device_kind: str) -> Hardware:
    """The shipped table for what `jax.Device.device_kind` says.

    Raises:
      ConfigError: no table lists this kind of device.
    """
    tables = {path.stem: HardwareConfig.load(path) for path in _shipped("hardware")}
    for name, table in tables.items():
        if device_kind in table.device_kinds:
            return table.hardware(name)
    raise ConfigError(
        f"no hardware table lists the device kind {device_kind!r}; set `hardware:` in the mesh config to one of "
        f"{', '.join(tables)}, or to the path of a table of your own written like those"
    )


def _shipped(folder: str) -> list[epath.Path]:
    return sorted((epath.resource_path("autoshard") / "configs" / folder).glob("*.yaml"))


def _find(folder: str, name: str | os.PathLike[str]) -> epath.Path:
    """``name`` itself when it is a path; a bare name is one of the files that ship with autoshard."""
    path = epath.Path(name)
    if path.suffix or len(path.parts) > 1:
        return path
    shipped = {file.stem: file for file in _shipped(folder)}
    if str(path) not in shipped:
        raise ConfigError(f"no {folder} config is named {str(path)!r}{nearest(str(path), shipped)}")
    return shipped[str(path)]


# --- meshes ------------------------------------------------------------------------------------------------------


class MeshConfig(Config):
    """A mesh in words: its axes in order, what they run on, and what planning must respect."""

    axes: dict[str, StrictInt] = Field(min_length=1)
    """Size of each axis, in order; one may be -1, and takes the devices that the others leave."""
    devices: StrictInt | None = Field(default=None, ge=1)
    """How many devices the axes must make up; None means all that JAX shows."""
    tpu: str | None = None
    """A slice of TPUs to compile for, here or not: chip and sides, ``v5e:4x4``. It gives devices and hardware."""
    slices: StrictInt = Field(default=1, ge=1, validate_default=True)
    """How many such slices there are, one after the other along the first axis."""
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
    def _sizes(cls, axes: dict[str, int]) -> dict[str, int]:
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
        if devices is not None and "axes" in info.data:
            fill(info.data["axes"], devices)
        return devices

    @field_validator("tpu")
    @classmethod
    def _slice(cls, tpu: str | None) -> str | None:
        try:
            return None if tpu is None else Target(tpu).topology
        except MeshError as error:
            raise ValueError(str(error)) from None

    @field_validator("slices")
    @classmethod
    def _sliced(cls, slices: int, info: ValidationInfo) -> int:
        tpu, axes, devices = (info.data.get(key) for key in ("tpu", "axes", "devices"))
        if tpu is None:
            if slices > 1:
                raise ValueError("slices are of TPUs; say which with tpu:")
            return slices
        size = Target(tpu, slices).size
        if devices is not None and devices != size:
            raise ValueError(f"{Target(tpu, slices)} has {size} devices, not {devices}; leave `devices` out")
        if axes is not None:
            first = next(iter(fill(axes, size).values()))
            if first % slices:
                raise ValueError(f"{slices} slices do not divide the first axis, of size {first}")
        return slices

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

    def mesh(self) -> LogicalMesh:
        """The mesh that this describes. Its devices are looked for only when it is to run.

        Raises:
          ConfigError: no hardware table fits this process, or the table lacks a link.
          MeshError: the axis of size -1 cannot take the devices that are left.
        """
        target = Target(self.tpu, self.slices) if self.tpu else None
        table = self.hardware or (target.chip.hardware if target else None)
        hardware = load_hardware(table) if table else hardware_of(jax.devices()[0].device_kind)
        if self.slices > 1:  # the first axis crosses from one to the next
            chosen = {next(iter(self.axes)): "dcn", **self.links}
        else:
            chosen = self.links
        try:
            _check_links(chosen.values(), hardware)
        except ValueError as error:
            raise ConfigError(f"links: {error}") from None
        count = target.size if target else self.devices
        if count is None and -1 in self.axes.values():
            count = jax.device_count()
        try:
            axes = fill(self.axes, count)
        except ValueError as error:
            raise MeshError(str(error)) from None
        first = next(iter(hardware.links))
        links = tuple(chosen.get(name, first) for name in axes) if chosen else ()
        return LogicalMesh(tuple(axes), tuple(axes.values()), hardware, links, target=target)


def fill(axes: Mapping[str, int], devices: int | None) -> dict[str, int]:
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


def _check_axes(names: Iterable[str], info: ValidationInfo) -> None:
    axes: dict[str, int] | None = info.data.get("axes")
    for name in names:
        if axes is not None and name not in axes:  # None: the axes are wrong themselves, and say so
            raise ValueError(f"{name!r} is no axis of this mesh{nearest(name, axes)}")


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
    if isinstance(mesh, str | os.PathLike):
        return MeshConfig.load(_find("mesh", mesh))
    return None


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
