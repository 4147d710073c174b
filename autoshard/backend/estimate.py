"""How long a compiled step takes by its own compiler's estimate.

The TPU compiler writes the cycles that it expects of every fusion into the HLO (`estimated_cycles`), once for a loop's
body however often the loop turns. Of a few it does not say, and the compilers for GPUs and CPUs write nothing of the
kind: those are put under the chip's roofline, instruction by instruction. None prices a collective, so those go by the
link model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from autoshard.backend.hlo_collectives import collectives
from autoshard.backend.hlo_roofline import instruction_seconds, roofline_seconds
from autoshard.backend.hlo_text import Module, parse
from autoshard.backend.hlo_trip_counts import run_counts
from autoshard.machine.collective import Collective, collective_seconds
from autoshard.machine.mesh import Hardware, LogicalMesh

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNPRICED = 2**63 - 1
"""The cycles of what the compiler does not price, such as gathers that a v5p leaves to its SparseCores."""


class Compiled(Protocol):
    """What an estimate needs of `jax.stages.Compiled`."""

    def as_text(self) -> str | None: ...


@dataclass(frozen=True)
class Estimate:
    """Seconds of one call on one device."""

    compute: float
    transfers: float
    """Of all collectives, none hidden behind compute."""
    exact: bool
    """False where some loop's trip count is not known: it counts as one trip."""
    cycles: int | None = None
    """What ``compute`` was told from; None where it is the roofline of what was compiled."""

    @property
    def seconds(self) -> float:
        """Where no transfer is hidden."""
        return self.compute + self.transfers

    @property
    def bound(self) -> float:
        """Where every transfer is hidden that compute can hide."""
        return max(self.compute, self.transfers)


def estimate(compiled: Compiled, mesh: LogicalMesh) -> Estimate:
    """Reads the HLO of a compiled step.

    Args:
      mesh: that it was compiled for; its hardware gives the clock or the roofline, its links price the collectives.
    """
    text = compiled.as_text() or ""
    module, clock = parse(text), mesh.hardware.clock
    cycles: int | None = None
    if clock:
        cycles, exact = estimated_cycles(module, mesh.hardware)
        compute = cycles / clock
    else:
        compute, exact = roofline_seconds(module, mesh.hardware)
    return Estimate(compute, sum(total_seconds(c, mesh) for c in collectives(text, mesh)), exact, cycles)


def estimated_cycles(module: Module, hardware: Hardware) -> tuple[int, bool]:
    """The compiler's cycles of one call, and whether every loop's trips are known."""
    total, exact = 0, True
    for name, (times, known) in run_counts(module).items():
        computation, cycles = module.computations[name], 0
        for instruction in computation.instructions.values():
            if match := _CYCLES.search(instruction.attributes):
                priced = int(match[1])
                if priced == _UNPRICED:
                    priced = round(instruction_seconds(instruction, computation, module, hardware) * hardware.clock)
                cycles += priced
        total += cycles * times
        exact = exact and (known or not cycles)
    return total, exact


def total_seconds(c: Collective, mesh: LogicalMesh) -> float:
    """Seconds of all runs of a collective on the link model."""
    axes = mesh.axis_names if c.axes is None else c.axes  # groups of no known axes: as if of all
    return collective_seconds(c.kind, axes, c.bytes, mesh) * c.count
