"""Logical meshes and the hardware beneath them.

A `LogicalMesh` is what planning needs of a machine: named axes, their sizes, the link that each axis
runs over, and the chip's figures. It holds no device, so a plan can be made for a cluster that is
not here; `LogicalMesh.concrete` finds the devices when the step is to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.machine.target import Target, device_array, is_available


@dataclass(frozen=True)
class Link:
    """One kind of interconnect. Bandwidth in bytes/s per device and direction, latency in seconds."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """One chip. ``flops``: peak FLOP/s by dtype name; ``memory``: bytes; ``bandwidth``: bytes/s."""

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    links: Mapping[str, Link]
    overhead: float = 0.0
    """Seconds that one kernel costs however small it is."""
    operand_bits: int = 64
    """Most bits of an operand that a matrix product looks at."""
    tile: tuple[int, int] = (1, 1)
    """Rows and columns that arrays are stored by."""
    clock: float = 0.0
    """Cycles/s, in which its compiler estimates; 0 where none does."""
    on_chip: float = 0.0
    """Bytes on the chip in which its compiler keeps arrays; 0 where it keeps none there."""
    fused_products: bool = True
    """Whether its compiler computes what goes into a matrix product, and what follows it, with the product."""
    remat_threshold: float = math.inf
    """Bytes beyond which its compiler makes values again by its own lights rather than hold them."""
    attention: tuple[float, float] | None = None
    """Shares of the peak at which its library's attention runs, forward and backward (`autoshard.transforms.cudnn_attention`); None where it
    has none."""
    all_gather_as_all_reduce_from: float = math.inf
    """Devices from which on its compiler makes a gather over all of them a reduction."""

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s for a matrix product of ``dtype``; the slowest listed when it is not listed."""
        return self.flops.get(dtype) or min(self.flops.values())

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))


@dataclass(frozen=True)
class LogicalMesh:
    """Ordered named axes over a kind of chip, with or without devices behind them."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    hardware: Hardware
    axis_links: tuple[str, ...] = ()
    """The link that each axis runs over, by name in ``hardware.links``; empty means its first."""
    devices: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
    """Devices in row-major axis order, when the caller chose them."""
    target: Target | None = None
    """What to compile for, where that is not simply the devices of this process."""

    def __post_init__(self) -> None:
        if len(set(self.axis_names)) != len(self.axis_names):
            raise MeshError(f"mesh axis names repeat: {self.axis_names}")
        if len(self.axis_names) != len(self.axis_sizes):
            raise MeshError(f"mesh has axes {self.axis_names} but sizes {self.axis_sizes}")
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}; sizes are 1 or more")

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Axis sizes by name, in mesh order."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    @functools.cached_property
    def nontrivial_axes(self) -> tuple[str, ...]:
        """The axes of more than one device, in mesh order."""
        return tuple(a for a, n in self.shape.items() if n > 1)

    def axes_size(self, axes: tuple[str, ...]) -> int:
        """Product of the sizes of ``axes``."""
        shape = self.shape
        return math.prod([shape[a] for a in axes])

    def slowest_link(self, axes: tuple[str, ...]) -> Link:
        """The slowest link that a collective over ``axes`` has to cross."""
        links = self.hardware.links
        if not self.axis_links:
            return next(iter(links.values()))
        chosen = [links[self.axis_links[self.axis_names.index(a)]] for a in axes]
        return min(chosen, key=lambda l: l.bandwidth) if chosen else next(iter(links.values()))

    @property
    def platform(self) -> str:
        """Whose compiler makes programs for it, by JAX's name: that of its target, or else of the devices."""
        return self.target.platform if self.target is not None else (self.devices or jax.devices())[0].platform

    @property
    def is_available(self) -> bool:
        """Whether it is no target, or one whose devices this process sees."""
        return self.target is None or is_available(self.target)

    def require_available(self, what: str) -> None:
        """Raises `MeshError` where ``what`` cannot run, for lack of the target's devices."""
        if not self.is_available:
            raise MeshError(
                f"{what}: the devices of {self.target} are not here; a step for them can be planned, lowered and "
                "compiled on this machine, and runs on one that has them"
            )

    def abstract_mesh(self) -> AbstractMesh:
        """The same axes as a `jax.sharding.AbstractMesh` (Auto axes), of this machine's devices if there are enough.

        It is then the mesh that a `jax.shard_map` in the step names.
        """
        if self.is_available and len(self.devices or jax.devices()) >= self.size:
            return self.concrete().abstract_mesh
        return AbstractMesh(self.axis_sizes, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))

    def concrete(self) -> Mesh:
        """A `jax.sharding.Mesh` over this machine's devices, or over those that stand for the target.

        Raises:
          MeshError: this machine has fewer devices than the mesh, or cannot compile for its target.
        """
        types = (AxisType.Auto,) * len(self.axis_names)
        if self.target is not None:
            return Mesh(device_array(self.target, self.axis_sizes), self.axis_names, axis_types=types)
        devices = self.devices if self.devices is not None else tuple(jax.devices())
        if len(devices) < self.size:
            raise MeshError(
                f"the mesh {self} needs {self.size} devices and this machine has {len(devices)} "
                f"({devices[0].platform}); planning for it needs none, compiling a mesh config that names the chips "
                f"with `tpu:` or `gpu:`; or run on a mesh of at most {len(devices)} devices. On CPU, "
                f"JAX_NUM_CPU_DEVICES={self.size} makes virtual ones."
            )
        if self.devices is None and self.size == len(devices):
            return jax.make_mesh(self.axis_sizes, self.axis_names, axis_types=types)
        grid = np.asarray(devices[: self.size], dtype=object).reshape(self.axis_sizes)
        return Mesh(grid, self.axis_names, axis_types=types)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """``spec`` over this mesh's devices."""
        return NamedSharding(self.concrete(), spec)

    def __str__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in self.shape.items())
        return f"({axes}) of {self.target or self.hardware.name}"
