"""TPU slices as ahead-of-time compilation targets, present or not.

A slice is named as Google Cloud names it: chip generation and chip grid, ``v5e:4x4``. Several equal slices are joined
by the data-centre network (DCN). Planning needs nothing; compiling needs libtpu, which the extra ``tpu`` installs and
which compiles on any machine.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.errors import MeshError, nearest


@dataclass(frozen=True)
class TpuChip:
    """A TPU generation."""

    hardware: str
    """Name of its hardware table."""
    device_kinds: tuple[str, ...]
    """What its devices are called in JAX."""
    grid_rank: int
    """Dimensions of its chip grid: 2 or 3."""
    devices_per_chip: int = 1
    """JAX devices per chip."""
    topology_options: tuple[tuple[str, str], ...] = ()
    """What `topologies.get_topology_desc` needs beside the topology's name."""


TPUS: Mapping[str, TpuChip] = {
    "tpu7x": TpuChip("tpu-tpu7x", ("TPU7x",), 3, devices_per_chip=2),
    "v4": TpuChip("tpu-v4", ("TPU v4",), 3, topology_options=(("chip_config_name", "megacore"),)),
    "v5e": TpuChip("tpu-v5e", ("TPU v5 lite", "TPU v5e"), 2),
    "v5p": TpuChip("tpu-v5p", ("TPU v5", "TPU v5p"), 3),
    "v6e": TpuChip("tpu-v6e", ("TPU v6 lite", "TPU v6e"), 2),
}


@dataclass(frozen=True)
class TpuSlice:
    """Equal TPU slices."""

    topology: str
    """Chip generation (a name in `TPUS`) and chip grid of one slice: ``v5e:4x4``."""
    slices: int = 1

    def __post_init__(self) -> None:
        name, _, sides = self.topology.partition(":")
        if name not in TPUS:
            raise MeshError(f"tpu {self.topology!r}: no TPU is named {name!r}{nearest(name, TPUS)}")
        if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", sides) or sides.count("x") + 1 != TPUS[name].grid_rank:
            example = "x".join("4" * TPUS[name].grid_rank)
            raise MeshError(
                f"tpu {self.topology!r}: a slice of {name} has {TPUS[name].grid_rank} sides, as in '{name}:{example}'"
            )
        if self.slices < 1:
            raise MeshError(f"tpu {self.topology!r}: {self.slices} slices; there must be 1 or more")

    @property
    def chip(self) -> TpuChip:
        """The chip of the slices."""
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
        """Number of slices: groups of devices joined by a slower link."""
        return self.slices

    @property
    def cross_group_link(self) -> str:
        """The link between slices, by its name in the hardware table."""
        return "dcn"

    @property
    def chip_grid(self) -> tuple[int, ...]:
        """Chips along each dimension of a slice."""
        return tuple(map(int, self.topology.partition(":")[2].split("x")))

    def wraps(self, dim: int) -> bool:
        """Whether the ends of this dimension of a slice's grid are joined: grids of two dimensions are on a side of 16
        chips, those of three where cubes of 4x4x4 chips make them up."""
        if dim >= len(self.chip_grid):
            return False
        return all(n % 4 == 0 for n in self.chip_grid) if len(self.chip_grid) == 3 else self.chip_grid[dim] == 16

    @property
    def size(self) -> int:
        """Number of devices in all slices."""
        return self.slices * math.prod(self.chip_grid) * self.chip.devices_per_chip

    def __str__(self) -> str:
        return f"{self.slices} x TPU {self.topology}" if self.slices > 1 else f"TPU {self.topology}"


def libtpu_installed() -> bool:
    """Whether libtpu, which contains XLA:TPU, is installed."""
    return importlib.util.find_spec("libtpu") is not None


def is_available(target: TpuSlice) -> bool:
    """Whether `jax.devices` are those of ``target``: TPUs, in the same number."""
    devices = jax.devices()
    return devices[0].platform == "tpu" and len(devices) == target.size


def group_of(device: Any) -> int:
    """The number of the slice of TPUs, or of the GPUs that NVLink joins, which JAX calls a slice too, of a device."""
    return getattr(device, "slice_index", 0)


def slice_of(devices: Sequence[Any]) -> TpuSlice | None:
    """The slice that these devices of JAX make up, or the several equal ones; None where they are no TPUs, or not whole
    slices."""
    chips = {kind: name for name, chip in TPUS.items() for kind in chip.device_kinds}
    if devices[0].platform != "tpu" or devices[0].device_kind not in chips:
        return None
    name, groups = chips[devices[0].device_kind], defaultdict[int, set[tuple[int, ...]]](set)
    for device in devices:
        groups[group_of(device)].add((*device.coords, device.core_on_chip))
    first, *others = groups.values()
    grid = [max(place[i] for place in first) + 1 for i in range(TPUS[name].grid_rank)]
    found = TpuSlice(f"{name}:{'x'.join(map(str, grid))}", len(groups))
    whole = all(other == first for other in others) and found.size == len(devices) == len(first) * len(groups)
    return found if whole else None


@functools.cache
def topology_devices(target: TpuSlice) -> tuple[Any, ...]:
    """Compile-only devices that describe ``target``.

    Raises:
      MeshError: libtpu is not installed, or refuses the topology.
    """
    if not libtpu_installed():
        raise MeshError(
            f"this process has neither the devices of {target} nor XLA's TPU compiler (libtpu): pip install "
            "'autoshard[tpu]', in an environment without the extra 'gpu'; planning needs neither"
        )
    options: dict[str, Any] = dict(target.chip.topology_options)
    if target.slices > 1:
        options["num_slices"] = target.slices
    try:
        found = topologies.get_topology_desc(topology_name=target.topology, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as e:
        locked = (
            "; another process uses libtpu: set ALLOW_MULTIPLE_LIBTPU_LOAD=true in both" if "lockfile" in str(e) else ""
        )
        raise MeshError(f"{target}: libtpu refuses this topology: {e}{locked}") from None
    return tuple(found.devices)
