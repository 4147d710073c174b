"""Where XLA's own partitioning falls short of what a rule allows: seen on two CPU devices, JAX 0.12.

The results are right, but a split that needs no communication is gathered all the same. Run part by part,
as `autoshard.rules.validation.part.compute` does, they need none.
"""

from __future__ import annotations

GATHERED: dict[str, str] = {
    "conv_general_dilated": "with feature groups that are neither one nor the channels, every split is gathered",
    "top_k": "every split is gathered, the batch's too",
    "triangular_solve": "a split of the right-hand sides is gathered",
    "tridiagonal_solve": "a split of the right-hand sides is gathered",
}
LOOPS: tuple[str, ...] = ("igamma", "igamma_grad_a", "igammac", "random_gamma", "regularized_incomplete_beta")
"""Lowered to loops that run until every element has converged: a scalar all-reduce a turn."""
