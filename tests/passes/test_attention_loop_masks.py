"""Masks that all layers of a loop share: read as the program made them, not of all heads."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.transforms.attention_op import attention_backward_p, attention_p
from tests.attentions import B, H, S, W, close, mix, normal, rewritten, scores


def packed(recomputed: bool) -> tuple[Any, tuple[Any, ...]]:
    """Three layers on rows of several segments, and their gradients."""

    def loss(ws: Any, h: Any, segment: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
            seen = (segment[:, :, None] == segment[:, None, :])[:, None]
            weights = jax.nn.softmax(jnp.where(seen, scores(q, k), -1e9), -1)
            return h + jnp.einsum("bshe,hed->bsd", mix(weights, v), w["o"]), None

        return (lax.scan(jax.checkpoint(layer) if recomputed else layer, h, ws)[0] ** 2).mean()

    ws = {n: 0.3 * normal(i, 3, H * W, H, W) for i, n in enumerate("qkv")} | {"o": 0.3 * normal(3, 3, H, W, H * W)}
    return jax.value_and_grad(loss), (ws, normal(4, B, S, H * W), jnp.arange(B * S).reshape(B, S) // 3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_mask_of_segments_enters_the_loop_without_its_heads(recomputed: bool):
    step, args = packed(recomputed)
    after, report = rewritten(step, args)
    assert "not replaced" not in report
    eqns = [e for e in jx.walk(after.jaxpr) if e.primitive in (attention_p, attention_backward_p)]
    assert len(eqns) == 2 + recomputed
    for eqn in eqns:
        mask = jx.aval(eqn.invars[3 if eqn.primitive is attention_p else -1])
        assert mask.dtype == bool
        assert mask.size == B * S * S
    into_loops = [jx.aval(v) for e in after.jaxpr.eqns if jx.scan_groups(e) for v in e.invars]
    assert max(x.size for x in into_loops if x.dtype == bool) == B * S * S
    done = jax.jit(jx.as_fun(after.jaxpr))(*jax.tree.leaves(args))
    close(jax.tree.unflatten(after.out_tree, done), jax.jit(step)(*args))
