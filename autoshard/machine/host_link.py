"""Copies of a layer's values between the memories of device and host, beside what the layer computes.

XLA for TPU sends a layer's value while it computes the next layer, and fetches one while it computes the layer before
(`autoshard.backend.host_copies`); in each direction the link takes one after the other. A device waits for what takes
longer than that. So it is on v5e, v5p and v6e (`Hardware.hidden_host_copies`). v4, v7x and GPUs have not been measured,
and XLA for CPU has one memory: there nothing counts as hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.machine.mesh import LogicalMesh

LAYER_EFFICIENCY = 0.82
"""Share of the chip's peak by which a layer's products are counted for how long the layer takes, with its norms and all
else: of decoders compiled for v5e 0.72 to 0.83."""
TO_HOST, FROM_HOST = "to the host", "from the host"
"""The two directions of the link, which do not wait for each other."""


def copies_beside_products(mesh: LogicalMesh) -> bool:
    """Whether XLA runs copies to the host and back beside the products of a loop, early enough or not."""
    return mesh.platform == "tpu" and mesh.hardware.host_bandwidth > 0


def hides_copies(mesh: LogicalMesh) -> bool:
    """Whether it does so early enough for them to be hidden as far as the products last."""
    return copies_beside_products(mesh) and mesh.hardware.hidden_host_copies


def layer_seconds(products: float, mesh: LogicalMesh) -> float:
    """Seconds of a layer whose products take ``products`` seconds at least."""
    return products * mesh.hardware.product_efficiency / LAYER_EFFICIENCY


def seconds_waited_for_copies(size: Any, beside: Any, mesh: LogicalMesh) -> Any:
    """Seconds that a device spends on ``size`` bytes of its own in one direction, numbers or arrays, where a layer
    takes ``beside`` seconds meanwhile: it waits for what takes longer, and copies what it sends or has fetched."""
    hardware = mesh.hardware
    return np.maximum(size / hardware.host_bandwidth - beside, 0.0) + 2 * size / hardware.memory_rate
