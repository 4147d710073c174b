"""Compiles a planned step with its target's compiler and compares memory, time and collectives with the plan; and times
of the stages up to there, in the log of ``autoshard`` at level DEBUG."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from autoshard.backend.audit import Audit, audit
from autoshard.backend.estimate import Estimate, estimate, total_seconds
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

LOGGER = logging.getLogger("autoshard")
_OUT_OF_MEMORY = (
    re.compile(r"required for .*?\(([\d.]+)([KMGT]?)i?B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)i?B?\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm"),
)
"""Out-of-memory messages of the TPU compiler: bytes needed, bytes available; binary units."""


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes per device as reported by the compiler."""

    arguments: int
    results: int
    aliased: int
    """Bytes of the results that reuse buffers of donated arguments."""
    temporaries: int
    code: int
    peak: int
    """The maximum over time."""
    host: int = 0
    """In the host's memory; in none of the above."""


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler refused a program for lack of memory: bytes per device that it needs, and that are available."""

    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Compilation:
    """A planned step compiled for its target. Without usage, estimate and audit where the compiler refused it."""

    plan: PlanRecord
    compile_seconds: float
    """Wall-clock time of the compilation."""
    usage: MemoryUsage | None = None
    out_of_memory: OutOfMemory | None = None
    estimate: Estimate | None = None
    audit: Audit | None = None
    compiled: jax.stages.Compiled | None = field(default=None, compare=False, repr=False)

    @property
    def needed_bytes(self) -> int:
        """Bytes per device that the program needs."""
        if self.out_of_memory is not None:
            return self.out_of_memory.needed_bytes
        return self.usage.peak if self.usage else 0

    @property
    def available_bytes(self) -> int:
        """Bytes per device that the program may use."""
        return (
            self.out_of_memory.available_bytes
            if self.out_of_memory is not None
            else int(self.plan.mesh.hardware.memory)
        )

    @property
    def fits(self) -> bool:
        """Whether the program fits in the devices' memory."""
        return self.out_of_memory is None and self.needed_bytes <= self.available_bytes

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to change if it does not fit, most promising first."""
        return () if self.fits else tuple(_remedies(self))

    def collective_seconds(self, c: Collective) -> float:
        """Seconds of all runs of an emitted collective, by the link model."""
        return total_seconds(c, self.plan.mesh)

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values: bytes are per device, times are seconds.

        - ``mesh``, ``devices``, ``strategy``, ``compiler_options``, ``compile_seconds``
        - ``fits``, ``needs`` (bytes needed), ``has`` (bytes available), ``remedies``
        - ``memory``: ``planned`` and, unless refused, ``compiled``, both by class
        - ``estimate``: ``compute``, ``transfers``, ``sum``, ``bound``, ``cycles``, ``exact``; null where refused
        - ``collectives``: emitted ones, each with ``kind``, ``axes``, ``bytes``, ``count``, ``source``, ``operation``,
          ``seconds``
        - ``refined``: the layouts that `refine` compiled to choose from, each with the fields of `decisions.Trial`
        - ``audit``: ``clean``, ``rows`` (planned and emitted, with a ``verdict``), ``explained``; null where refused
        """
        e, emitted = self.estimate, self.audit.emitted if self.audit else ()
        return {
            "mesh": str(self.plan.mesh),
            "devices": self.plan.mesh.size,
            "strategy": self.plan.strategy,
            "compiler_options": dict(self.plan.compiler_options),
            "compile_seconds": self.compile_seconds,
            "fits": self.fits,
            "needs": self.needed_bytes,
            "has": self.available_bytes,
            "remedies": list(self.remedies),
            "memory": {"planned": asdict(self.plan.memory), "compiled": asdict(self.usage) if self.usage else None},
            "estimate": asdict(e) | {"scheduled": e.scheduled, "sum": e.seconds, "bound": e.overlapped} if e else None,
            "collectives": [asdict(c) | {"seconds": self.collective_seconds(c)} for c in emitted],
            "refined": [asdict(t) for t in self.plan.refined],
            "audit": self.audit.as_json() if self.audit else None,
        }


@contextlib.contextmanager
def stage(name: str, step: str) -> Generator[None]:
    """Logs how long the ``with`` block took, as ``train: search took 12.3 ms``."""
    start = time.perf_counter()
    yield
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug("%s: %s took %s", step, name, time_text(time.perf_counter() - start))


def compile_plan(plan: PlanRecord, lowered: jax.stages.Lowered) -> Compilation:
    """Compiles ``lowered``, the lowering of ``plan``, and analyses the result.

    Raises:
      JaxRuntimeError: the compiler refuses it for another reason than lack of memory.
    """
    start = time.perf_counter()
    try:
        with stage("compile", plan.name):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        out_of_memory = parse_out_of_memory(str(error))
        if out_of_memory is None:
            raise
        return Compilation(plan, time.perf_counter() - start, out_of_memory=out_of_memory)
    seconds = time.perf_counter() - start
    return Compilation(
        plan,
        seconds,
        memory_usage(compiled, plan.mesh),
        estimate=estimate(compiled, plan.mesh),
        audit=audit(compiled, plan),
        compiled=compiled,
    )


def memory_usage(compiled: jax.stages.Compiled, mesh: LogicalMesh) -> MemoryUsage | None:
    """Memory per device that ``compiled`` uses; None where its compiler does not report it.

    On TPU the peak is the compiler's own. It counts arguments and results in the host's memory as the device's, which
    are taken off; with more temporaries there than on the device it is not the device's, which takes at most what is
    allocated. Other compilers' peak leaves temporaries out, so there it is arguments, results that alias none of them,
    and temporaries.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    arguments, results, aliased, temporaries, code = (
        int(getattr(found, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp", "generated_code")
    )
    total = arguments + results - aliased + temporaries
    peak = int(getattr(found, "peak_memory_in_bytes", 0)) if mesh.platform == "tpu" else 0
    on_host = [int(getattr(found, f"host_{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias", "temp")]
    carried = on_host[0] + on_host[1] - on_host[2]
    peak = peak - carried if peak else total
    if on_host[3]:
        peak = min(peak, int(getattr(found, "total_allocation_bytes", 0)) or peak)
    return MemoryUsage(arguments, results, aliased, temporaries, code, peak, carried + on_host[3])


def parse_out_of_memory(message: str) -> OutOfMemory | None:
    """Bytes needed and available in a compiler's out-of-memory message; None for any other error."""
    for pattern in _OUT_OF_MEMORY:
        if found := pattern.search(message):
            return OutOfMemory(_bytes(found[1], found[2]), _bytes(found[3], found[4]))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def _remedies(c: Compilation) -> list[str]:
    plan, over = c.plan, c.needed_bytes - c.available_bytes
    found: list[str] = []
    classes: Mapping[str, int] = dict(plan.memory.items())
    if not any(p.name == "recompute" for p in plan.passes) and classes["residuals"] >= classes["peak"] / 10:
        kept = size_text(classes["residuals"])
        found.append(f"passes: [..., 'recompute:full'] recomputes residuals of {kept} in the backward pass")
    if plan.strategy != "auto":
        found.append(f"strategy: auto in place of {plan.strategy}, which shards by one fixed scheme")
    if plan.memory.peak < c.available_bytes:
        budget = plan.memory.peak - over
        if budget > 0:
            predicted = f"the plan predicted a peak of only {size_text(plan.memory.peak)}"
            found.append(f"memory_budget: {budget // 2**20}MiB in the mesh, since {predicted}")
    found.append("a smaller batch, or a mesh of more devices")
    return found
