"""What a step's products take at the peak of the chips."""

from __future__ import annotations

import math
from typing import Any

from autoshard.jaxpr import product_flops
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import BoundStep, Step


def peak_seconds(step: Step | BoundStep, plan: Plan, state: Any, batch: Any) -> float | None:
    """Seconds that the products of ``step`` would take at the peak of the plan's chips: those that it is written with,
    without what a plan recomputes. None on CPUs, which have no peak of their own.

    Args:
      state, batch: of the step, arrays or their shapes.
    """
    if plan.jax_mesh.devices.flat[0].platform == "cpu":
        return None
    hardware, written = plan.mesh.hardware, step.written(state, batch)
    seconds = [flops / hardware.peak_flops(dtype) for dtype, flops in product_flops(written.jaxpr).items()]
    return math.fsum(seconds) / plan.mesh.size
