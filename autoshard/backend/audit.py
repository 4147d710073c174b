"""What a plan promised beside what the compiler emitted.

Collectives are compared by kind and mesh axes: for each pair, the bytes per device over all runs. A
difference of at most 5 % is none. What remains is first held against the rewrites that compilers are
known to do (`autoshard.backend.known_rewrites`); what one of these accounts for is *explained*, by name, and the audit is
clean when nothing is left. How often a collective runs is shown and not judged: compilers combine
small ones freely.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from autoshard.backend.hlo_collectives import collectives
from autoshard.backend.known_rewrites import Axes, Rewrite, fit_rewrites
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import LogicalMesh
from autoshard.units import size_text

TOLERANCE = 0.05
"""The share of a row's bytes that may differ."""

Key = tuple[str, Axes | None]


class Compiled(Protocol):
    """What an audit needs of `jax.stages.Compiled`."""

    def as_text(self) -> str | None: ...


class Cost(Protocol):
    """What an audit needs of a plan's cost."""

    @property
    def collectives(self) -> Iterable[Collective]: ...


class Planned(Protocol):
    """What an audit needs of a `Plan`."""

    @property
    def mesh(self) -> LogicalMesh: ...

    @property
    def cost(self) -> Cost: ...


@dataclass(frozen=True, slots=True)
class Explanation:
    """A rewrite that accounts for a difference. ``bytes``: how many of the planned ones it covers."""

    name: str
    axes: Axes
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} over {'+'.join(self.axes)}: {size_text(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Row:
    """All collectives of one kind over the same axes."""

    kind: str
    axes: Axes | None
    planned: tuple[Collective, ...]
    emitted: tuple[Collective, ...]
    unexplained: int
    """Bytes by which emitted exceed planned (negative: fall short) once rewrites are accounted for."""

    @property
    def verdict(self) -> str:
        planned, emitted = _total(self.planned), _total(self.emitted)
        if not self.unexplained:
            return "same" if _near(planned, emitted) else "explained"
        return "unplanned" if not planned else "missing" if not emitted else "differs"


@dataclass(frozen=True, slots=True)
class Audit:
    """Planned and emitted collectives side by side; prints as a table."""

    rows: tuple[Row, ...]
    explained: tuple[Explanation, ...]

    @property
    def planned(self) -> tuple[Collective, ...]:
        return tuple(c for row in self.rows for c in row.planned)

    @property
    def emitted(self) -> tuple[Collective, ...]:
        return tuple(c for row in self.rows for c in row.emitted)

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows whose bytes differ by more than 5 % and that no known rewrite explains."""
        return tuple(row for row in self.rows if row.unexplained)

    @property
    def clean(self) -> bool:
        """Whether for every kind and axes the bytes agree within 5 % or a known rewrite explains why not."""
        return not self.differences

    def as_json(self) -> dict[str, object]:
        """The audit as plain JSON values."""
        return {
            "clean": self.clean,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
            "explained": [asdict(e) for e in self.explained],
        }

    def lines(self) -> Iterator[tuple[str, Row | None]]:
        """The table's lines, those of a row with the row."""
        head = ("kind", "axes", "planned", "emitted", "verdict", "where")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        for row, line in zip((None, *self.rows), cells, strict=True):
            yield "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip(), row
        for e in self.explained:
            yield f"explained: {e}", None
        n = len(self.differences)
        yield "clean" if self.clean else f"not clean: {n} {'row differs' if n == 1 else 'rows differ'}", None
        if any(not c.exact for c in self.emitted):
            yield "+ marks a loop whose trip count is not known: counted once, it may run more often", None

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())


def audit(compiled: Compiled, plan: Planned) -> Audit:
    """Compares what ``compiled`` does with what ``plan`` said it would.

    Args:
      compiled: from ``step.lower(...).compile()`` on the plan's mesh.
      plan: its ``mesh`` gives device groups their axes, its ``cost.collectives`` what was expected.
    """
    return compare(plan.cost.collectives, collectives(compiled.as_text() or "", plan.mesh), plan.mesh)


def compare(planned: Iterable[Collective], emitted: Iterable[Collective], mesh: LogicalMesh) -> Audit:
    """Lays two lists of collectives side by side."""
    order = {axis: i for i, axis in enumerate(mesh.axis_names)}
    sides: dict[Key, tuple[list[Collective], list[Collective]]] = {}
    for side, found in enumerate((planned, emitted)):
        for c in found:
            axes = None if c.axes is None else tuple(sorted(c.axes, key=order.__getitem__))
            sides.setdefault((c.kind, axes), ([], []))[side].append(c)
    before, after = ({key: float(_total(both[i])) for key, both in sides.items()} for i in (0, 1))
    explained: dict[tuple[str, Axes], float] = defaultdict(float)
    left = {key: after[key] - before[key] for key in sides}
    if not all(_near(before[key], after[key]) for key in sides):
        known, found = ({(kind, axes): n for (kind, axes), n in side.items() if axes} for side in (before, after))
        for trade, units in fit_rewrites(known, found, mesh, list(_observed_rewrites(sides))):
            explained[trade.name, trade.axes] += units
            for sign, rates in ((-1, trade.emitted), (1, trade.planned)):
                for key, rate in rates.items():
                    left[key] = left.get(key, 0.0) + sign * units * rate
    rows: list[Row] = []
    for kind, axes in sorted(sides, key=lambda k: (k[0], k[1] is None, k[1] or ())):
        a, b = (tuple(sorted(s, key=lambda c: -c.total_bytes)) for s in sides[kind, axes])
        small = abs(left[kind, axes]) <= TOLERANCE * max(_total(a), _total(b))
        rows.append(Row(kind, axes, a, b, 0 if small else round(left[kind, axes])))
    done = [Explanation(name, axes, round(n)) for (name, axes), n in explained.items()]
    return Audit(tuple(rows), (*done, *_combined_collectives(sides)))


def _observed_rewrites(
    sides: Mapping[Key, tuple[list[Collective], list[Collective]]],
) -> Iterator[tuple[Rewrite, float]]:
    """Rewrites that collectives of one kind over the same axes show, each with the bytes that it may account for."""
    for (kind, axes), (planned, emitted) in sides.items():
        if axes:
            this, nothing = {(kind, axes): 1.0}, dict[tuple[str, Axes], float]()
            yield Rewrite(f"{kind} of the same operand again", axes, this, nothing), _redundant_bytes(emitted)
            yield Rewrite(f"{kind} of the same operand once", axes, nothing, this), _redundant_bytes(planned)
            yield Rewrite(f"{kind} in fewer bits", axes, nothing, this), _bytes_saved_by_narrowing(planned, emitted)


def _redundant_bytes(found: Iterable[Collective]) -> float:
    """Bytes of what is sent once more where it is read again, rather than held meanwhile."""
    return float(_total(c for c in found if c.redundant))


def _bytes_saved_by_narrowing(planned: Iterable[Collective], emitted: Iterable[Collective]) -> float:
    """Bytes spared by turning into fewer bits before sending, not after: as often, a half or a quarter of the bytes."""
    wide, narrow = Counter[int](), Counter[int]()
    for c in planned:
        wide[c.bytes] += c.count
    for c in emitted:
        narrow[c.bytes] += c.count
    wide, narrow, spared = wide - narrow, narrow - wide, 0.0
    for size, part in itertools.product(sorted(wide, reverse=True), (2, 4)):
        count = min(wide[size], narrow[size // part])
        wide[size], narrow[size // part] = wide[size] - count, narrow[size // part] - count
        spared += count * (size - size // part)
    return spared


def _combined_collectives(sides: Mapping[Key, tuple[list[Collective], list[Collective]]]) -> list[Explanation]:
    """The same bytes in fewer runs: the compiler has combined small collectives."""
    found: list[Explanation] = []
    for (kind, axes), (a, b) in sorted(sides.items(), key=lambda item: (item[0][0], item[0][1] or ())):
        before, after = (sum(c.count for c in side) for side in (a, b))
        if axes is not None and _near(_total(a), _total(b)) and after < before:
            found.append(Explanation(f"{before} {kind}s combined into {after}", axes, _total(a)))
    return found


def _cells(row: Row) -> tuple[str, ...]:
    axes = "unknown groups" if row.axes is None else "+".join(row.axes) or "none"
    where = list(dict.fromkeys(c.source for c in (*row.emitted, *row.planned) if c.source))
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return (
        row.kind,
        axes,
        _size_and_runs(row.planned),
        _size_and_runs(row.emitted),
        row.verdict,
        (where[0] + more) if where else "",
    )


def _size_and_runs(found: tuple[Collective, ...]) -> str:
    runs = sum(c.count for c in found)
    return f"{size_text(_total(found))} in {runs}{'' if all(c.exact for c in found) else '+'}" if found else "-"


def _total(found: Iterable[Collective]) -> int:
    return sum(c.total_bytes for c in found)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(a, b)
