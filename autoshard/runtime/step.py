"""The object that `autoshard.jit` returns: plans once for each set of argument shapes, then only calls the
executable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax

from autoshard import jaxpr as jx
from autoshard.backend.executable import Executable
from autoshard.errors import PlanError
from autoshard.export.artifact import export_step
from autoshard.export.symbolic import export_with_symbols, with_symbols
from autoshard.ir.trace import pinned_memory
from autoshard.jaxpr.arguments import ArgumentAval, abstract_argument, argument_aval
from autoshard.plan.document import plural
from autoshard.runtime import nnx
from autoshard.runtime.carried_state import FirstPlan
from autoshard.runtime.options import Options
from autoshard.runtime.plan import Plan
from autoshard.runtime.prepare import prepare, rewrites
from autoshard.runtime.shared_layout import Placements, placements, serves
from autoshard.runtime.signature import Call, as_the_function_has_them, signature
from autoshard.runtime.traced import Traced, traced
from autoshard.transforms.pipeline import AppliedPass


class Step:
    """A function that is planned for the argument shapes it is called with. Made by `autoshard.jit`.

    A call goes to JAX's C++ dispatch, which caches by the arguments' structure, shapes and shardings, by the values of
    static arguments and by JAX's settings. A cache miss comes back to `_miss`. NNX modules are split into structure and
    state before the call and updated after it; a step of its own is planned for the states.

    Example:
      >>> step = autoshard.jit(lambda w, x: w * jnp.mean(x @ w), mesh={"data": 8}, strategy="dp")
      >>> w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
      >>> bool(jnp.allclose(step(w, x), step.reference(w, x)))
      True
      >>> step.plan(w, x) is step.first_plan()
      True
      >>> compiled = step.lower(w, x).compile()
      >>> served = autoshard.load_exported(step.export(w, x))
      >>> step.trace(w, x).jaxpr.jaxpr.eqns[0].primitive.name
      'sum_of_products'
      >>> step.written(w, x).jaxpr.eqns[0].primitive.name
      'dot_general'
      >>> step.clear_cache()
    """

    def __init__(self, fun: Callable[..., Any], options: Options, first_plan: FirstPlan | None = None) -> None:
        self._fun, self._options = fun, options
        self._first_plan = FirstPlan() if first_plan is None else first_plan
        self._jitted: Any = jax.jit(
            fun,
            static_argnums=options.static_nums,
            static_argnames=options.static_names,
            donate_argnums=options.donate_nums,
            donate_argnames=options.donate_names,
        )
        self._signature = signature(fun, options.static_nums, options.static_names)
        eager = fun.on_values if isinstance(fun, nnx.PureFunction) else fun
        name, statics = self._signature.name, (options.static_nums, options.static_names)
        self._fast = jx.make_dispatcher(name, eager, self._miss, *statics)
        self._call: Callable[..., Any] = self._fast
        self._dispatch: Callable[..., Any] = self._first_call
        self._executables: dict[Any, list[tuple[Executable[Plan], Placements]]] = {}
        self._warned: set[str] = set()
        self._pure_steps: list[Step] = []
        self._bound_steps: dict[int, Step] = {}
        functools.update_wrapper(self, fun)

    def __repr__(self) -> str:
        made = sum(map(len, self._executables.values())) + sum(len(s._executables) for s in self._pure_steps)
        strategy = "a given plan" if self._options.plan is not None else self._options.request.strategy
        return f"<Step of {self._signature.name}, strategy {strategy}: planned for {plural(made, 'kind')} of arguments>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step: the results of ``jax.jit(fun)``."""
        if kwargs:
            args, kwargs = self._signature.by_position(args, kwargs)
        try:
            return self._dispatch(*args, **kwargs)
        except ValueError:  # JAX's dispatch raises it for a static argument without a hash, but does not say which
            self._signature.check_static_hashable(args, kwargs)
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _bind(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or their shapes. Needs only the mesh's description."""
        return self.executable(*args, **kwargs).plan

    def first_plan(self) -> Plan:
        """The plan that the step made first.

        Raises:
          PlanError: it has made none yet.
        """
        if self._first_plan.plan is None:
            name = self._signature.name
            raise PlanError(
                f"{name} has no plan yet, which like= asks for: call it first, or {name}.plan(...) with the shapes of "
                "its arguments"
            )
        return self._first_plan.plan

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The planned program for these arguments, after the passes, with the interface of `jax.stages.Traced`."""
        step, call = self._pure_call(args, kwargs)
        order = step._signature.leaf_order(*((args, kwargs) if step is self else call))
        executable = step._executable(*call)
        return traced(executable.program, functools.partial(executable.lower_for_call, *order))

    def written(self, *args: Any, **kwargs: Any) -> jx.Jaxpr:
        """The program for these arguments, arrays or their shapes, as the function is written: before the passes."""
        step, call = self._pure_call(args, kwargs)
        args, kwargs = step._abstract(*call)
        return step._jitted.trace(*args, **kwargs).jaxpr

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments with the planned shardings, as `jax.jit` does."""
        step, call = self._pure_call(args, kwargs)
        order = step._signature.leaf_order(*((args, kwargs) if step is self else call))
        return step._executable(*call).lower_for_call(*order)

    def export(self, *args: Any, symbolic_shapes: Sequence[Any] | None = None, **kwargs: Any) -> bytes:
        """The planned step for these arguments as bytes, for `autoshard.load_exported` or for JAX alone.

        The artifact has the program, the shardings of arguments and results, and the plan. It runs on as many devices
        of the same platform. ``jax.export.deserialize(bytearray(...))`` reads it in a process without autoshard: there
        containers are tuples, lists and dicts, and of any other class (a named tuple, a dataclass) a tuple of the
        children. Static arguments are part of the program; NNX modules are exported as their states.

        Args:
          symbolic_shapes: a pytree prefix of the positional arguments that are not static, as
            `jax.export.symbolic_args_specs` takes it: with ``(None, "8*b, s")`` the step takes a second argument of
            any batch that is a multiple of 8, and of any length. Arguments and results have the plan's shardings, and
            must divide over the mesh whatever the symbols are; what is between is laid out by XLA.

        Raises:
          ExportError: an argument that `jax.export` cannot store, or the library ``flatbuffers`` is missing; or the
            step cannot be exported for every size that the symbols stand for: says why.
          PlanError: state is stored with padding.
        """
        step, call = self._pure_call(args, kwargs)
        given = (args, kwargs) if step is self else call
        executable = step._executable(*call)
        if symbolic_shapes is not None:
            return step._export_symbolic(executable, call, symbolic_shapes)
        _, order = step._signature.leaf_order(*given)
        donated = [at for at, leaf in zip(order, executable.program.inputs, strict=True) if leaf.donated]
        return export_step(jax.export.export(cast(Any, step))(*given[0], **given[1]), executable.plan, donated)

    def _export_symbolic(self, executable: Executable[Plan], call: Call, shapes: Sequence[Any]) -> bytes:
        """`export`, for shapes with symbols."""
        plan, options = executable.plan, self._options
        if executable.stores_padding:
            raise PlanError(f"{plan.name} stores state with padding, which is of one size: plan it without pad_state=")
        args, kwargs = self._signature.dynamic(*self._abstract(*call))
        leaves = jax.tree.leaves((with_symbols(tuple(args), shapes, plan), kwargs))
        exported = export_with_symbols(
            self._fun,
            *self._signature.with_leaves(*call, leaves),
            plan,
            static_argnums=options.static_nums,
            static_argnames=options.static_names,
            donate_argnums=options.donate_nums,
            donate_argnames=options.donate_names,
        )
        return export_step(exported, plan, [i for i, leaf in enumerate(executable.program.inputs) if leaf.donated])

    def around(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Step:
        """The step of ``wrap(fun)``, which takes what ``fun`` takes, with the same options; planned anew."""
        return Step(wrap(self._fun), self._options)

    def clear_cache(self) -> None:
        """Forgets every plan, trace and executable, as the method of a `jax.jit` function does: the next call plans as
        the first one did.
        """
        self._jitted.clear_cache()
        jx.clear_dispatcher(self._fast)
        self._executables.clear()
        self._first_plan.forget()
        self._warned.clear()
        self._pure_steps.clear()
        self._bound_steps.clear()

    def executable(self, *args: Any, **kwargs: Any) -> Executable[Plan]:
        """The planned step for these arguments; planned now if it was not."""
        step, call = self._pure_call(args, kwargs)
        return step._executable(*call)

    def rewrites(self, *args: Any, **kwargs: Any) -> Iterator[AppliedPass]:
        """The program for these arguments before and after each pass that its plan was made with."""
        step, call = self._pure_call(args, kwargs)
        return rewrites(step._jitted, *step._abstract(*call), step._options, step._executable(*call).plan)

    def dynamic(self, *args: Any, **kwargs: Any) -> Call:
        """The program's arguments: without the static ones, NNX modules as their states."""
        step, call = self._pure_call(args, kwargs)
        return step._signature.dynamic(*call)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function under plain `jax.jit` on one device, without donation."""
        return jax.jit(self._fun, static_argnums=self._options.static_nums, static_argnames=self._options.static_names)(
            *args, **kwargs
        )

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        self._dispatch = self._call_with_modules if nnx.has_modules((args, kwargs)) else self._call
        return self._dispatch(*args, **kwargs)

    def _call_padded(self, *args: Any, **kwargs: Any) -> Any:
        """A call with arguments or results that are stored with padding."""
        args, kwargs = self._map_dynamic(jx.to_dispatch, args, kwargs)
        return jax.tree.map(jx.from_dispatch, self._fast(*args, **kwargs))

    def _map_dynamic(self, fun: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with ``fun`` applied to every array in it."""
        return self._signature.with_leaves(
            args, kwargs, map(fun, jax.tree.leaves(self._signature.dynamic(args, kwargs)))
        )

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, jx.FastPath]:
        """A call that is not in the dispatch cache: its result, and the fast path for the next such call."""
        pure = self._fun if isinstance(self._fun, nnx.PureFunction) else None
        if self._call is not self._fast:
            args, kwargs = self._map_dynamic(jx.from_dispatch, args, kwargs)
        if pure is not None:
            args, kwargs = pure.with_states(args, kwargs)
        elif nnx.has_modules((args, kwargs)):
            self._dispatch = self._call_with_modules
            return self._call_with_modules(*args, **kwargs), None
        executable = self._executable(args, kwargs)
        if executable.stores_padding and self._call is self._fast:
            self._call = self._call_padded
            self._dispatch = self._call if self._dispatch is self._fast else self._dispatch
        executable.plan.mesh.require_same_size_around(executable.program.name)
        if not jx.is_tracing():
            executable.plan.mesh.require_available(executable.program.name)
        leaves = jax.tree.leaves(self._signature.dynamic(args, kwargs))
        placed = executable.move_misplaced(leaves, self._warned)
        if jx.is_tracing():
            result = executable.nested_jit(*placed)
            return (result if pure is None else pure.with_values(result)), None
        out_tree = executable.program.out_tree
        if pure is not None:
            out_tree = jax.tree.structure(pure.with_values(out_tree.unflatten(range(out_tree.num_leaves))))
        result, fast_path = executable.call(placed, out_tree)
        none_moved = all(getattr(a, "stored", a) is b for a, b in zip(leaves, placed, strict=True))
        return result, fast_path if none_moved else None

    def _call_with_modules(self, *args: Any, **kwargs: Any) -> Any:
        """A call with NNX modules among the arguments."""
        if jax.config.jax_disable_jit:
            return self._fun(*args, **kwargs)
        if not nnx.has_modules((args, kwargs)):
            return self._call(*args, **kwargs)
        parts = nnx.split(args, kwargs)
        step, pure = self._pure_step(parts)
        return pure.call(step._call, args, kwargs, parts)

    def _executable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable[Plan]:
        """The planned step for these arguments: of several for such arrays, the first that takes them where they are,
        or that was made for those."""
        key = self._signature.cache_key(args, kwargs, self._offloaded)
        placed = placements(jax.tree.leaves(self._signature.dynamic(args, kwargs)))
        for executable, where in self._executables.get(key, ()):
            if not self._options.takes_placed or serves(executable.program, executable.plan, placed, where):
                return executable
        avals, call = self._avals(args, kwargs), self._abstract(args, kwargs)
        found = prepare(self._jitted, *call, avals, self._options, self._first_plan.carried, placed)
        if not found.closes_over_tracers:  # else it is valid within the outer trace only
            self._executables.setdefault(key, []).append((found, placed))
            self._first_plan.record(found)
        return found

    @property
    def _offloaded(self) -> Mapping[int, tuple[int, ...]] | None:
        """The flat arguments that a given plan, or the first one, keeps in the host's memory, with their shapes. Before
        there is one none; or where the user asks for it, None: all that come from there, as a restored state does."""
        plan = self._options.plan or self._first_plan.plan
        if plan is None:
            return None if any(p.moves_state for p in self._options.passes) else {}
        return {i: p.shape for i, p in enumerate(plan.inputs) if p.offloaded}

    def _abstract(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments as `jax.ShapeDtypeStruct`s, in the memory that is pinned; static ones as they are."""
        return self._signature.with_leaves(args, kwargs, map(abstract_argument, self._avals(args, kwargs)))

    def _avals(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ArgumentAval, ...]:
        """The abstract values of the flat arguments, in the memory that the user pins, else that the given plan has
        them in, else that they are in.
        """
        dynamic, named = self._signature.dynamic(args, kwargs)
        given, plan = map(argument_aval, jax.tree.leaves((dynamic, named))), self._options.plan
        avals = list(as_the_function_has_them(given, self._offloaded))
        if plan is not None and len(plan.inputs) == len(avals):
            host = [p.memory_kind == "pinned_host" and not p.offloaded for p in plan.inputs]
            avals = [(*a[:3], at) for a, at in zip(avals, host, strict=True)]
        for i, (kind, pinned) in enumerate(pinned_memory(self._options.in_shardings, dynamic)):
            if pinned:
                avals[i] = (*avals[i][:3], kind == "pinned_host")
        return tuple(avals)

    def _pure_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, Call]:
        """The step to plan for this call and its arguments: of the NNX modules' states if there are any, else
        itself.
        """
        args, kwargs = self._signature.by_position(args, kwargs)
        if isinstance(self._fun, nnx.PureFunction) or not nnx.has_modules((args, kwargs)):
            return self, (args, kwargs)
        parts = nnx.split(args, kwargs)
        return self._pure_step(parts)[0], (parts.states, dict(parts.states_by_name))

    def _pure_step(self, parts: nnx.SplitArguments) -> tuple[Step, nnx.PureFunction]:
        """The step that takes states of modules with this structure; the list is kept in order of last use."""
        for step in self._pure_steps:
            if isinstance(step._fun, nnx.PureFunction) and step._fun.matches(parts):
                if step is not self._pure_steps[0]:
                    self._pure_steps = [step, *(s for s in self._pure_steps if s is not step)]
                return step, step._fun
        pure = nnx.pure(self._fun, parts)
        outs = (*(None,) * len(parts.module_args), self._options.out_shardings)
        self._pure_steps = [Step(pure, replace(self._options, out_shardings=outs), self._first_plan), *self._pure_steps]
        return self._pure_steps[0], pure


class BoundStep:
    """A step as a method of an instance."""

    def __init__(self, step: Step, instance: Any) -> None:
        self._step, self._instance = step, instance
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._step.plan(self._instance, *args, **kwargs)

    def first_plan(self) -> Plan:
        return self._step.first_plan()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        return self._step.trace(self._instance, *args, **kwargs)

    def written(self, *args: Any, **kwargs: Any) -> jx.Jaxpr:
        return self._step.written(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._step.lower(self._instance, *args, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.reference(self._instance, *args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> bytes:
        return self._step.export(self._instance, *args, **kwargs)

    def around(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Step:
        step, instance = self._step, self._instance
        return Step(wrap(functools.partial(step._fun, instance)), step._options.without_first())

    def clear_cache(self) -> None:
        self._step.clear_cache()


def _bind(step: Step, instance: Any) -> Any:
    """``step`` bound to ``instance``, which is passed as an argument if JAX can take it as one, else closed over."""
    options, bound = step._options, step._bound_steps
    if 0 in options.static_nums or nnx.is_module(instance) or not jax.tree_util.all_leaves([instance]):
        return BoundStep(step, instance)
    if id(instance) not in bound:
        bound[id(instance)] = Step(functools.partial(step._fun, instance), options.without_first())
    return bound[id(instance)]
