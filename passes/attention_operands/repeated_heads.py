"""Attention by a kernel, whose keys and values repeat each head for a group of the queries' heads, reads them once.

``jnp.repeat(key, 4, axis=heads)`` writes keys and values four times, and the gradient is summed over the copies
afterwards. Kernels take as many key heads as there are, and sum the gradient themselves. Shapes stay as they are, and
with them the layouts that a plan may choose from, among them more parts of the heads than there are key heads: that
heads are repeated is noted in the attention's parameters, and the kernel's call takes each head once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.transforms.attention_kernels import KERNELS
from autoshard.transforms.attention_op import AttentionConfig, attention_backward_p, attention_p


def with_repeats(eqn: jx.JaxprEqn, made: Mapping[jx.Var, jx.JaxprEqn]) -> jx.JaxprEqn:
    """``eqn`` with the repeats of heads among its parameters, if it is an attention that has some; else itself.

    Args:
      made: the equation that makes each variable.
    """
    if eqn.primitive is not attention_p and eqn.primitive is not attention_backward_p:
        return eqn
    config: AttentionConfig = eqn.params["config"]
    if not config.kernel or not KERNELS[config.kernel].shared_keys:
        return eqn
    repeats = [
        _repeats(a, letters, made)
        for a, letters in zip(eqn.invars[1:3], (config.key_dims, config.value_dims), strict=True)
    ]
    if repeats[0] is None or repeats[0] != repeats[1] or repeats[0][0] not in config.query_dims:
        return eqn
    head, count = repeats[0]
    return eqn.replace(params=eqn.params | {"config": replace(config, repeated_head=head, head_repeats=count)})


def _repeats(atom: jx.Atom, letters: str, made: Mapping[jx.Var, jx.JaxprEqn]) -> tuple[str, int] | None:
    """The letter of the dimension of ``atom`` that has each element several times in a row, and how often."""
    eqn = made.get(atom) if isinstance(atom, jx.Var) else None
    if eqn is not None and eqn.primitive is _prims.transpose_p:
        by_source = sorted(zip(eqn.params["permutation"], letters, strict=True))
        return _repeats(eqn.invars[0], "".join(letter for _, letter in by_source), made)
    if eqn is None or eqn.primitive is not _prims.reshape_p or not isinstance(eqn.invars[0], jx.Var):
        return None
    spread = made.get(eqn.invars[0])
    if spread is None or spread.primitive is not _prims.broadcast_in_dim_p:
        return None
    dims, kept = spread.params["broadcast_dimensions"], jx.aval(spread.invars[0]).shape
    whole = jx.aval(spread.outvars[0]).shape
    added = [d for d in range(len(whole)) if d not in dims or kept[dims.index(d)] < whole[d]]
    if len(added) != 1 or not added[0]:
        return None
    (new,) = added
    merged = (*whole[: new - 1], whole[new - 1] * whole[new], *whole[new + 1 :])
    return (letters[new - 1], whole[new]) if jx.aval(atom).shape == merged and whole[new] > 1 else None
