"""relax: what of that which was asked for could be let go of, where nothing fits in memory.

A strategy other than "auto"; the pins of an argument, and of the results that replace it; the pins of all results; that
a state which is replaced is not donated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.ir.program import Leaf, Program
from autoshard.plan.planner import PlanRequest

Relaxed = tuple[str, Program, PlanRequest]
"""What was done, as in "with ..." or "without ..."; the step and what is asked of it then."""

_NAME = re.compile(r"\w+")


def best_relaxation(program: Program, request: PlanRequest, peak: Callable[[Program, PlanRequest], float]) -> tuple[float, str]:
    """The least ``peak`` that letting go of one thing, or of all, comes to, and what that is; infinite if of nothing.

    All is let go of only where one alone keeps over a tenth more.
    """
    alone = [(peak(relaxed, then), words) for words, relaxed, then in relaxations(program, request)]
    best = min(alone, default=(float("inf"), ""))
    if len(alone) > 1:
        words, relaxed, then = _all(program, request)
        every = peak(relaxed, then), words
        best = every if every[0] * 1.1 < best[0] else best
    return best


def relaxations(program: Program, request: PlanRequest) -> Iterator[Relaxed]:
    """One relaxation each."""
    if request.strategy != "auto":
        yield "with strategy 'auto'", program, replace(request, strategy="auto")
    after = dict(program.carries)
    for name in dict.fromkeys(_argument(leaf) for leaf in program.inputs):
        mine = {i for i, leaf in enumerate(program.inputs) if _argument(leaf) == name}
        if any(program.inputs[i].pin is not None for i in mine):
            inputs = _unpinned(program.inputs, mine)
            outputs = _unpinned(program.outputs, {after[i] for i in mine if i in after})
            yield f"without the pins of {name}", replace(program, inputs=inputs, outputs=outputs), request
        if any(i in after and not program.inputs[i].donated for i in mine):
            given = tuple(replace(x, donated=x.donated or i in mine) for i, x in enumerate(program.inputs))
            yield f"with {name} donated", replace(program, inputs=given), request
    if any(leaf.pin is not None for leaf in program.outputs):
        outputs = _unpinned(program.outputs, set(range(len(program.outputs))))
        yield "without the pins of results", replace(program, outputs=outputs), request


def _all(program: Program, request: PlanRequest) -> Relaxed:
    """All that there are, one after the other."""
    done: list[str] = []
    while (found := next(relaxations(program, request), None)) is not None:
        words, program, request = found
        done.append(words)
    return " and ".join(done), program, request


def _argument(leaf: Leaf) -> str:
    """The name of the argument that a leaf is of."""
    found = _NAME.match(leaf.path)
    return found[0] if found else leaf.path


def _unpinned(leaves: tuple[Leaf, ...], which: set[int]) -> tuple[Leaf, ...]:
    return tuple(replace(x, pin=None) if i in which else x for i, x in enumerate(leaves))
