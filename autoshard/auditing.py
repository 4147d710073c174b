"""What a plan promised beside what the compiler emitted.

Collectives are compared by kind and mesh axes: for each pair, the bytes per device over all runs. A
difference of at most 5 % is none. What remains is first held against the rewrites that compilers are
known to do (`_REWRITES`); what one of these accounts for is *explained*, by name, and the audit is
clean when nothing is left. How often a collective runs is shown and not judged: compilers combine
small ones freely.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from autoshard.collective import Collective
from autoshard.hlo import collectives
from autoshard.mesh import LogicalMesh
from autoshard.units import size_text

TOLERANCE = 0.05
"""The share of a row's bytes that may differ."""

Axes = tuple[str, ...]
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
    totals = {key: (_total(a), _total(b)) for key, (a, b) in sides.items()}
    differ = frozenset(key for key, (a, b) in totals.items() if not _near(a, b))
    ledger = _Ledger({key: b - a for key, (a, b) in totals.items()}, differ)
    explained = [e for step in (_again, _narrowed) for e in step(ledger, sides)]
    explained += [e for rewrite in _REWRITES for e in rewrite(ledger, mesh)]
    explained += _combined(sides)
    rows: list[Row] = []
    for kind, axes in sorted(sides, key=lambda k: (k[0], k[1] is None, k[1] or ())):
        a, b = (tuple(sorted(s, key=lambda c: -c.total)) for s in sides[kind, axes])
        open_bytes = ledger.open.get((kind, axes), 0.0)
        small = abs(open_bytes) <= TOLERANCE * max(_total(a), _total(b))
        rows.append(Row(kind, axes, a, b, 0 if small else round(open_bytes)))
    return Audit(tuple(rows), tuple(explained))


class _Ledger:
    """Bytes by which each kind and axes are over (positive) or under plan, as rewrites settle them."""

    def __init__(self, open_bytes: Mapping[Key, float], differ: frozenset[Key]) -> None:
        self.open: dict[Key, float] = dict(open_bytes)
        self.differ = differ
        """What has to be settled; what is near enough may serve to."""

    def over(self, kind: str, axes: Axes) -> float:
        return max(0.0, self.open.get((kind, axes), 0.0))

    def under(self, kind: str, axes: Axes) -> float:
        return max(0.0, -self.open.get((kind, axes), 0.0))

    def axes(self) -> list[Axes]:
        """The axes of which something is open, in a fixed order."""
        return sorted({axes for (_, axes), n in self.open.items() if axes and n})

    def settle(self, emitted: Mapping[tuple[str, Axes], float], planned: Mapping[tuple[str, Axes], float]) -> float:
        """Trades planned for emitted collectives, each weighted by bytes per unit; returns the units traded."""
        if self.differ.isdisjoint((*emitted, *planned)):
            return 0.0
        able = [self.over(*key) / w for key, w in emitted.items()] + [
            self.under(*key) / w for key, w in planned.items()
        ]
        units = min(able)
        for key, weight in emitted.items():
            self.open[key] = self.open.get(key, 0.0) - units * weight
        for key, weight in planned.items():
            self.open[key] = self.open.get(key, 0.0) + units * weight
        return units


Trade = tuple[str, Axes, Mapping[tuple[str, Axes], float], Mapping[tuple[str, Axes], float]]
"""What it is called, over which axes, and what is emitted in place of what is planned."""


def _traded(ledger: _Ledger, trades: Sequence[Trade]) -> Iterator[Explanation]:
    """Settles one trade after the other, that first which leaves least open: what is scattered or gathered first is not
    told by bytes alone."""

    def settled(order: Iterable[int], on: _Ledger) -> Iterator[Explanation]:
        for name, axes, emitted, planned in (trades[k] for k in order):
            if units := on.settle(emitted, planned):
                yield Explanation(name, axes, round(units))

    def left(order: Iterable[int]) -> float:
        trial = _Ledger(ledger.open, ledger.differ)
        list(settled(order, trial))
        return sum(map(abs, trial.open.values()))

    every = range(len(trades))
    yield from settled(min(([k, *(i for i in every if i != k)] for k in every), key=left, default=[]), ledger)


def _apart(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Two sets of axes of which something is open and that have none in common; then all their axes."""
    for a, b in itertools.combinations(ledger.axes(), 2):
        if not set(a) & set(b):
            yield a, b, tuple(axis for axis in mesh.axis_names if axis in (*a, *b))


def _merged(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[Explanation]:
    """One collective over two sets of axes in place of one over each, or the reverse."""
    for kind, (a, b, both) in itertools.product(
        ("all-reduce", "all-gather", "reduce-scatter"), list(_apart(ledger, mesh))
    ):
        one = {(kind, both): 1.0}
        trades: list[Trade] = []
        # Gathered over the second last, or scattered over it first: only that one sees all the bytes.
        for x, y in ((a, b), (b, a)):
            two = {(kind, x): 1.0 if kind == "all-reduce" else 1 / mesh.axes_size(y), (kind, y): 1.0}
            trades.append((f"{kind} in place of one over each", both, one, two))
            trades.append((f"{kind} split by axes", both, two, one))
        yield from _traded(ledger, trades)


def _scattered(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[Explanation]:
    """Reduce-scatter against all-reduce: XLA on CPU never forms the former itself."""
    for axes in ledger.axes():
        reduce, scatter, gather = ("all-reduce", axes), ("reduce-scatter", axes), ("all-gather", axes)
        for name, emitted, planned in (
            ("reduce-scatter + all-gather in place of all-reduce", {scatter: 1.0, gather: 1.0}, {reduce: 1.0}),
            ("all-reduce in place of reduce-scatter + all-gather", {reduce: 1.0}, {scatter: 1.0, gather: 1.0}),
            ("all-reduce + slice in place of reduce-scatter", {reduce: 1.0}, {scatter: 1.0}),
        ):
            if units := ledger.settle(emitted, planned):
                yield Explanation(name, axes, round(units))


def _sliced(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[Explanation]:
    """One all-reduce over all axes, where a value was to be scattered over some, and its part over the others."""
    trades: list[Trade] = []
    for a, b, both in _apart(ledger, mesh):
        for (x, y), then in itertools.product(((a, b), (b, a)), ("all-reduce", "reduce-scatter")):
            planned = {("reduce-scatter", x): 1.0, (then, y): 1 / mesh.axes_size(x)}
            name = f"all-reduce + slice in place of reduce-scatter + {then}"
            trades.append((name, both, {("all-reduce", both): 1.0}, planned))
    yield from _traded(ledger, trades)


def _windowed(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[Explanation]:
    """A gather or scatter as a ring of permutes: of n parts, n-1 travel, or all n where the loop's last does too."""
    for axes, kind in itertools.product(ledger.axes(), ("all-gather", "reduce-scatter")):
        n, sent, planned = mesh.axes_size(axes), ledger.over("collective-permute", axes), ledger.under(kind, axes)
        whole = planned and (n - 1) / n * (1 - TOLERANCE) <= sent / planned <= 1 + TOLERANCE
        if whole and ledger.settle({("collective-permute", axes): sent / planned}, {(kind, axes): 1.0}):
            yield Explanation(f"{kind} as a ring of collective-permutes", axes, round(planned))


def _partly(ledger: _Ledger, mesh: LogicalMesh) -> Iterator[Explanation]:
    """Of permutes over several axes, some whose pairs all lie along fewer: as those of the last hops of a chain."""
    for wide, axes in itertools.permutations(ledger.axes(), 2):
        if set(axes) < set(wide):
            units = ledger.settle({("collective-permute", axes): 1.0}, {("collective-permute", wide): 1.0})
            if units:
                yield Explanation("collective-permute along fewer axes than it is planned over", axes, round(units))


_REWRITES: tuple[Callable[[_Ledger, LogicalMesh], Iterator[Explanation]], ...] = (
    _partly,
    _sliced,
    _merged,
    _scattered,
    _windowed,
)
"""In this order: axes are put right first, so that the later ones compare like with like."""


Sides = Mapping[Key, tuple[list[Collective], list[Collective]]]
"""Planned and emitted collectives by kind and axes."""


def _again(ledger: _Ledger, sides: Sides) -> Iterator[Explanation]:
    """What is sent once more where it is read again, rather than held meanwhile."""
    for (kind, axes), (_, emitted) in sorted(sides.items(), key=lambda item: (item[0][0], item[0][1] or ())):
        if axes is None or (kind, axes) not in ledger.differ:
            continue
        if units := min(float(_total(c for c in emitted if c.again)), ledger.over(kind, axes)):
            ledger.open[kind, axes] -= units
            yield Explanation(f"{kind} of the same operand again", axes, round(units))


def _narrowed(ledger: _Ledger, sides: Sides) -> Iterator[Explanation]:
    """What is turned into fewer bits before it is sent, not after: as often, with a half or a quarter of the bytes."""
    for (kind, axes), (planned, emitted) in sorted(sides.items(), key=lambda item: (item[0][0], item[0][1] or ())):
        if axes is None or (kind, axes) not in ledger.differ:
            continue
        runs = [Counter[int]() for _ in range(2)]
        for side, found in zip(runs, (planned, emitted), strict=True):
            for c in found:
                side[c.bytes] += c.count
        wide, narrow = runs[0] - runs[1], runs[1] - runs[0]
        for size, part in itertools.product(sorted(wide, reverse=True), (2, 4)):
            count = min(wide[size], narrow[size // part])
            units = min(float(count * (size - size // part)), ledger.under(kind, axes))
            if units:
                ledger.open[kind, axes] += units
                wide[size], narrow[size // part] = wide[size] - count, narrow[size // part] - count
                yield Explanation(f"{kind} in fewer bits", axes, round(units))


def _combined(sides: Sides) -> list[Explanation]:
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
    return row.kind, axes, _side(row.planned), _side(row.emitted), row.verdict, (where[0] + more) if where else ""


def _side(found: tuple[Collective, ...]) -> str:
    runs = sum(c.count for c in found)
    return f"{size_text(_total(found))} in {runs}{'' if all(c.exact for c in found) else '+'}" if found else "-"


def _total(found: Iterable[Collective]) -> int:
    return sum(c.total for c in found)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(a, b)
