"""Passes: what they are, how a user names them, and the checks that each must stand before the next runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program, aval_text


@dataclass(frozen=True)
class Pass:
    """A rewriting of programs. A subclass is a frozen dataclass whose fields are its options.

    A valid program goes in and a valid one comes out, with the same inputs, outputs and effects; the
    program that was given is not changed.
    """

    name: ClassVar[str]

    def __call__(self, program: Program) -> Program:
        """The rewritten program."""
        raise PassError(f"the pass {type(self).__name__} does not say how it rewrites; define its __call__")

    def change(self, before: Program, after: Program) -> str:
        """One line on what was changed, for the report."""
        return "changed" if before.jaxpr is not after.jaxpr else "nothing to change"

    def variants(self, program: Program) -> tuple[Pass, ...]:
        """The forms of the pass that change ``program``, where the planner is to say which of them serves, if any."""
        return (self,) if self(program) is not program else ()

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """The pass from what follows the colon in ``"name:option"``: the value of its first field.

        Raises:
          PassError: an option where the pass takes none.
        """
        if option is None:
            return cls()
        if not fields(cls):
            raise PassError(f"the pass {cls.name!r} takes no option, but {cls.name}:{option} gives it {option!r}")
        make: Any = cls
        return make(option)

    def __str__(self) -> str:
        options = [str(getattr(self, f.name)) for f in fields(self)]
        return ":".join(filter(None, [self.name, *options[:1]]))


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    """``recompute``"""
    written: str
    """The pass as a user writes it, with its option: ``recompute:full``."""
    equations_before: int
    """Equations at every depth, before the pass."""
    equations_after: int
    change: str

    def __str__(self) -> str:
        return f"{self.written}: {self.change} ({self.equations_before} -> {self.equations_after} equations)"


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[Pass, ...] = ()

    def run(self, program: Program) -> tuple[Program, tuple[PassReport, ...]]:
        """The program after every pass, and a report of each.

        Raises:
          PassError: a pass that broke the program; the message names the pass and what is wrong.
        """
        reports: list[PassReport] = []
        had = _survey(program.jaxpr)
        for step in self.passes:
            after, has = step(program), had
            if after.jaxpr is not program.jaxpr:
                after = _checked(step, program, after)
                has = _survey(after.jaxpr)
                _same_effects(step, had.effects, has.effects)
            change = step.change(program, after)
            reports.append(PassReport(step.name, str(step), had.equations, has.equations, change))
            program, had = after, has
        return program, tuple(reports)


def parse_passes(specs: str | Pass | Iterable[str | Pass] | None, known: Mapping[str, type[Pass]]) -> tuple[Pass, ...]:
    """Passes from what a user writes: ``"dead_code"``, ``"recompute:full"``, a `Pass`, or several of these.

    Raises:
      PassError: a name that ``known`` has not, or an option that the pass does not take.
    """
    if specs is None:
        return ()
    return tuple(_parse(s, known) for s in ([specs] if isinstance(specs, (str, Pass)) else specs))


def _parse(spec: Any, known: Mapping[str, type[Pass]]) -> Pass:
    if isinstance(spec, Pass):
        return spec
    if not isinstance(spec, str):
        raise PassError(f"passes holds {spec!r}; it takes a pass or its name, such as {next(iter(known), 'name')!r}")
    name, colon, option = (part.strip() for part in spec.partition(":"))
    if name not in known:
        raise PassError(f"unknown pass {name!r} in passes={spec!r}{nearest(name, known)}")
    return known[name].from_option(option if colon else None)


def _checked(step: Pass, before: Program, after: Program) -> Program:
    """``after``, normalized where needed, once it is seen to be a valid form of ``before``; effects aside.

    Raises:
      PassError: inputs or outputs differ, or the jaxpr is not well formed.
    """
    for what, old, new in (
        ("inputs", before.jaxpr.in_avals, after.jaxpr.in_avals),
        ("outputs", before.jaxpr.out_avals, after.jaxpr.out_avals),
    ):
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            if not _same(a, b):
                leaf = (before.inputs if what == "inputs" else before.outputs)[i]
                raise PassError(f"the pass {step} changed {leaf.path} from {aval_text(a)} to {aval_text(b)}")
        if len(old) != len(new):
            raise PassError(f"the pass {step} changed the number of {what} from {len(old)} to {len(new)}")
    if not _defined_once(after.jaxpr):
        after = after.with_jaxpr(jx.normalize(after.jaxpr))
    try:
        jx.check_jaxpr(after.jaxpr, before.jaxpr)
    except Exception as e:
        raise PassError(f"the pass {step} left a program that is not well formed: {e}") from e
    return after


def _same(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


@dataclass(frozen=True)
class _Survey:
    """What a program has, at every depth."""

    equations: int
    effects: Counter[str]
    """How many equations with effects there are of each kind; those that only hold such equations left out."""


def _survey(jaxpr: jx.Jaxpr) -> _Survey:
    count, effects, bodies = 0, Counter[str](), [jaxpr]
    while bodies:
        body = bodies.pop()
        count += len(body.eqns)
        nests = set(jx.eqns_with_regions(body))
        for e in [e for e in body.eqns if e.effects or e in nests]:
            inner = jx.subjaxprs(e)
            bodies += inner
            if e.effects and not any(b.effects for b in inner):
                effects[e.primitive.name] += 1
    return _Survey(count, effects)


def _same_effects(step: Pass, old: Counter[str], new: Counter[str]) -> None:
    if old != new:
        changed = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in sorted((old - new) | (new - old)))
        raise PassError(f"the pass {step} lost or repeated equations with effects: {changed}")


def _defined_once(jaxpr: jx.Jaxpr) -> bool:
    seen: set[jx.Var] = set()

    def all_new(body: jx.Jaxpr) -> bool:
        found = [*body.constvars, *body.invars, *(v for e in body.eqns for v in e.outvars)]
        before = len(seen)
        seen.update(found)
        fresh = len(seen) == before + len(found)
        return fresh and all(all_new(r.body) for e in jx.eqns_with_regions(body) for r in jx.regions(e))

    return all_new(jaxpr)
