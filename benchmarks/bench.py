"""autoshard's plan beside what people write by hand, by the account of the compilers for TPUs and GPUs.

    python -m benchmarks.bench tpu|gpu [--cache DIR] [--kept] [WORD ...]

Needs the extra ``tpu`` or ``gpu``, and neither chip. Of each cell (`benchmarks.cells`; with WORDs, those that have all
in their name) it prints what `benchmarks.baselines` come to, and autoshard, which is given the model as it stands. A
baseline that does not fit is tried again with every block made again in the backward pass; autoshard sees to that by
itself. "floor" is what the model's products take at the chips' peak, each computed once.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

import autoshard
from autoshard import jaxpr as jx
from autoshard.auditing import Audit, audit
from autoshard.compiling import refused
from autoshard.estimate import Estimate, estimate
from autoshard.hlo import collectives
from autoshard.mesh import LogicalMesh
from benchmarks.answers import Answer, answer, asked, compilers
from benchmarks.baselines import BASELINES, abstract, lowered
from benchmarks.cells import CELLS, COLUMNS, Cell
from benchmarks.zoo import Model

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One plan of a cell."""

    plan: str
    needs: int
    has: int
    estimate: Estimate | None
    """None: the compiler refused it."""
    sent: int
    """Bytes of all collectives, on each device."""
    compile_seconds: float
    plan_seconds: float = 0.0
    predicted: int = 0
    """Peak bytes that autoshard foresaw."""
    audit: Audit | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.needs <= self.has

    def __str__(self) -> str:
        e = self.estimate
        times = f"{e.seconds * 1e3:,.1f} | {e.bound * 1e3:,.1f} | {self.sent / GIB:,.2f}" if e else "- | - | -"
        planned = f"{self.plan_seconds:.1f}" if self.plan_seconds else ""
        fits = "yes" if self.fits else "**no**"
        return f"{self.plan} | {fits} | {self.needs / GIB:,.2f} | {times} | {self.compile_seconds:.0f} | {planned}"


def floor(model: Model, mesh: LogicalMesh) -> float:
    """Seconds that the products of a step take where all devices work at their peak."""

    def flops(jaxpr: jx.Jaxpr) -> float:
        total = 0.0
        for eqn in jaxpr.eqns:
            inside = sum(map(flops, jx.subjaxprs(eqn)))
            total += jx.contraction_flops(eqn) + inside * eqn.params.get("length", 1)
        return total

    closed = jax.make_jaxpr(model.step())(*abstract(model))
    return flops(closed.jaxpr) / mesh.hardware.peak("bfloat16") / mesh.size


def by_hand(cell: Cell, mesh: LogicalMesh, cache: Path | None, kept: bool) -> Iterator[Line]:
    """What the baselines come to."""
    real = mesh.concrete()
    for name, baseline in BASELINES.items():
        line = None
        for remat in (False, True):
            found = answer(lowered(cell.build(remat), baseline, real), mesh, cache, kept=kept)
            if found is None:
                break
            line = _line(name + " + remat" * remat, found, mesh)
            if line.fits:
                break
        if line is not None:
            yield line


def by_autoshard(cell: Cell, mesh: LogicalMesh, cache: Path | None, kept: bool) -> Iterator[Line]:
    """What autoshard comes to."""
    model = cell.build(False)
    step = autoshard.jit(model.step(), mesh=COLUMNS[cell.column].mesh(), donate_argnums=0)
    start = time.perf_counter()
    plan = step.plan(*abstract(model))
    seconds = time.perf_counter() - start
    options = str(sorted(plan.compiler_options))
    found = answer(step.lower(*abstract(model)), mesh, cache, options=options, kept=kept)
    if found is not None:
        checked = None if found.refusal else audit(found, plan)
        again = "".join(" + " + p.partition(": ")[0] for p in plan.passes if p.startswith("recompute"))
        yield _line(f"autoshard{again}", found, mesh, seconds, plan.memory.peak, checked)


def _line(
    plan: str, found: Answer, mesh: LogicalMesh, seconds: float = 0.0, predicted: int = 0, checked: Audit | None = None
) -> Line:
    has = int(mesh.hardware.memory)
    if found.refusal:
        said = refused(found.refusal)
        needs, has = (said.needs, said.has) if said else (0, has)
        return Line(plan, needs, has, None, 0, found.seconds, seconds, predicted)
    used = found.usage(mesh)
    sent = sum(c.total for c in collectives(found.text, mesh))
    return Line(
        plan, used.peak if used else 0, has, estimate(found, mesh), sent, found.seconds, seconds, predicted, checked
    )


def main() -> None:
    cache, kept, (platform, *words) = asked(sys.argv[1:])
    ratios: list[float] = []
    print(f"JAX {jax.__version__}, {compilers()}\n")
    for cell in CELLS:
        if COLUMNS[cell.column].platform != platform or not all(w in str(cell) for w in words):
            continue
        mesh = COLUMNS[cell.column].mesh().mesh()
        print(f"## {cell}: {cell.says}\n\n{mesh}; floor {floor(cell.build(False), mesh) * 1e3:,.1f} ms\n")
        print("| plan | fits | peak, GiB | sum, ms | bound, ms | sent, GiB | compile, s | plan, s |")
        print("|---|---|--:|--:|--:|--:|--:|--:|", flush=True)
        ours, others = [], []
        for lines, made in ((ours, by_autoshard), (others, by_hand)):
            for line in made(cell, mesh, cache, kept):
                lines.append(line)
                print(f"| {line} |", flush=True)
        rest = [line.estimate.seconds for line in others if line.estimate and line.fits]
        for line in ours:
            print(f"\nForeseen: {line.predicted / GIB:,.2f} GiB.", end="")
            if line.audit is not None:
                clean = "clean" if line.audit.clean else "NOT CLEAN"
                print(
                    f" Audit {clean}."
                    + "".join(f"\n- {text}" for text, row in line.audit.lines() if row and row.unexplained),
                    end="",
                )
            if rest and line.estimate and line.fits:
                ratios.append(line.estimate.seconds / min(rest))
                print(f" {ratios[-1]:.2f} of the best by hand.", end="")
            print("\n", flush=True)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(ratios)} cells: geometric mean {mean:.2f} of the best by hand, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
