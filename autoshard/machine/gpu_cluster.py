"""NVIDIA GPU clusters as ahead-of-time compilation targets: nodes of equal GPUs, present or not.

XLA:GPU compiles for a described GPU without the device or its driver. The extra ``gpu`` installs it, with ``ptxas`` and
``libdevice``, which it calls, and cuDNN, which its attention kernel needs (`autoshard.transforms.cudnn_attention`).
Planning needs none of that.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.errors import MeshError, nearest


@dataclass(frozen=True)
class GpuChip:
    """What XLA's `GpuTargetConfigProto` asks of a GPU; sizes in bytes, bandwidth in bytes/s."""

    compute_capability: int
    """Major version of the CUDA compute capability."""
    multiprocessors: int
    fp32_units: int
    """FP32 units per multiprocessor."""
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int
    shared_memory: int
    """Per multiprocessor."""
    block_shared_memory: int
    """The most that one thread block can opt in to."""


# Sources: NVIDIA's architecture papers (A100, H100, Blackwell) and CUDA's table of compute capabilities; memory,
# bandwidth and clock as the driver reports them for SXM boards (OpenXLA, xla/backends/gpu/target_config/specs).
GPUS: Mapping[str, GpuChip] = {
    "a100": GpuChip(8, 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936, 166912),
    "b200": GpuChip(10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472, 232448),
    "h100": GpuChip(9, 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "h200": GpuChip(9, 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448),
}


@dataclass(frozen=True)
class GpuCluster:
    """Nodes of GPUs, all equal."""

    gpu: str
    """A name in `GPUS`."""
    nodes: int = 1
    per_node: int = 8
    """GPUs per node."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise MeshError(f"gpu {self.gpu!r}: no such GPU{nearest(self.gpu, GPUS)}")
        if self.nodes < 1 or self.per_node < 1:
            raise MeshError(f"gpu {self.gpu!r}: {self.nodes} nodes of {self.per_node} GPUs; both must be 1 or more")

    @property
    def platform(self) -> str:
        return "gpu"

    @property
    def hardware(self) -> str:
        """Name of its hardware table."""
        return self.gpu

    @property
    def size(self) -> int:
        """Number of devices in all nodes."""
        return self.nodes * self.per_node

    @property
    def num_groups(self) -> int:
        """Number of nodes: groups of devices joined by a slower link."""
        return self.nodes

    @property
    def cross_group_link(self) -> str:
        """The link between nodes, by its name in the hardware table."""
        return "infiniband"

    @property
    def chip_grid(self) -> None:
        """None: a switch joins all devices of a node."""
        return None

    def __str__(self) -> str:
        return (
            f"{self.nodes} x {self.per_node} {self.gpu.upper()}"
            if self.nodes > 1
            else f"{self.size} {self.gpu.upper()}"
        )


def is_available(cluster: GpuCluster) -> bool:
    """Whether `jax.devices` are those of ``cluster``: GPUs of this kind, in the same number."""
    devices = jax.devices()
    same_kind = cluster.gpu.upper() in str(devices[0].device_kind).upper()
    return devices[0].platform == "gpu" and same_kind and len(devices) == cluster.size


@functools.cache
def topology_devices(cluster: GpuCluster) -> tuple[Any, ...]:
    """Compile-only devices that describe ``cluster``, in node order.

    Raises:
      MeshError: XLA:GPU or a tool that it calls is not installed, or JAX did not load it.
    """
    missing = [name for name, present in compile_requirements().items() if not present]
    if missing:
        raise MeshError(
            f"this process has neither the devices of {cluster} nor XLA's GPU compiler (missing: "
            f"{', '.join(missing)}): pip install 'autoshard[gpu]', in an environment without the extra 'tpu'; "
            "planning needs neither"
        )
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=target_config(GPUS[cluster.gpu]),
            topology=f"{cluster.nodes}x1x{cluster.per_node}",
        )
    except jax.errors.JaxRuntimeError as e:
        raise MeshError(f"{cluster}: XLA's GPU compiler refuses this topology: {e}") from None
    except RuntimeError:  # what JAX raises for a platform that it did not load
        raise MeshError(
            f"this process has no devices of {cluster}, and JAX, which found no GPU, did not load XLA's GPU compiler: "
            "start Python with JAX_PLATFORMS=cpu to compile for GPUs on a machine without them"
        ) from None
    return tuple(found.devices)


def compile_requirements() -> dict[str, bool]:
    """What XLA:GPU needs to compile, and whether it is installed. Without the last two it aborts the process.

    cuDNN is not listed: only a step with fused attention needs it, and raises where JAX finds none.
    """
    plugin = importlib.util.find_spec("jax_cuda13_plugin")
    beside = Path(plugin.origin).parents[1] / "nvidia/cu13" if plugin and plugin.origin else None
    places = [p for p in (beside, Path("/usr/local/cuda"), Path("/opt/cuda")) if p]
    assembler = any(os.access(p / "bin/ptxas", os.X_OK) for p in places) or shutil.which("ptxas") is not None
    return {
        "jax-cuda13-plugin": plugin is not None,
        "ptxas": assembler,
        "libdevice": any((p / "nvvm/libdevice/libdevice.10.bc").is_file() for p in places),
    }


def target_config(chip: GpuChip) -> str:
    """``chip`` as XLA's `GpuTargetConfigProto` in text format."""
    features = "ACCELERATED_FEATURES" if chip.compute_capability >= 9 else "NONE"
    figures: dict[str, int | float] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": chip.shared_memory,
        "shared_memory_per_block_optin": chip.block_shared_memory,
        "threads_per_core_limit": 2048,
        "core_count": chip.multiprocessors,
        "fpus_per_core": chip.fp32_units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "clock_rate_ghz": chip.clock_ghz,
        "memory_bandwidth": chip.bandwidth,
        "device_memory_size": chip.memory,
        "l2_cache_size": chip.l2_cache,
    }
    lines = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    return (
        f"gpu_device_info {{\n{lines}\n"
        f"  cuda_compute_capability {{ major: {chip.compute_capability} feature_extension: {features} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
    )
