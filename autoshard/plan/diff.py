"""What differs between two plans of one step: specs, and what that costs at which source line. Of two steps: the specs
of the arguments that both take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from autoshard.errors import PlanError
from autoshard.machine.collective import collective_seconds
from autoshard.plan.decisions import Place
from autoshard.plan.document import Section, Table, plural, short_source
from autoshard.plan.grouping import group_arrays
from autoshard.plan.record import PlanRecord
from autoshard.plan.shared_arguments import shared_arguments
from autoshard.units import size_text, time_text

MAX_ROWS = 24
"""Most rows of a table."""


def compare_plans(plan: PlanRecord, other: PlanRecord) -> Iterator[Section]:
    """What changes from ``plan`` to ``other``; the first section is the heading. Of plans of two steps, how what both
    take differs.

    Raises:
      PlanError: they are of different steps that share no argument; names the first that differs.
    """
    arrays = [[(p.path, p.shape, p.dtype) for p in each.inputs] for each in (plan, other)]
    shared = shared_arguments(arrays[0], other.inputs)
    if arrays[0] != arrays[1] and shared:
        yield _disagreement(plan, other, shared)
        return
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


def _disagreement(plan: PlanRecord, other: PlanRecord, shared: Mapping[int, Place]) -> Section:
    """Which of the ``shared`` arguments, places of ``other``, have another spec than in ``plan``, of another step."""
    title = f"What {plan.name} and {other.name} both take"
    ours = {i: plan.inputs[i] for i in shared}
    differ = [i for i, p in ours.items() if p.where != shared[i].where or plan.mesh != other.mesh]
    if not differ:
        return Section(
            title, (f"{plural(len(shared), 'array')}, with the same specs: nothing moves between the steps.",)
        )
    sentence = (
        f"{len(differ)} of {plural(len(shared), 'array')} {'has' if len(differ) == 1 else 'have'} other specs, and "
        "move at every change of step; plan one like= the other."
    )
    by_spec: dict[str, list[Place]] = {}
    for i in differ:
        by_spec.setdefault(shared[i].where, []).append(ours[i])
    rows = [
        (group.path, str(len(group.places)), group.first.where, spec)
        for spec, places in by_spec.items()
        for group in group_arrays(places)
    ]
    over = [f"{p.name} on {p.mesh}" if plan.mesh != other.mesh else p.name for p in (plan, other)]
    return Section(title, (sentence,), _table(("array", "arrays", *over), rows, {1}))


def _heading(plan: PlanRecord, other: PlanRecord) -> Section:
    sentences = [
        f"A call takes {time_text(other.cost.seconds)} instead of {time_text(plan.cost.seconds)}"
        f"{_share(plan.cost.seconds, other.cost.seconds)}, and {size_text(other.memory.peak)} per device instead of "
        f"{size_text(plan.memory.peak)}{_share(plan.memory.peak, other.memory.peak)}."
    ]
    if plan.passes != other.passes:
        after, before = ("; ".join(map(str, p.passes)) or "none" for p in (other, plan))
        sentences.append(f"Passes: {after} instead of {before}.")
    names = [f"{p.strategy} on {p.mesh}" for p in (plan, other)]
    return Section(f"From {names[0]} to {names[1]}", tuple(sentences))


def _share(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})" if before else ""


def _arguments(plan: PlanRecord, other: PlanRecord) -> Section:
    specs = {p.path: p.where for p in other.inputs}
    changed = [p for p in plan.inputs if specs[p.path] != p.where]
    if not changed:
        return Section("Arguments", ("All have the same specs.",))
    by_spec: dict[str, list[Place]] = {}
    for p in changed:
        by_spec.setdefault(specs[p.path], []).append(p)
    rows = [
        (group.path, str(len(group.places)), group.first.where, spec)
        for spec, places in by_spec.items()
        for group in group_arrays(places)
    ]
    changes = (
        f"{len(changed)} of {plural(len(plan.inputs), 'array')} {'has' if len(changed) == 1 else 'have'} another spec."
    )
    return Section("Arguments", (changes,), _table(("array", "arrays", "before", "after"), rows, {1}))


def _time(plan: PlanRecord, other: PlanRecord) -> Section:
    """Seconds of compute, and of collectives by source line; the largest differences first."""
    before, after = _seconds(plan), _seconds(other)
    order = sorted({*before, *after}, key=lambda k: (-abs(after[k] - before[k]), k))
    rows = [
        (signed_time(after[k] - before[k]), time_text(before[k]), time_text(after[k]), *k)
        for k in order
        if abs(after[k] - before[k]) > 1e-9
    ]
    if not rows:
        return Section("Time", ("The same.",))
    return Section("Time", (), _table(("difference", "before", "after", "kind", "axes", "for"), rows, {0, 1, 2}))


def _seconds(plan: PlanRecord) -> Mapping[tuple[str, str, str], float]:
    """By kind, axes and source line; 0 of what the plan does not have."""
    found: dict[tuple[str, str, str], float] = defaultdict(float, {("compute", "", ""): plan.cost.compute})
    for c in plan.cost.collectives:
        seconds = collective_seconds(c.kind, c.axes or (), c.bytes, plan.mesh) * c.count
        found[c.kind, "+".join(c.axes or ()), short_source(c.source)] += seconds
    return found


def signed_time(seconds: float) -> str:
    """A difference of times in seconds as text, with its sign."""
    return f"{'-' if seconds < 0 else '+'}{time_text(abs(seconds))}"


def _memory(plan: PlanRecord, other: PlanRecord) -> Section:
    before, after = dict(plan.memory.items()), dict(other.memory.items())
    pairs = ((name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after})
    rows = [(name, size_text(a), size_text(b)) for name, a, b in pairs if a != b]
    if not rows:
        return Section("Memory", ("The same.",))
    return Section("Memory", (), _table(("class", "before", "after"), rows, {1, 2}))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], numbers: set[int]) -> Table:
    rest = [(f"and {len(rows) - MAX_ROWS} more", *[""] * (len(head) - 1))] if len(rows) > MAX_ROWS else []
    return Table(head, (*rows[:MAX_ROWS], *rest), frozenset(numbers))
