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
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule
from autoshard.ir.spec import Axes
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


SLACK = 1.25
"""Room of a block over the rows that it would have if they were evenly spread."""
ALIGNMENT = 8
"""The rows of a group's block are a multiple of so many: products of blocks contract them."""


def capacity(rows: int, blocks: int) -> int:
    """How many of ``rows`` one of so many ``blocks`` has room for."""
    return min(rows, -(-int(rows * SLACK) // blocks))


def group_capacity(rows: int, groups: int) -> int:
    """The same of the block of a group."""
    return -(-capacity(rows, groups) // ALIGNMENT) * ALIGNMENT


EXCHANGES = 2
"""Exchanges of the rows of an even load: the products of one are computed while another sends."""
LEAST_PLACES = 128
"""Places that a block has in each exchange, where there are several: products of fewer rows take longer."""


def exchanges(places: int) -> tuple[int, int]:
    """In how many exchanges the rows of an even load are sent, which fill blocks of so many places; places in each."""
    count = EXCHANGES if places >= EXCHANGES * LEAST_PLACES else 1
    return count, -(-places // (count * ALIGNMENT)) * ALIGNMENT if count > 1 else places


def device_of(group_of: Any, own: int, axes: Axes, *, in_place: bool) -> tuple[Any, Any]:
    """The device that has each row's group, and the group's number there.

    Args:
      group_of: [row], the group of each row, as of `grouped_rows`. A row that has no group is of the last device, where
        its number is ``own`` or more.
      own: how many groups a device has.
      axes: mesh axes that split the groups.
      in_place: whether devices are not told apart, but 0 is this one and 1 any other.
    """
    group_of = group_of.astype(jnp.int64 if group_of.dtype.itemsize == 8 else jnp.int32)  # than the groups alone need
    device = jnp.clip(group_of // own, 0, lax.axis_size(axes) - 1 if axes else 0)
    number = jnp.maximum(group_of - device * own, 0)
    return (jnp.where(device == lax.axis_index(axes), 0, 1) if in_place else device), number


def in_rounds(
    once: Callable[[Any, Any], Sequence[Any]],
    block_of: Any,
    shape: tuple[int, int],
    is_row_result: Sequence[bool],
    rounds_of_all: Callable[[Any], Any] = lambda rounds: rounds,
    at_once: int = 1,
) -> tuple[Any, ...]:
    """The results of rows that are put into blocks, in as many rounds as the fullest block takes.

    The first ``at_once`` are no part of the loop over the others: what one sends can be hidden by what another computes
    and by what is around them.

    Args:
      once: ``once(source, filled)`` -> the results of one round: for each place [block x place] or a sum. ``source``,
        [block x place], is the number of the row at each place, beyond all rows where there is none; ``filled``,
        [block, place], is whether there is one.
      block_of: [row], the block of each row; beyond the last block the row is in none, and has zeros.
      shape: how many blocks there are, and how many rows one has room for.
      is_row_result: of each result, whether it has a value for each row; else it is a sum.
      rounds_of_all: of the rounds that these rows take, those that are gone through.
      at_once: how many rounds are gone through in any case; an even load takes no more.
    """
    n, (blocks, places) = block_of.shape[0], shape
    block_of = block_of.astype(jnp.int32)  # of groups it may be narrower than places are counted in
    order = jnp.argsort(block_of)
    counts = jnp.bincount(block_of, length=blocks).astype(jnp.int32)
    starts = jnp.cumsum(counts) - counts
    position = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    place_of = jnp.where(block_of < blocks, position - jnp.take(starts, block_of, mode="clip"), -1)

    def one_round(i: Any) -> Sequence[Any]:
        place = i * places + jnp.arange(places, dtype=jnp.int32)
        filled = place < counts[:, None]
        source = jnp.where(filled, jnp.take(order, starts[:, None] + place, mode="clip"), n).reshape(-1)
        return once(source, filled)

    def rows_of(x: Any, i: Any, rounds: int = 1) -> Any:
        """Of each row its value in ``x``, [round x block x place], of so many rounds from ``i``; zeros of others."""
        place = place_of - i * places
        at = ((place // places) * blocks + block_of) * places + place % places
        at = jnp.where((place_of >= 0) & (place >= 0) & (place < rounds * places), at, rounds * blocks * places)
        return jnp.take(x, at, axis=0, mode="fill", fill_value=0)

    made = zip(*(one_round(i) for i in range(at_once)), strict=True)
    first = tuple(
        rows_of(jnp.concatenate(each), 0, at_once) if is_row else _sum(each)
        for each, is_row in zip(made, is_row_result, strict=True)
    )
    if at_once * places >= n:
        return first

    def added(i: Any, totals: Sequence[Any]) -> list[Any]:
        def both(total: Any, x: Any, is_row: bool) -> Any:
            if not is_row:
                return total + x.astype(total.dtype)
            here = (place_of >= i * places) & (place_of < (i + 1) * places)
            return jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), rows_of(x, i), total)

        return [both(*each) for each in zip(totals, one_round(i), is_row_result, strict=True)]

    def others(rounds: Any, *first: Any) -> tuple[Any, ...]:
        totals = [
            x if is_row else x.astype(_dtype_of_sums(x.dtype)) for x, is_row in zip(first, is_row_result, strict=True)
        ]
        _, totals = lax.while_loop(
            lambda s: s[0] < rounds, lambda s: (s[0] + 1, added(*s)), (jnp.int32(at_once), totals)
        )
        return tuple(total.astype(x.dtype) for total, x in zip(totals, first, strict=True))

    rounds = rounds_of_all(-(-jnp.max(counts) // places))
    with jx.branch_runs((1, 0), 1):  # with an even load
        return lax.cond(rounds > at_once, others, lambda _, *first: first, rounds, *first)


def _sum(parts: Sequence[Any]) -> Any:
    """Their sum, rounded once."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    return functools.reduce(jnp.add, [x.astype(_dtype_of_sums(dtype)) for x in parts]).astype(dtype)


def _dtype_of_sums(dtype: Any) -> Any:
    """Many rounds add up: float32 of floats that are narrower."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


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
    made = sorted_rows(group_of, *operands[: len(operands) - last], rule=rule, **params)
    return finished(made, (group_of, *operands), after, rule)


def finished(results: Sequence[Any], operands: Sequence[Any], after: Sequence[Sequence[Step]], rule: Rule) -> Any:
    """``results`` after the steps of `grouped_rows`, of which all ``operands`` are given, or shards of them."""
    size_of = factor_sizes(rule, [x.shape for x in operands])

    def last(x: Any, steps: Sequence[Step]) -> Any:
        values = [*operands, x]
        for step in steps:
            values.append(step.run([values[x] if isinstance(x, int) else x.value for x in step.operands], size_of))
        return values[-1]

    return tuple(map(last, results, after))


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
) -> Any:
    """The results of ``steps`` on rows sorted by group; those with a value for each row in the order of the operands.

    Args:
      group_of: as of `grouped_rows`.
      operands: arrays with a value for each row, then others, which are the same for all rows.
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
    """
    of_rows, others = [group_of, *operands[:rows]], operands[rows:]

    own, is_row = groups // (lax.axis_size(axes) if axes else 1), is_row_result(rule)
    summed = {x for step in steps if sums_rows(step) for x in step.operands}

    def run(of_rows: Sequence[Any], sizes: Any, filled: Any = None) -> list[Any]:
        """The results; of blocks, where ``filled`` [block, place] says which places have rows."""
        values = [*of_rows, *others]
        size_of = factor_sizes(rule, [x.shape for x in values]) | {group_factor(rule): own}
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
        each, n = own + (not in_range), group_of.shape[0]  # the last block is of rows that have no group
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

        def once(source: Any, filled: Any) -> Sequence[Any]:
            taken = [jnp.take(x, source, axis=0, mode="fill", fill_value=0) for x in of_rows]
            here = exchanged(filled.reshape(-1).astype(group_of.dtype), back=False) > 0
            made = run([exchanged(x, back=False) for x in taken], None, here.reshape(each, -1))
            return [exchanged(x, back=True) if row else x for x, row in zip(made, is_row, strict=True)]

        most = functools.partial(lax.pmax, axis_name=axes) if axes else lambda rounds: rounds
        return in_rounds(once, block_of, (parts * each, places), is_row, most, at_once)
    order = jnp.argsort(group_of)
    back = jnp.argsort(order)
    sizes = jnp.bincount(group_of, length=groups).astype(jnp.int32)
    found = zip(run([jnp.take(x, order, axis=0) for x in of_rows], sizes), is_row, strict=True)
    return tuple(jnp.take(x, back, axis=0) if row else x for x, row in found)


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
