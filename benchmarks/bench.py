"""autoshard's plan beside what people write by hand, by the account of the compilers for TPUs and GPUs.

    python -m benchmarks.bench tpu|gpu [--cache DIR] [--by-hand] [WORD ...]
    python -m benchmarks.bench table

Needs the extra ``tpu`` or ``gpu``, and neither chip. Of each cell (`benchmarks.cells`; with WORDs, those that have all
in their name) it measures what `benchmarks.baselines` come to, and autoshard, which is given the model as it stands;
with ``--by-hand``, the baselines alone. A baseline gets the first of its policies for what is recomputed that fits,
from the one that recomputes nothing on; autoshard decides that by itself. "floor" is what the model's products take at
the chips' peak, each computed once.

Figures are kept (`benchmarks.figures`) under a digest of the program, the machine and the compiler: what has not
changed is not compiled again, and what the cache has is read anew. ``table`` prints all that is kept.
"""

from __future__ import annotations

import datetime
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.backend.compilation import parse_out_of_memory
from autoshard.backend.estimate import estimate
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.mesh import LogicalMesh
from benchmarks.answers import Answer, answer, asked, compilers, digest
from benchmarks.baselines import BASELINES, POLICIES, abstract, lowered, options
from benchmarks.cells import CELLS, COLUMNS, Cell
from benchmarks.figures import Kept, Line, details, summary
from benchmarks.zoo import Model


def floor(model: Model, mesh: LogicalMesh) -> float:
    """Seconds that the products of a step take where all devices work at their peak."""

    def flops(jaxpr: jx.Jaxpr) -> float:
        total = 0.0
        for eqn in jaxpr.eqns:
            inside = sum(map(flops, jx.subjaxprs(eqn)))
            total += jx.contraction_flops(eqn) + inside * eqn.params.get("length", 1)
        return total

    closed = jax.make_jaxpr(model.step())(*abstract(model))
    return flops(closed.jaxpr) / mesh.hardware.peak_flops("bfloat16") / mesh.size


def by_hand(cell: Cell, mesh: LogicalMesh, cache: Path | None, kept: Kept) -> Iterator[str]:
    """Measures the baselines; their digests."""
    model, real = cell.build(), mesh.concrete()
    for name, baseline in BASELINES.items():
        key, given = "", str(sorted(options(mesh.hardware).items()))
        for policy, saved in POLICIES.items():
            program = lowered(model, baseline, real, mesh.hardware, saved=saved)
            before, key = key, digest(program, mesh, given)
            if key == before:  # a model without blocks
                break
            found = answer(program, mesh, cache, options=given, kept=key in kept.lines)
            if found is not None:
                kept.lines[key] = _line(f"{name} + {policy}".removesuffix(" + "), False, found, mesh)
            if kept.lines[key].fits:
                break
        yield key


def by_autoshard(cell: Cell, mesh: LogicalMesh, cache: Path | None, kept: Kept) -> Iterator[str]:
    """Measures autoshard; its digest."""
    model = cell.build()
    step = autoshard.jit(model.step(), mesh=COLUMNS[cell.column].mesh(), donate_argnums=0)
    start = time.perf_counter()
    plan = step.plan(*abstract(model))
    seconds = time.perf_counter() - start
    options = str(sorted(plan.compiler_options))
    program = step.lower(*abstract(model))
    key = digest(program, mesh, options)
    found = answer(program, mesh, cache, options=options, kept=key in kept.lines)
    if found is not None:
        again = "".join(" + " + p.written for p in plan.passes if p.name in ("losses", "recompute"))
        differences, wire = None, None
        if not found.refusal:
            audited = audit(found, plan)
            differences = tuple(text for text, row in audited.lines() if row and row.unexplained)
            planned, sent = (sum(c.wire_bytes(mesh) for c in side) for side in (audited.planned, audited.emitted))
            wire = sent / planned if planned else None
        line = _line(f"autoshard{again}", True, found, mesh, seconds, plan.memory.peak, differences)
        kept.lines[key] = replace(line, predicted_seconds=plan.cost.compute + plan.cost.sent, wire=wire)
    kept.lines[key] = replace(kept.lines[key], predicted_step=plan.cost.seconds)
    yield key


def _line(
    plan: str,
    ours: bool,
    found: Answer,
    mesh: LogicalMesh,
    seconds: float | None = None,
    predicted: int | None = None,
    differences: tuple[str, ...] | None = None,
) -> Line:
    has, today = int(mesh.hardware.memory), datetime.date.today().isoformat()
    if found.refusal:
        said = parse_out_of_memory(found.refusal)
        needs, has = (said.needed_bytes, said.available_bytes) if said else (0, has)
        return Line(plan, ours, needs, has, None, None, None, found.seconds, seconds, predicted, None, today)
    used, took = found.memory_usage(mesh), estimate(found, mesh)
    needs = used.peak if used else 0
    sent = sum(c.total_bytes for c in collectives(found.text, mesh))
    return Line(
        plan,
        ours,
        needs,
        has,
        took.seconds,
        took.overlapped,
        sent,
        found.seconds,
        seconds,
        predicted,
        differences,
        today,
        scheduled=took.scheduled,
    )


def main() -> None:
    cache, only, (platform, *words) = asked(sys.argv[1:], "--by-hand")
    if platform == "table":
        every = [Kept.of_platform(p) for p in ("tpu", "gpu")]
        for scheduled in (True, False):
            print(*summary(every, scheduled=scheduled), "", sep="\n")
        for kept, cell in itertools.product(every, CELLS):
            if str(cell) in kept.cells:
                print("", *details(kept, cell), sep="\n")
        return
    kept = Kept.of_platform(platform)
    print(f"JAX {jax.__version__}, {compilers()}\n")
    for cell in CELLS:
        if COLUMNS[cell.column].platform != platform or not all(w in str(cell) for w in words):
            continue
        mesh = COLUMNS[cell.column].mesh().mesh()
        kept.floors[str(cell)] = floor(cell.build(), mesh)
        before = [key for key in kept.cells.get(str(cell), ()) if key in kept.lines and kept.lines[key].ours]
        ours = before if only else list(by_autoshard(cell, mesh, cache, kept))
        kept.cells[str(cell)] = ours
        for key in by_hand(cell, mesh, cache, kept):
            kept.cells[str(cell)].append(key)
            kept.write()
        kept.write()
        print(*details(kept, cell), "", sep="\n", flush=True)
    print(*summary([kept]), sep="\n")


if __name__ == "__main__":
    main()
