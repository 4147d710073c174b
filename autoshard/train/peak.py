"""What a step's products take at the peak of the chips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from autoshard.jaxpr import product_flops
from autoshard.runtime.plan import Plan


def peak_seconds(step: Callable[[Any, Any], Any], plan: Plan) -> float | None:
    """Seconds that the products of ``step`` would take at the peak of the plan's chips: those that it is written with,
    without what a plan recomputes. None on CPUs, which have no peak of their own.
    """
    if plan.jax_mesh.devices.flat[0].platform == "cpu":
        return None
    hardware, traced = plan.mesh.hardware, jax.make_jaxpr(step)(*plan.in_avals)
    seconds = [flops / hardware.peak_flops(dtype) for dtype, flops in product_flops(traced.jaxpr).items()]
    return math.fsum(seconds) / plan.mesh.size
