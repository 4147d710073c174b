"""Estimated time of a compiled step, from its HLO.

The TPU compiler annotates every fusion with the cycles that it expects (`estimated_cycles`); a loop's body is
annotated once, so its cycles are multiplied by the trip count. It expects too many of fusions that memory bounds (two
of elementwise ones, up to twelve times of some reductions): one without a product takes at most what its bytes take.
Instructions that it does not annotate, and all instructions of the GPU and CPU compilers, are estimated by the chip's
roofline; kernels for attention, by their share of the peak (`hlo.attention`), those for products of ragged groups, by
the roofline (`hlo.grouped_products`). No compiler estimates collectives: their time is the link model's, and what of it
is hidden is read from the order of the program (`hlo.waits`); so for copies to the host's memory and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from autoshard.backend.hlo.attention import attention_seconds
from autoshard.backend.hlo.collectives import located_collectives
from autoshard.backend.hlo.grouped_products import grouped_product_seconds
from autoshard.backend.hlo.host_copies import host_copies
from autoshard.backend.hlo.roofline import (
    instruction_seconds,
    kernel_seconds,
    memory_bound_seconds,
    roofline_seconds,
)
from autoshard.backend.hlo.text import Computation, Instruction, Module, parse_hlo
from autoshard.backend.hlo.trip_counts import run_counts
from autoshard.backend.hlo.waits import Transfer, waiting_seconds
from autoshard.machine.collective import Collective, collective_seconds
from autoshard.machine.mesh import Hardware, LogicalMesh

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNPRICED = 2**63 - 1
"""`estimated_cycles` of what the compiler does not estimate, such as gathers that a v5p leaves to its SparseCores."""


class Compiled(Protocol):
    """What an estimate needs of `jax.stages.Compiled`."""

    def as_text(self) -> str | None: ...


@dataclass(frozen=True)
class Estimate:
    """Seconds of one call on one device."""

    compute: float
    transfers: float
    """Of all collectives, by the link model."""
    exact: bool
    """False where some loop's trip count is unknown: it counts as one."""
    cycles: int | None = None
    """What ``compute`` is computed from; None where that is the roofline."""
    blocking: float = 0.0
    """In which the device computes nothing and waits for collectives or for the host."""
    host: float = 0.0
    """What of ``blocking`` is for copies to the host's memory and back."""

    @property
    def seconds(self) -> float:
        """Without overlap of compute and communication between devices."""
        return self.compute + self.transfers + self.host

    @property
    def scheduled(self) -> float:
        """As the compiler ordered the program, which hides what is beside a collective as far as that lasts."""
        return self.compute + self.blocking

    @property
    def overlapped(self) -> float:
        """With perfect overlap of compute and communication: a lower bound."""
        return max(self.compute, self.transfers)


def estimate(compiled: Compiled, mesh: LogicalMesh) -> Estimate:
    """Estimates the time of one call from the HLO of a compiled step.

    Args:
      mesh: the mesh that it was compiled for: gives the clock or the roofline, and the links.
    """
    return module_estimate(parse_hlo(compiled.as_text() or ""), mesh)


def module_estimate(module: Module, mesh: LogicalMesh) -> Estimate:
    """`estimate` of a parsed module: of what runs when its entry does."""
    hardware, cycles = mesh.hardware, None
    if _has_cycles(module) and hardware.clock:
        cycles, exact = estimated_cycles(module, hardware)
        compute = cycles / hardware.clock
    else:
        compute, exact = roofline_seconds(module, hardware)
    found = located_collectives(module, mesh)
    once = {key: _transfer(c, mesh) for key, c in found.items()}
    transfers = sum(once[key].seconds * c.count for key, c in found.items())
    work = _work(module, hardware)
    blocking = without_host = waiting_seconds(module, once, work)
    if hardware.host_bandwidth and (copies := host_copies(module)):
        to_host = {key: Transfer(c.bytes / hardware.host_bandwidth, c.way) for key, c in copies.items()}
        blocking = waiting_seconds(module, once | to_host, work)
    return Estimate(compute, transfers, exact, cycles, blocking, blocking - without_host)


def seconds_by_name(module: Module, mesh: LogicalMesh) -> Iterator[tuple[str, float, str]]:
    """The seconds of one run of each instruction by its name, of a collective over its links, with the slowest of
    these; of others without a link, empty."""
    work, found = _work(module, mesh.hardware), located_collectives(module, mesh)
    for name, computation in module.computations.items():
        for i in computation.instructions.values():
            c = found.get((name, i.name))
            taken = Transfer(work(i, computation), "") if c is None else _transfer(c, mesh)
            yield i.name, taken.seconds, taken.link


def _work(module: Module, hardware: Hardware) -> Callable[[Instruction, Computation], float]:
    """What gives the seconds that an instruction computes, without what it calls."""
    if (clock := hardware.clock) and _has_cycles(module):
        return lambda i, within: _cycles(i, within, module, hardware) / clock
    return kernel_seconds(module, hardware)


def _has_cycles(module: Module) -> bool:
    """Whether it is the TPU compiler's."""
    instructions = (i for c in module.computations.values() for i in c.instructions.values())
    return any(_CYCLES.search(i.attributes) for i in instructions)


def estimated_cycles(module: Module, hardware: Hardware) -> tuple[int, bool]:
    """The estimated cycles of one call, and whether every loop's trip count is known."""
    total, exact = 0, True
    for name, (times, known) in run_counts(module).items():
        computation = module.computations[name]
        cycles = sum(_cycles(i, computation, module, hardware) for i in computation.instructions.values())
        total += cycles * times
        exact = exact and (known or not cycles)
    return total, exact


def _cycles(instruction: Instruction, computation: Computation, module: Module, hardware: Hardware) -> int:
    kernels = (attention_seconds, grouped_product_seconds)
    if seconds := sum(of_kernel(instruction, computation, module, hardware) for of_kernel in kernels):
        return round(seconds * hardware.clock)
    match = _CYCLES.search(instruction.attributes)
    if match is None:
        return 0
    priced = int(match[1])
    if priced == _UNPRICED:
        return round(instruction_seconds(instruction, computation, module, hardware) * hardware.clock)
    seconds = memory_bound_seconds(instruction, computation, module, hardware)
    return priced if seconds is None else min(priced, round(seconds * hardware.clock))


def total_seconds(c: Collective, mesh: LogicalMesh) -> float:
    """Seconds of all runs of a collective, by the link model."""
    return _transfer(c, mesh).seconds * c.count


def _transfer(c: Collective, mesh: LogicalMesh) -> Transfer:
    """One run of it."""
    axes = mesh.axis_names if c.axes is None else c.axes  # device groups that match no axes: priced as over all
    return Transfer(collective_seconds(c.kind, axes, c.bytes, mesh), mesh.slowest_link(axes).name)
