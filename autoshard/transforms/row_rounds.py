"""Rows in blocks of fixed capacity, in as many rounds as the fullest block takes: shapes are static, loads are not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule
from autoshard.transforms.sum_of_products import Step, factor_sizes

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


@dataclass(frozen=True)
class Finish:
    """What is made of results whose rows are in their own order: linear in those with a value for each row.

    Operands and steps are those of `grouped_rows`, or shards of them.
    """

    operands: Sequence[Any]
    after: Sequence[Sequence[Step]]
    rule: Rule

    def __call__(self, results: Sequence[Any]) -> tuple[Any, ...]:
        size_of = factor_sizes(self.rule, [x.shape for x in self.operands])

        def last(x: Any, steps: Sequence[Step]) -> Any:
            values = [*self.operands, x]
            for step in steps:
                values.append(step.run([values[x] if isinstance(x, int) else x.value for x in step.operands], size_of))
            return values[-1]

        return tuple(map(last, results, self.after))

    def picks(self, result: int) -> int:
        """How many rows on end its steps take for a token; 1 where it has none."""
        _, *picks = self.rule.operands[0][0]
        return math.prod(dict(self.rule.sizes)[f] for f in picks) if self.after[result] else 1


def in_rounds(
    once: Callable[[Any, Any], Sequence[Any]],
    block_of: Any,
    shape: tuple[int, int],
    is_row_result: Sequence[bool],
    rounds_of_all: Callable[[Any], Any] = lambda rounds: rounds,
    at_once: int = 1,
    *,
    key: Any = None,
    finish: Finish | None = None,
    in_place: bool = False,
) -> tuple[Any, ...]:
    """The results of rows that are put into blocks, in as many rounds as the fullest block takes.

    The first ``at_once`` are no part of the loop over the others: what one sends can be hidden by what another computes
    and by what is around them.

    Args:
      once: ``once(source, filled)`` -> the results of one round: for each place [block x place] or a sum. ``source``,
        [block x place], is the number of the row at each place, any where there is none; ``filled``, [block, place], is
        whether there is one. Nothing reads the results of other places; no sum may count them.
      block_of: [row], the block of each row; beyond the last block the row is in none, and has zeros.
      shape: how many blocks there are, and how many rows one has room for.
      is_row_result: of each result, whether it has a value for each row; else it is a sum.
      rounds_of_all: of the rounds that these rows take, those that are gone through.
      at_once: how many rounds are gone through in any case; an even load takes no more.
      key: [row], in whose order the rows of a block are: it grows with ``block_of``. None: in their own order.
      finish: what is made of results; None: nothing more.
      in_place: whether other devices have the rows of other blocks, so that results are to be reduced: each as soon as
        it is there, if further rounds come first.
    """
    n, (blocks, places) = block_of.shape[0], shape
    block_of = block_of.astype(jnp.int32)  # of groups it may be narrower than places are counted in
    order = jnp.argsort(block_of if key is None else key)
    counts = sizes_of(block_of, blocks)
    starts = jnp.cumsum(counts) - counts
    position = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    place_of = jnp.where(block_of < blocks, position - jnp.take(starts, block_of, mode="clip"), -1)

    def one_round(i: Any, order: Any = order) -> Sequence[Any]:
        place = i * places + jnp.arange(places, dtype=jnp.int32)
        return once(jnp.take(order, starts[:, None] + place, mode="clip").reshape(-1), place < counts[:, None])

    def rows_of(x: Any, i: Any, rounds: int = 1, picks: int = 1) -> Any:
        """Of each row its value in ``x``, [round x block x place], of so many rounds from ``i``; zeros of others.

        In memory the first of each token's ``picks`` come first, as rows of whole tiles.
        """
        place = place_of - i * places
        at = ((place // places) * blocks + block_of) * places + place % places
        is_here = (place_of >= 0) & (place >= 0) & (place < rounds * places)
        at, is_here = (y.reshape(-1, picks).T for y in (at, is_here))
        found = jnp.take(x, at.reshape(-1), axis=0, mode="clip").reshape(*at.shape, *x.shape[1:])
        found = jnp.where(is_here.reshape(*at.shape, *[1] * (x.ndim - 1)), found, 0)
        return found.swapaxes(0, 1).reshape(-1, *x.shape[1:])

    def results_of(made: Sequence[Any], i: Any, rounds: int = 1) -> Sequence[Any]:
        picks = [finish.picks(r) if finish is not None else 1 for r in range(len(made))]
        results = [
            rows_of(x, i, rounds, k) if is_row else x for x, is_row, k in zip(made, is_row_result, picks, strict=True)
        ]
        return finish(results) if finish is not None else tuple(results)

    def added(i: Any, totals: Sequence[Any]) -> list[Any]:
        here = (place_of >= i * places) & (place_of < (i + 1) * places)

        def both(total: Any, x: Any, is_row: bool) -> Any:
            if is_row and total.shape[0] == n:
                return jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), x, total)
            return total + x.astype(total.dtype)

        return [both(*each) for each in zip(totals, results_of(one_round(i), i), is_row_result, strict=True)]

    def others(rounds: Any, *first: Any) -> tuple[Any, ...]:
        """With the rounds from ``at_once`` on."""
        totals = [
            x if is_row and x.shape[0] == n else x.astype(_dtype_of_sums(x.dtype))
            for x, is_row in zip(first, is_row_result, strict=True)
        ]
        _, totals = lax.while_loop(
            lambda s: s[0] < rounds, lambda s: (s[0] + 1, added(*s)), (jnp.int32(at_once), totals)
        )
        return tuple(total.astype(x.dtype) for total, x in zip(totals, first, strict=True))

    def at_first(order: Any) -> Sequence[Any]:
        made = zip(*(one_round(i, order) for i in range(at_once)), strict=True)
        joined = [
            (jnp.concatenate(each) if at_once > 1 else each[0]) if is_row else _sum(each)
            for each, is_row in zip(made, is_row_result, strict=True)
        ]
        return results_of(joined, 0, at_once)

    if at_once * places >= n:
        return tuple(at_first(order))
    rounds = rounds_of_all(-(-jnp.max(counts) // places))

    def with_others(first: Sequence[Any]) -> tuple[Any, ...]:
        with jx.branch_runs((1, 0), 1):  # with an even load
            return lax.cond(rounds > at_once, others, lambda _, *first: first, rounds, *first)

    if not in_place:
        return with_others(at_first(order))
    rest = with_others([jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(at_first, order)])
    order, rest = lax.optimization_barrier((order, rest))  # so that nothing waits for them then
    return tuple(x + y for x, y in zip(at_first(order), rest, strict=True))


def sizes_of(group_of: Any, groups: int) -> Any:
    """int32 [group]: how many rows each group has. A sum of comparisons, which makes no scatter."""
    return jnp.sum(group_of[:, None] == jnp.arange(groups, dtype=group_of.dtype), 0, dtype=jnp.int32)


def _sum(parts: Sequence[Any]) -> Any:
    """Their sum, rounded once."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    return functools.reduce(jnp.add, [x.astype(_dtype_of_sums(dtype)) for x in parts]).astype(dtype)


def _dtype_of_sums(dtype: Any) -> Any:
    """Many rounds add up: float32 of floats that are narrower."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
