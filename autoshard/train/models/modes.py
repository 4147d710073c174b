"""Which parameter says to a model whether it trains, one of a few names; and what shows that none does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

from flax import linen

SWITCHED = {"train": False, "training": False, "is_training": False, "deterministic": True}
"""Parameters of a model that say whether it trains, and what each is where it does not."""
NAMES = ", ".join(map(repr, SWITCHED))

_LIKE_A_MODE = re.compile(r"(^|_)(train|determin|eval|infer|test|dropout|running)")


def mode_options(call: Callable[..., Any]) -> Callable[[bool], dict[str, Any]]:
    """What ``call`` is given by name: training or not -> those of `SWITCHED` that it has."""
    names = inspect.signature(call).parameters
    return lambda training: {name: training != no for name, no in SWITCHED.items() if name in names}


def unswitched(call: Callable[..., Any], given: Collection[str], switched: Collection[str] = SWITCHED) -> list[str]:
    """The parameters of ``call`` that look as if they said whether it trains, and keep their default, as
    ``is_test=True``; ``given`` are those that it gets by name.
    """
    parameters = inspect.signature(call).parameters.values()
    return [
        f"{p.name}={p.default}"
        for p in parameters
        if isinstance(p.default, bool) and p.name not in {*given, *switched} and _LIKE_A_MODE.search(p.name.lower())
    ]


@contextmanager
def silent_dropouts() -> Generator[list[str]]:
    """The Linen modules that are called in it with a rate of dropout and asked to drop nothing, by their paths."""
    found: list[str] = []

    def look(call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any) -> Any:
        module = context.module
        rate = getattr(module, "rate" if isinstance(module, linen.Dropout) else "dropout_rate", 0)
        if context.method_name == "__call__" and isinstance(rate, int | float) and rate > 0:
            given = options.get("deterministic", args[1] if isinstance(module, linen.Dropout) and args[1:] else None)
            given = getattr(module, "deterministic", None) if given is None else given
            if given is True:
                found.append("/".join(module.path) or type(module).__name__)
        return call(*args, **options)

    with linen.intercept_methods(look):
        yield found
