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

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.search.problem import REL_TOLERANCE, Array, Assignment, Problem

MAX_ORDERS = 8
"""Orders of elimination that are kept: those of the problems that a search solves again and again with other
multipliers of its budgets. One of 6,000 variables takes 7 MB."""


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
    sizes = tuple([len(u) for u in problem.unary])
    order = _elimination_order(sizes, tuple(problem.pairwise), max_entries)
    given = [*problem.unary, *problem.pairwise.values()]
    tables: list[Array] = [costs.squeeze() for costs in given]
    bound = sum([float(tables[n]) for n in order.constants], 0.0)
    for step in order.steps:
        for part in step.parts:
            total = tables[part.tables[0]].reshape(part.shapes[0])
            for n, shape, in_place in zip(part.tables[1:], part.shapes[1:], part.in_place, strict=True):
                total = np.add(total, tables[n].reshape(shape), out=total if in_place else None)
            least = np.minimum.reduce(total, axis=part.axis)
            tables.append(least)
            if part.is_constant:
                bound += float(least)
    assignment = [0] * len(sizes)
    for step in reversed(order.steps):
        costs = [tables[n][tuple([assignment[j] if j >= 0 else _ALL for j in of])] for n, of in step.bucket]
        assignment[step.variable] = int(np.argmin(sum(costs)))
    cost = problem.cost(assignment)
    return Solution(tuple(assignment), cost, min(bound, cost))


_ALL = slice(None)


class _Part(NamedTuple):
    """Tables that are added, and minimised over the variable that is eliminated; the next number has what is left."""

    tables: tuple[int, ...]
    """The largest first."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each, with an axis for each variable of all of them, of size 1 for those that it does not mention."""
    in_place: tuple[bool, ...]
    """Of each but the first, whether it adds no variable to a sum that is no table."""
    axis: int
    """That of the variable."""
    is_constant: bool
    """Whether no other variable is left."""


class _Step(NamedTuple):
    """The elimination of one variable."""

    variable: int
    bucket: tuple[tuple[int, tuple[int, ...]], ...]
    """The tables that mention it: the number of each, and its variables, with -1 for this one."""
    parts: tuple[_Part, ...]
    """One, or mini-buckets."""


class _Order(NamedTuple):
    """The order of an elimination. Tables are numbered: those of single variables, those of pairs, then what each part
    leaves."""

    constants: tuple[int, ...]
    """The tables of no variable that has more than one option."""
    steps: tuple[_Step, ...]


@functools.lru_cache(maxsize=MAX_ORDERS)
def _elimination_order(sizes: tuple[int, ...], pairs: tuple[tuple[int, int], ...], max_entries: int) -> _Order:
    """The order for variables of these numbers of options, and tables of these pairs of them. It is independent of all
    costs, so that it serves a problem again and again while only multipliers of budgets change."""
    variables_of: list[tuple[int, ...]] = []
    entries: list[int] = []
    tables_of: list[set[int]] = [set() for _ in sizes]

    def add(variables: tuple[int, ...]) -> None:
        for i in variables:
            tables_of[i].add(len(variables_of))
        variables_of.append(variables)
        entries.append(math.prod([sizes[i] for i in variables]))

    for i, size in enumerate(sizes):
        add((i,) if size > 1 else ())
    for pair in pairs:
        add(tuple([i for i in pair if sizes[i] > 1]))
    constants = tuple([n for n, variables in enumerate(variables_of) if not variables])

    def neighbours(i: int) -> set[int]:
        return {j for n in tables_of[i] for j in variables_of[n]} - {i}

    adjacent = [*map(neighbours, range(len(sizes)))]
    joint_sizes = [n * math.prod([sizes[j] for j in adjacent[i]]) if n > 1 else 0 for i, n in enumerate(sizes)]
    queue = [(size, i) for i, size in enumerate(joint_sizes) if size]
    heapq.heapify(queue)
    steps: list[_Step] = []
    while queue:
        size, i = heapq.heappop(queue)
        if joint_sizes[i] != size:  # eliminated already, or its size has changed since
            continue
        joint_sizes[i] = 0
        others, numbers = adjacent[i], tables_of[i]
        bucket = sorted(numbers)
        largest_first = sorted(bucket, key=lambda n: -entries[n])
        fits = size <= max_entries
        groups = [largest_first] if fits else _mini_buckets(largest_first, variables_of, sizes, max_entries)
        for j in others:
            tables_of[j] -= numbers
        parts: list[_Part] = []
        for group in groups:
            part, left = _part(group, variables_of, i, sizes)
            parts.append(part)
            add(left)
        of = tuple([(n, tuple([j if j != i else -1 for j in variables_of[n]])) for n in bucket])
        steps.append(_Step(i, of, tuple(parts)))
        for j in others:
            if len(parts) == 1:
                adjacent[j] |= others
                adjacent[j] -= {i, j}
            else:
                adjacent[j] = neighbours(j)
            size = sizes[j] * math.prod([sizes[k] for k in adjacent[j]])
            if size != joint_sizes[j]:
                joint_sizes[j] = size
                heapq.heappush(queue, (size, j))
    return _Order(constants, tuple(steps))


def _part(
    numbers: Sequence[int], variables_of: Sequence[tuple[int, ...]], i: int, sizes: Sequence[int]
) -> tuple[_Part, tuple[int, ...]]:
    """The sum of the tables of these ``numbers``, minimised over ``i``; and the variables that are left."""
    tables = [variables_of[n] for n in numbers]
    scope = sorted(set[int]().union(*tables))
    shapes = tuple([tuple([sizes[j] if j in variables else 1 for j in scope]) for variables in tables])
    covered, in_place = {*tables[0]}, list[bool]()
    for n, variables in enumerate(tables[1:]):
        in_place.append(n > 0 and covered.issuperset(variables))
        covered.update(variables)
    axis = scope.index(i)
    left = (*scope[:axis], *scope[axis + 1 :])
    return _Part(tuple(numbers), shapes, tuple(in_place), axis, not left), left


def _mini_buckets(
    bucket: Sequence[int], variables_of: Sequence[tuple[int, ...]], sizes: Sequence[int], max_entries: int
) -> list[list[int]]:
    """Partitions ``bucket``, the largest table first, so that each part's joint table has at most ``max_entries``
    entries: first fit."""
    parts: list[list[int]] = []
    scopes: list[set[int]] = []
    for n in bucket:
        for part, scope in zip(parts, scopes, strict=True):
            if math.prod(sizes[j] for j in scope.union(variables_of[n])) <= max_entries:
                part.append(n)
                scope.update(variables_of[n])
                break
        else:
            parts.append([n])
            scopes.append(set(variables_of[n]))
    return parts
