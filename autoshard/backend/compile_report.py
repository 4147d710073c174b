"""verdict: a compilation as a person reads it: sections as a plan's review has them, and the audit line by line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from autoshard.backend.audit import Audit, Row
from autoshard.backend.compilation import Compilation
from autoshard.backend.estimate import Estimate
from autoshard.plan.document import Section, Table, plural, shorten_paths
from autoshard.plan.render import as_text
from autoshard.plan.review import trials
from autoshard.units import size_text, time_text

MAX_COLLECTIVE_ROWS = 20
"""Collectives shown, those that take longest first."""


def print_compilation(c: Compilation, console: Console) -> None:
    """Prints a compilation; what was not planned is red where the console has colours."""
    heading = _heading(c)
    made = [_time(c, c.estimate), _collectives(c, c.audit)] if c.estimate and c.audit else []
    others = [trials(c.plan.refined)] if c.plan.refined else []
    body = Text(as_text([heading, _memory(c), *made, *others]))
    if not c.fits:
        body.stylize("bold red", 0, len(as_text([heading])))
    console.print(body)
    if c.audit is None:
        return
    console.print(Text("\nAudit: bytes a device, planned and emitted"))
    for line, row in c.audit.lines():
        console.print(Text(f"  {shorten_paths(line)}", "red" if row and row.unexplained else ""))
        if row and row.verdict in ("unplanned", "differs"):
            for cause in _causes(row):
                console.print(Text(f"    {cause}", "red"))


def _heading(c: Compilation) -> Section:
    here = f"on {c.plan.mesh}, compiled in {time_text(c.compile_seconds)}"
    share = f"{size_text(c.needed_bytes, 2)} of {size_text(c.available_bytes, 2)} on each device"
    if c.fits:
        return Section(f"Fits {here}: {share}, {size_text(c.available_bytes - c.needed_bytes, 2)} left")
    words = f"DOES NOT FIT {here}: {share}, {size_text(c.needed_bytes - c.available_bytes, 2)} too much"
    return Section(words, remarks=tuple(c.remedies))


def _memory(c: Compilation) -> Section:
    m, u = c.plan.memory, c.usage
    rows = [(name, size_text(size)) for name, size in m.items()]
    table = Table(("planned", "a device"), tuple(rows), frozenset({1}))
    if u is None:
        return Section("Memory", ("The compiler refused the step for memory; this is what was planned.",), table)
    held = m.parameters + m.optimizer + m.inputs
    both = [
        ("arguments", held, u.arguments),
        ("results beside them", None, u.results - u.aliased),
        ("temporaries", m.peak - held, u.temporaries),
        ("code", None, u.code),
        ("peak", m.peak, u.peak),
    ]
    made = [(n, "-" if a is None else size_text(a), size_text(b)) for n, a, b in both]
    parts = ", ".join(f"{name} {size}" for name, size in rows[:-1])
    return Section(
        "Memory", (f"Planned: {parts}.",), Table(("class", "planned", "compiled"), tuple(made), frozenset({1, 2}))
    )


def _time(c: Compilation, e: Estimate) -> Section:
    how = f"{e.cycles:,} cycles by the compiler's estimate" if e.cycles is not None else "the roofline of what it made"
    least = "" if e.exact else "; a loop's trips are not known and count as one, so it may take longer"
    words = (
        f"{time_text(e.seconds)} a step, {time_text(e.bound)} where all is hidden that can be: compute "
        f"{time_text(e.compute)} ({how}), collectives {time_text(e.transfers)} (on the link model){least}. "
        f"Planned: {time_text(c.plan.cost.compute)} and {time_text(c.plan.cost.transfers)}."
    )
    return Section("Time", (words,))


def _collectives(c: Compilation, audit: Audit) -> Section:
    alike, seconds = Counter[tuple[str, str, int, str]](), defaultdict[tuple[str, str, int, str], float](float)
    for x in audit.emitted:
        axes = "unknown groups" if x.axes is None else "+".join(x.axes) or "no axis"
        key = x.kind, axes, x.bytes, shorten_paths(x.source) or x.operation or "unknown"
        alike[key] += x.count
        seconds[key] += c.collective_seconds(x)
    if not alike:
        return Section("Collectives", ("None: nothing is sent between devices.",))
    order = sorted(alike, key=lambda k: (-seconds[k], k))
    rows = [
        (time_text(seconds[k]), k[0], k[1], size_text(k[2]), str(alike[k]), k[3]) for k in order[:MAX_COLLECTIVE_ROWS]
    ]
    rest = f"{plural(len(order) - MAX_COLLECTIVE_ROWS, 'smaller row')} left out: --json has each."
    sent = sum(x.total_bytes for x in audit.emitted)
    return Section(
        "Collectives",
        (f"{sum(alike.values())} in a step, {size_text(sent)} a device.",),
        Table(("in all", "collective", "over", "each", "runs", "for"), tuple(rows), frozenset({0, 3, 4})),
        (rest,) if len(order) > MAX_COLLECTIVE_ROWS else (),
    )


def _causes(row: Row) -> Iterator[str]:
    """Where the emitted collectives of a row come from: line and operation, those of most bytes first."""
    for x in row.emitted[:3]:
        yield f"from {shorten_paths(x.source) or 'no line of yours'}: {x.operation or x.computation}"
