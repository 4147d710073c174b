"""Operations that order a dimension. The largest elements are found in parts; a sort sends all once there and back."""

from __future__ import annotations

from typing import Any

from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.rules.builders import build, rows, table
from autoshard.rules.local_forms.sort import ordered
from autoshard.rules.local_forms.top_k import top


def sort(*xs: Aval, dimension: int, num_keys: int = 1, **_: Any) -> Rule:
    """Several operands are ordered together."""
    labels = rows(xs[0].shape)
    local = None if 0 in xs[0].shape else ordered(xs, dimension, num_keys)
    sides = [labels] * len(xs)
    return build(sides, sides, {labels[dimension]: "local" if local else "whole"}, local=local)


def _top(x: Aval, axis: int, local: Local | None = None) -> Rule:
    labels = rows(x.shape)
    kept = [None if d == axis else f for d, f in enumerate(labels)]
    return build([labels], [kept, kept], {labels[axis]: "local" if local else "whole"}, local=local)


def top_k(x: Aval, *, k: int, axis: int = -1, **params: Any) -> Rule:
    """Values and their positions."""
    axis %= len(x.shape)
    return _top(x, axis, top(k, x.shape[axis], axis, params) if k and x.shape[axis] else None)


def approx_top_k(x: Aval, *, reduction_dimension: int, **_: Any) -> Rule:
    """Values and their positions. How good the approximation is depends on the size, so parts would change it."""
    return _top(x, reduction_dimension % len(x.shape))


RULES: dict[str, RuleFn] = {
    "approx_top_k": approx_top_k,
    "sort": sort,
    "top_k": top_k,
}
TABLE = table(RULES)
