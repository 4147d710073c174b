"""The call forms of a function, and the key under which a call's plan is cached."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError, nearest
from autoshard.jaxpr.arguments import ArgumentAval, argument_aval

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""
Names = str | Sequence[str] | None
Nums = int | Sequence[int] | None
"""Arguments as `jax.jit` takes them: their names or positions, or one alone."""


@dataclass(frozen=True)
class Signature:
    """Which arguments of a function can be passed by position, and which are static."""

    name: str
    positional_only: int
    """Number of positional-only arguments; they come first in `names`."""
    names: tuple[str, ...]
    """Names of the arguments that can be passed by position."""
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]

    def by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The same call with as many arguments by position as possible, so that all its forms share one program."""
        if not kwargs or len(args) < self.positional_only:
            return args, dict(kwargs)
        kwargs, given = dict(kwargs), list(args)
        for name in self.names[len(args) :]:
            if name not in kwargs:
                break
            given.append(kwargs.pop(name))
        return tuple(given), kwargs

    def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The arguments that are not static: those of the program."""
        return (
            tuple(a for i, a in enumerate(args) if i not in self.static_nums),
            {k: v for k, v in kwargs.items() if k not in self.static_names},
        )

    def with_leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Iterable[Any]) -> Call:
        """The call with ``leaves`` as its flat dynamic arguments."""
        dynamic, named = jax.tree.structure(self.dynamic(args, kwargs)).unflatten(leaves)
        rest = iter(dynamic)
        given = tuple(a if i in self.static_nums else next(rest) for i, a in enumerate(args))
        return given, {**kwargs, **named}

    def leaf_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
        """The tree structure of a call's arguments, and the position among its leaves of each leaf of `by_position`."""
        tree = jax.tree.structure(self.dynamic(args, kwargs))
        numbered = self.with_leaves(args, kwargs, range(tree.num_leaves))
        return tree, tuple(jax.tree.leaves(self.dynamic(*self.by_position(*numbered))))

    def cache_key(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], offloaded: Mapping[int, tuple[int, ...]] | None
    ) -> Any:
        """Equal for calls that share one plan: shapes, static values, and the settings that JAX's tracing depends on.

        Args:
          offloaded: as `as_the_function_has_them`.

        Raises:
          ArgumentError: an argument is not an array, or a static one is not hashable.
        """
        leaves, tree = jax.tree.flatten(self.dynamic(args, kwargs))
        static = tuple((i, type(a), a) for i, a in enumerate(args) if i in self.static_nums)
        named = tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in self.static_names)
        try:
            avals = as_the_function_has_them(map(argument_aval, leaves), offloaded)
            key = tree, avals, static, named, jx.trace_context()
            hash(key)
        except TypeError:
            raise ArgumentError(self._invalid_argument(args, kwargs)) from None
        if symbolic := next((a[0] for a in avals if any(map(jax.export.is_symbolic_dim, a[0]))), None):
            raise ArgumentError(
                f"{self.name}: an argument has the symbolic shape {symbolic}, and a plan is for sizes: plan it for "
                "one, and name the others in step.export(..., symbolic_shapes=...)"
            )
        return key

    def check_static_hashable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises `ArgumentError` if a static argument is not hashable."""
        for key, value in (*enumerate(args), *kwargs.items()):
            if (key in self.static_nums or key in self.static_names) and not _accepts(hash, value):
                raise ArgumentError(
                    f"{self.name}: the static argument {self._argument_name(key)} is a {type(value).__name__}, which "
                    "is not hashable; pass something immutable, such as a tuple or a frozen dataclass"
                )

    def _argument_name(self, key: int | str) -> str:
        if isinstance(key, str):
            return key
        return self.names[key] if key < len(self.names) else f"args[{key}]"

    def _invalid_argument(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The error message for a call with an argument that is not an array."""
        self.check_static_hashable(args, kwargs)
        for key, value in (*enumerate(args), *kwargs.items()):
            if key in self.static_nums or key in self.static_names:
                continue
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                if not _accepts(argument_aval, leaf):
                    name = f"{self._argument_name(key)}{jax.tree_util.keystr(path)}"
                    return (
                        f"{self.name}: {name} is a {type(leaf).__name__}, which is not an array; name it in "
                        "static_argnums or static_argnames if it is a setting, or take it out of the pytree"
                    )
        return f"{self.name}: the tree structure of an argument is not hashable"


def as_the_function_has_them(
    avals: Iterable[ArgumentAval], offloaded: Mapping[int, tuple[int, ...]] | None
) -> tuple[ArgumentAval, ...]:
    """``avals`` of flat arguments, those that a plan keeps in the host's memory on the device.

    Args:
      offloaded: shapes of the arguments that a plan of the step keeps in the host's memory, by flat position; None:
        all of them.
    """
    return tuple((*a[:3], a[3] and offloaded is not None and offloaded.get(i) != a[0]) for i, a in enumerate(avals))


def signature(fun: Callable[..., Any], static_nums: Sequence[int], static_names: Sequence[str]) -> Signature:
    """The signature of ``fun``; without names where Python cannot inspect it."""
    name = getattr(fun, "__name__", "step")
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return Signature(name, 0, (), tuple(static_nums), tuple(static_names))
    only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    both = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return Signature(name, len(only), (*only, *both), tuple(static_nums), tuple(static_names))


def positions_and_names(fun: Callable[..., Any], nums: Nums, names: Names) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and the names of the arguments in ``nums`` and ``names``, as `jax.jit` infers one from the other.

    Raises:
      ArgumentError: the function has no argument of that name.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given_nums = [] if nums is None else [nums] if isinstance(nums, int) else list(nums)
    given_names = [] if names is None else [names] if isinstance(names, str) else list(names)
    positions = {operator.index(n) + (len(positional) if n < 0 else 0) for n in given_nums}
    known = {p.name for p in parameters}
    for name in given_names:
        if known and name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ArgumentError(f"{getattr(fun, '__name__', fun)} has no argument {name!r}{nearest(name, known)}")
    positions |= {positional.index(n) for n in given_names if n in positional}
    all_names = dict.fromkeys([*given_names, *(positional[n] for n in sorted(positions) if n < len(positional))])
    return tuple(sorted(positions)), tuple(all_names)


def _accepts(test: Callable[[Any], Any], value: Any) -> bool:
    try:
        test(value)
    except TypeError:
        return False
    return True
