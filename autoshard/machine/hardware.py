"""Chips as people write them in YAML, and what planning makes of them."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

from pydantic import Field

from autoshard.errors import ConfigError
from autoshard.machine.mesh import Hardware, Link
from autoshard.strict_config import Bytes, Config, find_config, parse_yaml, read_text, shipped_configs

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4", "int8"]


class LinkConfig(Config):
    """One kind of interconnect: ``bandwidth`` in bytes/s per device and direction, ``latency`` in seconds."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class AttentionConfig(Config):
    """How fast attention is that a library computes in one kernel, its scores never in memory."""

    forward: float = Field(gt=0, le=1)
    """Its share of the peak; the work of what a causal mask leaves out is not counted."""
    backward: float = Field(gt=0, le=1)
    """The same of the gradient, which makes the scores again: five products."""


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
    on_chip: Bytes | None = None
    """Memory on the chip in which its compiler keeps arrays; left out where it keeps none there."""
    clock: float = Field(default=0.0, ge=0)
    """Cycles/s in which the chip's compiler estimates; left out where it does not."""
    fused_products: bool = True
    """Whether its compiler computes what goes into a matrix product, and what follows it, with the product; if not,
    operands and results are there as arrays."""
    remat_threshold: Bytes | None = None
    """Memory beyond which its compiler makes values again by its own lights; left out where it does not."""
    attention: AttentionConfig | None = None
    """Left out where the chip's compiler calls no library for attention."""
    all_gather_as_all_reduce_from: int | None = Field(default=None, ge=2)
    """Number of devices from which on its compiler makes a gather over all of them a reduction; left out where it does
    not."""

    def hardware(self, name: str) -> Hardware:
        """The table as planning uses it."""
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
            (self.attention.forward, self.attention.backward) if self.attention else None,
            self.all_gather_as_all_reduce_from or math.inf,
        )


def load_hardware(name: str) -> Hardware:
    """The hardware table ``name`` of those that ship with autoshard, or the one in the file ``name``.

    Raises:
      ConfigError: no such table or file, or an entry in it that is impossible.
    """
    path = find_config("hardware", name)
    return _table(read_text(path), str(path)).hardware(path.stem)


@functools.lru_cache(maxsize=64)
def _table(text: str, file: str) -> HardwareConfig:
    """The hardware table in ``file``, whose text this is: parsed once, since every plan asks for one."""
    return parse_yaml(text, file, HardwareConfig)


def hardware_of(device_kind: str) -> Hardware:
    """The shipped table for what `jax.Device.device_kind` says.

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
