"""Where XLA's partitioner communicates more than a rule says: observed on two CPU devices with JAX 0.12.

The results are right, but XLA gathers operands that need no communication: each shard can be computed on its own, as
`autoshard.rules.validation.shard.run_shard` does.
"""

from __future__ import annotations

GATHERED_BY_XLA: dict[str, str] = {
    "conv_general_dilated": "every sharded dimension is gathered where feature groups are neither one nor the channels",
    "top_k": "every sharded dimension is gathered, the batch too",
    "triangular_solve": "sharded right-hand sides are gathered",
    "tridiagonal_solve": "sharded right-hand sides are gathered",
}
CONVERGENCE_LOOPS: tuple[str, ...] = (
    "igamma",
    "igamma_grad_a",
    "igammac",
    "random_gamma",
    "regularized_incomplete_beta",
)
"""Lowered to loops that run until all elements have converged: a scalar all-reduce in each iteration."""
