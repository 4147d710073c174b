"""problem: a choice among options for each of many variables, as plain arrays.

    cost(x) = sum of unary[i][x[i]]  +  sum of pairs[i, j][x[i], x[j]]

under rows ``sum of loads[i][x[i]] <= limit``. It knows nothing of programs: `space` makes one from a graph, `solve`
minimises it, and `Problem.cost` says what a choice costs, however it was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Assignment = tuple[int, ...]

REL_TOLERANCE = 1e-9
"""Costs that differ by a smaller share are the same."""


@dataclass(frozen=True, eq=False)
class Budget:
    """A budget: the load of every variable's option, and what they may add up to."""

    loads: Mapping[int, Array]
    limit: float

    def load(self, choice: Sequence[int]) -> float:
        """What ``choice`` takes of it."""
        return float(sum(a[choice[i]] for i, a in self.loads.items()))


@dataclass(frozen=True, eq=False)
class Problem:
    """Costs by option, for each variable and for pairs of them. Infinite: not to be had."""

    unary: tuple[Array, ...]
    pairwise: Mapping[tuple[int, int], Array] = field(default_factory=dict[tuple[int, int], Array])
    """By two variables, the lower first."""
    budgets: tuple[Budget, ...] = ()
    neighbourhoods: tuple[tuple[Indices, ...], ...] = ()
    """Ways to see options as alike, a label an option for each variable: to look for what is better near a choice, each
    variable may take any option that is labelled as the one it has."""

    def cost(self, choice: Sequence[int]) -> float:
        """The cost of ``choice``, summed afresh."""
        alone = sum(u[choice[i]] for i, u in enumerate(self.unary))
        return float(alone + sum(t[choice[i], choice[j]] for (i, j), t in self.pairwise.items()))

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether ``choice`` keeps every budget."""
        return all(row.load(choice) <= row.limit for row in self.budgets)

    def infeasible(self) -> bool:
        """Whether some budget is less than what the lightest options of all variables take of it."""

        def least(i: int, load: Array) -> float:
            return float(load[np.isfinite(self.unary[i])].min(initial=np.inf))

        return any(sum(least(i, load) for i, load in row.loads.items()) > row.limit for row in self.budgets)

    def lagrangian(self, multipliers: Sequence[float]) -> Problem:
        """This problem without its rows, a unit of each row's load priced instead."""
        unary = list(self.unary)
        for row, price in zip(self.budgets, multipliers, strict=True):
            for i, load in row.loads.items() if price else ():
                unary[i] = unary[i] + price * load
        return Problem(tuple(unary), self.pairwise, neighbourhoods=self.neighbourhoods)


def restricted(problem: Problem, options: Sequence[Indices], *, kin: bool = False) -> Problem:
    """``problem`` without its rows and with some of each variable's options, given by number; ``kin``: with its kin."""
    return Problem(
        tuple(u[k] for u, k in zip(problem.unary, options, strict=True)),
        {(i, j): t[np.ix_(options[i], options[j])] for (i, j), t in problem.pairwise.items()},
        neighbourhoods=tuple(
            tuple(l[k] for l, k in zip(labels, options, strict=True)) for labels in problem.neighbourhoods
        )
        if kin
        else (),
    )


class ProblemBuilder:
    """Adds up a problem's costs."""

    def __init__(self) -> None:
        self.unary: list[Array] = []
        self.pairwise: dict[tuple[int, int], Array] = {}

    def add_variable(self, options: int) -> int:
        """A new variable."""
        self.unary.append(np.zeros(options))
        return len(self.unary) - 1

    def add_unary(self, i: int, costs: Array) -> None:
        self.unary[i] += costs

    def add_pairwise(self, i: int, j: int, costs: Array) -> None:
        """Adds ``costs[option of i, option of j]``."""
        if i == j:
            self.unary[i] += np.diagonal(costs)
            return
        key, costs = ((i, j), costs) if i < j else ((j, i), costs.T)
        self.pairwise[key] = self.pairwise[key] + costs if key in self.pairwise else costs

    def build(self, kin: tuple[tuple[Indices, ...], ...] = ()) -> Problem:
        return Problem(tuple(self.unary), self.pairwise, neighbourhoods=kin)
