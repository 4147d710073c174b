"""stateful: steps that mutate Flax NNX modules in place, as pure functions of their state.

`nnx.split` takes the modules among the arguments apart into a static structure and one pytree of arrays
for each; the pure step puts them together, runs the user's function, and hands back what they hold then.
A Variable that two modules share is one array, in the first of them.
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
    """Whether ``x`` is something that NNX mutates in place."""
    return isinstance(x, (nnx.Pytree, nnx.Variable)) and not isinstance(x, nnx.State)


def has_modules(tree: Any) -> bool:
    """Whether a module stands anywhere in ``tree``."""
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


@dataclass(frozen=True)
class SplitArguments:
    """Arguments taken apart. ``structure`` is of the modules among them, jointly, and is hashable."""

    structure: Any
    module_args: tuple[int | str, ...]
    """Positions and names of the arguments that hold modules."""
    states: tuple[Any, ...]
    """The arguments by position, each that holds modules replaced by the state in them."""
    states_by_name: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those by name, likewise."""

    @property
    def module_states(self) -> list[Any]:
        """The states at ``where``."""
        return [self.states_by_name[w] if isinstance(w, str) else self.states[w] for w in self.module_args]


def split(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> SplitArguments:
    """Takes the modules among the arguments apart."""
    kwargs = kwargs or {}
    where = tuple(w for w, a in (*enumerate(args), *sorted(kwargs.items())) if has_modules(a))
    structure, state = nnx.split(tuple(_arguments_at(args, kwargs, where)))
    taken = [state[n] if n in state else nnx.State({}) for n in range(len(where))]
    return SplitArguments(structure, where, *_replace_at(args, kwargs, where, taken))


def merge(parts: SplitArguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The inverse of `split`, with other states in the arguments: new modules that hold these arrays."""
    state = nnx.State(dict(enumerate(_arguments_at(args, kwargs, parts.module_args))))
    return _replace_at(args, kwargs, parts.module_args, nnx.merge(parts.structure, state))


def array_holders(state: Any) -> list[Any]:
    """What holds the arrays of a state, in the order of its leaves: Variables, and arrays that none holds."""
    return jax.tree.leaves(state, is_leaf=_is_variable)


def values(state: Any) -> list[Any]:
    """What is in the Variables of a state: its leaves, but for Variables that hold a pytree."""
    return [v.get_raw_value() if _is_variable(v) else v for v in array_holders(state)]


@dataclass(eq=False)
class PureFunction:
    """``fun`` of arguments with modules, as a function of their states.

    It returns the state after the step for each argument that holds modules, then the result. It is called with
    `values` in place of states, which cost less to take apart, and then returns such.
    """

    fun: Callable[..., Any]
    parts: SplitArguments
    """Of the first call; without its arrays."""
    state_trees: tuple[Any, ...]
    """Structures of the states."""
    result_structure: list[Any] = field(default_factory=list[Any])
    """Structure of the modules in the result, left by the last trace; empty when it holds none."""

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
                "added, removed, or is another's alias now; make every Variable before the step"
            )
        after = [state[n] if n in state else nnx.State({}) for n in range(len(modules))]
        self.result_structure[:] = []
        if has_modules(result):
            structure, state = nnx.split((modules, result))
            self.result_structure[:] = [structure]
            result = state[1] if 1 in state else nnx.State({})
        return (*after, result)

    def matches(self, parts: SplitArguments) -> bool:
        """Whether arguments taken apart so are those of this function."""
        return parts.module_args == self.parts.module_args and parts.structure == self.parts.structure

    def with_states(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Arguments that hold `values`, with the states instead."""
        given = _arguments_at(args, kwargs, self.parts.module_args)
        return _replace_at(
            args, kwargs, self.parts.module_args, [t.unflatten(jax.tree.leaves(v)) for t, v in self._with_trees(given)]
        )

    def with_values(self, returned: Sequence[Any]) -> tuple[Any, ...]:
        """What a call returns, with `values` instead of states."""
        *after, result = returned
        return (*map(values, after), result)

    def call(
        self, fast: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], parts: SplitArguments
    ) -> Any:
        """Calls ``fast``, which takes and gives `values`, and writes what it gives into the modules.

        Args:
          args, kwargs: the user's.
          parts: the same taken apart.
        """
        taken = parts.module_states
        given, named = _replace_at(parts.states, parts.states_by_name, parts.module_args, list(map(values, taken)))
        *after, result = fast(*given, **named)
        holders = [v for state in taken for v in array_holders(state)]
        arrays = [x for part in after for x in part]
        if self.result_structure or not all(map(_is_variable, holders)) or jx.any_tracer(arrays):
            return self._update_modules(tuple(_arguments_at(args, kwargs, parts.module_args)), after, result)
        for variable, value in zip(holders, arrays, strict=True):
            variable.set_raw_value(value)
        return result

    def _update_modules(self, modules: tuple[Any, ...], after: Sequence[Any], result: Any) -> Any:
        """Writes ``after`` into modules of any kind, and gives the result, which may hold modules too."""
        states = nnx.State({n: t.unflatten(jax.tree.leaves(v)) for n, (t, v) in enumerate(self._with_trees(after))})
        nnx.update(modules, states)
        if not self.result_structure:
            return result
        return nnx.merge(self.result_structure[0], nnx.State({0: states, 1: result}))[1]

    def _with_trees(self, given: Sequence[Any]) -> list[tuple[Any, Any]]:
        return list(zip(self.state_trees, given, strict=True))


def pure(fun: Callable[..., Any], parts: SplitArguments) -> PureFunction:
    """``fun`` as a function of the states of modules taken apart as ``parts``."""
    trees = tuple(map(jax.tree.structure, parts.module_states))
    return PureFunction(fun, replace(parts, states=(), states_by_name={}), trees)


def _arguments_at(args: Sequence[Any], kwargs: Mapping[str, Any], where: Sequence[int | str]) -> list[Any]:
    return [kwargs[w] if isinstance(w, str) else args[w] for w in where]


def _replace_at(args: Sequence[Any], kwargs: Mapping[str, Any], where: Sequence[int | str], new: Sequence[Any]) -> Call:
    """The arguments, those at ``where`` replaced."""
    given, named = list(args), dict(kwargs)
    for w, value in zip(where, new, strict=True):
        if isinstance(w, str):
            named[w] = value
        else:
            given[w] = value
    return tuple(given), named


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def leaves_of(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Flat arrays of ``tree`` in the order in which `split` would give its state, and the way back."""
    parts = split((tree,))
    if not parts.module_args:
        leaves, structure = jax.tree.flatten(tree)
        return leaves, structure.unflatten
    leaves, structure = jax.tree.flatten(parts.states[0])
    return leaves, lambda new: merge(parts, (structure.unflatten(new),), {})[0][0]
