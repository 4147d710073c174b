"""What is computed of rows that are sorted by group, as one primitive that takes and gives them in their own order.

In a mixture of experts each token goes to a few experts: programs sort the rows of all tokens by expert, multiply each
group of rows with its expert's matrices (`jax.lax.ragged_dot`) and sort the rows back. Which row is where after sorting
depends on all rows. As one operation, the order of rows inside does not matter: each device sorts those that it has, or
those that it is sent.

Where the target has no kernel for products of ragged groups, XLA multiplies all rows with the matrices of all groups,
and masks. There the rows of each group fill a block of fixed capacity, and the products are dense ones of all blocks.
What does not fit waits for another round, so that no row is ever dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Rule
from autoshard.ir.spec import Axes
from autoshard.transforms.primitive import define_primitive
from autoshard.transforms.row_rounds import Finish, capacity, exchanges, group_capacity, in_rounds, sizes_of
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


def evenly_filled(rows: int, places: int) -> Any:
    """A context in which products of ragged groups are traced that have so many places, and with an even load so many
    rows: HLO keeps it in their names. Kernels skip tiles without rows."""
    return jax.named_scope(f"rows_{rows}_of_{places}")


def device_of(group_of: Any, own: int, axes: Axes, *, in_place: bool = False) -> tuple[Any, Any]:
    """The device that has each row's group, and the group's number there.

    Args:
      group_of: [row], the group of each row, as of `grouped_rows`. A row that has no group is of the last device, where
        its number is ``own`` or more.
      own: how many groups a device has.
      axes: mesh axes that split the groups.
      in_place: whether devices are not distinguished, but 0 is this one and 1 any other.
    """
    group_of = _wide(group_of)
    device = jnp.clip(group_of // own, 0, lax.axis_size(axes) - 1 if axes else 0)
    number = jnp.maximum(group_of - device * own, 0)
    return (jnp.where(device == lax.axis_index(axes), 0, 1) if in_place else device), number


def _wide(group_of: Any) -> Any:
    """As numbers that devices and blocks can be counted in; where groups are few, their own may be narrower."""
    return group_of.astype(jnp.int64 if group_of.dtype.itemsize == 8 else jnp.int32)


def grouped_rows(
    group_of: Any,
    *operands: Any,
    after: tuple[tuple[Step, ...], ...],
    last: int,
    rule: Rule,
    flops: float,
    **params: Any,
) -> Any:
    """What is made of the results of `sorted_rows`.

    Args:
      group_of: [row], the group of each row; below zero it is the first, and from ``groups`` on the row has none.
      operands: those of `sorted_rows`, then those that steps of ``after`` read.
      after: of each result, what is computed of it where rows are in their own order. Values are numbered: ``group_of``
        and the operands, the result, then what steps make.
      last: how many operands are of ``after``.
      rule: factors of the operands and the results.
      flops: FLOPs of all products, for cost models that see only the primitive.
      params: other parameters of `sorted_rows`.
    """
    del flops
    finish = Finish((group_of, *operands), after, rule)
    return sorted_rows(group_of, *operands[: len(operands) - last], rule=rule, finish=finish, **params)


def sorted_rows(
    group_of: Any,
    *operands: Any,
    steps: tuple[Step, ...],
    rows: int,
    results: tuple[int, ...],
    rule: Rule,
    groups: int,
    in_blocks: bool,
    in_range: bool,
    axes: Axes = (),
    in_place: bool = False,
    finish: Finish | None = None,
) -> Any:
    """The results of ``steps`` on rows sorted by group; those with a value for each row in the order of the operands.

    Args:
      group_of: as of `grouped_rows`.
      operands: arrays with a value for each row, or one for as many rows on end as they are fewer; then others, which
        are the same for all rows.
      steps: their values are numbered: ``group_of`` and the operands, the sizes of the groups, then the steps' results.
      rows: how many operands have a value for each row.
      results: numbers of the values that are results.
      rule: factors of the operands and the results.
      groups: how many there are.
      in_blocks: whether products are dense, of blocks of each group's rows; else they are ragged.
      in_range: whether all groups are below ``groups``, but for rows whose results nobody reads.
      axes: mesh axes that split the groups of blocks, which are exchanged over them.
      in_place: whether in place of that all devices of ``axes`` have the same rows, and each computes those of its
        groups; the others have zeros.
      finish: what is made of the results; None: nothing more.
    """
    of_rows, others, n = [group_of, *operands[:rows]], operands[rows:], group_of.shape[0]
    own, is_row = groups // (lax.axis_size(axes) if axes else 1), is_row_result(rule)
    summed = {x for step in steps if sums_rows(step) for x in step.operands}
    row, *picks = rule.operands[0][0]

    def run(of_rows: Sequence[Any], sizes: Any, filled: Any = None) -> list[Any]:
        """The results; of blocks, where ``filled`` [block, place] says which places have rows."""
        values = [*of_rows, *others]
        size_of = factor_sizes(rule, [x.shape for x in values])
        size_of |= {group_factor(rule): own, row: of_rows[0].shape[0]} | dict.fromkeys(picks, 1)
        values.append(sizes)
        for step in steps:
            read = [values[x] if isinstance(x, int) else x.value for x in step.operands]
            if filled is not None and (numbers := ragged_numbers(step)) is not None:
                made = _product_of_blocks(step, numbers, read, own, filled.shape)
            else:
                made = step.run(read, size_of)
            if filled is not None and len(values) in summed:  # nothing of a place without a row may count
                made = jnp.where(filled.reshape(-1, *[1] * (made.ndim - 1)), made, 0)
            values.append(made)
        return [values[i] for i in results]

    if in_blocks:
        each = own + (not in_range)  # the last block is of rows that have no group
        device, number = device_of(group_of, own, axes, in_place=in_place)
        axes = () if in_place else axes
        parts = lax.axis_size(axes) if axes else 1
        at_once, places = exchanges(group_capacity(n, groups)) if axes else (1, group_capacity(n, groups))
        block_of = jnp.minimum(device * each + jnp.minimum(number, own), parts * each)

        def exchanged(x: Any, *, back: bool) -> Any:
            """Places [device, block, place] to the devices of these blocks, there [block, device, place]; or back."""
            if not axes:
                return x
            if back:
                x = x.reshape(each, parts, places, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
            x = lax.all_to_all(x, axes, 0, 0, tiled=True)
            return x if back else x.reshape(parts, each, places, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

        def blocks(source: Any, filled: Any) -> Sequence[Any]:
            source = jnp.where(filled.reshape(-1), source, n)
            taken = [take_rows(x, source, n, mode="fill", fill_value=0) for x in of_rows]
            here = exchanged(filled.reshape(-1).astype(group_of.dtype), back=False) > 0
            made = run([exchanged(x, back=False) for x in taken], None, here.reshape(each, -1))
            return [exchanged(x, back=True) if row else x for x, row in zip(made, is_row, strict=True)]

        most = functools.partial(lax.pmax, axis_name=axes) if axes else lambda rounds: rounds
        shape = parts * each, places
        return in_rounds(blocks, block_of, shape, is_row, most, at_once, finish=finish, in_place=in_place)
    if in_place:
        device, number = device_of(group_of, own, axes, in_place=True)
        key = jnp.where(device == 0, jnp.minimum(number, own), own + 1)

        def one_block(source: Any, filled: Any) -> Sequence[Any]:
            sizes = sizes_of(jnp.where(filled[0], jnp.take(key, source), own), own)
            with evenly_filled(n // lax.axis_size(axes), filled.size):
                return run([take_rows(x, source, n) for x in of_rows], sizes)

        shape = 1, capacity(n, lax.axis_size(axes))
        return in_rounds(one_block, device, shape, is_row, key=key, finish=finish, in_place=True)
    group_of = jnp.maximum(_wide(group_of), 0)
    order = jnp.argsort(group_of)
    back = jnp.argsort(order)
    made = run([take_rows(x, order, n) for x in of_rows], sizes_of(group_of, groups))
    found = tuple(jnp.take(x, back, axis=0, mode="clip") if row else x for x, row in zip(made, is_row, strict=True))
    return found if finish is None else finish(found)


def take_rows(x: Any, source: Any, rows: int, mode: str = "clip", **fill: Any) -> Any:
    """The values of the rows of these numbers in ``x``, which has one for each or for several on end."""
    return jnp.take(x, source // (rows // x.shape[0]) if x.shape[0] < rows else source, axis=0, mode=mode, **fill)


def ragged_numbers(step: Step) -> lax.RaggedDotDimensionNumbers | None:
    """The dimensions of a product of ragged groups; None of any other step."""
    return dict(step.params).get("ragged_dot_dimension_numbers")


def sums_rows(step: Step) -> bool:
    """Whether a step sums products over the rows of each group."""
    numbers = ragged_numbers(step)
    return numbers is not None and 0 in numbers.dot_dimension_numbers[0][0]


def _product_of_blocks(
    step: Step, numbers: lax.RaggedDotDimensionNumbers, operands: Sequence[Any], groups: int, shape: tuple[int, int]
) -> Any:
    """A product of ragged groups whose rows are in blocks [block, place]: one for each group, then those of none."""
    params, (lhs, rhs, _) = dict(step.params), operands
    (contracted, others), _ = numbers.dot_dimension_numbers
    dot = functools.partial(
        lax.dot_general, precision=params["precision"], preferred_element_type=params["preferred_element_type"]
    )

    def blocks(x: Any) -> Any:
        return x.reshape(*shape, *x.shape[1:])[:groups]

    if sums_rows(step):
        return dot(blocks(lhs), blocks(rhs), (((1,), (1,)), ((0,), (0,))))
    made = dot(blocks(lhs), rhs, (([d + 1 for d in contracted], others), ((0,), numbers.rhs_group_dimensions)))
    made = jnp.pad(made, [(0, shape[0] - groups), *[(0, 0)] * (made.ndim - 1)])
    return made.reshape(-1, *made.shape[2:])


def _shapes(
    *operands: Any,
    steps: tuple[Step, ...],
    results: tuple[int, ...],
    rule: Rule,
    groups: int,
    after: tuple[tuple[Step, ...], ...],
    last: int,
    **_: Any,
) -> Any:
    sizes = factor_sizes(rule, [x.shape for x in operands]) | {group_factor(rule): groups}
    made = [(steps[i - (len(operands) - last) - 1], *then)[-1] for i, then in zip(results, after, strict=True)]
    avals = [(step.shape(sizes), jnp.dtype(step.dtype)) for step in made]
    return tuple(operands[0].update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in avals)


grouped_rows_p = define_primitive("grouped_rows", grouped_rows, _shapes)
"""Operands and parameters as of `grouped_rows`."""
