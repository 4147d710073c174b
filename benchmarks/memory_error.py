"""Predicted memory against the account of the compiler for TPUs or GPUs.

    python -m benchmarks.memory_error [v5e|v5p|v6e|h100] [--cache DIR] [--kept] [WORD]

Needs the extra ``tpu`` or ``gpu``, and neither chip. For each case (`benchmarks.target_cases`; with WORD, those that
have it in their name; with --kept, those whose answer is in DIR) the peak bytes per device that the plan predicts,
beside the compiler's. On TPU that is its `peak_memory_in_bytes`, and not the sum of arguments and temporaries, for it
is what it holds against the chip's memory: it compiles programs of which the sum is more. On GPU it is that sum.
"""

from __future__ import annotations

import statistics

from benchmarks.target_cases import MIB, answers, options


def main() -> None:
    errors: list[float] = []
    print("| program | mesh | strategy | predicted MiB | compiler MiB | error | plan s | compile s |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for case, plan, found, seconds in answers(options()):
        used = found.memory_usage(plan.mesh)
        if used is None:
            print(
                f"| {case} | {case.mesh} | {case.strategy} | {plan.memory.peak / MIB:,.0f} | refused | | | |",
                flush=True,
            )
            continue
        errors.append(plan.memory.peak / used.peak - 1)
        sizes = f"{plan.memory.peak / MIB:,.0f} | {used.peak / MIB:,.0f} | {errors[-1]:+.1%}"
        print(f"| {case} | {case.mesh} | {case.strategy} | {sizes} | {seconds:.1f} | {found.seconds:.0f} |", flush=True)
    off = [abs(e) for e in errors]
    print(f"\n{len(off)} cases: median error {statistics.median(off):.1%}, worst {max(off):.1%}")


if __name__ == "__main__":
    main()
