"""Ahead-of-time compilation targets: TPU slices and GPU clusters, and their devices as an array in mesh order.

A target whose devices this process has is compiled for, and run on, those devices.
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
from autoshard.machine.tpu_slice import TpuSlice, group_of

type Target = TpuSlice | GpuCluster


def is_available(target: Target) -> bool:
    """Whether this process has the devices of ``target``."""
    return gpu_cluster.is_available(target) if isinstance(target, GpuCluster) else tpu_slice.is_available(target)


def crosses(devices: np.ndarray) -> tuple[bool, ...]:
    """Of each axis of an array of devices, whether it goes from one slice or node to another."""
    groups = np.array([group_of(device) for device in devices.flat]).reshape(devices.shape)
    return tuple(bool((groups != groups.take([0], axis)).any()) for axis in range(devices.ndim))


def crossing_axes(target: Target, sizes: Sequence[int]) -> int:
    """How many of the first axes cross slices or nodes, which are consecutive along them: one, or of nodes of GPUs as
    many as it takes; 0 where they do not fit."""
    whole, most = 1, len(sizes) if isinstance(target, GpuCluster) else 1
    for n, size in enumerate(sizes[:most], 1):
        if whole * size % target.num_groups == 0:
            return n
        if target.num_groups % (whole * size):
            break
        whole *= size
    return 0


def require_fit(target: Target, sizes: Sequence[int]) -> None:
    """Raises `MeshError` where a mesh of ``sizes`` has another number of devices, or axes along which slices or nodes
    are not consecutive."""
    if math.prod(sizes) != target.size or not crossing_axes(target, sizes):
        shape = "x".join(map(str, sizes))
        groups = f", and {target.num_groups} must divide the first axis" if target.num_groups > 1 else ""
        raise MeshError(f"a mesh of {shape} does not fit {target}, which has {target.size} devices{groups}")


def device_array(target: Target, sizes: Sequence[int]) -> np.ndarray:
    """The devices of ``target`` as an array of shape ``sizes``, with neighbours close in the network.

    Slices or nodes are consecutive blocks along the first axis, nodes of GPUs along several where it takes them.

    Raises:
      MeshError: the compiler is not installed or refuses the topology, or ``sizes`` do not fit ``target``.
    """
    describe = gpu_cluster.topology_devices if isinstance(target, GpuCluster) else tpu_slice.topology_devices
    devices = sorted(jax.devices(), key=lambda d: (group_of(d), d.id)) if is_available(target) else describe(target)
    require_fit(target, sizes)
    if isinstance(target, GpuCluster):  # in node order; within a node all devices are equally close
        return np.asarray(devices, dtype=object).reshape(sizes)
    shape = (sizes[0] // target.slices, *sizes[1:])
    each = len(devices) // target.slices
    slices = [devices[i : i + each] for i in range(0, len(devices), each)]
    return np.concatenate([mesh_utils.create_device_mesh(shape, s, allow_split_physical_axes=True) for s in slices])
