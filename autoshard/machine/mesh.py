"""Logical device meshes and the hardware they are made of.

A `LogicalMesh` is what planning needs to know of a machine: named axes with sizes, the interconnect of each axis, and
the chip's rates and memory. It needs no devices, so a plan can be made for a cluster that this process is not on;
`LogicalMesh.concrete` finds the devices when the step is compiled or run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError, nearest
from autoshard.machine.target import Target, device_array, is_available
from autoshard.machine.torus import Span


@dataclass(frozen=True)
class Link:
    """One kind of interconnect. Bandwidth in bytes/s per device and direction, latency in seconds."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class AttentionRates:
    """A library's kernel for attention, and the fractions of peak FLOP/s that it reaches."""

    kernel: str
    """A name in `autoshard.transforms.attention_kernels.KERNELS`."""
    forward: float
    backward: float


@dataclass(frozen=True)
class Hardware:
    """One chip and how XLA compiles for it."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s of a matrix product, by operand dtype."""
    memory: float
    """Bytes of device memory that a program may use."""
    bandwidth: float
    """Bytes/s of device memory."""
    links: Mapping[str, Link]
    """Interconnects by name; the first is the default of a mesh axis."""
    overhead: float = 0.0
    """Seconds that any kernel takes, however small."""
    operand_bits: int = 64
    """Bits of an operand that a matrix product uses, at most, at JAX's default precision."""
    tile: tuple[int, int] = (1, 1)
    """Tile of the two minor dimensions that arrays are padded to in memory."""
    clock: float = 0.0
    """Cycles/s, to convert the estimated cycles that XLA reports into seconds; 0 where it reports none."""
    on_chip: float = 0.0
    """Bytes of on-chip memory in which XLA places arrays; 0 where it places none there."""
    on_chip_bandwidth: float = 0.0
    """Bytes/s at which fusions pass over arrays there; 0 where arrays are not known to stay there."""
    fused_products: bool = True
    """Whether XLA fuses producers and consumers into a matrix product; otherwise its operands and results are arrays
    in memory."""
    remat_threshold: float = math.inf
    """Bytes above which XLA starts its own rematerialization."""
    attention: AttentionRates | None = None
    """The library's kernel for attention; None without one."""
    host_bandwidth: float = 0.0
    """Bytes/s between the memories of the host and of the device, in each direction; 0 where they are one, and XLA
    leaves a value that the program moves between them where it is."""
    all_gather_as_all_reduce_from: float = math.inf
    """Number of devices from which XLA implements an all-gather over all of them as an all-reduce of zero-padded
    shards."""
    combined_all_reduces: bool = False
    """Whether XLA combines all-reduces that do not depend on each other into one, which has one latency."""

    product_efficiency: float = 1.0
    """Share of the peak FLOP/s that XLA's matrix products reach."""
    convolution_efficiency: float = 1.0
    """The same of convolutions, of the FLOPs on whole tiles."""
    memory_efficiency: float = 1.0
    """Share of ``bandwidth`` that XLA's fusions reach."""
    sparse_core_collectives: bool = False
    """Whether XLA runs collectives on the chip's SparseCores, beside what the TensorCore computes, if asked to."""
    blocking_reduce_scatters: bool = False
    """Whether XLA computes nothing while a reduce-scatter runs, so that those of products run as rings beside them, and
    those of kernels beside other kernels."""
    blocking_gathers: bool = False
    """Whether XLA gathers beside nothing but its own products: what one has just made, and weights of kernels, are
    waited for, so that those gathers run as rings."""
    scoped_vmem: int = 0
    """Bytes of on-chip memory that XLA is asked to let one fusion use; 0: as many as it does by itself."""
    hidden_collectives: float = 0.0
    """Share of the seconds of collectives that run beside compute, as far as that lasts, in steps as XLA schedules them
    that have no pipeline."""
    grouped_products: bool = True
    """Whether XLA has a kernel for products of ragged groups; else it multiplies all rows with all groups."""
    async_all_to_all_up_to: float = math.inf
    """The greatest number of devices on which XLA compiles a program whose all-to-alls are to run beside compute."""
    host_memory: float = math.inf
    """Bytes of the host's memory for each chip; where a table does not say, the chip's own memory stands for it."""
    hidden_host_copies: bool = False
    """Whether XLA copies values of a loop to the host's memory and back beside the loop's products, early enough."""
    matrix_unit: int = 0
    """Columns of the matrix unit; 0 where no product is laid out for it."""
    attention_layouts: bool = False
    """Whether rotary positions are computed on whole rows, and attention's kernels read each of repeated heads once."""

    @property
    def hides_beyond_products(self) -> bool:
        """Whether XLA runs more collectives beside compute than what products send, as its compiler for TPUs does."""
        return self.clock > 0

    @property
    def memory_rate(self) -> float:
        """Bytes/s of device memory that XLA's fusions reach."""
        return self.bandwidth * self.memory_efficiency

    def product_rate(self, dtype: str, *, convolution: bool = False) -> float:
        """FLOP/s that XLA's matrix products of ``dtype``, or its convolutions, reach."""
        share = self.convolution_efficiency if convolution else self.product_efficiency
        return self.peak_flops(dtype) * share

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of a matrix product of ``dtype``; that of the slowest listed dtype where ``dtype`` is not."""
        return self.flops.get(dtype) or min(self.flops.values())

    def __eq__(self, other: object) -> bool:
        """Whether all figures are equal, and the links in one order: chips of one mesh are keys of caches."""
        if not isinstance(other, Hardware):
            return NotImplemented
        equal = all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))
        return equal and [*self.links] == [*other.links]

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))


@dataclass(frozen=True)
class LogicalMesh:
    """Ordered named axes over equal chips, with or without devices."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    hardware: Hardware
    axis_links: tuple[str, ...] = ()
    """The interconnect of each axis, a name in ``hardware.links``; empty: the first of these for every axis."""
    devices: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
    """Devices in row-major order, where the caller gave a `jax.sharding.Mesh`."""
    target: Target | None = None
    """The machine to compile for, where it is not simply the devices of this process."""
    torus: tuple[tuple[Span, ...], ...] = ()
    """Where each axis runs in a slice of TPUs, so that its links are counted. Empty, of all or of one axis: it is not
    known, or the axis is of several slices; then it is a ring of one link."""

    def __post_init__(self) -> None:
        if len(set(self.axis_names)) != len(self.axis_names):
            raise MeshError(f"mesh axis names repeat: {self.axis_names}")
        if len(self.axis_names) != len(self.axis_sizes):
            raise MeshError(f"mesh has axes {self.axis_names} but sizes {self.axis_sizes}")
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            if size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size}; sizes must be 1 or more")
        if self.axis_links and len(self.axis_links) != len(self.axis_names):
            raise MeshError(f"mesh has axes {self.axis_names} but links {self.axis_links}")
        if self.torus and len(self.torus) != len(self.axis_names):
            raise MeshError(f"mesh has axes {self.axis_names} but {len(self.torus)} of them run along a torus")
        for name, size, along in zip(self.axis_names, self.axis_sizes, self.torus, strict=False):
            if any(s.devices < 2 or s.stride < 1 or s.dim not in range(3) for s in along):
                raise MeshError(f"mesh axis {name!r} runs along {along}: no dimensions of a torus")
            if along and math.prod(s.devices for s in along) != size:
                raise MeshError(f"mesh axis {name!r} has size {size}, and runs along {along}, of another size")
        for link in self.axis_links:
            if link not in self.hardware.links:
                raise MeshError(f"{self.hardware.name} has no link {link!r}{nearest(link, self.hardware.links)}")

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

    def along(self, axis: str) -> tuple[Span, ...]:
        """Where an axis runs in a slice of TPUs; empty where that is not known."""
        return self.torus[self.axis_names.index(axis)] if self.torus else ()

    def slowest_link(self, axes: tuple[str, ...]) -> Link:
        """The slowest of the interconnects that a collective over ``axes`` uses."""
        links = self.hardware.links
        if not self.axis_links:
            return next(iter(links.values()))
        chosen = [links[self.axis_links[self.axis_names.index(a)]] for a in axes]
        return min(chosen, key=lambda l: l.bandwidth) if chosen else next(iter(links.values()))

    @functools.cached_property
    def slow_axes(self) -> tuple[str, ...]:
        """Where interconnects differ, the axes of more than one device that run over the slowest; else none."""
        axes = self.nontrivial_axes
        slow = tuple(a for a in axes if self.slowest_link((a,)) == self.slowest_link(axes))
        return slow if len(slow) < len(axes) else ()

    @property
    def platform(self) -> str:
        """JAX platform that programs are compiled for: the target's, or else the devices'."""
        return self.target.platform if self.target is not None else (self.devices or jax.devices())[0].platform

    @property
    def is_available(self) -> bool:
        """Whether this process has the devices; always without a target."""
        return self.target is None or is_available(self.target)

    def require_available(self, what: str) -> None:
        """Raises `MeshError`, naming ``what`` was to run, where this process lacks the target's devices."""
        if not self.is_available:
            raise MeshError(
                f"{what}: this process does not have the devices of {self.target}; here a step for them can be "
                "planned, lowered and compiled, but not run"
            )

    def require_same_size_around(self, what: str) -> None:
        """Raises `MeshError`, naming ``what`` was to run, where JAX's mesh here has another number of devices."""
        around = jax.sharding.get_abstract_mesh()
        if not around.empty and around.size != self.size:
            raise MeshError(
                f"{what} is over the mesh {self} of size {self.size}, and it is called where JAX's mesh is "
                f"{dict(around.shape)} of size {around.size}: inside a step over that, or under jax.set_mesh; give it "
                "the same mesh, or call it outside"
            )

    def abstract_mesh(self) -> AbstractMesh:
        """As a `jax.sharding.AbstractMesh` with Auto axes.

        Where there are enough devices it is that of `concrete`, so that a `jax.shard_map` in the step may name it.
        """
        if self.is_available and len(self.devices or jax.devices()) >= self.size:
            return self.concrete().abstract_mesh
        return AbstractMesh(self.axis_sizes, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))

    def concrete(self) -> Mesh:
        """As a `jax.sharding.Mesh` over this process's devices, or over compile-only devices of the target.

        Raises:
          MeshError: there are fewer devices than the mesh needs, or no compiler for the target.
        """
        types = (AxisType.Auto,) * len(self.axis_names)
        if self.target is not None:
            return Mesh(device_array(self.target, self.axis_sizes), self.axis_names, axis_types=types)
        devices = self.devices if self.devices is not None else tuple(jax.devices())
        if len(devices) < self.size:
            raise MeshError(
                f"the mesh {self} needs {self.size} devices and this process has {len(devices)} "
                f"({devices[0].platform}). Planning needs no devices; compiling without them needs a mesh config with "
                f"`tpu:` or `gpu:`; running needs a mesh of at most {len(devices)} devices, or on CPU "
                f"JAX_NUM_CPU_DEVICES={self.size} for virtual ones."
            )
        if self.devices is None and self.size == len(devices):
            return jax.make_mesh(self.axis_sizes, self.axis_names, axis_types=types)
        grid = np.asarray(devices[: self.size], dtype=object).reshape(self.axis_sizes)
        return Mesh(grid, self.axis_names, axis_types=types)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """``spec`` as a `NamedSharding` over this mesh's devices."""
        return NamedSharding(self.concrete(), spec)

    def __str__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in self.shape.items())
        return f"({axes}) of {self.target or self.hardware.name}"
