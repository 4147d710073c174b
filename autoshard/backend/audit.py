"""The audit: a plan's predicted collectives against those that the compiler emitted.

Collectives are compared by kind and mesh axes: for each pair, bytes per device over all runs. Differences of up to 5
% are ignored. The rest is matched against rewrites that compilers are known to do
(`autoshard.backend.known_rewrites`); what a rewrite accounts for is *explained*, by its name, and the audit is clean
when nothing else is left. The number of runs is reported and not compared: compilers combine small collectives
freely.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from autoshard.backend.estimate import Compiled
from autoshard.backend.hlo.collectives import collectives
from autoshard.backend.known_rewrites import KindAxes, Rewrite, fit_rewrites
from autoshard.backend.stage_branches import Stray, stray_collectives
from autoshard.ir.spec import Axes
from autoshard.machine.collective import ALL_REDUCE, Collective
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.document import short_source
from autoshard.units import size_text

TOLERANCE = 0.05
"""Share of a row's bytes by which planned and emitted may differ."""

RowKey = tuple[str, Axes | None]


class CostLike(Protocol):
    """The part of a plan's cost that an audit uses."""

    @property
    def collectives(self) -> Iterable[Collective]: ...


class PipelineLike(Protocol):
    """The part of a plan's pipeline that an audit uses."""

    @property
    def axis(self) -> str: ...


class AuditedPlan(Protocol):
    """The part of a `Plan` that an audit uses."""

    @property
    def mesh(self) -> LogicalMesh: ...

    @property
    def cost(self) -> CostLike: ...

    @property
    def pipeline(self) -> PipelineLike | None: ...


@dataclass(frozen=True, slots=True)
class Explanation:
    """A known rewrite that explains a difference. ``bytes``: the units of the rewrite, bytes per device."""

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
    """Emitted minus planned bytes that no known rewrite explains."""

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
    strays: tuple[Stray, ...] = ()
    """Collectives in what a stage of a pipeline runs by itself, in which devices of other stages take part too: on CPUs
    and GPUs such a program waits for ever."""

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
        """Whether for every kind and axes the bytes agree within 5 % or a known rewrite explains why not, and no stage
        of a pipeline waits for another."""
        return not self.differences and not self.strays

    def as_json(self) -> dict[str, object]:
        """The audit as plain JSON values."""
        return {
            "clean": self.clean,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
            "explained": [asdict(e) for e in self.explained],
            "strays": [asdict(s) for s in self.strays],
        }

    def lines(self) -> Iterator[tuple[str, Row | None]]:
        """The lines of the printed table, each with the row that it shows."""
        head = ("kind", "axes", "planned", "emitted", "verdict", "source")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        for row, line in zip((None, *self.rows), cells, strict=True):
            yield "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip(), row
        for e in self.explained:
            yield f"explained: {e}", None
        for s in self.strays:
            yield f"waits for other stages: {s.kind}, {short_source(s.source) or s.operation}", None
        n = len(self.differences)
        differ = [f"{n} {'row differs' if n == 1 else 'rows differ'}"] if n or not self.strays else []
        waits = [f"{len(self.strays)} in which stages wait for others"] if self.strays else []
        yield "clean" if self.clean else f"not clean: {', '.join([*differ, *waits])}", None
        if any(not c.exact for c in self.emitted):
            yield "+ marks a loop whose trip count is unknown: counted once, it may run more often", None

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())

    def __repr__(self) -> str:
        what = "clean" if self.clean else f"{len(self.differences)} of {len(self.rows)} rows differ"
        return f"<Audit of planned and emitted collectives: {what}; print it>"


def audit(compiled: Compiled, plan: AuditedPlan) -> Audit:
    """Compares the collectives that ``compiled`` runs with those that ``plan`` predicts.

    Args:
      compiled: from ``step.lower(...).compile()`` on the plan's mesh.
      plan: its ``mesh`` maps device groups to axes; its ``cost.collectives`` are those predicted.

    Example:
      >>> step = autoshard.jit(lambda x: jnp.sum(x @ x.T), mesh={"data": 8}, strategy="dp")
      >>> x = jnp.ones((64, 16))
      >>> autoshard.audit(step.lower(x).compile(), step.plan(x)).clean
      True
    """
    text = compiled.as_text() or ""
    found = audit_collectives(plan.cost.collectives, collectives(text, plan.mesh), plan.mesh)
    pipeline = plan.pipeline
    return found if pipeline is None else replace(found, strays=stray_collectives(text, plan.mesh, pipeline.axis))


def audit_collectives(planned: Iterable[Collective], emitted: Iterable[Collective], mesh: LogicalMesh) -> Audit:
    """The audit of two lists of collectives."""
    order = {axis: i for i, axis in enumerate(mesh.axis_names)}
    sides: dict[RowKey, tuple[list[Collective], list[Collective]]] = {}
    for side, found in enumerate((planned, emitted)):
        for c in found:
            axes = None if c.axes is None else tuple(sorted(c.axes, key=order.__getitem__))
            sides.setdefault((c.kind, axes), ([], []))[side].append(c)
    before, after = ({key: float(_total(both[i])) for key, both in sides.items()} for i in (0, 1))
    explained: dict[KindAxes, float] = defaultdict(float)
    left = {key: after[key] - before[key] for key in sides}
    if not all(_near(before[key], after[key]) for key in sides):
        # Groups that match no axes, or that are of one device, have no rewrites.
        ours, theirs = ({(kind, axes): n for (kind, axes), n in side.items() if axes} for side in (before, after))
        for rewrite, units in fit_rewrites(ours, theirs, mesh, list(_observed_rewrites(sides))):
            explained[rewrite.name, rewrite.axes] += units
            for sign, rates in ((-1, rewrite.emitted), (1, rewrite.planned)):
                for key, rate in rates.items():
                    left[key] = left.get(key, 0.0) + sign * units * rate
    rows: list[Row] = []
    for kind, axes in sorted(sides, key=lambda k: (k[0], k[1] is None, k[1] or ())):
        a, b = (tuple(sorted(s, key=lambda c: -c.total_bytes)) for s in sides[kind, axes])
        small = abs(left[kind, axes]) <= TOLERANCE * max(_total(a), _total(b))
        rows.append(Row(kind, axes, a, b, 0 if small else round(left[kind, axes])))
    rewritten = [Explanation(name, axes, round(n)) for (name, axes), n in explained.items()]
    return Audit(tuple(rows), (*rewritten, *_combined_collectives(sides)))


def _observed_rewrites(
    sides: Mapping[RowKey, tuple[list[Collective], list[Collective]]],
) -> Iterator[tuple[Rewrite, float]]:
    """Rewrites visible in the collectives of one kind and axes alone, each with the most bytes that it explains."""
    sums = [c for _, emitted in sides.values() for c in emitted if c.addends > 1 and c.axes]
    for (kind, axes), (planned, emitted) in sides.items():
        if axes:
            this, none = {(kind, axes): 1.0}, dict[KindAxes, float]()
            yield Rewrite(f"{kind} repeated for the same operand", axes, this, none), _redundant_bytes(emitted)
            repeated = f"{kind} repeated for the same operand, done once"
            yield Rewrite(repeated, axes, none, this), _redundant_bytes(planned)
            yield Rewrite(f"{kind} of a narrower dtype", axes, none, this), _bytes_saved_by_narrowing(planned, emitted)
            if kind == ALL_REDUCE:
                added = float(sum((c.addends - 1) * c.total_bytes for c in sums if set(c.axes or ()) <= set(axes)))
                yield (
                    Rewrite("all-reduces of values that are added up before, done once for the sum", axes, none, this),
                    added,
                )


def _redundant_bytes(found: Iterable[Collective]) -> float:
    """Bytes of collectives that repeat another one, which saves keeping its result in memory until the next use."""
    return float(_total(c for c in found if c.redundant))


def _bytes_saved_by_narrowing(planned: Iterable[Collective], emitted: Iterable[Collective]) -> float:
    """Bytes saved by converting to a narrower dtype before communication, not after it.

    Recognised by the arrays sent: as many of a half or a quarter of the bytes, also where they are combined.
    """
    wide, narrow = Counter[int](), Counter[int]()
    for found, side in ((planned, wide), (emitted, narrow)):
        for c in found:
            for size in c.parts or (c.bytes,):
                side[size] += c.count
    wide, narrow, saved = wide - narrow, narrow - wide, 0.0
    for size, ratio in itertools.product(sorted(wide, reverse=True), (2, 4)):
        count = min(wide[size], narrow[size // ratio])
        wide[size], narrow[size // ratio] = wide[size] - count, narrow[size // ratio] - count
        saved += count * (size - size // ratio)
    return saved


def _combined_collectives(sides: Mapping[RowKey, tuple[list[Collective], list[Collective]]]) -> list[Explanation]:
    """Kinds and axes with equal bytes in fewer runs: the compiler has combined small collectives."""
    found: list[Explanation] = []
    for (kind, axes), (a, b) in sorted(sides.items(), key=lambda item: (item[0][0], item[0][1] or ())):
        before, after = (sum(c.count for c in side) for side in (a, b))
        if axes is not None and _near(_total(a), _total(b)) and after < before:
            found.append(Explanation(f"{before} {kind}s combined into {after}", axes, _total(a)))
    return found


def _cells(row: Row) -> tuple[str, ...]:
    axes = "unknown groups" if row.axes is None else "+".join(row.axes) or "none"
    where = list(dict.fromkeys(short_source(c.source) for c in (*row.emitted, *row.planned) if c.source))
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
