"""Hardware tables: one YAML file per chip in `configs/hardware/`, read into `Hardware` records."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

from pydantic import Field

from autoshard.errors import CompileError, ConfigError
from autoshard.machine.mesh import AttentionRates, Hardware, Link, LogicalMesh
from autoshard.strict_config import Bytes, Config, find_config, parse_yaml, read_text, shipped_configs

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "int8"]


class LinkConfig(Config):
    """One kind of interconnect."""

    bandwidth: float = Field(gt=0)
    """Bytes/s per device and direction."""
    latency: float = Field(ge=0)
    """Seconds until the first byte arrives."""


class AttentionKernelConfig(Config):
    """The library's kernel for attention, which never writes the scores to memory, and its measured efficiency."""

    kernel: Literal["cudnn", "splash", "splash_interpreted"]
    """Which kernel: cuDNN's for NVIDIA GPUs, splash attention for TPUs; interpreted, for tests."""
    forward: float = Field(gt=0, le=1)
    """Fraction of peak FLOP/s, not counting the work that a mask saves."""
    backward: float = Field(gt=0, le=1)
    """The same for the gradient: five matrix products, as it recomputes the scores."""


class HardwareConfig(Config):
    """One chip, and how XLA compiles for it: a file in `configs/hardware/`."""

    device_kinds: tuple[str, ...] = ()
    """Values of `jax.Device.device_kind` on this chip; an exact match selects the table."""
    flops: dict[Dtype, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Peak FLOP/s of a matrix product, by the dtype of its operands."""
    memory: Bytes
    """Bytes of device memory that a program may use."""
    bandwidth: float = Field(gt=0)
    """Bytes/s of device memory."""
    links: dict[str, LinkConfig] = Field(min_length=1)
    """Interconnects by name; the first is the default of a mesh axis."""
    overhead: float = Field(default=0.0, ge=0)
    """Seconds that any kernel takes, however small."""
    operand_bits: int = Field(default=64, ge=1)
    """Bits of an operand that a matrix product uses, at most, at JAX's default precision."""
    tile: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1, 1)
    """Tile of the two minor dimensions that arrays are padded to in memory."""
    on_chip: Bytes | None = None
    """Bytes of on-chip memory in which XLA places arrays; left out where it plans none."""
    on_chip_bandwidth: float = Field(default=0.0, ge=0)
    """Bytes/s at which fusions pass over arrays in on-chip memory; left out where they are not known to stay there."""
    clock: float = Field(default=0.0, ge=0)
    """Cycles/s, which make seconds of the cycles that XLA estimates; left out where it estimates none."""
    fused_products: bool = True
    """Whether XLA fuses producers and consumers into a matrix product."""
    remat_threshold: Bytes | None = None
    """Bytes above which XLA starts its own rematerialization; left out where it does not."""
    attention: AttentionKernelConfig | None = None
    """The library's kernel for attention; left out where there is none."""
    host_bandwidth: float = Field(default=0.0, ge=0)
    """Bytes/s between the memories of host and device, in each direction; left out where they are one."""
    all_gather_as_all_reduce_from: int | None = Field(default=None, ge=2)
    """Number of devices from which XLA implements an all-gather over all of them as an all-reduce of zero-padded
    shards; left out where it does not."""
    combined_all_reduces: bool = False
    """Whether XLA combines all-reduces that do not depend on each other into one, which has one latency."""
    product_efficiency: float = Field(default=1.0, gt=0, le=1)
    """Share of the peak FLOP/s that XLA's matrix products reach."""
    convolution_efficiency: float = Field(default=1.0, gt=0, le=1)
    """The same of convolutions, of the FLOPs on whole tiles."""
    memory_efficiency: float = Field(default=1.0, gt=0, le=1)
    """Share of ``bandwidth`` that XLA's fusions reach."""
    sparse_core_collectives: bool = False
    """Whether XLA runs collectives on the chip's SparseCores, beside what the TensorCore computes, if asked to; plans
    then ask."""
    blocking_reduce_scatters: bool = False
    """Whether XLA computes nothing while a reduce-scatter runs; those of products then run as rings beside them, and
    those of kernels beside other kernels."""
    blocking_gathers: bool = False
    """Whether XLA gathers beside nothing but its own products: what one has just made, and weights of kernels, are
    waited for. Those gathers then run as rings."""
    scoped_vmem: Bytes | None = None
    """How much of the on-chip memory plans ask XLA to let one fusion use; left out where they leave it to XLA."""
    hidden_collectives: float = Field(default=0.0, ge=0, le=1)
    """Share of the seconds of collectives that XLA runs beside compute in steps without a pipeline."""
    grouped_products: bool = True
    """Whether XLA has a kernel for products of ragged groups; else it multiplies all rows with all groups."""
    async_all_to_all_up_to: int | None = Field(default=None, ge=1)
    """Most devices on which XLA compiles a program whose all-to-alls are to run beside compute; left out where any
    number will do."""
    host_memory: Bytes | None = None
    """Bytes of the host's memory for each chip; left out where it is not known."""
    hidden_host_copies: bool = False
    """Whether XLA copies values of a loop to the host's memory and back beside the loop's products, early enough. Else
    the planner sends none there unasked."""
    matrix_unit: int = Field(default=0, ge=0)
    """Columns of the matrix unit; left out where no product is laid out for it."""
    attention_layouts: bool = False
    """Whether rotary positions are computed on whole rows, and attention's kernels read each of repeated heads once
    (`autoshard.passes.rotary`, `autoshard.passes.attention_operands`): left out where it has not been seen to pay."""

    def hardware(self, name: str) -> Hardware:
        """The table as a `Hardware` record."""
        links = {key: Link(key, link.bandwidth, link.latency) for key, link in self.links.items()}
        flops: dict[str, float] = {**self.flops}
        return Hardware(
            name,
            flops,
            self.memory,
            self.bandwidth,
            links,
            self.overhead,
            self.operand_bits,
            self.tile,
            self.clock,
            self.on_chip or 0,
            self.on_chip_bandwidth,
            self.fused_products,
            self.remat_threshold or math.inf,
            AttentionRates(**self.attention.model_dump()) if self.attention else None,
            self.host_bandwidth,
            self.all_gather_as_all_reduce_from or math.inf,
            self.combined_all_reduces,
            self.product_efficiency,
            self.convolution_efficiency,
            self.memory_efficiency,
            self.sparse_core_collectives,
            self.blocking_reduce_scatters,
            self.blocking_gathers,
            self.scoped_vmem or 0,
            self.hidden_collectives,
            self.grouped_products,
            self.async_all_to_all_up_to or math.inf,
            self.host_memory or self.memory,
            self.hidden_host_copies,
            self.matrix_unit,
            self.attention_layouts,
        )


def load_hardware(name: str) -> Hardware:
    """The hardware table that ships as ``name``, or that is in the file ``name``.

    Raises:
      ConfigError: no such table or file, or an invalid entry in it.
    """
    path = find_config("hardware", name)
    return _table(read_text(path), str(path)).hardware(path.stem)


@functools.lru_cache(maxsize=64)
def _table(text: str, file: str) -> HardwareConfig:
    """The hardware table ``text`` of ``file``; cached by content, since every plan reads one."""
    return parse_yaml(text, file, HardwareConfig)


def hardware_of(device_kind: str) -> Hardware:
    """The shipped table that lists ``device_kind``, a value of `jax.Device.device_kind`.

    Raises:
      ConfigError: no table lists this kind of device.
    """
    tables = {path.stem: _table(read_text(path), str(path)) for path in shipped_configs("hardware")}
    for name, table in tables.items():
        if device_kind in table.device_kinds:
            return table.hardware(name)
    raise ConfigError(
        f"no hardware table lists the device kind {device_kind!r}; set `hardware:` in the mesh config to one of "
        f"{', '.join(tables)}, or to the path of a table of your own written like those"
    )


def is_of_other_chip(hardware: Hardware, device_kind: str) -> bool:
    """Whether ``hardware`` is a shipped table that does not list ``device_kind``; of a table of one's own it is not
    known.
    """
    shipped = {path.stem: path for path in shipped_configs("hardware")}
    if (path := shipped.get(hardware.name)) is None:
        return False
    return device_kind not in _table(read_text(path), str(path)).device_kinds


def require_compiler(mesh: LogicalMesh) -> None:
    """Raises `CompileError` where programs over ``mesh``, whose table is of an accelerator, are compiled for CPU: what
    that compiler says of memory and time is not true of the chip."""
    chip = mesh.hardware
    if mesh.platform == "cpu" and is_of_other_chip(chip, "cpu"):
        raise CompileError(
            f"the mesh has the hardware table {chip.name}, and would be compiled for CPU, which is what is here: give "
            f"the mesh a target in place of `hardware: {chip.name}`, such as `tpu: v5e:4x4` or `gpu: h100`, which is "
            "compiled for without devices"
        )
