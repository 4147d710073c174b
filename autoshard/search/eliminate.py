"""eliminate: the best choice of a `Problem` without its budgets, and a bound that no choice can go below.

Variables are eliminated one after the other, the cheapest first: what touches a variable becomes one table over its
neighbours, in which each entry is the best that the variable can do. That is exact, and quick where a problem is a long
chain with a few things beside it, as programs are. Where a table would become too large, what touches the variable is
split, and each part takes its own best (mini-buckets): the sum is then a bound from below, and the choice read off it
is near the best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.problem import REL_TOLERANCE, Array, Assignment, Problem


@dataclass(frozen=True)
class Solution:
    """A choice, its cost, and a lower bound on the cost of every choice that keeps the budgets."""

    assignment: Assignment
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far from optimal the choice can be, as a fraction of its cost; 0: it is optimal."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether it is the best."""
        return self.cost <= self.bound + REL_TOLERANCE * abs(self.bound)


@dataclass(frozen=True, eq=False)
class CostTable:
    """A table over some variables."""

    variables: tuple[int, ...]
    costs: Array

    def costs_of(self, i: int, chosen: Sequence[int]) -> Array:
        """The entries for every option of ``i``, the others as chosen."""
        return self.costs[tuple(slice(None) if j == i else chosen[j] for j in self.variables)]


def eliminate(problem: Problem, largest: int) -> Solution:
    """The best choice, budgets aside; its gap is 0 unless a table would have more than ``largest`` entries."""
    sizes = [len(u) for u in problem.unary]
    choice = [0] * len(sizes)
    number = itertools.count()
    factors: dict[int, CostTable] = {}
    touching: list[set[int]] = [set() for _ in sizes]
    bound = 0.0

    def add(over: tuple[int, ...], table: Array) -> None:
        nonlocal bound
        over, table = tuple([i for i in over if sizes[i] > 1]), table.squeeze()
        if not over:
            bound += float(table)
            return
        factors[n := next(number)] = CostTable(over, table)
        for i in over:
            touching[i].add(n)

    for i, costs in enumerate(problem.unary):
        add((i,), costs)
    for pair, table in problem.pairwise.items():
        add(pair, table)

    def near(i: int) -> set[int]:
        return {j for n in touching[i] for j in factors[n].variables} - {i}

    def effort(i: int) -> int:
        return math.prod(sizes[j] for j in (*near(i), i))

    efforts = {i: effort(i) for i, n in enumerate(sizes) if n > 1}
    queue = [(e, i) for i, e in efforts.items()]
    heapq.heapify(queue)
    order: list[tuple[int, list[CostTable]]] = []
    while queue:
        e, i = heapq.heappop(queue)
        if efforts.get(i) != e:
            continue
        del efforts[i]
        others = near(i)
        bucket = [factors.pop(n) for n in sorted(touching[i])]
        for part in _mini_buckets(bucket, sizes, largest):
            scope = (i, *sorted({j for f in part for j in f.variables} - {i}))
            add(scope[1:], _sum_tables([_aligned(f, scope) for f in part]).min(axis=0))
        order.append((i, bucket))
        for j in others:
            touching[j] = {n for n in touching[j] if n in factors}
            if (e := effort(j)) != efforts[j]:
                efforts[j] = e
                heapq.heappush(queue, (e, j))
    for i, bucket in reversed(order):
        choice[i] = int(np.argmin(sum(f.costs_of(i, choice) for f in bucket)))
    cost = problem.cost(choice)
    return Solution(tuple(choice), cost, min(bound, cost))


def _mini_buckets(bucket: Sequence[CostTable], sizes: Sequence[int], largest: int) -> list[list[CostTable]]:
    """The factors in as few groups as keep each group's table within ``largest`` entries, widest first."""
    parts: list[list[CostTable]] = []
    scopes: list[set[int]] = []
    for f in sorted(bucket, key=lambda f: -f.costs.size):
        for part, scope in zip(parts, scopes, strict=True):
            if math.prod(sizes[j] for j in scope.union(f.variables)) <= largest:
                part.append(f)
                scope.update(f.variables)
                break
        else:
            parts.append([f])
            scopes.append(set(f.variables))
    return parts


def _sum_tables(tables: Sequence[Array]) -> Array:
    """The sum of tables, each of one entry along the axes that it has not."""
    if len(tables) == 1:
        return tables[0]
    total = np.empty(np.broadcast_shapes(*(t.shape for t in tables)))
    np.add(tables[0], tables[1], out=total)
    for t in tables[2:]:
        total += t
    return total


def _aligned(factor: CostTable, scope: tuple[int, ...]) -> Array:
    """The factor's table, its axes where ``scope`` has them and of one entry elsewhere."""
    place = {j: k for k, j in enumerate(scope)}
    order = sorted(range(len(factor.variables)), key=lambda k: place[factor.variables[k]])
    table = factor.costs.transpose(order)
    shape = [1] * len(scope)
    for k, n in zip(order, table.shape, strict=True):
        shape[place[factor.variables[k]]] = n
    return table.reshape(shape)
