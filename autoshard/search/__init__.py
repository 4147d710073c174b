"""search: which layout.

In come a `Graph`, a strategy and a memory budget. The choice of a spec for every group of values becomes a `Problem` of
arrays (unary and pairwise costs); it is solved with a bound on what was left unexplored; solutions become layouts that
`autoshard.cost` prices once more. Out go the best `Candidate` and the `Search` with all that was tried.

May import: cost, and what it may.
"""
