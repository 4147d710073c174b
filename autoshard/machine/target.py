"""Accelerators to compile for that this machine may lack: TPU slices and clusters of NVIDIA GPUs.

Where the process sees those very devices, they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from autoshard.errors import MeshError
from autoshard.machine import gpu_cluster, tpu_slice
from autoshard.machine.gpu_cluster import GpuCluster
from autoshard.machine.tpu_slice import TpuSlice

type Target = TpuSlice | GpuCluster


def is_available(target: Target) -> bool:
    """Whether this process sees the devices themselves."""
    return gpu_cluster.is_available(target) if isinstance(target, GpuCluster) else tpu_slice.is_available(target)


def device_array(target: Target, sizes: Sequence[int]) -> np.ndarray:
    """The devices of ``target`` as an array of shape ``sizes``, neighbours close in the network.

    Several slices or nodes follow one another along the first axis.

    Raises:
      MeshError: the extra is not installed, the compiler knows no such slice, or the sizes do not fit it.
    """
    describe = gpu_cluster.topology_devices if isinstance(target, GpuCluster) else tpu_slice.topology_devices
    devices = tuple(jax.devices()) if is_available(target) else describe(target)
    if math.prod(sizes) != len(devices) or sizes[0] % target.num_groups:
        shown = "x".join(map(str, sizes))
        along = f", in groups of {len(devices) // target.num_groups} along the first axis" if target.num_groups > 1 else ""
        raise MeshError(f"a mesh of {shown} does not fit {target}, which has {len(devices)} devices{along}")
    if isinstance(target, GpuCluster):  # node by node, and within one all are alike
        return np.asarray(devices, dtype=object).reshape(sizes)
    shape = (sizes[0] // target.slices, *sizes[1:])
    each = len(devices) // target.slices
    parts = [devices[i : i + each] for i in range(0, len(devices), each)]
    made = [mesh_utils.create_device_mesh(shape, part, allow_split_physical_axes=True) for part in parts]
    return np.concatenate(made)
