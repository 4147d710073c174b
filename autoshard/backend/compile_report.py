"""The report of ``autoshard compile``: memory, time, collectives and the audit of one compiled plan, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from autoshard.backend.audit import Audit, Row
from autoshard.backend.compilation import Compilation
from autoshard.backend.estimate import Estimate
from autoshard.plan.document import Section, Table, plural, short_source
from autoshard.plan.render import as_text
from autoshard.plan.review_cost import compiled_layouts
from autoshard.units import size_text, time_text

MAX_COLLECTIVE_ROWS = 20
"""Rows of collectives shown, longest time first."""


def print_compilation(c: Compilation, console: Console) -> None:
    """Prints the report of a compilation; collectives that were not planned are red where the console has colours."""
    heading = _heading(c)
    measured = [_time(c, c.estimate), _collectives(c, c.audit)] if c.estimate and c.audit else []
    others = [compiled_layouts(c.plan.refined)] if c.plan.refined else []
    body = Text(as_text([heading, _memory(c), *measured, *others]))
    if not c.fits:
        body.stylize("bold red", 0, len(as_text([heading])))
    console.print(body)
    if c.audit is None:
        return
    console.print(Text("\nAudit: bytes per device, planned and emitted"))
    for line, row in c.audit.lines():
        console.print(Text(f"  {line}", "red" if row and row.unexplained else ""))
        if row and row.verdict in ("unplanned", "differs"):
            for cause in _causes(row):
                console.print(Text(f"    {cause}", "red"))


def _heading(c: Compilation) -> Section:
    where = f"on {c.plan.mesh}, compiled in {time_text(c.compile_seconds)}"
    if c.fits:
        used = f"{size_text(c.needed_bytes, 2)} of {size_text(c.available_bytes, 2)} per device"
        return Section(f"Fits {where}: {used}, {size_text(c.available_bytes - c.needed_bytes, 2)} free")
    needed = f"needs {size_text(c.needed_bytes, 2)} per device, {size_text(c.available_bytes, 2)} available"
    over = f"{size_text(c.needed_bytes - c.available_bytes, 2)} too much"
    return Section(f"DOES NOT FIT {where}: {needed}, {over}", remarks=tuple(c.remedies))


def _memory(c: Compilation) -> Section:
    m, u = c.plan.memory, c.usage
    rows = [(name, size_text(size)) for name, size in m.items()]
    if u is None:
        table = Table(("predicted", "per device"), tuple(rows), frozenset({1}))
        return Section("Memory", ("The compiler ran out of memory for the step; this is the prediction.",), table)
    arguments = m.parameters + m.optimizer + m.inputs
    both = [
        ("arguments", arguments, u.arguments),
        ("results not aliased", None, u.results - u.aliased),
        ("temporaries", m.peak - arguments, u.temporaries),
        ("code", None, u.code),
        ("peak", m.peak, u.peak),
    ]
    both += [("host", m.host, u.host)] if m.host or u.host else []
    compared = [(n, "-" if a is None else size_text(a), size_text(b)) for n, a, b in both]
    table = Table(("per device", "predicted", "compiled"), tuple(compared), frozenset({1, 2}))
    return Section(
        "Memory", (f"Predicted: {', '.join(f'{name} {size}' for name, size in rows if name != 'peak')}.",), table
    )


def _time(c: Compilation, e: Estimate) -> Section:
    how = f"the compiler's estimate: {e.cycles:,} cycles" if e.cycles is not None else "the roofline of its HLO"
    more = "" if e.exact else "; a loop's trip count is unknown and counts as one, so it may take longer"
    words = (
        f"Estimated {time_text(e.scheduled)} a step as it was scheduled, {time_text(e.seconds)} with nothing hidden, "
        f"{time_text(e.overlapped)} with perfect overlap: compute {time_text(e.compute)} ({how}), collectives "
        f"{time_text(e.transfers)} (the link model), {time_text(e.blocking)} of them blocking{more}. "
        f"Predicted: {time_text(c.plan.cost.compute)} and {time_text(c.plan.cost.sent)}, of which "
        f"{time_text(c.plan.cost.transfers)} blocking."
    )
    return Section("Time", (words,))


def _collectives(c: Compilation, audit: Audit) -> Section:
    runs, seconds = Counter[tuple[str, str, int, str]](), defaultdict[tuple[str, str, int, str], float](float)
    for x in audit.emitted:
        axes = "unknown groups" if x.axes is None else "+".join(x.axes) or "no axis"
        key = x.kind, axes, x.bytes, short_source(x.source) or x.operation or "unknown"
        runs[key] += x.count
        seconds[key] += c.collective_seconds(x)
    if not runs:
        return Section("Collectives", ("None: nothing is sent between devices.",))
    order = sorted(runs, key=lambda k: (-seconds[k], k))
    rows = [
        (time_text(seconds[k]), k[0], k[1], size_text(k[2]), str(runs[k]), k[3]) for k in order[:MAX_COLLECTIVE_ROWS]
    ]
    rest = f"{plural(len(order) - MAX_COLLECTIVE_ROWS, 'smaller row')} left out; --json lists every collective."
    total = sum(x.total_bytes for x in audit.emitted)
    return Section(
        "Collectives",
        (f"{sum(runs.values())} in a step, {size_text(total)} per device.",),
        Table(("total time", "collective", "axes", "bytes", "runs", "source"), tuple(rows), frozenset({0, 3, 4})),
        (rest,) if len(order) > MAX_COLLECTIVE_ROWS else (),
    )


def _causes(row: Row) -> Iterator[str]:
    """Source line and operation of the emitted collectives of a row, most bytes first."""
    for x in row.emitted[:3]:
        yield f"from {short_source(x.source) or 'no source line'}: {x.operation or x.computation}"
