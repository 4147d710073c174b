"""Steps that mutate Flax NNX modules in place, as pure functions of the modules' states.

`split` replaces the modules among the arguments by a static structure and a pytree of arrays for each; the pure
function merges them, runs the user's function, and returns their state afterwards. A Variable that two modules share
is one array, in the state of the first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError
from autoshard.runtime.signature import Call


def is_module(x: Any) -> bool:
    """Whether ``x`` is an object that NNX mutates in place."""
    return isinstance(x, (nnx.Pytree, nnx.Variable)) and not isinstance(x, nnx.State)


def has_modules(tree: Any) -> bool:
    """Whether ``tree`` has a module anywhere. The variables in an `nnx.State` are none: functions that take one return
    the next, as of any pytree."""
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=lambda x: is_module(x) or isinstance(x, nnx.State))))


@dataclass(frozen=True)
class SplitArguments:
    """Arguments with their modules replaced by states."""

    structure: Any
    """The graph definition of all modules together; hashable."""
    module_args: tuple[int | str, ...]
    """Positions and names of the arguments that contain modules."""
    states: tuple[Any, ...]
    """The positional arguments, each that contains modules replaced by their state."""
    states_by_name: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The keyword arguments, likewise."""

    @property
    def module_states(self) -> list[Any]:
        """The states of the arguments `module_args`."""
        return [self.states_by_name[w] if isinstance(w, str) else self.states[w] for w in self.module_args]


def split(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> SplitArguments:
    """Splits the modules among the arguments into structure and states."""
    kwargs = kwargs or {}
    where = tuple(w for w, a in (*enumerate(args), *sorted(kwargs.items())) if has_modules(a))
    structure, state = nnx.split(tuple(_arguments_at(args, kwargs, where)))
    taken = [state[n] if n in state else nnx.State({}) for n in range(len(where))]
    return SplitArguments(structure, where, *_replace_at(args, kwargs, where, taken))


def merge(parts: SplitArguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The inverse of `split`: the arguments with new modules that have the states in ``args`` and ``kwargs``."""
    state = nnx.State(dict(enumerate(_arguments_at(args, kwargs, parts.module_args))))
    return _replace_at(args, kwargs, parts.module_args, nnx.merge(parts.structure, state))


def array_holders(state: Any) -> list[Any]:
    """The Variables of a state and the arrays outside of Variables, in the order of the state's leaves."""
    return jax.tree.leaves(state, is_leaf=_is_variable)


def values(state: Any) -> list[Any]:
    """The raw values of a state's Variables: its leaves, except where a Variable holds a pytree."""
    return [v.get_raw_value() if _is_variable(v) else v for v in array_holders(state)]


@dataclass(eq=False)
class PureFunction:
    """``fun`` as a pure function of the states of the modules among its arguments.

    It returns the state afterwards of each argument that contains modules, then the result. A dispatched call passes
    and returns lists of `values` in place of states: they are faster to flatten.
    """

    fun: Callable[..., Any]
    parts: SplitArguments
    """The split arguments of the first call, without arrays."""
    state_trees: tuple[Any, ...]
    """Tree structures of the states."""
    result_structure: Any = None
    """Graph definition of the modules in the result, set by the last trace; None if it has none."""

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun)
        self.__signature__ = inspect.signature(self.fun)

    def __call__(self, *states: Any, **named: Any) -> tuple[Any, ...]:
        args, kwargs = merge(self.parts, states, named)
        result = self.fun(*args, **kwargs)
        modules = tuple(_arguments_at(args, kwargs, self.parts.module_args))
        structure, state = nnx.split(modules)
        if structure != self.parts.structure:
            raise ArgumentError(
                f"{self.fun.__name__} changes the structure of its modules, not only their values: a Variable was "
                "added or removed, or now aliases another one; create every Variable before the step"
            )
        after = [state[n] if n in state else nnx.State({}) for n in range(len(modules))]
        self.result_structure = None
        if has_modules(result):
            self.result_structure, state = nnx.split((modules, result))
            result = state[1] if 1 in state else nnx.State({})
        return (*after, result)

    def on_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The function of `values`, where a dispatched call runs it operation by operation."""
        args, kwargs = self.with_states(args, kwargs)
        return self.with_values(self(*args, **kwargs))

    def matches(self, parts: SplitArguments) -> bool:
        """Whether split arguments have this function's structure."""
        return parts.module_args == self.parts.module_args and parts.structure == self.parts.structure

    def with_states(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The arguments with states in place of `values`."""
        states = self._states(_arguments_at(args, kwargs, self.parts.module_args))
        return _replace_at(args, kwargs, self.parts.module_args, states)

    def with_values(self, returned: Sequence[Any]) -> tuple[Any, ...]:
        """The results of a call with `values` in place of states."""
        *after, result = returned
        return (*map(values, after), result)

    def call(
        self, fast: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], parts: SplitArguments
    ) -> Any:
        """Calls ``fast``, which takes and returns `values`, and updates the modules; returns the step's result.

        Args:
          args, kwargs: the user's arguments.
          parts: the same, split.
        """
        states = parts.module_states
        given, named = _replace_at(parts.states, parts.states_by_name, parts.module_args, list(map(values, states)))
        *after, result = fast(*given, **named)
        holders = [v for state in states for v in array_holders(state)]
        arrays = [x for part in after for x in part]
        if self.result_structure is not None or not all(map(_is_variable, holders)) or jx.any_tracer(arrays):
            return self._update_modules(tuple(_arguments_at(args, kwargs, parts.module_args)), after, result)
        for variable, value in zip(holders, arrays, strict=True):
            variable.set_raw_value(value)
        return result

    def _update_modules(self, modules: tuple[Any, ...], after: Sequence[Any], result: Any) -> Any:
        """Updates the modules with the values ``after``; returns the result, merged if it contains modules."""
        states = nnx.State(dict(enumerate(self._states(after))))
        nnx.update(modules, states)
        if self.result_structure is None:
            return result
        return nnx.merge(self.result_structure, nnx.State({0: states, 1: result}))[1]

    def _states(self, each: Sequence[Any]) -> list[Any]:
        """The states that have these `values`."""
        return [tree.unflatten(jax.tree.leaves(v)) for tree, v in zip(self.state_trees, each, strict=True)]


def pure(fun: Callable[..., Any], parts: SplitArguments) -> PureFunction:
    """``fun`` as a pure function of the states in ``parts``."""
    trees = tuple(map(jax.tree.structure, parts.module_states))
    return PureFunction(fun, replace(parts, states=(), states_by_name={}), trees)


def _arguments_at(args: Sequence[Any], kwargs: Mapping[str, Any], where: Sequence[int | str]) -> list[Any]:
    return [kwargs[w] if isinstance(w, str) else args[w] for w in where]


def _replace_at(args: Sequence[Any], kwargs: Mapping[str, Any], where: Sequence[int | str], new: Sequence[Any]) -> Call:
    """The arguments with those at ``where`` replaced by ``new``."""
    given, named = list(args), dict(kwargs)
    for w, value in zip(where, new, strict=True):
        if isinstance(w, str):
            named[w] = value
        else:
            given[w] = value
    return tuple(given), named


def updated(tree: Any, state: Any) -> Any:
    """``tree`` with the values of ``state``, as `split` gives it: its modules updated in place, or ``state`` itself
    where it has none.
    """
    if not has_modules(tree):
        return state
    nnx.update((tree,), nnx.State({0: state}))
    return tree


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def leaves_of(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The flat arrays of ``tree`` in the order of the state that `split` gives, and the function that unflattens
    them.
    """
    parts = split((tree,))
    if not parts.module_args:
        leaves, structure = jax.tree.flatten(tree)
        return leaves, structure.unflatten
    leaves, structure = jax.tree.flatten(parts.states[0])
    return leaves, lambda new: merge(parts, (structure.unflatten(new),), {})[0][0]
