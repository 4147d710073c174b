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

from autoshard.search.problem import SAME, Array, Choice, Labels, Problem

SWEEPS = 4
"""How often the costs are moved before what they leave is looked at again."""


@dataclass(eq=False)
class _Side:
    """A pair of variables as one of the two has it."""

    table: Array
    """[options of the other, own options]"""
    sent: Array
    """What of the variable's costs the pair holds, by option."""
    other: _Side = field(init=False, repr=False)


class Narrowed:
    """A problem with its costs moved, and the options that are left; budgets aside.

    Costs above ``most``, that of a choice that is known, count as ``most``: they are in no better choice.
    """

    def __init__(self, problem: Problem, most: float) -> None:
        tables = (*problem.unary, *problem.pairs.values())
        if not math.isfinite(most):
            most = sum(float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables)
        self.bound = 0.0
        self.alone = [np.minimum(u, most) for u in problem.unary]
        self.left: list[Labels] = [np.arange(len(u)) for u in self.alone]
        """The options that are left of each variable."""
        self.order = _order(problem)
        self.pairs: dict[tuple[int, int], _Side] = {}
        """By two variables, the lower first: its side."""
        self.before: list[list[_Side]] = [[] for _ in self.alone]
        self.after: list[list[_Side]] = [[] for _ in self.alone]
        place = {i: k for k, i in enumerate(self.order)}
        for (i, j), table in problem.pairs.items():
            table = np.minimum(table, most)
            one = _Side(np.ascontiguousarray(table.T), np.zeros(len(self.alone[i])))
            two = _Side(np.ascontiguousarray(table), np.zeros(len(self.alone[j])))
            one.other, two.other = two, one
            self.pairs[i, j] = one
            (self.after if place[i] < place[j] else self.before)[i].append(one)
            (self.after if place[j] < place[i] else self.before)[j].append(two)

    def sweep(self, best: float) -> None:
        """Raises the bound, and drops options that are in no choice of less than ``best``."""
        for _ in range(SWEEPS):
            self._once(best)

    def _once(self, best: float) -> None:
        for i in self.order:
            alone, before, after = self.alone[i], self.before[i], self.after[i]
            for side in before:
                least = (side.table + side.other.sent[:, None]).min(axis=0) + side.sent
                side.sent = side.sent - least
                alone = alone + least
            least = float(alone.min())
            self.bound += least
            alone = alone - least
            keep = alone <= best * (1 + SAME) - self.bound
            if not keep.all() and keep.any():
                alone = alone[keep]
                self._keep(i, keep)
            share = alone / max(len(before), len(after), 1)
            for side in after:
                side.sent = side.sent + share
                alone = alone - share
            self.alone[i] = alone
        self.order.reverse()
        self.before, self.after = self.after, self.before

    def _keep(self, i: int, keep: np.ndarray) -> None:
        self.left[i] = self.left[i][keep]
        for side in (*self.before[i], *self.after[i]):
            side.table = np.ascontiguousarray(side.table[:, keep])
            side.other.table = side.other.table[keep]
            side.sent = side.sent[keep]

    def problem(self) -> Problem:
        """What is left, its costs as they were moved: each choice costs the bound less than it does."""
        pairs = {pair: side.other.table + side.sent[:, None] + side.other.sent for pair, side in self.pairs.items()}
        return Problem(tuple(self.alone), pairs)

    def choice(self, choice: Sequence[int]) -> Choice:
        """A choice among what is left as one among all options."""
        return tuple(int(left[c]) for left, c in zip(self.left, choice, strict=True))


def _order(problem: Problem) -> list[int]:
    """The variables, each near those that it is in a pair with: breadth first."""
    near: dict[int, list[int]] = defaultdict(list)
    for i, j in sorted(problem.pairs):
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
