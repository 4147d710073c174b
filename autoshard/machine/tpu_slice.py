"""TPU slices to compile for on a machine that has none.

A slice is named as Google names it: a chip and how many stand along each side, ``v5e:4x4``. Several such slices are
joined by a data-centre network. Planning for a slice needs nothing; compiling needs the compiler for TPUs, which the
extra ``tpu`` installs and which runs on any machine.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.errors import MeshError, nearest


@dataclass(frozen=True)
class TpuChip:
    """A generation of TPU: its hardware table, its sides, and what JAX shows of one chip."""

    hardware: str
    grid_rank: int
    """Dimensions of its network."""
    devices_per_chip: int = 1
    """Devices a chip."""
    topology_options: tuple[tuple[str, str], ...] = ()
    """What the compiler has to be told beside the name."""


TPUS: Mapping[str, TpuChip] = {
    "tpu7x": TpuChip("tpu-tpu7x", 3, devices_per_chip=2),
    "v4": TpuChip("tpu-v4", 3, topology_options=(("chip_config_name", "megacore"),)),
    "v5e": TpuChip("tpu-v5e", 2),
    "v5p": TpuChip("tpu-v5p", 3),
    "v6e": TpuChip("tpu-v6e", 2),
}


@dataclass(frozen=True)
class TpuSlice:
    """TPU slices, all alike."""

    topology: str
    """TpuChip and sides, ``v5e:4x4``."""
    slices: int = 1

    def __post_init__(self) -> None:
        name, _, sides = self.topology.partition(":")
        if name not in TPUS:
            raise MeshError(f"tpu {self.topology!r}: no TPU is named {name!r}{nearest(name, TPUS)}")
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sides) or sides.count("x") + 1 != TPUS[name].grid_rank:
            example = "x".join("4" * TPUS[name].grid_rank)
            raise MeshError(
                f"tpu {self.topology!r}: a slice of {name} has {TPUS[name].grid_rank} sides, as in '{name}:{example}'"
            )
        if self.slices < 1:
            raise MeshError(f"tpu {self.topology!r}: there are {self.slices} slices; their number is 1 or more")

    @property
    def chip(self) -> TpuChip:
        """What the slices are made of."""
        return TPUS[self.topology.partition(":")[0]]

    @property
    def platform(self) -> str:
        return "tpu"

    @property
    def hardware(self) -> str:
        """Name of its hardware table."""
        return self.chip.hardware

    @property
    def num_groups(self) -> int:
        """How many groups of devices there are, joined by a slower link."""
        return self.slices

    @property
    def cross_group_link(self) -> str:
        """That link, by its name in the hardware table."""
        return "dcn"

    @property
    def chip_grid(self) -> tuple[int, ...]:
        """How many chips stand along each side of a slice."""
        return tuple(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def size(self) -> int:
        """Number of devices, of all slices together."""
        return self.slices * math.prod(self.chip_grid) * self.chip.devices_per_chip

    def __str__(self) -> str:
        return f"{self.slices} x TPU {self.topology}" if self.slices > 1 else f"TPU {self.topology}"


def libtpu_installed() -> bool:
    """Whether the compiler for TPUs is there."""
    return importlib.util.find_spec("libtpu") is not None


def is_available(target: TpuSlice) -> bool:
    """Whether this process sees such a slice, of as many devices."""
    devices = jax.devices()
    return devices[0].platform == "tpu" and len(devices) == target.size


@functools.cache
def topology_devices(target: TpuSlice) -> tuple[Any, ...]:
    """Devices that stand for ``target``: programs can be compiled for them, and not run."""
    if not libtpu_installed():
        raise MeshError(
            f"{target} is not here, and neither is the compiler for TPUs: pip install 'autoshard[tpu]', in an "
            "environment without the extra 'gpu'; planning needs neither"
        )
    options: dict[str, Any] = dict(target.chip.topology_options)
    if target.slices > 1:
        options["num_slices"] = target.slices
    try:
        found = topologies.get_topology_desc(topology_name=target.topology, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as e:
        held = "; another process holds it, set ALLOW_MULTIPLE_LIBTPU_LOAD=true in both" if "lockfile" in str(e) else ""
        raise MeshError(f"{target}: the compiler for TPUs refuses it: {e}{held}") from None
    return tuple(found.devices)
