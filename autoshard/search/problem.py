"""The optimisation problem as plain arrays: choose one option for each variable.

    minimise   sum_i unary[i][x[i]]  +  sum_(i,j) pairwise[i, j][x[i], x[j]]
    subject to sum_i loads[i][x[i]] <= limit   for each budget

`Problem.cost` and `Problem.fits` evaluate an assignment x however it was found. This module knows nothing of programs:
`autoshard.search.build_problem` makes a problem of a graph, `autoshard.search.solve` minimises it (docs/math/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Assignment = tuple[int, ...]
"""The option of each variable."""

REL_TOLERANCE = 1e-9
"""Costs whose relative difference is smaller count as equal."""


@dataclass(frozen=True, eq=False)
class Budget:
    """A linear constraint: the loads of the assigned options add up to at most ``limit``."""

    loads: Mapping[int, Array]
    """By variable, the load of each of its options; variables without an entry load nothing."""
    limit: float

    def load(self, assignment: Sequence[int]) -> float:
        """The sum of the loads under ``assignment``."""
        return float(sum(a[assignment[i]] for i, a in self.loads.items()))


@dataclass(frozen=True, eq=False)
class Problem:
    """Costs of options and of pairs of options, and budgets. An infinite cost forbids an option or a pair."""

    unary: tuple[Array, ...]
    """For each variable, [options]."""
    pairwise: Mapping[tuple[int, int], Array] = field(default_factory=dict[tuple[int, int], Array])
    """By two variables (i, j) with i < j, [options of i, options of j]."""
    budgets: tuple[Budget, ...] = ()
    neighbourhoods: tuple[tuple[Indices, ...], ...] = ()
    """For large-neighbourhood search: each neighbourhood labels the options of every variable, [options]. The
    neighbours of an assignment are those in which every variable has an option with the label of its present one."""

    def cost(self, assignment: Sequence[int]) -> float:
        """The objective, summed from the tables."""
        unary = sum(u[assignment[i]] for i, u in enumerate(self.unary))
        return float(unary + sum(t[assignment[i], assignment[j]] for (i, j), t in self.pairwise.items()))

    def fits(self, assignment: Sequence[int]) -> bool:
        """Whether ``assignment`` is within every budget."""
        return all(budget.load(assignment) <= budget.limit for budget in self.budgets)

    def infeasible(self) -> bool:
        """Whether some budget is exceeded even by the allowed options of least load. If not, no statement is made."""

        def least(i: int, load: Array) -> float:
            return float(load[np.isfinite(self.unary[i])].min(initial=np.inf))

        return any(sum(least(i, load) for i, load in b.loads.items()) > b.limit for b in self.budgets)

    def lagrangian(self, multipliers: Sequence[float]) -> Problem:
        """The problem without budgets in which a unit of each budget's load costs its multiplier.

        Its optimum, less the sum of multiplier times limit, bounds the optimum of this problem from below.
        """
        unary = list(self.unary)
        for budget, multiplier in zip(self.budgets, multipliers, strict=True):
            for i, load in budget.loads.items() if multiplier else ():
                unary[i] = unary[i] + multiplier * load
        return Problem(tuple(unary), self.pairwise, neighbourhoods=self.neighbourhoods)


def restricted(problem: Problem, options: Sequence[Indices], *, neighbourhoods: bool = False) -> Problem:
    """``problem`` without budgets, with the given options of each variable; ``neighbourhoods``: with those it has."""
    kept = problem.neighbourhoods if neighbourhoods else ()
    return Problem(
        tuple(u[k] for u, k in zip(problem.unary, options, strict=True)),
        {(i, j): t[np.ix_(options[i], options[j])] for (i, j), t in problem.pairwise.items()},
        neighbourhoods=tuple(tuple(l[k] for l, k in zip(labels, options, strict=True)) for labels in kept),
    )


class ProblemBuilder:
    """Accumulates the costs of a problem term by term."""

    def __init__(self) -> None:
        self.unary: list[Array] = []
        self.pairwise: dict[tuple[int, int], Array] = {}

    def add_variable(self, options: int) -> int:
        """A new variable; each of its ``options`` costs 0."""
        self.unary.append(np.zeros(options))
        return len(self.unary) - 1

    def add_unary(self, i: int, costs: Array) -> None:
        """Adds ``costs[option of i]``."""
        self.unary[i] += costs

    def add_pairwise(self, i: int, j: int, costs: Array) -> None:
        """Adds ``costs[option of i, option of j]``; i may be j."""
        if i == j:
            self.unary[i] += np.diagonal(costs)
            return
        key, costs = ((i, j), costs) if i < j else ((j, i), costs.T)
        self.pairwise[key] = self.pairwise[key] + costs if key in self.pairwise else costs

    def build(self, neighbourhoods: tuple[tuple[Indices, ...], ...] = ()) -> Problem:
        """The problem, without budgets."""
        return Problem(tuple(self.unary), self.pairwise, neighbourhoods=neighbourhoods)
