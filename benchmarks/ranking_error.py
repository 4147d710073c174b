"""Predicted step times against those of what was compiled, by the order in which they put plans of one program.

    python -m benchmarks.ranking_error [tpu|gpu] [--cache DIR] [--kept] [WORD]

Needs the extra ``tpu`` or ``gpu``, and neither chip. Of each case (`benchmarks.target_cases`; with WORD, those that
have it in their name) the seconds that the plan predicts beside those of `autoshard.backend.estimate`: the TPU
compiler's cycles times trip counts, or the roofline of what the GPU compiler made, and its collectives on the link
model. Then Kendall's tau over all pairs of plans of one program, of which the compiler's times differ by more than
10 %, below which its estimates are noise.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from autoshard.backend.estimate import estimate
from benchmarks.target_cases import answers, options

NOISE = 0.1


def tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau over differences (predicted, found): 1 where all have the same sign, -1 where none has."""
    agree = [(a > 0) - (a < 0) == (b > 0) - (b < 0) for a, b in pairs]
    return 2 * sum(agree) / len(agree) - 1


def main() -> None:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    print(
        "| program | mesh | strategy | predicted: compute, transfers, sum | compiler: compute, transfers, sum | ratio |"
    )
    print("|---|---|---|--:|--:|--:|")
    for case, plan, said, _ in answers(options()):
        a, b = plan.cost, estimate(said, plan.mesh)
        ms = [" ".join(f"{x * 1e3:.2f}" for x in (c.compute, c.transfers, c.seconds)) for c in (a, b)]
        row = f"| {case} | {case.mesh} | {case.strategy} | {ms[0]} | {ms[1]} | {a.seconds / b.seconds:.2f} |"
        print(row + ("" if b.exact else " trips unknown"), flush=True)
        found[case.program].append((a.seconds, b.seconds))
    pairs: list[tuple[float, float]] = []
    for times in found.values():
        for (a, b), (c, d) in itertools.combinations(times, 2):
            if max(b, d) > (1 + NOISE) * min(b, d):
                pairs.append((a - c, b - d))
    print(f"\n{len(pairs)} pairs: Kendall's tau {tau(pairs):.2f}")


if __name__ == "__main__":
    main()
