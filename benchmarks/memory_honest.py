"""Predicted memory against the TPU compiler's own account of it.

    python -m benchmarks.memory_honest [--cache DIR] [--kept] [WORD]

Needs the extra ``tpu``, no TPU. For each case (`benchmarks.tpu_cases`; with WORD, those that have it in their name;
with --kept, those whose answer is in DIR) the peak bytes per device that the plan predicts, beside the compiler's
`peak_memory_in_bytes`. That, and not the sum of arguments and temporaries, is what it holds against the chip's memory:
it compiles programs of which the sum is more.
"""

from __future__ import annotations

import statistics

from benchmarks.tpu_cases import MIB, answers, options


def main() -> None:
    errors: list[float] = []
    print("| program | mesh | strategy | predicted MiB | compiler MiB | error | plan s | compile s |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for case, plan, found, seconds in answers(options()):
        errors.append(plan.memory.peak / found.peak - 1)
        sizes = f"{plan.memory.peak / MIB:,.0f} | {found.peak / MIB:,.0f} | {errors[-1]:+.1%}"
        print(f"| {case} | {case.mesh} | {case.strategy} | {sizes} | {seconds:.1f} | {found.seconds:.0f} |", flush=True)
    off = [abs(e) for e in errors]
    print(f"\n{len(off)} cases: median error {statistics.median(off):.1%}, worst {max(off):.1%}")


if __name__ == "__main__":
    main()
