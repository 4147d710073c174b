"""prepare: from the abstract arguments of a call to the step planned for them."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.adopt import adopt, passes_of
from autoshard.align import aligned
from autoshard.carried import Carried, as_first, held_to
from autoshard.config import MeshConfig, MeshLike, mesh_config, resolve_mesh
from autoshard.entry import Entry
from autoshard.errors import AutoshardError, MemoryBudgetError, SpecError
from autoshard.flatten import flatten
from autoshard.graph import Graph
from autoshard.mesh import LogicalMesh
from autoshard.plan import Alternative, Plan
from autoshard.planner import Wish, budget_of, make
from autoshard.program import Program
from autoshard.refine import refine
from autoshard.relax import helps_most
from autoshard.rewrite import Pass, Pipeline
from autoshard.rule import RuleTable
from autoshard.search import explore
from autoshard.signature import Aval
from autoshard.study import Study, pinned
from autoshard.trace import trace
from autoshard.units import size_text, time_text

FROZEN = 1000
"""Most objects that the interpreter itself keeps out of searches for cycles; more were put there by the program."""
HELPS = 0.01
"""The least share of memory for which something is to be let go of."""
LIGHTER = 3
"""Of the sets of passes that hold less, how many are weighed where the compiler chooses."""


@dataclass(frozen=True)
class Options:
    """The arguments of `jit`, checked and in one form."""

    mesh: MeshLike
    plan: Plan | None
    wish: Wish
    passes: tuple[Pass, ...]
    lighter: tuple[Pass, ...]
    """Passes to weigh in place of them where memory stands in the way, what is new among them in all its forms, from
    what holds most to what holds least; none where the user chose the passes."""
    weighed: tuple[Pass, ...]
    """Passes whose every form is weighed against going without."""
    table: RuleTable
    in_shardings: Any
    out_shardings: Any
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]
    donate_nums: tuple[int, ...]
    donate_names: tuple[str, ...]
    refine: int = 0
    """Layouts that are compiled to choose from; none where predictions choose."""
    cache: str | os.PathLike[str] | None = None
    """The folder where the compiler's answers are kept."""

    def without_first(self) -> Options:
        """For the same function with its first argument bound."""

        def shifted(nums: Sequence[int]) -> tuple[int, ...]:
            return tuple(n - 1 for n in nums if n > 0)

        return replace(self, static_nums=shifted(self.static_nums), donate_nums=shifted(self.donate_nums))


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """No search for reference cycles meanwhile: tracing and planning make millions of objects, nearly all of which
    stay, and going through them again and again takes a quarter of the time. Afterwards they are old at once: by
    themselves they would be gone through as the youngest first, then as the next."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and gc.get_freeze_count() <= FROZEN:
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()


@_uncollected()
def prepare(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    avals: tuple[Aval, ...],
    options: Options,
    first: Carried | None = None,
) -> Entry:
    """Traces and plans ``jitted`` (a `jax.jit` object) for a call.

    Args:
      args, kwargs: `jax.ShapeDtypeStruct`s, and static arguments as they are.
      avals: of the flat arguments.
      first: what the step carries is laid out so where that is possible, lest it be moved whenever the shapes change.

    Raises:
      AutoshardError, and whatever the function raises while it is traced.
    """

    def traced(mesh: LogicalMesh) -> Program:
        pins = options.in_shardings, options.out_shardings
        program = trace(jitted, args, kwargs, mesh, in_shardings=pins[0], out_shardings=pins[1])
        config = mesh_config(options.mesh)
        return pinned(program, config.specs() if config else {}, "the mesh's pin")

    served: list[Program] = []

    def fitting(program: Program) -> tuple[Plan, Graph]:
        made = _fitting(program, options)
        served.append(program)
        return made

    def planned(mesh: LogicalMesh) -> tuple[Plan, Graph]:
        return fitting(traced(mesh))

    def freely() -> tuple[Plan, Graph]:
        config, name = mesh_config(options.mesh), getattr(jitted, "__name__", "step")
        if config is not None and config.axes == "auto":
            return _cheapest(planned, config.meshes(), name)
        if options.mesh is not None:
            program = traced(resolve_mesh(options.mesh))
            try:
                return fitting(program)
            except MemoryBudgetError as e:
                raise MemoryBudgetError(f"{e}{_relaxed(program, options, e.least)}", e.least) from None
        return _cheapest(planned, _candidates((options.in_shardings, options.out_shardings)), name)

    bound, why, ready = frozenset[int](), "", None
    if options.plan is not None:
        config = mesh_config(options.mesh)
        chosen = options.mesh is not None and (config is None or config.axes != "auto")
        program = traced(resolve_mesh(options.mesh) if chosen else options.plan.mesh)
        ways = _ways(program, options)
        passes = next((w for w in ways if tuple(map(str, w)) == passes_of(options.plan.passes)), options.passes)
        program, wish = _passed(program, passes, options)
        plan, graph = adopt(options.plan, program, options.table, wish)
    elif first is not None and first.specs and options.wish.strategy == "auto":
        try:
            program, bound = as_first(traced(first.mesh), first)
            plan, graph = fitting(program)
        except (AutoshardError, ValueError) as e:
            bound, why = frozenset[int](), str(e)
            plan, graph = freely()
    else:
        plan, graph = freely()
    if options.refine:
        ways = (_passed(program, way, options) for program in served for way in _ways(program, options, LIGHTER))
        plan, graph, ready = refine((plan, graph), ways, options.table, avals, options.refine, options.cache)
    plan = held_to(plan, first, bound, why) if first is not None else plan
    study = Study(graph, options.table, replace(options.wish, passes=plan.passes))
    plain = functools.partial(_plain, graph.program, plan, options, avals) if graph.program.written else None
    return Entry(graph.program, graph, replace(plan, study=study), avals, plain, ready)


def _plain(program: Program, plan: Plan, options: Options, avals: tuple[Aval, ...]) -> Entry:
    """The step as it was before values were made longer, with its arguments and results where ``plan`` has them."""
    ends = ((program.inputs, plan.inputs), (program.outputs, plan.outputs))
    inputs, outputs = (
        tuple(replace(leaf, pin=place.spec) for leaf, place in zip(leaves, places, strict=True))
        for leaves, places in ends
    )
    assert program.written is not None
    program = replace(program, jaxpr=program.written, written=None, inputs=inputs, outputs=outputs)
    plan, graph = make(program, options.table, replace(options.wish, memory_budget=math.inf))
    return Entry(program, graph, plan, avals)


def _passed(program: Program, passes: tuple[Pass, ...], options: Options) -> tuple[Program, Wish]:
    program, reports = Pipeline(passes).run(program)
    return aligned(program, options.table), replace(options.wish, passes=tuple(map(str, reports)))


def _forms(program: Program, passes: tuple[Pass, ...], options: Options) -> Iterator[tuple[Pass, ...]]:
    """``passes``, and ``passes`` after each form of those that are weighed."""
    yield passes
    for weighed in options.weighed:
        for form in weighed.forms(program):
            yield form, *passes


def _ways(program: Program, options: Options, most: int | None = None) -> Iterator[tuple[Pass, ...]]:
    """Passes that may serve: those chosen and those that hold less, each after every form of what is weighed.

    Of those that hold less all, or ``most``, 2 or more, evenly from what holds most to what holds least.
    """
    lighter = list(_lighter(program, options))
    if most is not None and len(lighter) > most:
        lighter = [lighter[i * (len(lighter) - 1) // (most - 1)] for i in range(most)]
    for passes in (options.passes, *lighter):
        yield from _forms(program, passes, options)


def _fitting(program: Program, options: Options) -> tuple[Plan, Graph]:
    """Plans ``program`` into what its compiler leaves as it is planned; if nothing fits there, into the budget.

    Raises:
      MemoryBudgetError: nothing fits.
    """
    room = program.mesh.hardware.room
    if room < budget_of(options.wish, program):
        with contextlib.suppress(MemoryBudgetError):
            return _within(program, replace(options, wish=replace(options.wish, memory_budget=room)))
    return _within(program, options)


def _within(program: Program, options: Options) -> tuple[Plan, Graph]:
    """Plans ``program`` into the budget. Where memory stands in the way of the fastest layout and the user said nothing
    of passes, those that hold less are tried, and the fastest of what fits is taken.

    Raises:
      MemoryBudgetError: nothing fits; what it says is of the passes with which least is missing.
    """
    made: list[tuple[Plan, Graph, tuple[Pass, ...]]] = []
    refused: list[MemoryBudgetError] = []

    def unhindered(passes: tuple[Pass, ...], way: tuple[Pass, ...] | None = None) -> bool:
        rewritten, wish = _passed(program, way or passes, options)
        try:
            plan, graph = make(rewritten, options.table, wish)
        except MemoryBudgetError as e:
            refused.append(e)
            return False
        if passes is not options.passes:
            added = ", ".join(str(p) for p in passes if p not in options.passes)
            said = f"{added} was added: without it, {refused[0] if refused else _slower(made[0][0])}"
            plan = replace(plan, diagnostics=(*plan.diagnostics, said))
        made.append((plan, graph, passes))
        return not _hindered(plan)

    def fastest() -> tuple[Plan, Graph, tuple[Pass, ...]]:
        return min(made, key=lambda m: m[0].cost.seconds)

    if not unhindered(options.passes):
        ways = list(_lighter(program, options))
        bisect.bisect_left(ways, True, key=unhindered)  # what holds most and leaves every layout its room
    if made:
        *_, passes = fastest()
        for way in itertools.islice(_forms(program, passes, options), 1, None):
            unhindered(passes, way)
        plan, graph, _ = fastest()
        return plan, graph
    how = "" if options.lighter else "; or pass passes=['recompute:full']"
    if options.lighter:
        how = f" (with {', '.join(str(p) for p in options.lighter if p not in options.passes)})"
    raise MemoryBudgetError(f"{refused[-1]}{how}", refused[-1].least) from None


def _relaxed(program: Program, options: Options, least: float) -> str:
    """What to let go of so that less than ``least`` bytes would do, as a sentence ends; empty where none helps."""
    *_, passes = options.passes, *_lighter(program, options)

    def peak(relaxed: Program, wish: Wish) -> float:
        rewritten, wish = _passed(relaxed, passes, replace(options, wish=wish))
        try:
            graph, budget = flatten(rewritten, options.table), budget_of(wish, rewritten)
            return explore(graph, wish.strategy, budget, wish.compiler_options)[0].memory.peak
        except AutoshardError:  # a strategy that does not serve what is left
            return math.inf

    peak_then, words = helps_most(program, options.wish, peak)
    return f"; {words}, {size_text(peak_then, 2)} would do" if peak_then < least * (1 - HELPS) else ""


def _lighter(program: Program, options: Options) -> Iterator[tuple[Pass, ...]]:
    """What holds less than the passes that were chosen, from most to least."""
    for i, lighter in enumerate(options.lighter):
        if lighter not in options.passes:
            for form in lighter.forms(program):
                yield *options.lighter[:i], form, *options.lighter[i + 1 :]


def _hindered(plan: Plan) -> bool:
    """Whether a faster layout was found that does not fit in memory."""
    return bool(plan.alternatives) and plan.alternatives[0].seconds < plan.cost.seconds


def _slower(plan: Plan) -> str:
    fastest = plan.alternatives[0]
    return (
        f"what fits takes {time_text(plan.cost.seconds)}; what takes {time_text(fastest.seconds)} "
        f"holds {size_text(fastest.peak, 2)} a device"
    )


def _candidates(pins: Any) -> list[LogicalMesh]:
    """The meshes to weigh where none is given.

    That of the shardings given, if one names any, or every factoring of the devices into ``data`` and ``model``.
    """
    leaves = jax.tree.leaves(pins, is_leaf=lambda x: isinstance(x, NamedSharding))
    named = dict.fromkeys(p.mesh for p in leaves if isinstance(p, NamedSharding))
    if len({tuple(mesh.shape.items()) for mesh in named}) > 1:
        raise SpecError(f"the shardings given are over {' and '.join(str(dict(m.shape)) for m in named)}: choose one")
    if named:
        return [resolve_mesh(next(iter(named)))]
    return MeshConfig(axes="auto").meshes()


def _cheapest(
    planned: Callable[[LogicalMesh], tuple[Plan, Graph]], meshes: Sequence[LogicalMesh], name: str
) -> tuple[Plan, Graph]:
    """What is ``planned`` for the mesh that it is fastest on; meshes that do not serve what was asked are left out.

    Raises:
      AutoshardError: no mesh serves; of the kind of the first refusal, and the refusal itself where all are alike.
    """
    made: list[tuple[Plan, Graph]] = []
    refused: dict[str, Exception] = {}
    for mesh in meshes:
        try:
            made.append(planned(mesh))
        except (AutoshardError, ValueError) as e:  # JAX has ValueError for a spec of an axis that the mesh lacks
            refused[str(mesh)] = e
    if made:
        plan, graph = min(made, key=lambda m: m[0].cost.seconds)
        others = [Alternative(f"the mesh {p.mesh}", p.cost.seconds, p.memory.peak) for p, _ in made if p is not plan]
        return replace(plan, alternatives=(*plan.alternatives, *others)), graph
    first = next(iter(refused.values()))
    if len({(type(e), str(e)) for e in refused.values()}) == 1 or not isinstance(first, AutoshardError):
        raise first
    reasons = "; ".join(f"{mesh}: {e}" for mesh, e in refused.items())
    raise type(first)(f"{name}: no mesh of these devices serves what was asked; give one as mesh=. {reasons}")
