"""signature: the forms in which a function can be called, and what tells two calls apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError
from autoshard.jaxpr.arguments import argument_aval

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""


@dataclass(frozen=True)
class Signature:
    """What can be given by position, and which arguments are static."""

    name: str
    positional_only: int
    """How many of `names` can be given by position only."""
    names: tuple[str, ...]
    """Of the arguments that can be given by position."""
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]

    def by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The same call with as few keywords as it can be written with: one program for all its forms."""
        if not kwargs or len(args) < self.positional_only:
            return args, dict(kwargs)
        kwargs, given = dict(kwargs), list(args)
        for name in self.names[len(args) :]:
            if name not in kwargs:
                break
            given.append(kwargs.pop(name))
        return tuple(given), kwargs

    def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The arguments that the program takes: static ones left out."""
        return (
            tuple(a for i, a in enumerate(args) if i not in self.static_nums),
            {k: v for k, v in kwargs.items() if k not in self.static_names},
        )

    def with_leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Iterable[Any]) -> Call:
        """The call with other flat arguments; static ones as they are."""
        dynamic, named = jax.tree.structure(self.dynamic(args, kwargs)).unflatten(leaves)
        rest = iter(dynamic)
        given = tuple(a if i in self.static_nums else next(rest) for i, a in enumerate(args))
        return given, {**kwargs, **named}

    def leaf_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
        """The structure of a call's arguments, and where among its leaves those of `by_position` stand."""
        tree = jax.tree.structure(self.dynamic(args, kwargs))
        numbered = self.with_leaves(args, kwargs, range(tree.num_leaves))
        return tree, tuple(jax.tree.leaves(self.dynamic(*self.by_position(*numbered))))

    def cache_key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What calls share that one plan serves: shapes, static values, and the settings that JAX traces by.

        Raises:
          ArgumentError: an argument is no array, or a static one has no hash.
        """
        leaves, tree = jax.tree.flatten(self.dynamic(args, kwargs))
        static = tuple((i, type(a), a) for i, a in enumerate(args) if i in self.static_nums)
        named = tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in self.static_names)
        try:
            key = tree, tuple(map(argument_aval, leaves)), static, named, jx.trace_context()
            hash(key)
        except TypeError:
            raise ArgumentError(self._invalid_argument(args, kwargs)) from None
        return key

    def check_static_hashable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises `ArgumentError` when a static argument has no hash."""
        for where, value in (*enumerate(args), *kwargs.items()):
            if (where in self.static_nums or where in self.static_names) and not _accepts(hash, value):
                raise ArgumentError(
                    f"{self.name}: the static argument {self._argument_name(where)} is a {type(value).__name__}, which has "
                    "no hash; pass something immutable, such as a tuple or a frozen dataclass"
                )

    def _argument_name(self, where: int | str) -> str:
        if isinstance(where, str):
            return where
        return self.names[where] if where < len(self.names) else f"args[{where}]"

    def _invalid_argument(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What to say of an argument that is no array."""
        self.check_static_hashable(args, kwargs)
        for where, value in (*enumerate(args), *kwargs.items()):
            if where in self.static_nums or where in self.static_names:
                continue
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                if not _accepts(argument_aval, leaf):
                    return (
                        f"{self.name}: {self._argument_name(where)}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, "
                        "which is no array; name it in static_argnums or static_argnames if it is a setting, or take "
                        "it out of the pytree"
                    )
        return f"{self.name}: the structure of an argument has no hash"


def signature(fun: Callable[..., Any], static_nums: Sequence[int], static_names: Sequence[str]) -> Signature:
    """The signature of ``fun``, as far as Python tells it."""
    name = getattr(fun, "__name__", "step")
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return Signature(name, 0, (), tuple(static_nums), tuple(static_names))
    only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    both = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return Signature(name, len(only), (*only, *both), tuple(static_nums), tuple(static_names))


def _accepts(test: Callable[[Any], Any], value: Any) -> bool:
    try:
        test(value)
    except TypeError:
        return False
    return True
