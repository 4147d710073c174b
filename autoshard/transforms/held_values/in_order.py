"""A choice for values loop by loop, as numbers of layers of the whole step.

A user says in how many layers a value is made again: the first ones in order of execution, whatever loops they are in;
and in how many of the next it is on the host. So of a value that several loops have, the first loops make it again and
the last ones hold it. What the loops are to hold becomes such numbers here, and of numbers follows what each loop does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard import jaxpr as jx
from autoshard.transforms.held_values.names import LayerCounts, ResidualGroup
from autoshard.transforms.held_values.sets import LayerLoop, Price, choose_held, price_of_held


def choose_counts(
    loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], room: float, *, may_differ: bool = True
) -> tuple[dict[str, LayerCounts], Price]:
    """What becomes of each value in how many layers, by name, for least time within ``room`` bytes per device, and the
    price of that.

    Args:
      may_differ: whether the layers of a loop may differ.
    """
    part = room
    while True:
        chosen = choose_held(loops, part, may_differ=may_differ)
        counts = {g.name: _in_order(g, loops, _needing(g, loops, chosen), whole=not may_differ) for g in groups}
        price = price_of_held(loops, counts_by_loop(loops, groups, counts))
        if price.bytes < room + 1 or part <= 0:
            return counts, price
        part = max(0.0, part - (price.bytes - room))  # in order it takes more: another choice goes with a value


def price_of_counts(
    loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], counts: Mapping[str, LayerCounts]
) -> Price:
    """As `price_of_held`, of ``counts`` by name, of those layers that need the value."""
    ordered = {g.name: _in_order(g, loops, counts.get(g.name, LayerCounts())) for g in groups}
    return price_of_held(loops, counts_by_loop(loops, groups, ordered))


def counts_by_loop(
    loops: Sequence[LayerLoop], groups: Sequence[ResidualGroup], counts: Mapping[str, LayerCounts]
) -> list[dict[str, LayerCounts]]:
    """For each loop what becomes of each value in how many of its layers; less is made again and less on the host where
    unrolled layers do not all have the value."""
    found: list[dict[str, LayerCounts]] = [{} for _ in loops]
    for group in groups:
        parted = [*group.parted(counts.get(group.name, LayerCounts()))]
        for loop, of_loop in zip(loops, found, strict=True):
            inside = [(m.layers, made, sent - made) for m, made, sent in parted if m.eqn in loop.eqns]
            if inside:
                layers = sum(n for n, _, _ in inside)
                again, host = (loop.layers * sum(n[i] for n in inside) // layers for i in (1, 2))
                of_loop[group.name] = LayerCounts(again, host)
    return found


def _needing(
    group: ResidualGroup, loops: Sequence[LayerLoop], chosen: Sequence[Mapping[str, LayerCounts]]
) -> LayerCounts:
    """In how many layers that need it a value is made again or on the host, as each loop has it; rounded up."""
    found = [0, 0]
    for loop, counts in zip(loops, chosen, strict=True):
        if group.name in loop.needed:
            layers = sum(m.layers for m in group.members if m.eqn in loop.eqns)
            unnamed = LayerCounts(None)  # what no choice decides is made again
            for i, n in enumerate(counts.get(group.name, unnamed).of(loop.layers)):
                found[i] += -(-layers * n // loop.layers)
    return LayerCounts(*found)


def _in_order(
    group: ResidualGroup, loops: Sequence[LayerLoop], counts: LayerCounts, *, whole: bool = False
) -> LayerCounts:
    """The least numbers of first layers, and of next ones, with ``counts`` among them that need the value; ``whole``:
    of whole scans."""
    needing = {e for loop in loops if group.name in loop.needed for e in loop.eqns}
    again, host = counts.of(group.layers)
    first = _first(group, needing, again, whole)
    return LayerCounts(first, _first(group, needing, again + host, whole) - first if host else 0)


def _first(group: ResidualGroup, needing: set[jx.JaxprEqn], wanted: int, whole: bool) -> int:
    """The least number of first layers with ``wanted`` among them that ``needing`` equations are in."""
    if wanted and wanted >= sum(m.layers for m in group.members if m.eqn in needing):
        return group.layers
    found = 0
    for member in group.members:
        if wanted <= 0:
            break
        here = min(wanted, member.layers) if member.eqn in needing else 0
        wanted -= here
        found += here if here and not whole else member.layers
    return found
