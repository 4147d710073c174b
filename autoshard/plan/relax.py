"""Which demand of the user, when dropped, lowers peak memory most: for the error where no layout fits the budget.

Demands are a strategy other than "auto"; the pins of an argument, with those of the results that replace it; the pins
of all results; that an argument which a result replaces is not donated; and that state is stored without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from autoshard.ir.program import Leaf, Program
from autoshard.jaxpr.paths import argument_name
from autoshard.plan.planner import PlanRequest
from autoshard.transforms.pad_state import pad_state, padded_shapes

MIN_GAIN_OF_ALL = 1.1
"""Dropping all demands is proposed only where dropping the best one alone leaves the peak this many times higher."""


class Relaxation(NamedTuple):
    """The step and the request without some demand, and a text that says which: "with ..." or "without ..."."""

    text: str
    program: Program
    request: PlanRequest


def best_relaxation(
    program: Program, request: PlanRequest, peak: Callable[[Program, PlanRequest], float]
) -> tuple[float, str]:
    """The lowest ``peak`` in bytes that dropping one demand, or all of them, leads to, and the text that says which.

    Infinite where there is none to drop.
    """
    single = [(peak(r.program, r.request), r.text) for r in relaxations(program, request)]
    best = min(single, default=(float("inf"), ""))
    if len(single) > 1:
        r = _relax_all(program, request)
        lowest = peak(r.program, r.request)
        best = (lowest, r.text) if lowest * MIN_GAIN_OF_ALL < best[0] else best
    return best


def relaxations(program: Program, request: PlanRequest) -> Iterator[Relaxation]:
    """Each demand dropped by itself."""
    if request.strategy != "auto":
        yield Relaxation("with strategy 'auto'", program, replace(request, strategy="auto"))
    result_of = dict(program.carries)
    names = [argument_name(leaf.path) for leaf in program.inputs]
    for name in dict.fromkeys(names):
        own = {i for i, n in enumerate(names) if n == name}
        if any(program.inputs[i].pin is not None for i in own):
            inputs = _unpinned(program.inputs, own)
            outputs = _unpinned(program.outputs, {result_of[i] for i in own if i in result_of})
            text = f"without the pins of {name}"
            yield Relaxation(text, replace(program, inputs=inputs, outputs=outputs), request)
        if any(i in result_of and not program.inputs[i].donated for i in own):
            donated = tuple(replace(x, donated=x.donated or i in own) for i, x in enumerate(program.inputs))
            yield Relaxation(f"with {name} donated", replace(program, inputs=donated), request)
    if shapes := padded_shapes(program):
        yield Relaxation("with pad_state=True", pad_state(program, shapes), request)
    if any(leaf.pin is not None for leaf in program.outputs):
        outputs = _unpinned(program.outputs, set(range(len(program.outputs))))
        yield Relaxation("without the pins of results", replace(program, outputs=outputs), request)


def _relax_all(program: Program, request: PlanRequest) -> Relaxation:
    """All demands dropped, one after the other."""
    texts: list[str] = []
    while (found := next(relaxations(program, request), None)) is not None:
        text, program, request = found
        texts.append(text)
    return Relaxation(" and ".join(texts), program, request)


def _unpinned(leaves: tuple[Leaf, ...], which: set[int]) -> tuple[Leaf, ...]:
    return tuple(replace(x, pin=None) if i in which else x for i, x in enumerate(leaves))
