"""Routers whose loads are evened out: by a bias that follows the loads, or by losses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from tests.experts import EXCHANGING, Params, arrays, on, products, routed, split_only
from tests.forms import HASTY, same

EXPERTS = ("up", "gated", "down")
EVEN = 128 * 2 / 8
"""The load of each expert, of 128 tokens that go to two of eight."""


def balanced(p: Params, x: Any) -> tuple[Params, dict[str, Any]]:
    """A step as DeepSeek-V3's (arXiv:2412.19437): experts with more than the mean load are chosen less."""

    def loss(p: Params) -> tuple[Any, Any]:
        weights, chosen = routed(p, x, 2)
        flat = chosen.reshape(-1)
        order, loads = jnp.argsort(flat), jnp.bincount(flat, length=8)
        rows = products(p, x[order // 2], loads)[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return jnp.mean((x - jnp.einsum("tkd,tk->td", rows, weights)) ** 2), loads

    (value, loads), grads = jax.value_and_grad(loss, has_aux=True)(p)
    after = jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)
    bias = p["bias"] + 0.02 * jnp.sign(jnp.mean(loads.astype("float32")) - loads)
    return {**after, "bias": bias}, {"loss": value, "loads": loads}


@pytest.mark.parametrize(
    ("axes", "form", "kind"),
    [("y", "exchanged", "ragged"), (("x", "y"), "exchanged", "blocks"), ("y", "in place", "ragged")],
)
def test_a_bias_that_follows_the_loads_is_that_of_one_device_after_each_step_and_evens_them(
    axes: Any, form: str, kind: str
):
    """Experts over four devices or eight. Without the bias the largest load stays what it is."""
    p, x = arrays(128, 16, 64, 8)
    p["bias"] = np.zeros(8, "float32")
    specs = dict.fromkeys(p, P()) | dict.fromkeys(EXPERTS, P(axes))
    tokens = P("x") if form == "in place" else P(("x", "y"))
    where: dict[str, Any] = {"in_shardings": (specs, tokens), "out_shardings": (specs, P()), "rules": split_only(form)}
    step = autoshard.jit(balanced, mesh=on(HASTY, kind), passes=EXCHANGING, strategy="replicated", **where)
    assert ("all-to-all" in {c.kind for c in step.plan(p, x).cost.collectives}) == (form == "exchanged")
    alone, ours, theirs, largest = jax.jit(balanced), p, p, list[int]()
    for _ in range(16):
        (ours, said), (theirs, expected) = step(ours, x), alone(theirs, x)
        same((ours, said), (theirs, expected), scale=1e-3)
        largest.append(int(said["loads"].max()))
    assert largest[0] > 3 * EVEN
    assert largest[-1] < 1.25 * EVEN, largest


@pytest.mark.parametrize(("kind", "form"), [("ragged", "exchanged"), ("blocks", "exchanged"), ("ragged", "in place")])
def test_losses_of_loads_clipping_and_counts_of_what_a_capacity_drops_are_those_of_one_device(kind: str, form: str):
    """A step as people write it: a capacity of its own, two losses of the router, and a norm over all experts."""
    p, x = arrays(64, 16, 64, 8)
    # Of a gradient next to zero Adam's first update is its sign, or what rounding leaves of it.
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4))

    def loss(p: Params, x: Any) -> Any:
        logits = x @ p["gate"]
        weights, chosen = lax.top_k(jax.nn.softmax(logits), 2)
        flat = chosen.reshape(-1)
        arrived = jnp.take_along_axis(jnp.cumsum(jax.nn.one_hot(flat, 8, dtype="int32"), 0), flat[:, None], 1)[:, 0]
        expert = jnp.where(arrived <= 20, flat, 8)
        order = jnp.argsort(expert)
        rows = products(p, x[order // 2], jnp.bincount(expert, length=8))[jnp.argsort(order)]
        rows = jnp.where((expert < 8)[:, None], rows, 0).reshape(*chosen.shape, -1)
        loads = jnp.mean(jax.nn.one_hot(chosen, 8), (0, 1))
        balance = 8 * jnp.sum(loads * jnp.mean(jax.nn.softmax(logits), 0))
        of_router = balance + jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        error = jnp.mean((x - jnp.einsum("tkd,tk->td", rows, weights)) ** 2)
        return error + 0.01 * of_router, {"balance": balance, "dropped": jnp.sum(expert == 8)}

    def train(state: Any, x: Any) -> Any:
        grads, said = jax.grad(loss, has_aux=True)(state[0], x)
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), said | {"norm": optax.tree.norm(grads)}

    state = (p, optimizer.init(p))
    axes, tokens = (("x", "y"), P(("x", "y"))) if form == "exchanged" else ("y", P("x"))
    by_expert = jax.tree.map(lambda w: P(axes) if np.ndim(w) == 3 else P(), state)
    specs: dict[str, Any] = {"in_shardings": (by_expert, tokens), "out_shardings": (by_expert, P())}
    specs |= {"rules": split_only(form), "strategy": "replicated"}
    step = autoshard.jit(train, mesh=on(HASTY, kind), passes=EXCHANGING, **specs)
    assert ("all-to-all" in {c.kind for c in step.plan(state, x).cost.collectives}) == (form == "exchanged")
    got, want = step(state, x), jax.jit(train)(state, x)
    assert got[1]["dropped"] == want[1]["dropped"] > 0
    assert want[1]["norm"] > 0.1
    same(got, want, scale=1e-3)
