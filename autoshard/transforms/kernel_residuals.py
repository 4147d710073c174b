"""The gradient of a library's attention from an output and log-sum-exp of the caller's choice.

A library's own gradient is of what its forward kernel computed. That of a block of keys needs the output and the
log-sum-exp over all blocks; and one that is given both need not run the forward kernel, which is then dead code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autoshard.errors import MeshError


def gradients_from(
    pullback: Callable[[Any], tuple[Any, ...]], out: Any, rows: tuple[int, ...], what: str
) -> tuple[Any, Callable[[Any, Any, Any], tuple[Any, ...]]]:
    """The log-sum-exp that the forward part saved, and the function (output, log-sum-exp, cotangent) -> gradients.

    Args:
      pullback: of `jax.vjp`, a pytree with the residuals as leaves.
      out: the output of the forward part, which is one of these.
      rows: the shape of the log-sum-exp, the one residual in float32 with it.
      what: the kernel, for messages.

    Raises:
      MeshError: this version of JAX saves other residuals.
    """
    residuals, tree = jax.tree.flatten(pullback)
    sums = [i for i, x in enumerate(residuals) if (x.shape, str(x.dtype)) == (rows, "float32")]
    outs = [i for i, x in enumerate(residuals) if x is out]
    if len(sums) != 1 or len(outs) != 1:
        raise MeshError(
            f"attention of {out.dtype}{list(out.shape)}: JAX {jax.__version__} saves other residuals for the gradient "
            f"of {what} than autoshard knows; leave the pass 'attention' out of passes=[...]"
        )

    def gradients(out: Any, logsumexp: Any, cotangent: Any) -> tuple[Any, ...]:
        replaced = list(residuals)
        replaced[outs[0]], replaced[sums[0]] = out, logsumexp
        return jax.tree.unflatten(tree, replaced)(cotangent)

    return residuals[sums[0]], gradients
