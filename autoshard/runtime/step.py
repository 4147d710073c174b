"""step: the object that `jit` returns: plans on first sight of a set of shapes, then only calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.backend.executable import Executable
from autoshard.jaxpr.arguments import argument_aval
from autoshard.runtime import nnx
from autoshard.runtime.carried_state import CarriedSpecs, carried_specs
from autoshard.runtime.options import Options
from autoshard.runtime.plan import Plan
from autoshard.runtime.prepare import prepare
from autoshard.runtime.signature import Call, signature
from autoshard.runtime.traced import Traced, traced


class Step:
    """A function that is planned for the shapes it is called with. Made by `autoshard.jit`.

    A call goes to JAX's own dispatch, which knows the calls that it has seen by their arguments' structure, shapes and
    places, by the values of static ones and by JAX's settings. What it has not seen comes back to `_miss`. Modules are
    taken apart before and put together after, for a step of their states.
    """

    def __init__(self, fun: Callable[..., Any], options: Options, shared: list[CarriedSpecs] | None = None) -> None:
        self._fun, self._options = fun, options
        self._carried: list[CarriedSpecs] = [] if shared is None else shared
        self._jitted = jax.jit(
            fun,
            static_argnums=options.static_nums,
            static_argnames=options.static_names,
            donate_argnums=options.donate_nums,
            donate_argnames=options.donate_names,
        )
        self._signature = signature(fun, options.static_nums, options.static_names)
        self._fast = jx.make_dispatcher(fun, self._miss, options.static_nums, options.static_names)
        self._dispatch: Callable[..., Any] = self._first_call
        self._executables: dict[Any, Executable[Plan]] = {}
        self._warned: set[str] = set()
        self._pure_steps: list[Step] = []
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step: the results of ``jax.jit(fun)``."""
        if kwargs:
            args, kwargs = self._signature.by_position(args, kwargs)
        try:
            return self._dispatch(*args, **kwargs)
        except ValueError:  # JAX's dispatch says so of a static argument without a hash, but not which
            self._signature.check_static_hashable(args, kwargs)
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _bind(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s. Needs only the mesh's description."""
        return self.executable(*args, **kwargs).plan

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The program that is planned for these arguments, after the passes, with what `jax.stages.Traced` offers."""
        step, called = self._pure_call(args, kwargs)
        given, named = step._abstract(*called)
        return traced(step._executable(*called).program, functools.partial(step.lower, *given, **named))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for these arguments, as planned. ``.compile()`` gives what `jax.stages` offers."""
        step, called = self._pure_call(args, kwargs)
        form = (args, kwargs) if step is self else called
        return step._executable(*called).lower_for_call(*step._signature.leaf_order(*form))

    def executable(self, *args: Any, **kwargs: Any) -> Executable[Plan]:
        """What was planned for these arguments, made now if need be."""
        step, called = self._pure_call(args, kwargs)
        return step._executable(*called)

    def dynamic(self, *args: Any, **kwargs: Any) -> Call:
        """The arguments that the program takes: static ones left out, NNX modules as their states."""
        step, called = self._pure_call(args, kwargs)
        return step._signature.dynamic(*called)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The function under plain `jax.jit` on one device, donating nothing: what the step is held against."""
        return jax.jit(self._fun, static_argnums=self._options.static_nums, static_argnames=self._options.static_names)(
            *args, **kwargs
        )

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        self._dispatch = self._call_with_modules if nnx.has_modules((args, kwargs)) else self._fast
        return self._dispatch(*args, **kwargs)

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, jx.FastPath]:
        """A call that JAX's dispatch has not seen: its result, and how to do it again."""
        pure = self._fun if isinstance(self._fun, nnx.PureFunction) else None
        if pure is not None:
            args, kwargs = pure.with_states(args, kwargs)
        elif nnx.has_modules((args, kwargs)):
            self._dispatch = self._call_with_modules
            return self._call_with_modules(*args, **kwargs), None
        entry = self._executable(args, kwargs)
        if not jx.is_tracing():
            entry.plan.mesh.require_available(entry.program.name)
        leaves = jax.tree.leaves(self._signature.dynamic(args, kwargs))
        placed = entry.move_misplaced(leaves, self._warned)
        if jx.is_tracing():
            result = entry.nested_jit(*placed)
            return (result if pure is None else pure.with_values(result)), None
        out_tree = entry.program.out_tree
        if pure is not None:
            out_tree = jax.tree.structure(pure.with_values(out_tree.unflatten(range(out_tree.num_leaves))))
        result, shortcut = entry.call(placed, out_tree)
        as_given = all(a is b for a, b in zip(leaves, placed, strict=True))
        return result, shortcut if as_given else None

    def _call_with_modules(self, *args: Any, **kwargs: Any) -> Any:
        """A call with NNX modules among the arguments."""
        if jax.config.jax_disable_jit:
            return self._fun(*args, **kwargs)
        if not nnx.has_modules((args, kwargs)):
            return self._fast(*args, **kwargs)
        parts = nnx.split(args, kwargs)
        step, pure = self._pure_step(parts)
        return pure.call(step._fast, args, kwargs, parts)

    def _executable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable[Plan]:
        key = self._signature.cache_key(args, kwargs)
        found = self._executables.get(key)
        if found is None:
            avals = tuple(map(argument_aval, jax.tree.leaves(self._signature.dynamic(args, kwargs))))
            first = self._carried[0] if self._carried else None
            found = prepare(self._jitted, *self._abstract(args, kwargs), avals, self._options, first)
            if not found.closes_over_tracers:  # what closes over a trace is good for that trace only
                self._executables[key] = found
                if not self._carried and carried_specs(found).specs:
                    self._carried.append(carried_specs(found))
        return found

    def _abstract(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments without their values or where they lie; static ones as they are."""
        avals = map(argument_aval, jax.tree.leaves(self._signature.dynamic(args, kwargs)))
        shapes = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
        return self._signature.with_leaves(args, kwargs, shapes)

    def _pure_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, Call]:
        """The step that takes the states of the NNX modules among the arguments, and those; itself without any."""
        args, kwargs = self._signature.by_position(args, kwargs)
        if isinstance(self._fun, nnx.PureFunction) or not nnx.has_modules((args, kwargs)):
            return self, (args, kwargs)
        parts = nnx.split(args, kwargs)
        return self._pure_step(parts)[0], (parts.states, dict(parts.states_by_name))

    def _pure_step(self, parts: nnx.SplitArguments) -> tuple[Step, nnx.PureFunction]:
        """The step of the states of modules so taken apart; the one used last stands first."""
        for step in self._pure_steps:
            if isinstance(step._fun, nnx.PureFunction) and step._fun.matches(parts):
                if step is not self._pure_steps[0]:
                    self._pure_steps = [step, *(s for s in self._pure_steps if s is not step)]
                return step, step._fun
        pure = nnx.pure(self._fun, parts)
        outs = (*(None,) * len(parts.module_args), self._options.out_shardings)
        self._pure_steps = [Step(pure, replace(self._options, out_shardings=outs), self._carried), *self._pure_steps]
        return self._pure_steps[0], pure


class _BoundStep:
    """A step as a method of an instance."""

    def __init__(self, step: Step, instance: Any) -> None:
        self._step, self._instance = step, instance
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._step.plan(self._instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        return self._step.trace(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._step.lower(self._instance, *args, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.reference(self._instance, *args, **kwargs)


def _bind(step: Step, instance: Any) -> Any:
    """``step`` bound to ``instance``: passed on where JAX can take it as an argument, closed over where not."""
    options = step._options
    if 0 in options.static_nums or nnx.is_module(instance) or not jax.tree_util.all_leaves([instance]):
        return _BoundStep(step, instance)
    bound: dict[int, Step] = step.__dict__.setdefault("_bound", {})
    if id(instance) not in bound:
        bound[id(instance)] = Step(functools.partial(step._fun, instance), options.without_first())
    return bound[id(instance)]
