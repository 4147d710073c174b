"""Reductions over dimensions, and scans along one.

A reduced factor leaves a partial result of the reduction's own kind; along the dimension that a cumulative
operation or an arg-reduction runs along, parts exchange totals or candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import build, is_complex, rows, table
from autoshard.rules.local_forms.cumulative import scan
from autoshard.rules.local_forms.top_k import arg


def reduction(kind: str, lets: str = "", able: Callable[[Any], bool] = lambda dtype: True) -> RuleFn:
    """One operand reduced over ``axes``; ``kind`` says what splitting a reduced dimension leaves.

    ``able``: the types of which XLA can combine partial results between devices; for others, whole.
    """

    def rule(x: Aval, *, axes: Sequence[int], **_: Any) -> Rule:
        labels = rows(x.shape)
        kept = [f for d, f in enumerate(labels) if d not in axes]
        reduced = dict.fromkeys((labels[d] for d in axes), kind if able(x.dtype) else "whole")
        return build([labels], [kept], reduced, lets if able(x.dtype) else "")

    return rule


def _is_flag(dtype: Any) -> bool:
    """Bitwise reductions of integers have no collective."""
    return dtype == np.bool_


def _is_ordered(dtype: Any) -> bool:
    """Complex numbers are compared part by part, which has no collective."""
    return not is_complex(dtype)


def reduce_any(*avals: Aval, dimensions: Sequence[int], **_: Any) -> Rule:
    """Any reduction of several operands; the second half of ``avals`` are its initial values, scalars."""
    count = len(avals) // 2
    labels = rows(avals[0].shape)
    kept = [f for d, f in enumerate(labels) if d not in dimensions]
    return build([*[labels] * count, *[[]] * count], [kept] * count, {labels[d]: "whole" for d in dimensions})


def cumulative(name: str, lets: str = "") -> RuleFn:
    """The running reduction along ``axis``."""

    def rule(x: Aval, *, axis: int, reverse: bool, **_: Any) -> Rule:
        labels, size = rows(x.shape), x.shape[axis]
        if not size:
            return build([labels], [labels], {labels[axis]: "whole"}, lets)
        return build([labels], [labels], {labels[axis]: "local"}, lets, local=scan(name, size, axis, reverse))

    return rule


def extreme(largest: bool) -> RuleFn:
    """The position of the largest or smallest element; whole where ``index_dtype`` cannot count that far."""

    def rule(x: Aval, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> Rule:
        labels, (axis,) = rows(x.shape), axes
        kept, size = labels[:axis] + labels[axis + 1 :], x.shape[axis]
        if not jax.dtypes.issubdtype(index_dtype, np.integer) or size > np.iinfo(index_dtype).max:
            return build([labels], [kept], {labels[axis]: "whole"})
        return build(
            [labels], [kept], {labels[axis]: "local"}, local=arg(largest, x.dtype, np.dtype(index_dtype), size, axis)
        )

    return rule


RULES: dict[str, RuleFn] = {
    "argmax": extreme(largest=True),
    "argmin": extreme(largest=False),
    "cumlogsumexp": cumulative("cumlogsumexp"),
    "cummax": cumulative("cummax", "max: 0"),
    "cummin": cumulative("cummin", "min: 0"),
    "cumprod": cumulative("cumprod", "prod: 0"),
    "cumsum": cumulative("cumsum", "sum: 0"),
    "reduce": reduce_any,
    "reduce_and": reduction("and", "and: 0", _is_flag),
    "reduce_max": reduction("max", "max: 0", _is_ordered),
    "reduce_min": reduction("min", "min: 0", _is_ordered),
    "reduce_or": reduction("or", "or: 0", _is_flag),
    "reduce_prod": reduction("prod", "prod: 0"),
    "reduce_sum": reduction("sum", "sum: 0"),
    "reduce_xor": reduction("whole"),
}
TABLE = table(RULES)
