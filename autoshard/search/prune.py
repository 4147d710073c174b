"""narrow: which options are in no choice that is better than one already known, found by passing messages.

What a choice costs can be moved between variables and pairs so that no choice costs more or less in all. Every sweep
goes through the variables in order, the next in the reverse: a variable takes what the pairs with those before it cost
at least under each of its options, what its best option then costs is added to the bound, and the rest goes on to the
pairs with those after it (TRW-S: Kolmogorov, "Convergent tree-reweighted message passing", 2006, in the form of his "A
new look at reweighted message passing", 2015). No choice costs less than the bound, and none that has an option less
than the bound and what is left of that option's cost.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.search.problem import REL_TOLERANCE, Array, Assignment, Indices, Problem

SWEEPS = 4
"""How often the costs are moved before what they leave is looked at again."""


@dataclass(eq=False)
class _Edge:
    """A pair of variables as one of the two has it."""

    table: Array
    """[options of the other, own options]"""
    message: Array
    """What of the variable's costs the pair holds, by option."""
    reverse: _Edge = field(init=False, repr=False)


class PrunedProblem:
    """A problem with its costs moved, and the options that are left; budgets aside.

    Costs above ``most``, that of a choice that is known, count as ``most``: they are in no better choice.
    """

    def __init__(self, problem: Problem, most: float) -> None:
        tables = (*problem.unary, *problem.pairwise.values())
        if not math.isfinite(most):
            most = sum(float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables)
        self.bound = 0.0
        self.unary = [np.minimum(u, most) for u in problem.unary]
        self.options: list[Indices] = [np.arange(len(u)) for u in self.unary]
        """The options that are left of each variable."""
        self.order = _breadth_first_order(problem)
        self.edges: dict[tuple[int, int], _Edge] = {}
        """By two variables, the lower first: its side."""
        self.incoming: list[list[_Edge]] = [[] for _ in self.unary]
        self.outgoing: list[list[_Edge]] = [[] for _ in self.unary]
        place = {i: k for k, i in enumerate(self.order)}
        for (i, j), table in problem.pairwise.items():
            table = np.minimum(table, most)
            one = _Edge(np.ascontiguousarray(table.T), np.zeros(len(self.unary[i])))
            two = _Edge(np.ascontiguousarray(table), np.zeros(len(self.unary[j])))
            one.reverse, two.reverse = two, one
            self.edges[i, j] = one
            (self.outgoing if place[i] < place[j] else self.incoming)[i].append(one)
            (self.outgoing if place[j] < place[i] else self.incoming)[j].append(two)

    def sweep(self, best: float) -> None:
        """Raises the bound, and drops options that are in no choice of less than ``best``."""
        for _ in range(SWEEPS):
            self._sweep_once(best)

    def _sweep_once(self, best: float) -> None:
        for i in self.order:
            alone, before, after = self.unary[i], self.incoming[i], self.outgoing[i]
            for side in before:
                least = (side.table + side.reverse.message[:, None]).min(axis=0) + side.message
                side.message = side.message - least
                alone = alone + least
            least = float(alone.min())
            self.bound += least
            alone = alone - least
            keep = alone <= best * (1 + REL_TOLERANCE) - self.bound
            if not keep.all() and keep.any():
                alone = alone[keep]
                self._drop_options(i, keep)
            share = alone / max(len(before), len(after), 1)
            for side in after:
                side.message = side.message + share
                alone = alone - share
            self.unary[i] = alone
        self.order.reverse()
        self.incoming, self.outgoing = self.outgoing, self.incoming

    def _drop_options(self, i: int, keep: np.ndarray) -> None:
        self.options[i] = self.options[i][keep]
        for side in (*self.incoming[i], *self.outgoing[i]):
            side.table = np.ascontiguousarray(side.table[:, keep])
            side.reverse.table = side.reverse.table[keep]
            side.message = side.message[keep]

    def reparametrized(self) -> Problem:
        """What is left, its costs as they were moved: each choice costs the bound less than it does."""
        pairs = {
            pair: side.reverse.table + side.message[:, None] + side.reverse.message for pair, side in self.edges.items()
        }
        return Problem(tuple(self.unary), pairs)

    def original_assignment(self, choice: Sequence[int]) -> Assignment:
        """A choice among what is left as one among all options."""
        return tuple(int(left[c]) for left, c in zip(self.options, choice, strict=True))


def _breadth_first_order(problem: Problem) -> list[int]:
    """The variables, each near those that it is in a pair with: breadth first."""
    near: dict[int, list[int]] = defaultdict(list)
    for i, j in sorted(problem.pairwise):
        near[i].append(j)
        near[j].append(i)
    found: dict[int, None] = {}
    for start in range(len(problem.unary)):
        queue = deque([start])
        while queue:
            i = queue.popleft()
            if i not in found:
                found[i] = None
                queue += near[i]
    return list(found)
