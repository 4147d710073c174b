"""Recipes: their configurations are valid, and a few steps on eight devices are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autoshard
from autoshard.train.calls import Call
from autoshard.train.config import named_config

RECIPES = Path(__file__).parents[1] / "configs/recipes"


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_three_steps_of_experts_without_dropped_tokens(name: str):
    config = named_config(RECIPES / f"{name}.yaml")
    assert isinstance(config.model, Call)
    assert isinstance(config.data, Call)
    init, apply = config.model.resolved()()
    rows = {k: x[:16] for k, x in config.data.resolved()().items()}
    adam = optax.adam(3e-3, eps=1e-4)  # above the noise of these gradients

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = apply(params, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, opt = adam.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), opt), value

    passes = ["dead_code", "one_hot", "transposed_products", "experts:recompute", "pad_uneven"]
    sharded = autoshard.jit(step, mesh=config.all_phases[0].mesh, passes=passes)
    params = init(jax.random.key(0))
    ours = theirs = (params, adam.init(params))
    alone = jax.jit(step)
    for _ in range(3):
        (ours, loss), (theirs, expected) = sharded(ours, rows), alone(theirs, rows)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))
    report = sharded.plan(ours, rows).passes
    assert [p.change for p in report if p.name == "experts"] == ["2 operations on rows that are sorted by group"]
