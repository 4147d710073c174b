"""A choice of held values loop by loop, as numbers of layers of the whole step.

A user says in how many layers a value is made again: the first ones in order of execution, whatever loops they are in.
So of a value that several loops have, the first loops make it again and the last ones hold it. What the loops are to
hold becomes such numbers here, and of numbers follows what each loop holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.transforms.held_values.names import ResidualGroup
from autoshard.transforms.held_values.sets import LayerLoop, Price, choose_held, price_of_held


def choose_again(
    loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], room: float, *, may_differ: bool = True
) -> tuple[dict[str, int], Price]:
    """In how many layers each value is made again, by name, for least time within ``room`` bytes per device, and the
    price of that.

    Args:
      may_differ: whether the layers of a loop may hold different values.
    """
    part = room
    while True:
        chosen = choose_held(loops, part, may_differ=may_differ)
        again = {g.name: _in_order(g, loops, _again(g, loops, chosen), whole=not may_differ) for g in groups}
        price = price_of_held(loops, held_by_loop(loops, groups, again))
        if price.bytes < room + 1 or part <= 0:
            return again, price
        part = max(0.0, part - (price.bytes - room))  # in order it takes more: another set goes with a value


def price_of_again(loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], again: Mapping[str, int]) -> Price:
    """As `price_of_held`, where the backward part makes each value again in ``again`` layers, by name, of those that it
    reads."""
    counts = {g.name: _in_order(g, loops, again.get(g.name, 0)) for g in groups}
    return price_of_held(loops, held_by_loop(loops, groups, counts))


def held_by_loop(
    loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], again: Mapping[str, int]
) -> list[dict[str, int]]:
    """For each loop, in how many of its layers each value is held, where the first ``again`` of all layers make it
    again; rounded up where unrolled layers do not all have the value."""
    found: list[dict[str, int]] = [{} for _ in loops]
    for group in groups:
        first = [*group.first(again.get(group.name, 0))]
        for loop, held in zip(loops, found, strict=True):
            inside = [(m.layers, n) for m, n in first if m.eqn in loop.eqns]
            if inside:
                layers = sum(n for n, _ in inside)
                held[group.name] = -(-loop.layers * (layers - sum(n for _, n in inside)) // layers)
    return found


def _again(group: ResidualGroup, loops: Sequence[LayerLoop], held: Sequence[Mapping[str, int]]) -> int:
    """In how many layers that need it a value is made again, where each loop holds it in ``held``; rounded up."""
    found = 0
    for loop, counts in zip(loops, held, strict=True):
        if group.name in loop.needed:
            layers = sum(m.layers for m in group.members if m.eqn in loop.eqns)
            found += -(-layers * (loop.layers - counts.get(group.name, 0)) // loop.layers)
    return found


def _in_order(group: ResidualGroup, loops: Sequence[LayerLoop], again: int, *, whole: bool = False) -> int:
    """The least number of first layers with ``again`` among them that need the value; ``whole``: of whole scans."""
    needing = {e for loop in loops if group.name in loop.needed for e in loop.eqns}
    if again and again >= sum(m.layers for m in group.members if m.eqn in needing):
        return group.layers
    found = 0
    for member in group.members:
        if again <= 0:
            break
        here = min(again, member.layers) if member.eqn in needing else 0
        again -= here
        found += here if here and not whole else member.layers
    return found
