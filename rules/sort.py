"""Rules of operations that sort a dimension: the sorted dimension has a local form, all others are parallel."""

from __future__ import annotations

from typing import Any

from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.jaxpr import dtype_bits
from autoshard.rules.builders import build, dim_labels, table
from autoshard.rules.local_forms.sort import sharded_sort
from autoshard.rules.local_forms.top_k import sharded_top_k


def sort(*xs: Aval, dimension: int, num_keys: int = 1, **_: Any) -> Rule:
    """Several operands are sorted together, by the first ``num_keys`` of them. Without an operand whose elements are
    whole bytes, a shard's bytes do not tell how many rows it has."""
    labels = dim_labels(xs[0].shape)
    known = 0 not in xs[0].shape and max(dtype_bits(x.dtype) for x in xs) >= 8
    local = sharded_sort(xs, dimension, num_keys) if known else None
    sides = [labels] * len(xs)
    return build(sides, sides, {labels[dimension]: "local" if local else "whole"}, local=local)


def _top_rule(x: Aval, axis: int, local: Local | None = None) -> Rule:
    labels = dim_labels(x.shape)
    kept = [None if d == axis else f for d, f in enumerate(labels)]
    return build([labels], [kept, kept], {labels[axis]: "local" if local else "whole"}, local=local)


def top_k(x: Aval, *, k: int, axis: int = -1, **params: Any) -> Rule:
    """Results: the largest values and their indices."""
    axis %= len(x.shape)
    return _top_rule(x, axis, sharded_top_k(k, x.shape[axis], axis, params) if k and x.shape[axis] else None)


def approx_top_k(x: Aval, *, reduction_dimension: int, **_: Any) -> Rule:
    """Results: values and their indices. The recall of the approximation depends on the size, so ``axis`` is whole."""
    return _top_rule(x, reduction_dimension % len(x.shape))


RULES: dict[str, RuleFn] = {
    "approx_top_k": approx_top_k,
    "sort": sort,
    "top_k": top_k,
}
TABLE = table(RULES)
