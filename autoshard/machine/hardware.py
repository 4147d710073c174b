"""Hardware tables: one YAML file per chip in `configs/hardware/`, read into `Hardware` records."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

from pydantic import Field

from autoshard.errors import ConfigError
from autoshard.machine.mesh import AttentionRates, Hardware, Link
from autoshard.strict_config import Bytes, Config, find_config, parse_yaml, read_text, shipped_configs

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "int8"]


class LinkConfig(Config):
    """One kind of interconnect: ``bandwidth`` in bytes/s per device and direction, ``latency`` in seconds."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class AttentionKernelConfig(Config):
    """The library's kernel for attention, which never writes the scores to memory, and its measured efficiency."""

    kernel: Literal["cudnn", "splash", "splash_interpreted"]
    """Which kernel: cuDNN's for NVIDIA GPUs, splash attention for TPUs; interpreted, for tests."""
    forward: float = Field(gt=0, le=1)
    """Fraction of peak FLOP/s, not counting the work that a mask saves."""
    backward: float = Field(gt=0, le=1)
    """The same for the gradient: five matrix products, as it recomputes the scores."""


class HardwareConfig(Config):
    """The keys of `configs/hardware/NAME.yaml`; `Hardware` documents those that are not documented here."""

    device_kinds: tuple[str, ...] = ()
    """Values of `jax.Device.device_kind` on this chip; an exact match selects the table."""
    flops: dict[Dtype, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Peak FLOP/s of a matrix product, by the dtype of its operands."""
    memory: Bytes
    bandwidth: float = Field(gt=0)
    """Bytes/s of device memory."""
    links: dict[str, LinkConfig] = Field(min_length=1)
    """Interconnects by name; the first is the default of a mesh axis."""
    overhead: float = Field(default=0.0, ge=0)
    operand_bits: int = Field(default=64, ge=1)
    tile: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (1, 1)
    on_chip: Bytes | None = None
    """Left out where XLA plans no on-chip memory."""
    clock: float = Field(default=0.0, ge=0)
    """Left out where XLA reports no estimated cycles."""
    fused_products: bool = True
    remat_threshold: Bytes | None = None
    """Left out where XLA does not rematerialize."""
    attention: AttentionKernelConfig | None = None
    """Left out where XLA calls no library for attention."""
    host_bandwidth: float = Field(default=0.0, ge=0)
    """Left out where the host's memory is the device's."""
    all_gather_as_all_reduce_from: int | None = Field(default=None, ge=2)
    """Left out where XLA does not do so."""
    combined_all_reduces: bool = False
    product_efficiency: float = Field(default=1.0, gt=0, le=1)
    convolution_efficiency: float = Field(default=1.0, gt=0, le=1)
    memory_efficiency: float = Field(default=1.0, gt=0, le=1)

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
            self.fused_products,
            self.remat_threshold or math.inf,
            AttentionRates(**self.attention.model_dump()) if self.attention else None,
            self.host_bandwidth,
            self.all_gather_as_all_reduce_from or math.inf,
            self.combined_all_reduces,
            self.product_efficiency,
            self.convolution_efficiency,
            self.memory_efficiency,
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
