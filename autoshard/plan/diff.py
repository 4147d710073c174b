"""compare: what sets one plan of a step apart from another, and what that costs where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoshard.errors import PlanError
from autoshard.machine.collective import collective_seconds
from autoshard.plan.document import Section, Table, plural, shorten_paths
from autoshard.plan.grouping import group_arrays
from autoshard.plan.record import PlanRecord
from autoshard.units import size_text, time_text

ROWS = 24
"""Rows that a table has at most."""


def compare(plan: PlanRecord, other: PlanRecord) -> Iterator[Section]:
    """What changes from ``plan`` to ``other``, in reading order; the first section is the heading.

    Raises:
      PlanError: they are of different steps; names the first argument that differs.
    """
    _check(plan, other)
    yield _heading(plan, other)
    yield _arguments(plan, other)
    yield _time(plan, other)
    yield _memory(plan, other)


def _check(plan: PlanRecord, other: PlanRecord) -> None:
    kinds = [[(p.path, p.shape, p.dtype) for p in each.inputs] for each in (plan, other)]
    for (path, shape, dtype), theirs in zip(*kinds, strict=False):
        if (path, shape, dtype) != theirs:
            raise PlanError(
                f"the plans are of different steps: {path} is {dtype}{list(shape)} in one, and in the other "
                f"{theirs[0]} is {theirs[2]}{list(theirs[1])}"
            )
    if len(plan.inputs) != len(other.inputs):
        raise PlanError(
            f"the plans are of different steps: one has {len(plan.inputs)} argument arrays, the other "
            f"{len(other.inputs)}"
        )


def _heading(plan: PlanRecord, other: PlanRecord) -> Section:
    words = [
        f"A call takes {time_text(other.cost.seconds)} instead of {time_text(plan.cost.seconds)}"
        f"{_share(plan.cost.seconds, other.cost.seconds)}, and {size_text(other.memory.peak)} on a device instead of "
        f"{size_text(plan.memory.peak)}{_share(plan.memory.peak, other.memory.peak)}."
    ]
    if plan.passes != other.passes:
        words.append(f"Passes: {'; '.join(other.passes) or 'none'} instead of {'; '.join(plan.passes) or 'none'}.")
    names = [f"{p.strategy} on {p.mesh}" for p in (plan, other)]
    return Section(f"From {names[0]} to {names[1]}", tuple(words))


def _share(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})" if before else ""


def _arguments(plan: PlanRecord, other: PlanRecord) -> Section:
    theirs = {p.path: p.spec for p in other.inputs}
    moved = [p for p in plan.inputs if theirs[p.path] != p.spec]
    if not moved:
        return Section("Arguments", ("All lie alike.",))
    alike: dict[str, list[int]] = {}
    for i, p in enumerate(moved):
        alike.setdefault(str(theirs[p.path]), []).append(i)
    rows = [
        (family.path, str(len(family.places)), str(family.first.spec), spec)
        for spec, places in alike.items()
        for family in group_arrays([moved[i] for i in places])
    ]
    words = f"{plural(len(moved), 'array')} of {len(plan.inputs)} lie otherwise."
    return Section("Arguments", (words,), _table(("array", "arrays", "here", "there"), rows, {1}))


def _time(plan: PlanRecord, other: PlanRecord) -> Section:
    """Seconds by what is sent for which line, and of compute; what differs most first."""
    here, there = _seconds(plan), _seconds(other)
    order = sorted({*here, *there}, key=lambda k: (-abs(there[k] - here[k]), k))
    rows = [
        (signed_time(there[k] - here[k]), time_text(here[k]), time_text(there[k]), *k)
        for k in order
        if abs(there[k] - here[k]) > 1e-9
    ]
    if not rows:
        return Section("Time", ("It goes where it went.",))
    return Section("Time", (), _table(("difference", "here", "there", "of", "over", "for"), rows, {0, 1, 2}))


def _seconds(plan: PlanRecord) -> Counter[tuple[str, str, str]]:
    found = Counter({("compute", "", ""): plan.cost.compute})
    for c in plan.cost.collectives:
        seconds = collective_seconds(c.kind, c.axes or (), c.bytes, plan.mesh) * c.count
        found[c.kind, "+".join(c.axes or ()), shorten_paths(c.source)] += seconds  # type: ignore[assignment]
    return found  # type: ignore[return-value]


def signed_time(seconds: float) -> str:
    """A difference of times, with its sign."""
    return f"{'-' if seconds < 0 else '+'}{time_text(abs(seconds))}"


def _memory(plan: PlanRecord, other: PlanRecord) -> Section:
    pairs = zip(plan.memory.items(), other.memory.items(), strict=True)
    rows = [(name, size_text(here), size_text(there)) for (name, here), (_, there) in pairs if here != there]
    if not rows:
        return Section("Memory", ("The same.",))
    return Section("Memory", (), _table(("class", "here", "there"), rows, {1, 2}))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], numbers: set[int]) -> Table:
    rest = [(f"and {len(rows) - ROWS} more", *[""] * (len(head) - 1))] if len(rows) > ROWS else []
    return Table(head, (*rows[:ROWS], *rest), frozenset(numbers))
