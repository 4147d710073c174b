"""compiling: what the compiler of a step's target makes of it, held against its plan and against the chip."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from autoshard.backend.audit import Audit, audit
from autoshard.backend.estimate import Estimate, estimate, total_seconds
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text

_OUT_OF_MEMORY = (
    re.compile(r"required for .*?\(([\d.]+)([KMGT]?)i?B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)i?B?\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm"),
)
"""How the TPU compiler says what a program needs and what there is; binary units."""


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes per device, by the compiler's account."""

    arguments: int
    results: int
    aliased: int
    """Of results, what takes the room of donated arguments."""
    temporaries: int
    code: int
    peak: int
    """At the moment when most is held."""


@dataclass(frozen=True)
class Refusal:
    """The compiler would not have a program for lack of memory: bytes per device needed and there."""

    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Compilation:
    """A planned step as its target's compiler made it; what the compiler refused has no usage, estimate or audit."""

    plan: PlanRecord
    compile_seconds: float
    """What compiling took."""
    usage: MemoryUsage | None = None
    refusal: Refusal | None = None
    estimate: Estimate | None = None
    audit: Audit | None = None

    @property
    def needed_bytes(self) -> int:
        """Bytes per device."""
        if self.refusal is not None:
            return self.refusal.needed_bytes
        return self.usage.peak if self.usage else 0

    @property
    def available_bytes(self) -> int:
        """Bytes per device that there are."""
        return self.refusal.available_bytes if self.refusal is not None else int(self.plan.mesh.hardware.memory)

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory that it needs."""
        return self.refusal is None and self.needed_bytes <= self.available_bytes

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to change where it does not fit, likeliest first."""
        return () if self.fits else tuple(_remedies(self))

    def collective_seconds(self, c: Collective) -> float:
        """What all runs of an emitted collective take on the link model."""
        return total_seconds(c, self.plan.mesh)

    def as_json(self) -> dict[str, Any]:
        """The account as plain JSON values: bytes are per device, times are seconds.

        - ``mesh``, ``devices``, ``strategy``, ``compiler_options``, ``compile_seconds``
        - ``fits``, ``needs``, ``has``, ``remedies``
        - ``memory``: ``planned`` and, unless refused, ``compiled``, both by class
        - ``estimate``: ``compute``, ``transfers``, ``sum``, ``bound``, ``cycles``, ``exact``; null where refused
        - ``collectives``: emitted ones, each with ``kind``, ``axes``, ``bytes``, ``count``, ``source``, ``operation``,
          ``seconds``
        - ``refined``: the layouts that were compiled to choose from, each as `decisions.Trial` has it
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
            "estimate": asdict(e) | {"sum": e.seconds, "bound": e.bound} if e else None,
            "collectives": [asdict(c) | {"seconds": self.collective_seconds(c)} for c in emitted],
            "refined": [asdict(t) for t in self.plan.refined],
            "audit": self.audit.as_json() if self.audit else None,
        }


def compile_plan(plan: PlanRecord, lowered: jax.stages.Lowered) -> Compilation:
    """Compiles a step that was lowered as ``plan`` says, and reads what came of it.

    Raises:
      JaxRuntimeError: the compiler refuses it for anything but memory.
    """
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_refusal(str(error))
        if refusal is None:
            raise
        return Compilation(plan, time.perf_counter() - start, refusal=refusal)
    seconds = time.perf_counter() - start
    return Compilation(
        plan,
        seconds,
        memory_usage(compiled, plan.mesh),
        estimate=estimate(compiled, plan.mesh),
        audit=audit(compiled, plan),
    )


def memory_usage(compiled: jax.stages.Compiled, mesh: LogicalMesh) -> MemoryUsage | None:
    """What ``compiled`` takes of a device's memory; None where its compiler does not say.

    The peak is the TPU compiler's own; that of other compilers leaves temporaries out, so there it is the sum of all.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    given, made, shared, between, code = (
        int(getattr(found, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp", "generated_code")
    )
    whole = given + made - shared + between
    peak = int(getattr(found, "peak_memory_in_bytes", 0)) if mesh.hardware.clock else 0
    return MemoryUsage(given, made, shared, between, code, peak or whole)


def parse_refusal(message: str) -> Refusal | None:
    """What a compiler's message says of memory; None where it is about something else."""
    for pattern in _OUT_OF_MEMORY:
        if found := pattern.search(message):
            return Refusal(_bytes(found[1], found[2]), _bytes(found[3], found[4]))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def _remedies(c: Compilation) -> list[str]:
    plan, over = c.plan, c.needed_bytes - c.available_bytes
    found: list[str] = []
    classes: Mapping[str, int] = dict(plan.memory.items())
    if not any(p.name == "recompute" for p in plan.passes) and classes["residuals"] >= classes["peak"] / 10:
        kept = size_text(classes["residuals"])
        found.append(f"passes: [..., 'recompute:full'] makes again in the backward pass what holds {kept}")
    if plan.strategy != "auto":
        found.append(f"strategy: auto in place of {plan.strategy}, which splits only what it names")
    if plan.memory.peak < c.available_bytes:
        budget = plan.memory.peak - over
        missed = f"planning foresaw {size_text(plan.memory.peak)}"
        if budget > 0:
            found.append(f"memory_budget: {budget // 2**20}MiB in the mesh, as {missed}")
    found.append("a smaller batch, or a mesh of more devices")
    return found
