"""Bucket elimination: the optimum of a `Problem` without its budgets, or a lower bound on it.

Eliminating variable i replaces the tables that mention it by one table over the other variables in them, the minimum
over i of their sum: dynamic programming, exact, exponential in the largest table only. Programs are long chains with a
little beside them, so the variable whose joint table is smallest goes first (`eliminate`). Where that table would have
more than ``max_entries`` entries, the tables are split into mini-buckets that are minimised separately
(`_mini_buckets`): the result is then a lower bound, and the assignment read off has no guarantee.

Sources: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Dechter and Rish, "Mini-buckets", JACM 2003;
docs/math/elimination.md.
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
    """An assignment, its cost, and a lower bound on the cost of every assignment within the budgets."""

    assignment: Assignment
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: how much of the cost the optimum can save at most."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the cost equals the bound, up to `REL_TOLERANCE`."""
        return self.cost <= self.bound + REL_TOLERANCE * abs(self.bound)


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs by the options of some variables, one axis each."""

    variables: tuple[int, ...]
    """In increasing order."""
    costs: Array

    def costs_of(self, i: int, assignment: Sequence[int]) -> Array:
        """The costs of each option of ``i``, the other variables as assigned."""
        return self.costs[tuple(slice(None) if j == i else assignment[j] for j in self.variables)]


def eliminate(problem: Problem, max_entries: int) -> Solution:
    """Minimises ``problem`` without its budgets; optimal if no table needs more than ``max_entries`` entries."""
    sizes = [len(u) for u in problem.unary]
    assignment = [0] * len(sizes)
    number = itertools.count()
    tables: dict[int, CostTable] = {}
    tables_of: list[set[int]] = [set() for _ in sizes]
    bound = 0.0

    def add(variables: tuple[int, ...], costs: Array) -> None:
        nonlocal bound
        variables, costs = tuple([i for i in variables if sizes[i] > 1]), costs.squeeze()
        if not variables:
            bound += float(costs)
            return
        tables[n := next(number)] = CostTable(variables, costs)
        for i in variables:
            tables_of[i].add(n)

    for i, costs in enumerate(problem.unary):
        add((i,), costs)
    for pair, costs in problem.pairwise.items():
        add(pair, costs)

    def neighbours(i: int) -> set[int]:
        return {j for n in tables_of[i] for j in tables[n].variables} - {i}

    adjacent = [*map(neighbours, range(len(sizes)))]

    def joint_size(i: int) -> int:
        return sizes[i] * math.prod([sizes[j] for j in adjacent[i]])

    joint_sizes = {i: joint_size(i) for i, n in enumerate(sizes) if n > 1}
    queue = [(size, i) for i, size in joint_sizes.items()]
    heapq.heapify(queue)
    eliminated: list[tuple[int, list[CostTable]]] = []
    while queue:
        size, i = heapq.heappop(queue)
        if joint_sizes.get(i) != size:  # eliminated already, or its size has changed since
            continue
        del joint_sizes[i]
        others, numbers = adjacent[i], tables_of[i]
        bucket = [tables.pop(n) for n in sorted(numbers)]
        largest_first = sorted(bucket, key=lambda t: -t.costs.size)
        parts = [largest_first] if size <= max_entries else _mini_buckets(largest_first, sizes, max_entries)
        for j in others:
            tables_of[j] -= numbers
        for part in parts:
            scope = sorted({j for t in part for j in t.variables})
            least = _joint_table(part, scope, sizes).min(axis=scope.index(i))
            add(tuple([j for j in scope if j != i]), least)
        eliminated.append((i, bucket))
        for j in others:
            if len(parts) == 1:
                adjacent[j] |= others
                adjacent[j] -= {i, j}
            else:
                adjacent[j] = neighbours(j)
            if (size := joint_size(j)) != joint_sizes[j]:
                joint_sizes[j] = size
                heapq.heappush(queue, (size, j))
    for i, bucket in reversed(eliminated):
        assignment[i] = int(np.argmin(sum(t.costs_of(i, assignment) for t in bucket)))
    cost = problem.cost(assignment)
    return Solution(tuple(assignment), cost, min(bound, cost))


def _mini_buckets(bucket: Sequence[CostTable], sizes: Sequence[int], max_entries: int) -> list[list[CostTable]]:
    """Partitions ``bucket``, the largest table first, so that each part's joint table has at most ``max_entries``
    entries: first fit."""
    parts: list[list[CostTable]] = []
    scopes: list[set[int]] = []
    for table in bucket:
        for part, scope in zip(parts, scopes, strict=True):
            if math.prod(sizes[j] for j in scope.union(table.variables)) <= max_entries:
                part.append(table)
                scope.update(table.variables)
                break
        else:
            parts.append([table])
            scopes.append(set(table.variables))
    return parts


def _joint_table(tables: Sequence[CostTable], scope: Sequence[int], sizes: Sequence[int]) -> Array:
    """[options of each variable of ``scope``]: the sum of ``tables``. ``scope`` is in increasing order, as the
    variables of every table are."""
    first, *others = tables
    total, covered = _aligned(first, scope, sizes), {*first.variables}
    for n, table in enumerate(others):
        in_place = n > 0 and covered.issuperset(table.variables)
        total = np.add(total, _aligned(table, scope, sizes), out=total if in_place else None)
        covered.update(table.variables)
    return total


def _aligned(table: CostTable, scope: Sequence[int], sizes: Sequence[int]) -> Array:
    """The costs with an axis for each variable of ``scope``, of size 1 for those that the table does not mention."""
    return table.costs.reshape([sizes[j] if j in table.variables else 1 for j in scope])
