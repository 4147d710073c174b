"""Over what the experts of a layer are split where nothing is said: themselves, their features, or the rows alone."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from tests.experts import Params, arrays, sorted_back
from tests.forms import same


def step(p: Params, x: Any) -> tuple[Any, Any]:
    """One of plain descent."""

    def loss(p: Params) -> Any:
        return jnp.mean((x + sorted_back(p, x, 2)) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - g, p, grads), value


SPLIT = {
    "experts": dict.fromkeys(("up", "gated", "down"), P("data")),
    "features": {"up": P(None, None, "data"), "gated": P(None, None, "data"), "down": P(None, "data")},
    "rows": dict.fromkeys(("up", "gated", "down"), P()),
}


@pytest.mark.parametrize(
    ("hardware", "split", "sizes"),
    [
        ("tpu-v5e", "experts", (2048, 256, 256, 32)),
        ("tpu-v5e", "features", (64, 512, 2048, 4)),
        ("tpu-v5e", "rows", (32768, 64, 64, 8)),
        ("h100", "experts", (2048, 256, 256, 16)),
        ("h100", "features", (64, 512, 2048, 4)),
        ("h100", "rows", (65536, 64, 64, 8)),
    ],
)
def test_many_experts_are_split_few_large_ones_by_features_and_small_ones_not_at_all(
    hardware: str, split: str, sizes: tuple[int, int, int, int]
):
    """Sizes are tokens, width, hidden features and experts: two for each token, on eight devices."""
    p, x = arrays(*sizes)
    where = autoshard.MeshConfig(axes={"data": 8}, hardware=hardware)
    chosen = autoshard.jit(step, mesh=where, donate_argnums=0)
    plan = chosen.plan(p, x)
    inputs, _ = plan.in_shardings
    assert {name: placed.spec for name, placed in inputs.items()} == SPLIT[split] | {"gate": P()}
    same(chosen(p, x), jax.jit(step)(p, x), scale=1e-3)
