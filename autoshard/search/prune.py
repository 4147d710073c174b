"""Pruning: options of a `Problem` that are in no assignment better than a known one, found by message passing (TRW-S).

Costs are moved between variables and pairs such that every assignment costs the same as before (a reparametrization).
A sweep visits the variables in order, the next sweep in reverse. Each variable takes from its pairs with earlier
variables what those cost at least under each of its options; the minimum of what it then costs is moved to the bound;
the rest is passed on in equal shares to its pairs with later variables (`PrunedProblem._sweep_once`). All costs that
are left are non-negative, so the bound is one, and an assignment with option k of variable i costs at least the bound
plus what is left of k's cost: where that exceeds the known cost, k is dropped.

Sources: Kolmogorov, "Convergent tree-reweighted message passing", PAMI 2006, in the one-pass form of his "A new look at
reweighted message passing", PAMI 2015; docs/math/pruning.md.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.problem import REL_TOLERANCE, Array, Assignment, Indices, Problem

SWEEPS = 4
"""Sweeps between two attempts to eliminate what is left."""


@dataclass(eq=False)
class _Edge:
    """One of the two directions of a pair of variables."""

    table: Array
    """[options of the other variable, options of this one]: the pair's cost as given."""
    message: Array
    """[options of this variable]: what of its cost has been moved to the pair."""


class PrunedProblem:
    """A problem without budgets whose costs are reparametrized and whose useless options are dropped.

    Costs above ``upper_bound``, the cost of a known assignment, are set to it: no better assignment has them.
    """

    def __init__(self, problem: Problem, upper_bound: float) -> None:
        tables = (*problem.unary, *problem.pairwise.values())
        if not math.isfinite(upper_bound):
            upper_bound = sum(float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables)
        self.bound = 0.0
        """No assignment costs less."""
        self.unary = [np.minimum(u, upper_bound) for u in problem.unary]
        """The reparametrized cost of each remaining option."""
        self.options: list[Indices] = [np.arange(len(u)) for u in self.unary]
        """The remaining options of each variable, by their numbers in the problem as given."""
        self.order = _breadth_first_order(problem)
        self.edges: dict[tuple[int, int], tuple[_Edge, _Edge]] = {}
        """By two variables, the lower first: the direction of that one, and the other's."""
        self.incoming: list[list[tuple[_Edge, _Edge]]] = [[] for _ in self.unary]
        """By variable, both directions of each pair with an earlier one: its own first. The edges do not know of each
        other, so that the tables, which may be gigabytes, are freed with the problem."""
        self.outgoing: list[list[tuple[_Edge, _Edge]]] = [[] for _ in self.unary]
        position = {i: k for k, i in enumerate(self.order)}
        for (i, j), table in problem.pairwise.items():
            table = np.minimum(table, upper_bound)
            edge = _Edge(np.ascontiguousarray(table.T), np.zeros(len(self.unary[i])))
            reverse = _Edge(np.ascontiguousarray(table), np.zeros(len(self.unary[j])))
            self.edges[i, j] = edge, reverse
            (self.outgoing if position[i] < position[j] else self.incoming)[i].append((edge, reverse))
            (self.outgoing if position[j] < position[i] else self.incoming)[j].append((reverse, edge))

    def sweep(self, upper_bound: float) -> None:
        """Raises the bound, and drops options that are in no assignment that costs less than ``upper_bound``."""
        for _ in range(SWEEPS):
            self._sweep_once(upper_bound)

    def _sweep_once(self, upper_bound: float) -> None:
        minimum, maximum, limit = np.minimum.reduce, np.maximum.reduce, upper_bound * (1 + REL_TOLERANCE)
        for i in self.order:
            unary, incoming, outgoing = self.unary[i], self.incoming[i], self.outgoing[i]
            for edge, reverse in incoming:
                least = minimum(edge.table + reverse.message[:, None]) + edge.message
                edge.message = edge.message - least
                unary = unary + least
            least = float(minimum(unary))
            self.bound += least
            unary = unary - least
            if maximum(unary) > limit - self.bound:
                keep = unary <= limit - self.bound
                if keep.any():
                    unary = unary[keep]
                    self._drop_options(i, keep)
            share = unary / max(len(incoming), len(outgoing), 1)
            for edge, _ in outgoing:
                edge.message = edge.message + share
                unary = unary - share
            self.unary[i] = unary
        self.order.reverse()
        self.incoming, self.outgoing = self.outgoing, self.incoming

    def _drop_options(self, i: int, keep: np.ndarray) -> None:
        kept = np.flatnonzero(keep)
        self.options[i] = self.options[i][kept]
        for edge, reverse in (*self.incoming[i], *self.outgoing[i]):
            edge.table = edge.table.take(kept, axis=1)
            reverse.table = reverse.table.take(kept, axis=0)
            edge.message = edge.message[kept]

    def reparametrized(self) -> Problem:
        """The problem of the remaining options: each assignment costs ``bound`` less there than in the original."""
        pairwise = {
            pair: reverse.table + edge.message[:, None] + reverse.message
            for pair, (edge, reverse) in self.edges.items()
        }
        return Problem(tuple(self.unary), pairwise)

    def original_assignment(self, assignment: Sequence[int]) -> Assignment:
        """An assignment of remaining options, by the options' numbers in the problem as given."""
        return tuple(int(options[c]) for options, c in zip(self.options, assignment, strict=True))


def _breadth_first_order(problem: Problem) -> list[int]:
    """The variables in breadth-first order, so that each is near those that it has a pair with."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for i, j in sorted(problem.pairwise):
        neighbours[i].append(j)
        neighbours[j].append(i)
    order: dict[int, None] = {}
    for start in range(len(problem.unary)):
        queue = deque([start])
        while queue:
            i = queue.popleft()
            if i not in order:
                order[i] = None
                queue += neighbours[i]
    return list(order)
