"""Whether the compiler for TPUs or GPUs takes what a plan says fits, with a twentieth of the memory in reserve.

    python -m benchmarks.fits [v5e|v5p|v6e|h100] [--cache DIR] [WORD]

Needs the extra ``tpu`` or ``gpu``, and neither chip. Programs grow by their batch until their plan fills a chip's
memory but for that twentieth; then the compiler is asked (with WORD, of those that have it in their name). That for
TPUs refuses what does not fit; that for GPUs says what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

import autoshard
from autoshard.errors import MemoryBudgetError
from autoshard.runtime.plan import Plan
from benchmarks.answers import answer
from benchmarks.target_cases import MESHES, MIB, StepAndShapes, conv, decoder, experts, mesh, mlp, options

RESERVE = 0.05
GROWN: Mapping[str, Callable[[int], StepAndShapes]] = {
    "decoder-scanned": lambda n: decoder(n, layers=4, d_model=1024, heads=8, d_ff=4096, vocab=16384, seq=1024),
    "decoder-unrolled": lambda n: decoder(n, layers=2, d_model=768, heads=6, vocab=8192, seq=1024, scan=False),
    "experts": lambda n: experts(batch=n, seq=512, width=1024, hidden=4096, count=8, layers=4),
    "mlp": lambda n: mlp(batch=256 * n, width=2048, hidden=8192, layers=3),
    "conv": lambda n: conv(batch=16 * n, size=64, widths=(128, 256)),
}
"""Programs by their batch, a multiple of the number of devices."""


def filled(name: str, strategy: str, machine: str) -> tuple[int, Plan, jax.stages.Lowered]:
    """The largest batch whose plan leaves the reserve, within a sixteenth of it, its plan, and the step lowered."""
    where = mesh(machine, MESHES[machine][0])
    budget = where.mesh().hardware.memory * (1 - RESERVE)

    def step(batch: int) -> tuple[autoshard.Step, StepAndShapes]:
        program = GROWN[name](batch)
        # No pass recomputes: the residuals that the step asks for are the ones that are kept in memory.
        passes = ("dead_code", "one_hot", "transposed_products", "sum_products", "pad_uneven")
        made = autoshard.jit(
            program[0], mesh=where, strategy=strategy, memory_budget=budget, passes=passes, donate_argnums=0
        )
        return made, program

    def fits(batch: int) -> bool:
        made, (_, *given) = step(batch)
        try:
            made.plan(*given)
        except MemoryBudgetError:
            return False
        return True

    low = 16
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(16, low // 16):
        middle = (low + high) // 32 * 16
        low, high = (middle, high) if fits(middle) else (low, middle)
    made, (_, *given) = step(low)
    return low, made.plan(*given), made.lower(*given)


def main() -> None:
    chosen = options()
    print("| program | strategy | batch | predicted MiB | compiler MiB | taken |")
    print("|---|---|--:|--:|--:|---|")
    for name in GROWN:
        for strategy in ("auto", "fsdp"):
            if chosen.word not in f"{name} {strategy}":
                continue
            batch, plan, lowered = filled(name, strategy, chosen.machine)
            found = answer(lowered, plan.mesh, chosen.cache)
            used = found.memory_usage(plan.mesh) if found is not None else None
            said = f"- | NO: {found.refusal[:200]}" if found is not None else "- | -"
            if used is not None:
                taken = "yes" if used.peak <= plan.mesh.hardware.memory else "NO"
                said = f"{used.peak / MIB:,.0f} | {taken}"
            print(f"| {name} | {strategy} | {batch} | {plan.memory.peak / MIB:,.0f} | {said} |", flush=True)


if __name__ == "__main__":
    main()
