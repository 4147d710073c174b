"""Mixtures of experts whose tokens are sorted by expert, as programs spell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard.ir.rule import Rule
from autoshard.machine.mesh import LogicalMesh
from autoshard.rules.composed import grouped_rows
from autoshard.transforms.grouped_rows import grouped_rows_p

Params = Mapping[str, Any]
EXCHANGING = ("dead_code", "one_hot", "transposed_products", "experts:recompute")
"""Passes that make one operation of experts, which `split_only` splits in one form."""


def routed(p: Params, x: Any, k: int) -> tuple[Any, Any]:
    """Weights and experts of each token, [token, k]; with a bias, which balances loads, experts are chosen by it."""
    gates = jax.nn.softmax(x @ p["gate"])
    if "bias" not in p:
        weights, experts = lax.top_k(gates, k)
    else:
        experts = lax.top_k(gates + lax.stop_gradient(p["bias"]), k)[1]
        weights = jnp.take_along_axis(gates, experts, -1)
    return weights / weights.sum(-1, keepdims=True) if k > 1 else weights, experts


def products(p: Params, rows: Any, sizes: Any) -> Any:
    hidden = jax.nn.silu(lax.ragged_dot(rows, p["gated"], sizes)) * lax.ragged_dot(rows, p["up"], sizes)
    return lax.ragged_dot(hidden, p["down"], sizes)


def sorted_back(p: Params, x: Any, k: int) -> Any:
    """Rows are taken back to their places, as MaxText and Mixtral do."""
    weights, experts = routed(p, x, k)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    rows = products(p, jnp.take(x, order // k, axis=0), jnp.bincount(flat, length=len(p["up"])))
    rows = jnp.take(rows, jnp.argsort(order), axis=0).reshape(*experts.shape, -1)
    return jnp.einsum("tkd,tk->td", rows, weights)


def added_up(p: Params, x: Any, k: int) -> Any:
    """Rows are weighed as they are sorted, and added up at their tokens, as DeepSeek's do."""
    weights, experts = routed(p, x, k)
    order = jnp.argsort(experts.reshape(-1))
    token = order // k
    rows = products(p, x[token], jnp.bincount(experts.reshape(-1), length=len(p["up"])))
    return jnp.zeros_like(x).at[token].add(rows * weights.reshape(-1)[order][:, None])


def scattered_back(p: Params, x: Any, k: int) -> Any:
    """Rows are repeated before they are sorted, and put back by a scatter; sizes are counted of what is sorted."""
    weights, experts = routed(p, x, k)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.zeros(len(p["up"]), jnp.int32).at[experts.reshape(-1)[order]].add(1)
    rows = products(p, jnp.repeat(x, k, axis=0)[order], sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True).reshape(*experts.shape, -1)
    return (rows * weights[..., None]).sum(1)


SPELLED: Mapping[str, Callable[[Params, Any, int], Any]] = {
    "sorted back": sorted_back,
    "added up": added_up,
    "scattered back": scattered_back,
}


def arrays(
    tokens: int, width: int, hidden: int, groups: int, *, bias: bool = False, shared: bool = False
) -> tuple[dict[str, Any], Any]:
    """Parameters and tokens. The gate prefers some experts, and never chooses the last one; a shared expert has all."""
    rng = np.random.default_rng(0)

    def real(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=shape[-2] ** -0.5).astype("float32")

    p = {"gate": real(width, groups), "up": real(groups, width, hidden), "gated": real(groups, width, hidden)}
    p |= {"down": real(groups, hidden, width)}
    x = rng.normal(size=(tokens, width)).astype("float32")
    x[:, 0] = 1
    p["gate"][0] = np.linspace(2, -1, groups)
    p["gate"][0, -1] = -99
    if bias:
        p["bias"] = np.linspace(-0.1, 0.1, groups, dtype="float32")
        p["bias"][-1] = -2
    if shared:
        p |= {"shared_up": real(width, hidden), "shared_down": real(hidden, width)}
    return p, x


def gradient(experts: Callable[[Params, Any, int], Any], k: int) -> Callable[[Params, Any], Any]:
    """The gradient of a loss of the experts' results, and these."""

    def loss(p: Params, x: Any) -> Any:
        out = experts(p, x, k)
        if "shared_up" in p:
            out += jax.nn.silu(x @ p["shared_up"]) @ p["shared_down"]
        return jnp.sum(out**2) / len(x), out

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def split_only(form: str) -> Mapping[Any, Callable[..., Rule]]:
    """Rules by which experts are split in one form alone: rows are "exchanged", or computed "in place"."""

    def rule(*operands: Any, **params: Any) -> Rule:
        found = grouped_rows(*operands, **params)
        assert found.local is not None
        if form == "in place":
            return replace(found, local=replace(found.local, collectives=lambda *_: None))
        factor = found.local.in_place
        kinds, sizes = (tuple((f, x) for f, x in of if f != factor) for of in (found.kinds, found.sizes))
        return replace(found, kinds=kinds, sizes=sizes, local=replace(found.local, in_place=None))

    return {grouped_rows_p: rule}


def on(whole: LogicalMesh, kind: str) -> LogicalMesh:
    """The mesh of a chip with a kernel for ragged products, or without: products of blocks."""
    return replace(whole, hardware=replace(whole.hardware, grouped_products=kind == "ragged"))
