"""The rules of operations that passes compose of several steps, which they carry with them.

- `autoshard.transforms.sum_of_products`: partial sums of its results are reduced.
- `autoshard.transforms.grouped_rows`: rows are parallel, since each device sorts its own. Where the groups are split,
  rows are split over the same devices too, which exchange them (`autoshard.rules.local_forms.exchange_rows`); or all of
  these have the same rows, and each computes those of its groups, so that results are partial.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from autoshard.ir.rule import Aval, CollectiveBytes, Local, LocalWork, Rule, RuleFn
from autoshard.ir.spec import Spec
from autoshard.jaxpr import dtype_bits, dtype_from_name
from autoshard.machine.collective import ALL_REDUCE, ALL_TO_ALL
from autoshard.rules.local_forms.exchange_rows import exchange_rows
from autoshard.transforms.grouped_rows import group_factor, grouped_rows_p, is_row_result, row_factor, sorted_rows
from autoshard.transforms.row_rounds import Finish, capacity, exchanges, group_capacity
from autoshard.transforms.sum_of_products import Step, factor_sizes, sum_of_products_p


def sum_of_products(*operands: Aval, steps: tuple[Step, ...], rule: Rule, **_: Any) -> Rule:
    """What its steps read of one another is no operand or result; partial sums of the results are reduced."""
    sizes, stored = factor_sizes(rule, [x.shape for x in operands]), _stored(steps, len(operands))

    def work(parts: Mapping[str, int]) -> LocalWork:
        local = {f: n // parts.get(f, 1) for f, n in sizes.items()}
        flops = sum(s.flops / math.prod(parts.get(f, 1) for f in s.factors) for s in steps)
        bits = sum(_bits(s, local) for s in stored)
        return LocalWork(flops, bits // 8)

    reads = [[x for x in s.operands if isinstance(x, int)] for s in steps if s.flops]
    starts = tuple(tuple(r) for r in reads if max(r) < len(operands))
    contracted = {f for s in steps for f in s.factors if not any(f in dim for dim in s.dims)}
    computed = {f for s in steps for f in s.factors} - contracted
    parallel = frozenset(f for f, kind in rule.kinds if kind == "sum" and f in computed)
    after = _read_after(steps, len(operands), len(operands))
    local = Local(
        None, lambda *_: (), used_when="partial", work=work, starts=starts, parallel=parallel, read_after=after
    )
    return replace(rule, local=local)


def _stored(steps: Sequence[Step], operands: int) -> list[Step]:
    """The steps whose results are stored because products read them, perhaps through a view or a scaling."""
    found: dict[int, Step] = {}
    for step in steps if len(steps) > 1 else ():
        for x in step.operands if step.flops else ():
            at = x - operands if isinstance(x, int) else -1
            while at >= 0 and not (found.get(at) or steps[at].flops):
                inner = [y - operands for y in steps[at].operands if isinstance(y, int) and y >= operands]
                if len(inner) != 1:
                    break
                (at,) = inner
            if at >= 0:
                found[at] = steps[at]
    return list(found.values())


def grouped_rows(
    *operands: Aval,
    steps: tuple[Step, ...],
    rows: int,
    rule: Rule,
    results: tuple[int, ...],
    groups: int,
    in_blocks: bool,
    in_range: bool,
    after: tuple[tuple[Step, ...], ...],
    last: int,
    flops: float,
) -> Rule:
    """The groups are the local factor; the rows are split over their axes too, or the groups in place.

    Where the rows of each group are in blocks, products compute all places of these, and operands are put there.
    """
    del flops
    group, row, (_, *picks) = group_factor(rule), row_factor(rule), rule.operands[0][0]
    in_place = group.upper()  # other factors have small letters
    ends = enumerate((*rule.operands, *rule.results))
    value, dim = next((i, dims.index((group,))) for i, dims in ends if (group,) in dims)
    sizes = factor_sizes(rule, [x.shape for x in operands]) | {group: groups}
    count, is_row = len(operands) - last, is_row_result(rule)
    made = [steps[i - count - 1] for i in results]
    between = _between(steps, count + 1, results)
    compute = functools.partial(
        sorted_rows, steps=steps, rows=rows, results=results, rule=rule, in_blocks=in_blocks, in_range=in_range
    )

    def fun(specs: Sequence[Spec], group_of: Any, *xs: Any) -> Any:
        axes, rows_over = specs[value].dims[dim], specs[0].dims[0]
        stay = not set(axes) <= set(rows_over)
        finish = Finish((group_of, *xs), after, rule)
        xs = xs[: count - 1]
        if in_blocks or axes:
            group_of = _apart(group_of, xs[:rows])
        if in_blocks or stay or not axes:
            return compute(group_of, *xs, groups=groups, axes=axes, in_place=stay, finish=finish)
        own = groups // lax.axis_size(axes)

        def on_own_groups(group_of: Any, *received: Any) -> Any:
            return compute(group_of, *received, *xs[rows:], groups=own)

        return exchange_rows(axes, on_own_groups, group_of, xs[:rows], own, is_row, finish)

    def repeats(operand: int) -> int:
        """How many rows on end have the same value of an operand."""
        return operands[0].shape[0] // operands[operand].shape[0]

    def of_shard(operand: int, split: Mapping[str, int]) -> float:
        """Bits of a shard of an operand."""
        shards = math.prod(split.get(f) or 1 for dim in rule.operands[operand] for f in dim)
        return math.prod(operands[operand].shape) / shards * dtype_bits(operands[operand].dtype)

    def places(n: int, parts: int, own: int = 1) -> tuple[int, int]:
        """Exchanges of a device with ``n`` rows, and the places in one, of all groups, split into so many ``parts``, or
        of the groups of one of its ``own`` parts in place."""
        if not in_blocks:
            count, each = exchanges(capacity(n, parts)) if parts > 1 else (1, capacity(n, own) if own > 1 else n)
            return count, parts * each
        count, each = exchanges(group_capacity(n, groups)) if parts > 1 else (1, group_capacity(n, groups))
        return count, (groups // own + parts * (not in_range)) * each

    def collectives(parts: int, shard_bytes: Sequence[int]) -> CollectiveBytes | None:
        n = shard_bytes[0] // operands[0].dtype.itemsize
        if n == 0:
            return None
        times, sent = places(n, parts)
        of_rows = [shard_bytes[i] * repeats(i) // n for i in range(rows + 1)]
        of_rows += [row_bytes(i, shard_bytes[len(operands) + i], n) for i in range(len(results)) if is_row[i]]
        return (ALL_REDUCE, 4), *((ALL_TO_ALL, size * sent) for size in of_rows for _ in range(times))

    def row_bytes(i: int, shard_bytes: int, n: int) -> int:
        """Bytes of each of ``n`` rows of a result, of which so many are left in the end."""
        then, features = after[i], made[i].dims[1:]
        bits = dtype_bits(dtype_from_name(made[i].dtype))
        if then and not all(d in then[-1].dims for d in features):  # what is contracted is whole
            return math.prod(made[i].shape(sizes)[1:]) * bits // 8
        left = n // sizes[picks[0]] if then else n
        return shard_bytes // left * bits // dtype_bits(dtype_from_name((made[i], *then)[-1].dtype))

    def work(parts: Mapping[str, int]) -> LocalWork:
        split, sent, own = Counter(parts), parts.get(group, 1), parts.get(in_place, 1)
        split[group] = sent * own
        split[row] = parts.get(row, 1) * split[group]
        local = {f: n // (split[f] or 1) for f, n in sizes.items()}
        flops = sum(s.flops / own / math.prod(parts.get(f, 1) for f in s.factors) for s in steps)
        n = local[row] * math.prod(sizes[f] for f in picks)
        if n == 0:
            return LocalWork(flops, 0)
        rounds, each = places(n * own, sent, own)
        room = rounds * each
        read = sum(of_shard(i, split) for i in range(1, rows + 1))
        taken = sum(of_shard(i, split) * repeats(i) for i in range(1, rows + 1)) * room / n
        of_rows = [(s, then) for s, then, of_row in zip(made, after, is_row, strict=True) if of_row]
        back = sum(_bits(s, local) for s, _ in of_rows) * room / n
        own_rows = local | {row: n * own} | dict.fromkeys(picks, 1)
        left = 0 if in_blocks else sum(_bits(s, own_rows) for s, then in of_rows if then)
        tokens = local | {row: local[row] * own}
        ends = [_bits((s, *then)[-1], tokens) for s, then in zip(made, after, strict=True)]
        if in_blocks:  # rows are summed as they are read out of blocks
            moved = read + taken + back + sum(bits for bits, of_row in zip(ends, is_row, strict=True) if of_row)
            moved += 2 * (taken + back) if sent > 1 else 0
        else:
            sorts = 2 if sent > 1 else 1  # for the exchange, and then by group
            moved = 2 * (sorts * taken + (sorts - 1) * back + sum(_bits(s, own_rows) for s, _ in of_rows)) + left
        if rounds > 1:
            moved += 2 * back  # the results of several exchanges are put together
        if own > 1:  # what further rounds make is zeros, and is added
            moved += (2 if in_blocks else 4) * sum(ends)
        if in_blocks:
            flops *= room / n
            local |= {row: room} | dict.fromkeys(picks, 1)
            moved += sum(_bits(s, local) for s in between)
        stored = left + taken + sum(_bits(s, local) for s in steps if s.flops)
        return LocalWork(flops, int(stored) // 8, int(moved) // 8, rounds)

    read_after = _read_after(steps, len(operands), count + 1)
    form = Local(
        fun, collectives, "always", work=work, takes_specs=True, alongside=row, in_place=in_place, read_after=read_after
    )
    if any(s.dtype == "bool" for s, of_row in zip(made, is_row, strict=True) if of_row):
        return replace(rule, local=replace(form, in_place=None))  # they have no sum
    kinds, of_size = sorted((*rule.kinds, (in_place, "sum"))), sorted((*rule.sizes, (in_place, groups)))
    return replace(rule, kinds=tuple(kinds), sizes=tuple(of_size), local=form)


def _read_after(steps: Sequence[Step], operands: int, first: int) -> tuple[float, ...]:
    """`Local.read_after` of so many operands; values of steps are numbered from ``first``."""
    reads: list[set[int]] = [{i} for i in range(first)]
    whole, done, found = sum(s.flops for s in steps), 0.0, [0.0] * operands
    seen = set[int]()
    for step in steps:
        reads.append(set().union(*(reads[x] for x in step.operands if isinstance(x, int))))
        if step.flops:
            for i in reads[-1] - seen:
                if i < operands:
                    found[i] = done / whole
            seen |= reads[-1]
            done += step.flops
    return tuple(found)


def _between(steps: Sequence[Step], first: int, results: Sequence[int]) -> list[Step]:
    """What kernels between the products read of these, and write for them and as results; values of steps are numbered
    from ``first``."""
    by_products = {x for s in steps if s.flops for x in s.operands}
    by_others = {x for s in steps if not s.flops for x in s.operands}
    return [s for i, s in enumerate(steps, first) if (i in by_others if s.flops else i in by_products or i in results)]


def _bits(step: Step, sizes: Mapping[str, int]) -> int:
    """Bits of the result of a step, for factors of these sizes."""
    return math.prod(step.shape(sizes)) * dtype_bits(dtype_from_name(step.dtype))


def _apart(group_of: Any, rows: Sequence[Any]) -> Any:
    """``group_of`` as another value to XLA than it is to operations on other ``rows``.

    A backward part sends and computes again what the forward part did. XLA would see that it is the same, and keep it
    in memory from the one to the other.
    """
    return lax.optimization_barrier((group_of, *(x[:1] for x in rows)))[0]


TABLE: dict[Primitive, RuleFn] = {grouped_rows_p: grouped_rows, sum_of_products_p: sum_of_products}
