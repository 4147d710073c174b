"""Rules of reductions over dimensions, and of cumulative operations along one.

A reduced factor leaves a partial result of the reduction's kind. Along the dimension of a cumulative operation or of an
argmax there is a local form, in which devices exchange totals or candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.jaxpr import is_narrow_float
from autoshard.rules.builders import build, dim_labels, is_complex, rounded_kinds, table
from autoshard.rules.local_forms.cumulative import sharded_cumulative
from autoshard.rules.local_forms.top_k import sharded_arg_extreme


def reduction(kind: str, passthrough: str = "", reducible: Callable[[Any], bool] = lambda dtype: True) -> RuleFn:
    """The rule of a reduction of one operand over ``axes``.

    Args:
      kind: of the partial results that sharding a reduced dimension leaves.
      passthrough: as in a rule's text.
      reducible: whether XLA has a collective that combines partial results of a dtype; else these dimensions are whole.
    """

    def rule(x: Aval, *, axes: Sequence[int], **_: Any) -> Rule:
        labels = dim_labels(x.shape)
        kept = [f for d, f in enumerate(labels) if d not in axes]
        reduced = rounded_kinds(dict.fromkeys((labels[d] for d in axes), kind), x.dtype)
        if not reducible(x.dtype):
            return build([labels], [kept], dict.fromkeys(reduced, "whole"))
        return build([labels], [kept], reduced, passthrough)

    return rule


def _is_flag(dtype: Any) -> bool:
    """Whether values are booleans: there is no collective for bitwise reductions of integers."""
    return dtype == np.bool_


def _is_ordered(dtype: Any) -> bool:
    """Whether values are ordered: there is no collective for the lexicographic order of complex numbers."""
    return not is_complex(dtype)


def reduce_any(*avals: Aval, dimensions: Sequence[int], **_: Any) -> Rule:
    """Any reduction of several operands; the second half of ``avals`` are initial values, scalars."""
    count = len(avals) // 2
    labels = dim_labels(avals[0].shape)
    kept = [f for d, f in enumerate(labels) if d not in dimensions]
    return build([*[labels] * count, *[[]] * count], [kept] * count, {labels[d]: "whole" for d in dimensions})


def cumulative(name: str, passthrough: str = "") -> RuleFn:
    """The rule of the cumulative operation `jax.lax` calls ``name``, along ``axis``."""

    def rule(x: Aval, *, axis: int, reverse: bool, **_: Any) -> Rule:
        labels, size = dim_labels(x.shape), x.shape[axis]
        rounds = name not in ("cummax", "cummin") and is_narrow_float(x.dtype)
        if not size or rounds:
            return build([labels], [labels], {labels[axis]: "whole"}, passthrough)
        local = sharded_cumulative(name, size, axis, reverse)
        return build([labels], [labels], {labels[axis]: "local"}, passthrough, local=local)

    return rule


def arg_extreme(largest: bool) -> RuleFn:
    """The rule of argmax or argmin. ``axis`` is kept whole where ``index_dtype`` cannot represent its indices."""

    def rule(x: Aval, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> Rule:
        labels, (axis,) = dim_labels(x.shape), axes
        kept, size = labels[:axis] + labels[axis + 1 :], x.shape[axis]
        if not jax.dtypes.issubdtype(index_dtype, np.integer) or size > jnp.iinfo(index_dtype).max:
            return build([labels], [kept], {labels[axis]: "whole"})
        local = sharded_arg_extreme(largest, x.dtype, np.dtype(index_dtype), size, axis)
        return build([labels], [kept], {labels[axis]: "local"}, local=local)

    return rule


RULES: dict[str, RuleFn] = {
    "argmax": arg_extreme(largest=True),
    "argmin": arg_extreme(largest=False),
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
