"""prepare: from the abstract arguments of a call to the step planned for them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard import jaxpr as jx
from autoshard.adopt import adopt, passes_of
from autoshard.config import MeshLike, mesh_config, resolve_mesh
from autoshard.entry import Entry
from autoshard.errors import AutoshardError, MemoryBudgetError, SpecError
from autoshard.graph import Graph
from autoshard.mesh import LogicalMesh
from autoshard.plan import Plan
from autoshard.planner import Wish, make
from autoshard.program import Program
from autoshard.rewrite import Pass, Pipeline
from autoshard.rule import RuleTable
from autoshard.signature import Aval
from autoshard.spec import Spec
from autoshard.study import Study, pinned
from autoshard.trace import trace


@dataclass(frozen=True)
class Options:
    """The arguments of `jit`, checked and in one form."""

    mesh: MeshLike
    plan: Plan | None
    wish: Wish
    passes: tuple[Pass, ...]
    lighter: tuple[tuple[Pass, ...], ...]
    """Passes to take in place of them where nothing fits in memory; none where the user chose the passes."""
    table: RuleTable
    in_shardings: Any
    out_shardings: Any
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]
    donate_nums: tuple[int, ...]
    donate_names: tuple[str, ...]

    def without_first(self) -> Options:
        """For the same function with its first argument bound."""

        def shifted(nums: Sequence[int]) -> tuple[int, ...]:
            return tuple(n - 1 for n in nums if n > 0)

        return replace(self, static_nums=shifted(self.static_nums), donate_nums=shifted(self.donate_nums))


@dataclass(frozen=True)
class Carried:
    """How a step's first plan lays out what the step carries from call to call."""

    mesh: LogicalMesh
    specs: Mapping[tuple[str, tuple[int, ...], str], Spec]
    """By argument path, shape and dtype."""


def carried(entry: Entry) -> Carried:
    """What ``entry``, the first of a step, lays down for those after it."""
    places = [entry.plan.inputs[i] for i, _ in entry.program.carries]
    return Carried(entry.plan.mesh, {(p.path, p.shape, p.dtype): p.spec for p in places})


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """No search for reference cycles meanwhile: tracing and planning make millions of objects, nearly all of which
    stay, and going through them again and again takes a quarter of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
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

    def planned(mesh: LogicalMesh) -> tuple[Plan, Graph]:
        return _fitting(traced(mesh), options)

    def freely() -> tuple[Plan, Graph]:
        if options.mesh is not None:
            return planned(resolve_mesh(options.mesh))
        name = getattr(jitted, "__name__", "step")
        return _cheapest(planned, _candidates((options.in_shardings, options.out_shardings)), name)

    if options.plan is not None:
        program = traced(options.plan.mesh if options.mesh is None else resolve_mesh(options.mesh))
        ways = (options.passes, *options.lighter)
        chosen = next((w for w in ways if tuple(map(str, w)) == passes_of(options.plan.passes)), options.passes)
        program, wish = _passed(program, chosen, options.wish)
        plan, graph = adopt(options.plan, program, options.table, wish)
    elif first is not None and first.specs and options.wish.strategy == "auto":
        plan, graph = _as_first(traced, options, freely, first)
    else:
        plan, graph = freely()
    study = Study(graph, options.table, replace(options.wish, passes=plan.passes))
    return Entry(graph.program, graph, replace(plan, study=study), avals)


def _passed(program: Program, passes: tuple[Pass, ...], wish: Wish) -> tuple[Program, Wish]:
    program, reports = Pipeline(passes).run(program)
    return program, replace(wish, passes=tuple(map(str, reports)))


def _fitting(program: Program, options: Options) -> tuple[Plan, Graph]:
    """Plans ``program``; where nothing fits and the user said nothing of passes, the best of what fits with those that
    hold less.

    Raises:
      MemoryBudgetError: nothing fits; what it says is of the passes with which least is missing.
    """
    rewritten, wish = _passed(program, options.passes, options.wish)
    try:
        return make(rewritten, options.table, wish)
    except MemoryBudgetError as e:
        first = last = e
    made: list[tuple[Plan, Graph]] = []
    for passes in options.lighter:
        rewritten, wish = _passed(program, passes, options.wish)
        try:
            plan, graph = make(rewritten, options.table, wish)
        except MemoryBudgetError as e:
            last = e
        else:
            added = ", ".join(str(p) for p in passes if p not in options.passes)
            made.append(
                (replace(plan, diagnostics=(*plan.diagnostics, f"{added} was added: without it, {first}")), graph)
            )
    if made:
        return min(made, key=lambda m: m[0].cost.seconds)
    how = (
        f" (with {', '.join(str(p) for p in options.lighter[-1] if p not in options.passes)})"
        if options.lighter
        else "; or pass passes=['recompute:full']"
    )
    raise MemoryBudgetError(f"{last}{how}") from None


def _as_first(
    traced: Callable[[LogicalMesh], Program],
    options: Options,
    freely: Callable[[], tuple[Plan, Graph]],
    first: Carried,
) -> tuple[Plan, Graph]:
    """A plan that lays out what the step carries as its first plan does; another, that says so, where none can be."""
    try:
        program = traced(first.mesh)
        keys = [(leaf.path, leaf.aval.shape, jx.dtype_name(leaf.aval.dtype)) for leaf in program.inputs]
        bound = {i: first.specs[k] for i, k in enumerate(keys) if k in first.specs and program.inputs[i].pin is None}
        leaves = [replace(leaf, pin=bound.get(i, leaf.pin)) for i, leaf in enumerate(program.inputs)]
        plan, graph = _fitting(replace(program, inputs=tuple(leaves)), options)
    except (AutoshardError, ValueError) as e:
        why = str(e)
    else:
        inputs = [replace(p, why="as in the first plan") if i in bound else p for i, p in enumerate(plan.inputs)]
        return replace(plan, inputs=tuple(inputs)), graph
    plan, graph = freely()
    lay = [(p, first.specs.get((p.path, p.shape, p.dtype))) for p in plan.inputs]
    moved = [p.path for p, spec in lay if spec is not None and (first.mesh, spec) != (plan.mesh, p.spec)]
    said = (
        f"{', '.join(moved)}: laid out otherwise than in the first plan of the step, which does not serve here: {why}"
    )
    return replace(plan, diagnostics=(*plan.diagnostics, said)) if moved else plan, graph


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
    n = jax.device_count()
    shapes = [{"data": n}] + [{"data": n // m, "model": m} for m in range(2, n) if n % m == 0]
    return [resolve_mesh(s) for s in shapes]


def _cheapest[T: tuple[Plan, Any]](planned: Callable[[LogicalMesh], T], meshes: Sequence[LogicalMesh], name: str) -> T:
    """What is ``planned`` for the mesh that it is fastest on; meshes that do not serve what was asked are left out.

    Raises:
      AutoshardError: no mesh serves; of the kind of the first refusal, and the refusal itself where all are alike.
    """
    made: list[T] = []
    refused: dict[str, Exception] = {}
    for mesh in meshes:
        try:
            made.append(planned(mesh))
        except (AutoshardError, ValueError) as e:  # JAX has ValueError for a spec of an axis that the mesh lacks
            refused[str(mesh)] = e
    if made:
        return min(made, key=lambda m: m[0].cost.seconds)
    first = next(iter(refused.values()))
    if len({(type(e), str(e)) for e in refused.values()}) == 1 or not isinstance(first, AutoshardError):
        raise first
    reasons = "; ".join(f"{mesh}: {e}" for mesh, e in refused.items())
    raise type(first)(f"{name}: no mesh of these devices serves what was asked; give one as mesh=. {reasons}")
