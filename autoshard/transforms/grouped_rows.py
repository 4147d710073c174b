"""What is computed of rows that are sorted by group, as one primitive that takes and gives them in their own order.

In a mixture of experts each token goes to a few experts: programs sort the rows of all tokens by expert, multiply each
group of rows with its expert's matrices (`jax.lax.ragged_dot`) and sort the rows back. Which row is where after sorting
depends on all rows. As one operation, the order of rows inside does not matter: each device sorts those that it has, or
those that it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import numpy as jnp

from autoshard.ir.rule import Rule
from autoshard.transforms.primitive import define_primitive
from autoshard.transforms.sum_of_products import Step, factor_sizes


def row_factor(rule: Rule) -> str:
    """The factor of the rows."""
    return rule.operands[0][0][0]


def group_factor(rule: Rule) -> str:
    """The factor of the groups."""
    return next(f for f, kind in rule.kinds if kind == "local")


def is_row_result(rule: Rule) -> list[bool]:
    """Of each result, whether it has a value for each row; else it has one for each group."""
    return [row_factor(rule) in dims[0] for dims in rule.results]


def grouped_rows(
    group_of: Any,
    *operands: Any,
    steps: tuple[Step, ...],
    rows: int,
    results: tuple[int, ...],
    rule: Rule,
    groups: int,
    flops: float,
) -> Any:
    """The results of ``steps`` on rows sorted by group; those with a value for each row in the order of the operands.

    Args:
      group_of: [row], the group of each row; below zero it is the first, and from ``groups`` on the row has none.
      operands: arrays with a value for each row, then others, which are the same for all rows.
      steps: their values are numbered: ``group_of`` and the operands, the sizes of the groups, then the steps' results.
      rows: how many operands have a value for each row.
      results: numbers of the values that are results.
      rule: factors of the operands and the results.
      groups: how many there are.
      flops: FLOPs of all products, for cost models that see only the primitive.
    """
    del flops
    order = jnp.argsort(group_of)
    back = jnp.argsort(order)
    sizes = jnp.bincount(group_of, length=groups).astype(jnp.int32)
    values = [jnp.take(x, order, axis=0) for x in (group_of, *operands[:rows])]
    values += [*operands[rows:], sizes]
    size_of = factor_sizes(rule, [x.shape for x in values[:-1]]) | {group_factor(rule): groups}
    for step in steps:
        values.append(step.run([values[x] if isinstance(x, int) else x.value for x in step.operands], size_of))
    found = zip(results, is_row_result(rule), strict=True)
    return tuple(jnp.take(values[i], back, axis=0) if is_row else values[i] for i, is_row in found)


def _shapes(
    *operands: Any, steps: tuple[Step, ...], results: tuple[int, ...], rule: Rule, groups: int, **_: Any
) -> Any:
    sizes = factor_sizes(rule, [x.shape for x in operands]) | {group_factor(rule): groups}
    made: Sequence[Step] = [steps[i - len(operands) - 1] for i in results]
    avals = [(step.shape(sizes), jnp.dtype(step.dtype)) for step in made]
    return tuple(operands[0].update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in avals)


grouped_rows_p = define_primitive("grouped_rows", grouped_rows, _shapes)
"""Operands and parameters as of `grouped_rows`."""
