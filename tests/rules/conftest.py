"""What a program's one equation of interest has for a rule, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from autoshard import jaxpr as jx
from autoshard.rules import TABLE


@pytest.fixture
def rule_of() -> Callable[..., str]:
    """``rule_of(name, fn, *args)``: the rule of the last ``name`` equation in ``fn``, without partials."""

    def text(name: str, fn: Callable[..., Any], *args: Any, passthrough: bool = False) -> str:
        jaxpr = jx.normalize(jax.make_jaxpr(fn)(*(arg(a) for a in args)))
        eqn = [e for e in jaxpr.eqns if e.primitive.name == name][-1]
        rule = TABLE[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params)
        rule.factor_sizes([a.aval.shape for a in (*eqn.invars, *eqn.outvars)])
        body, _, after = str(rule).partition(" | ")
        return after if passthrough else body.strip()

    return text


def arg(a: Any) -> Any:
    """A shape stands for float32, a shape with a dtype before it for that."""
    if isinstance(a, tuple):
        dtype, shape = (a[0], a[1:]) if a and isinstance(a[0], str) else ("float32", a)
        return jax.ShapeDtypeStruct(shape, dtype)
    return a
