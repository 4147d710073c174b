"""step: the object that `jit` returns: plans on first sight of a set of shapes, then only calls."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import jaxpr as jx
from autoshard import stateful
from autoshard.adopt import adopt
from autoshard.config import MeshLike, mesh_config, resolve_mesh
from autoshard.entry import Entry, aval
from autoshard.errors import ArgumentError, ConfigError, OtherShapesError, nearest
from autoshard.graph import Graph
from autoshard.mesh import LogicalMesh
from autoshard.plan import Plan
from autoshard.planner import Wish, make
from autoshard.program import Leaf, Program
from autoshard.rewrite import Pass, Pipeline
from autoshard.rule import RuleTable
from autoshard.spec import check
from autoshard.trace import trace


@dataclass(frozen=True)
class Options:
    """The arguments of `jit`, checked and in one form."""

    mesh: MeshLike
    plan: Plan | None
    wish: Wish
    passes: tuple[Pass, ...]
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


class Step:
    """A function that is planned for the shapes it is called with. Made by `autoshard.jit`."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self._fun, self._options = fun, options
        self._jitted = jax.jit(
            fun,
            static_argnums=options.static_nums,
            static_argnames=options.static_names,
            donate_argnums=options.donate_nums,
            donate_argnames=options.donate_names,
        )
        self._entries: dict[Any, Entry] = {}
        self._hot: Callable[..., Any] = _unplanned
        self._warned: set[str] = set()
        self._pures: dict[Any, Step] = {}
        self._name: str = getattr(fun, "__name__", "step")
        self._positional = _positional(fun)
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step: the results of ``jax.jit(fun)``."""
        if kwargs:
            args, kwargs = self._by_position(args, kwargs)
        try:
            return self._hot(*args, **kwargs)
        except (OtherShapesError, ValueError, TypeError):
            pass  # other shapes, or arguments elsewhere than planned; outside of the handler errors stand alone
        return self._cold(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _bound(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s. Needs only the mesh's description."""
        step, args, kwargs = self._pure(args, kwargs)
        return step._entry(args, kwargs).plan

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that is planned for these arguments, after the passes."""
        step, args, kwargs = self._pure(args, kwargs)
        return step._entry(args, kwargs).program

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for these arguments, as planned. ``.compile()`` gives what `jax.stages` offers."""
        step, args, kwargs = self._pure(args, kwargs)
        return step._entry(args, kwargs).lowered(jax.tree.leaves(step._dynamic(args, kwargs)))

    def entry(self, *args: Any, **kwargs: Any) -> Entry:
        """What was planned for these arguments, made now if need be."""
        step, args, kwargs = self._pure(args, kwargs)
        return step._entry(args, kwargs)

    def dynamic(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the program takes: static ones left out, NNX modules as their states."""
        step, args, kwargs = self._pure(args, kwargs)
        return step._dynamic(args, kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The function under plain `jax.jit` on one device, donating nothing: what the step is held against."""
        return jax.jit(self._fun, static_argnums=self._options.static_nums, static_argnames=self._options.static_names)(
            *args, **kwargs
        )

    def _cold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step, states, _ = self._pure(args, kwargs)
        if step is not self:
            return stateful.finish(step._fun, args, step(*states, **kwargs))
        entry = self._entry(args, kwargs)
        leaves = jax.tree.leaves(self._dynamic(args, kwargs))
        placed = entry.place(leaves, self._warned)
        if entry.closes or any(map(jx.is_tracer, leaves)):
            return entry.inner(*placed)
        entry.lowered(leaves)
        result = entry.call(placed)
        only = len(self._entries) == 1 and not (entry.flat or entry.refused)
        self._hot = entry.jitted if only else self._by_shape
        return result

    def _by_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The hot path once there are several sets of shapes, or arguments come now from here, now from there."""
        entry = self._entries.get(self._key(args, kwargs))
        if entry is None or not entry.is_lowered:
            raise OtherShapesError
        return entry.call(jax.tree.leaves(self._dynamic(args, kwargs)))

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        key = self._key(args, kwargs)
        found = self._entries.get(key)
        if found is None:
            found = self._make(args, kwargs)
            if not found.closes:  # what closes over a trace is good for that trace only
                self._entries[key] = found
        return found

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        options = self._options
        avals = tuple(map(aval, jax.tree.leaves(self._dynamic(args, kwargs))))
        form = tuple((i, a) for i, a in enumerate(args) if i in options.static_nums), bool(kwargs)
        args, kwargs = self._abstract(args, kwargs, avals)
        best: tuple[Plan, Graph] | None = None
        given = options.plan.mesh if options.plan is not None and options.mesh is None else options.mesh
        for mesh in _meshes(given):
            program = trace(
                self._jitted, args, kwargs, mesh, in_shardings=options.in_shardings, out_shardings=options.out_shardings
            )
            program = _with_config_pins(program, options.mesh)
            program, reports = Pipeline(options.passes).run(program)
            wish = replace(options.wish, passes=tuple(map(str, reports)))
            if options.plan is not None:
                plan, graph = adopt(options.plan, program, options.table, wish)
                return Entry(program, graph, plan, avals, *form)
            made = make(program, options.table, wish)
            if best is None or made[0].cost.seconds < best[0].cost.seconds:
                best = made
        assert best is not None
        return Entry(best[1].program, best[1], best[0], avals, *form)

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with as few keywords as it can be written with: one program for all its forms."""
        if not kwargs or len(args) < self._positional[0]:
            return args, kwargs
        kwargs, given = dict(kwargs), list(args)
        for name in self._positional[1][len(args) :]:
            if name not in kwargs:
                break
            given.append(kwargs.pop(name))
        return tuple(given), kwargs

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        options = self._options
        return (
            tuple(a for i, a in enumerate(args) if i not in options.static_nums),
            {k: v for k, v in kwargs.items() if k not in options.static_names},
        )

    def _abstract(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], avals: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without their values or where they lie; static ones as they are."""
        shapes = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
        dynamic, named = jax.tree.structure(self._dynamic(args, kwargs)).unflatten(shapes)
        rest = iter(dynamic)
        given = tuple(a if i in self._options.static_nums else next(rest) for i, a in enumerate(args))
        return given, {**kwargs, **named}

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = self._options
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        static = tuple((i, type(a), a) for i, a in enumerate(args) if i in options.static_nums)
        named = tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in options.static_names)
        try:
            key = tree, tuple(map(aval, leaves)), static, named
            hash(key)
        except TypeError:
            raise ArgumentError(self._unfit(args, kwargs)) from None
        return key

    def _unfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What to say of an argument that is no array, or of a static one that has no hash."""
        names = self._positional[1]
        for where, value in (*enumerate(args), *kwargs.items()):
            name = where if isinstance(where, str) else names[where] if where < len(names) else f"args[{where}]"
            if where in self._options.static_nums or where in self._options.static_names:
                if not _passes(hash, value):
                    return (
                        f"{self._name}: the static argument {name} is a {type(value).__name__}, which has no hash; "
                        "pass something immutable, such as a tuple or a frozen dataclass"
                    )
                continue
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                if not _passes(aval, leaf):
                    return (
                        f"{self._name}: {name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, which is no "
                        "array; name it in static_argnums or static_argnames if it is a setting, or take it out "
                        "of the pytree"
                    )
        return f"{self._name}: the structure of an argument has no hash"

    def _pure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, tuple[Any, ...], dict[str, Any]]:
        """The step that takes the states of the NNX modules among the arguments, and those; itself without any."""
        if isinstance(self._fun, stateful.Pure):
            return self, args, kwargs
        args, kwargs = self._by_position(args, kwargs)
        if stateful.has_modules(kwargs):
            raise ArgumentError(f"{self._name}: an NNX module is passed to a keyword-only argument; make it positional")
        if not stateful.has_modules(args):
            return self, args, kwargs
        parts = stateful.split(args)
        found = self._pures.get(parts.structure)
        if found is None:
            outs = self._options.out_shardings
            options = replace(self._options, out_shardings=(*(None,) * len(parts.where), outs))
            found = self._pures[parts.structure] = Step(stateful.Pure(self._fun, replace(parts, states=())), options)
        return found, parts.states, kwargs


class _Bound:
    """A step as a method of an instance."""

    def __init__(self, step: Step, instance: Any) -> None:
        self._step, self._instance = step, instance
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._step.plan(self._instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        return self._step.trace(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._step.lower(self._instance, *args, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.reference(self._instance, *args, **kwargs)


def _bound(step: Step, instance: Any) -> Any:
    """``step`` bound to ``instance``: passed on where JAX can take it as an argument, closed over where not."""
    options = step._options
    if 0 in options.static_nums or stateful.is_module(instance) or not jax.tree_util.all_leaves([instance]):
        return _Bound(step, instance)
    bound: dict[int, Step] = step.__dict__.setdefault("_bound", {})
    if id(instance) not in bound:
        bound[id(instance)] = Step(functools.partial(step._fun, instance), options.without_first())
    return bound[id(instance)]


def _unplanned(*_: Any, **__: Any) -> Any:
    raise OtherShapesError


def _positional(fun: Callable[..., Any]) -> tuple[int, list[str]]:
    """The names of the arguments of ``fun`` that can be given by position, and how many of them only so."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return 0, []
    only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    return len(only), [*only, *(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)]


def _passes(test: Callable[[Any], Any], value: Any) -> bool:
    try:
        test(value)
    except TypeError:
        return False
    return True


def _meshes(mesh: MeshLike) -> list[LogicalMesh]:
    """The meshes to weigh: the one given, or every factoring of the local devices into ``data`` and ``model``."""
    if mesh is not None:
        return [resolve_mesh(mesh)]
    n = jax.device_count()
    shapes = [{"data": n}] + [{"data": n // m, "model": m} for m in range(2, n) if n % m == 0]
    return [resolve_mesh(s) for s in shapes]


def _with_config_pins(program: Program, mesh: MeshLike) -> Program:
    """``program`` with the pins of a mesh config, by argument-path glob; a pin given in the call wins."""
    config = mesh_config(mesh)
    inputs = list(program.inputs)
    for pattern, spec in (config.specs() if config else {}).items():
        hits = [i for i, leaf in enumerate(inputs) if fnmatch.fnmatchcase(leaf.path, _literal(pattern))]
        if not hits:
            raise ConfigError(
                f"the mesh's pin {pattern!r} matches no argument of {program.name}"
                f"{nearest(pattern, [leaf.path for leaf in inputs])}"
            )
        inputs = [_pinned(leaf, spec, program.mesh) if i in hits else leaf for i, leaf in enumerate(inputs)]
    return replace(program, inputs=tuple(inputs))


def _literal(pattern: str) -> str:
    """A glob in which brackets stand for themselves: paths are full of them."""
    return pattern.replace("[", "[[]")


def _pinned(leaf: Leaf, spec: PartitionSpec, mesh: LogicalMesh) -> Leaf:
    return leaf if leaf.pin is not None else replace(leaf, pin=check(spec, leaf.aval.shape, mesh.shape, leaf.path))
