"""The contract of a pass, how a user names passes, and the pipeline that runs them and checks each one's result."""

from __future__ import annotations

import abc
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from autoshard import jaxpr as jx
from autoshard.errors import MicrobatchError, PassError, nearest
from autoshard.ir.program import Program, aval_text

MIN_KEPT = 32
"""Programs that `KeptPrograms` keeps, however large."""
MAX_KEPT_EQUATIONS = 1 << 18
"""Most equations of the programs that it keeps beyond these: as many as a few hundred decoders of scanned layers have,
each after another sequence of passes."""


@dataclass(frozen=True)
class Pass:
    """A rewrite of programs. A subclass is a frozen dataclass whose fields are its options.

    It takes a valid program and returns a valid one with the same inputs, outputs and effects. Programs are immutable.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Look(autoshard.Pass):
      ...     name = "look"
      ...     def __call__(self, program):
      ...         return program
      ...     def change(self, before, after):
      ...         return f"{len(after.jaxpr.eqns)} equations seen"
      >>> plan = autoshard.jit(jnp.sin, mesh={"data": 8}, passes=[Look()]).plan(jnp.ones(8))
      >>> print(*plan.passes)
      look: 1 equations seen (1 -> 1 equations)
      >>> Look.from_option(None) == Look()
      True
      >>> Look().within(plan, prices={}, counts={}, layouts=[]) is None  # it decides on no values to hold
      True
    """

    name: ClassVar[str]
    """What a user writes in ``passes=[...]``."""
    saves_memory: ClassVar[bool] = False
    """Whether the planner tries it only where memory is short, so that less need be recomputed."""

    makes_room: ClassVar[bool] = False
    """Whether it is there for speed, and yet a step may fit with it that does not without."""

    keeps_layers: ClassVar[bool] = False
    """Whether layers stay what they are, so that the planner may try it on a step that is split into stages."""

    moves_state: ClassVar[bool] = False
    """Whether it puts carried arguments in another memory than the step's function has them in."""

    decides_held: ClassVar[bool] = False
    """Whether it decides what is held for the backward part (`within`)."""

    def __call__(self, program: Program) -> Program:
        """The rewritten program.

        Raises:
          PassError: the subclass does not say how it is rewritten.
        """
        raise PassError(f"the pass {type(self).__name__} has no __call__; define __call__(program) -> Program")

    def change(self, before: Program, after: Program) -> str:
        """What was rewritten, in one line for the plan's report."""
        return "changed" if before.jaxpr is not after.jaxpr else "nothing to change"

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """The passes to try where the planner is to choose options for this one: those that change ``program``.

        Args:
          batch_axes: the mesh axes that split the batch in a plan without this pass; None where there is no plan.
        """
        return (self,) if self(program) is not program else ()

    def within(
        self,
        program: Program,
        prices: Mapping[str, tuple[float, float]],
        counts: Mapping[str, tuple[int, int]],
        layouts: Sequence[tuple[float, float]],
    ) -> tuple[Pass, float] | None:
        """The pass that holds, of the values that a step may hold for its backward part, those with which the step
        takes least time, and the seconds that it then takes; None where this pass decides nothing of the kind.

        Args:
          prices: by name of a value, bytes per device in one layer, and seconds to make it again there.
          counts: by name, in how many layers it is made again now, and in how many it is on the host meanwhile.
          layouts: of each layout to choose from, the seconds of the step with what is held now, and the bytes per
            device that may be held beyond it; below 0, by how much less.
        """
        del program, prices, counts, layouts
        return None

    @classmethod
    def from_option(cls, option: str | None) -> Self:
        """The pass whose first field is ``option``, the text after the colon in ``"name:option"``.

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
class InParts(Pass, abc.ABC):
    """A pass that computes a step in parts of its batch."""

    parts: int = 0
    """Their number; 0 leaves it open."""

    @abc.abstractmethod
    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[InParts, ...]:
        """One for each number of parts to choose from, fewest first; none where there is a reason (`why_none`)."""

    @abc.abstractmethod
    def why_none(self, program: Program) -> MicrobatchError | None:
        """Why ``program`` is not computed in parts, whatever their number; None where it can be."""


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    """The pass's name, as ``recompute``."""
    written: str
    """The pass as a user writes it, with its option: ``recompute:full``."""
    equations_before: int
    """Equations at every depth, before the pass."""
    equations_after: int
    change: str
    """What was rewritten."""

    def __str__(self) -> str:
        return f"{self.written}: {self.change} ({self.equations_before} -> {self.equations_after} equations)"


@dataclass(frozen=True)
class AppliedPass:
    """A program before and after one pass."""

    before: Program
    after: Program
    report: PassReport
    counts: _Counts
    """Of ``after``."""


class KeptPrograms:
    """What passes made of programs: the last `MIN_KEPT` that were asked for, and those before them as long as all have
    no more than `MAX_KEPT_EQUATIONS`."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[int, Pass], AppliedPass] = OrderedDict()
        self._equations = 0
        """Of all that is kept."""

    def apply(self, step: Pass, program: Program, counts: _Counts) -> AppliedPass:
        """What ``step`` makes of ``program``, which has ``counts``.

        Raises:
          PassError: as `Pipeline.run`.
        """
        key = id(program), step  # what is kept holds its program, so no other gets that id
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _apply(step, program, counts)
            self._equations += found.counts.equations
        self._found.move_to_end(key)
        while len(self._found) > MIN_KEPT and self._equations > MAX_KEPT_EQUATIONS:
            self._equations -= self._found.popitem(last=False)[1].counts.equations
        return found


@dataclass(frozen=True)
class Pipeline:
    """Passes, in the order in which they run."""

    passes: tuple[Pass, ...] = ()
    kept: KeptPrograms | None = field(default=None, compare=False, repr=False)
    """Asked before a pass is run, and given what it made; None runs each."""

    def run(self, program: Program) -> tuple[Program, tuple[PassReport, ...]]:
        """The program after all passes, and a report on each.

        Raises:
          PassError: a pass returned an invalid program, or one with other inputs, outputs or effects.
        """
        rewrites = tuple(self.rewrites(program))
        return rewrites[-1].after if rewrites else program, tuple(r.report for r in rewrites)

    def rewrites(self, program: Program) -> Iterator[AppliedPass]:
        """What each pass makes of the program that those before it made of ``program``.

        Raises:
          PassError: as `run`.
        """
        counts = _count(program.jaxpr)
        for step in self.passes:
            found = (_apply if self.kept is None else self.kept.apply)(step, program, counts)
            yield found
            program, counts = found.after, found.counts


def _apply(step: Pass, program: Program, counts: _Counts) -> AppliedPass:
    after, new = step(program), counts
    if after.jaxpr is not program.jaxpr:
        after = _validated(step, program, after)
        new = _count(after.jaxpr)
        _check_effects(step, counts.effects, new.effects)
    change = step.change(program, after)
    report = PassReport(step.name, str(step), counts.equations, new.equations, change)
    return AppliedPass(program, after, report, new)


def parse_passes(specs: str | Pass | Iterable[str | Pass] | None, known: Mapping[str, type[Pass]]) -> tuple[Pass, ...]:
    """The passes that a user names: ``"dead_code"``, ``"recompute:full"``, a `Pass`, or several of these.

    Raises:
      PassError: a name that is not in ``known``, or an option that the pass does not take.
    """
    if specs is None:
        return ()
    return tuple(_parse(s, known) for s in ([specs] if isinstance(specs, (str, Pass)) else specs))


def _parse(spec: Any, known: Mapping[str, type[Pass]]) -> Pass:
    if isinstance(spec, Pass):
        return spec
    if not isinstance(spec, str):
        raise PassError(
            f"passes contains {spec!r}, not a Pass or the name of one, such as {next(iter(known), 'name')!r}"
        )
    name, colon, option = (part.strip() for part in spec.partition(":"))
    if name not in known:
        raise PassError(f"unknown pass {name!r} in passes={spec!r}{nearest(name, known)}")
    return known[name].from_option(option if colon else None)


def _validated(step: Pass, before: Program, after: Program) -> Program:
    """``after``, normalized where needed, once its inputs, outputs and equations are checked.

    Raises:
      PassError: inputs or outputs differ from those of ``before``, or the jaxpr is not well formed.
    """
    for what, old, new in (
        ("inputs", before.jaxpr.in_avals, after.jaxpr.in_avals),
        ("outputs", before.jaxpr.out_avals, after.jaxpr.out_avals),
    ):
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            if not _same_aval(a, b):
                leaf = (before.inputs if what == "inputs" else before.outputs)[i]
                raise PassError(f"the pass {step} changed {leaf.path} from {aval_text(a)} to {aval_text(b)}")
        if len(old) != len(new):
            raise PassError(f"the pass {step} changed the number of {what} from {len(old)} to {len(new)}")
    if not _defined_once(after.jaxpr):
        after = after.with_jaxpr(jx.normalize(after.jaxpr))
    try:
        jx.check_jaxpr(after.jaxpr, before.jaxpr)
    except Exception as e:
        raise PassError(f"the pass {step} returned a program that is not well formed: {e}") from e
    return after


def _same_aval(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


@dataclass(frozen=True)
class _Counts:
    """Equations of a jaxpr, at every depth."""

    equations: int
    effects: Counter[str]
    """Equations with effects, by primitive; not those that only contain such equations."""


def _count(jaxpr: jx.Jaxpr) -> _Counts:
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
    return _Counts(count, effects)


def _check_effects(step: Pass, old: Counter[str], new: Counter[str]) -> None:
    if old != new:
        changed = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in sorted((old - new) | (new - old)))
        raise PassError(f"the pass {step} removed or duplicated equations with effects: {changed}")


def _defined_once(jaxpr: jx.Jaxpr) -> bool:
    seen: set[jx.Var] = set()

    def all_unseen(body: jx.Jaxpr) -> bool:
        defined = [*body.constvars, *body.invars, *(v for e in body.eqns for v in e.outvars)]
        before = len(seen)
        seen.update(defined)
        unseen = len(seen) == before + len(defined)
        return unseen and all(all_unseen(r.body) for e in jx.eqns_with_regions(body) for r in jx.regions(e))

    return all_unseen(jaxpr)
