"""search: which layout.

In come a `Graph`, a strategy and a memory budget. The specs of all values become a `Problem` of arrays (unary and
pairwise costs, and budgets), which is solved with a lower bound; solutions become layouts that `autoshard.cost` prices
once more. Out go the cheapest `Candidate` found and the `Search` with everything that was priced.

May import: cost, and what it may.
"""
