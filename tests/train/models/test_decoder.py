"""The decoder against what defines it: causal, the same scanned or not, and able to learn."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.train.models.decoder import Decoder, ModelConfig, make_steps, rotary
from autoshard.train.optimizer import OptimizerConfig, schedule

TINY = {"layers": 2, "d_model": 32, "heads": 4, "seq": 16}


def tokens(batch: int = 2, seq: int = 16) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (batch, seq), 0, 256)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"kv_heads": 2},
        {"kv_heads": 1, "tied": True},
        {"mlp": "gelu", "scan": False},
        {"dtype": "bfloat16"},
        {"experts": 4},
        {"experts": 8, "experts_per_token": 3, "shared": 1, "scan": False},
    ],
)
def test_logits_do_not_see_the_future(sizes: dict[str, object]):
    model = Decoder(ModelConfig.model_validate(TINY | sizes), nnx.Rngs(0))
    here = tokens()
    there = here.at[:, 9].set((here[:, 9] + 1) % 256)
    before, after = model(here), model(there)
    assert before.shape == (2, 16, 256)
    assert before.dtype == jnp.float32
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert bool(jnp.all(jnp.any(before[:, 9:] != after[:, 9:], axis=-1)))


def test_a_scanned_decoder_is_the_unrolled_one():
    scanned = Decoder(ModelConfig.model_validate(TINY), nnx.Rngs(0))
    unrolled = Decoder(ModelConfig.model_validate(TINY | {"scan": False}), nnx.Rngs(7))
    unrolled.embed, unrolled.head, unrolled.norm = scanned.embed, scanned.head, scanned.norm
    stacked = nnx.state(scanned.layers)
    for number, layer in enumerate(unrolled.layers):
        nnx.update(layer, jax.tree.map(lambda leaf, n=number: leaf[n], stacked))
    np.testing.assert_allclose(scanned(tokens()), unrolled(tokens()), rtol=1e-5, atol=1e-5)


def test_grouped_heads_share_their_keys():
    grouped = Decoder(ModelConfig.model_validate(TINY | {"kv_heads": 2, "layers": 1}), nnx.Rngs(0))
    full = Decoder(ModelConfig.model_validate(TINY | {"layers": 1}), nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(grouped))
    for name in ("wk", "wv"):
        state["layers"]["attention"][name] = jnp.repeat(state["layers"]["attention"][name], 2, axis=2)
    nnx.update(full, state)
    np.testing.assert_allclose(grouped(tokens()), full(tokens()), rtol=1e-5, atol=1e-5)


def test_one_expert_with_capacity_for_all_is_the_mlp():
    dense = Decoder(ModelConfig.model_validate(TINY | {"layers": 1}), nnx.Rngs(0))
    single = Decoder(
        ModelConfig.model_validate(TINY | {"layers": 1, "experts": 1, "experts_per_token": 1}), nnx.Rngs(0)
    )
    state = nnx.to_pure_dict(nnx.state(dense))
    mlp = state["layers"]["mlp"]
    state["layers"]["mlp"] = {k: w[:, None] for k, w in mlp.items()} | {"router": jnp.ones((1, 32, 1))}
    nnx.update(single, state)
    np.testing.assert_allclose(single(tokens()), dense(tokens()), rtol=1e-5, atol=1e-5)


def test_tokens_beyond_an_experts_capacity_skip_it():
    config = ModelConfig.model_validate(
        TINY | {"layers": 1, "scan": False, "experts": 2, "experts_per_token": 1, "capacity_factor": 0.5}
    )
    block = Decoder(config, nnx.Rngs(0)).layers[0].mlp
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (32,)), (1, 16, 32))  # all choose the same expert
    passed = np.asarray(jnp.all(block(x) == 0, axis=-1))[0]
    np.testing.assert_array_equal(passed, np.arange(16) >= 4)


def test_rotary_products_depend_on_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    rows = jnp.broadcast_to(query, (1, 12, 1, 8)), jnp.broadcast_to(key, (1, 12, 1, 8))
    turned = [rotary(row, 10_000.0)[0, :, 0] for row in rows]
    products = turned[0] @ turned[1].T
    np.testing.assert_allclose(products[:-3, :-3], products[3:, 3:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(turned[0], axis=-1), jnp.linalg.norm(query), rtol=1e-5)


def test_training_starts_at_chance_and_learns_one_batch():
    steps = make_steps(ModelConfig.model_validate(TINY), OptimizerConfig(learning_rate=1e-2, warmup=2), 40)
    batch = {"inputs": tokens(4)[:, :-1], "targets": tokens(4)[:, 1:]}
    state = jax.jit(steps.init)(jax.random.key(0))
    train = jax.jit(steps.train, donate_argnums=0)
    before = float(jax.jit(steps.evaluate)(state["params"], batch)["loss"])
    assert abs(before - math.log(256)) < 0.7
    for _ in range(40):
        state, metrics = train(state, batch)
    assert float(metrics["loss"]) < 0.2 * before
    assert int(state["step"]) == 40


def test_norms_are_not_decayed():
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=1.0)
    with_decay, without = (
        make_steps(ModelConfig.model_validate(TINY), c, 10)
        for c in (config, config.model_copy(update={"weight_decay": 0}))
    )
    state = with_decay.init(jax.random.key(0))
    batch = {"inputs": tokens(), "targets": tokens()}
    ours, theirs = (jax.jit(steps.train)(state, batch)[0]["params"] for steps in (with_decay, without))
    np.testing.assert_array_equal(ours["norm"]["scale"], theirs["norm"]["scale"])
    np.testing.assert_array_equal(ours["layers"]["mlp_norm"]["scale"], theirs["layers"]["mlp_norm"]["scale"])
    assert bool(jnp.any(ours["layers"]["mlp"]["up"] != theirs["layers"]["mlp"]["up"]))


def test_the_learning_rate_warms_up_and_decays():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup=10, final=0.1), 100)
    assert float(rate(0)) == 0.0
    assert float(rate(10)) == 1.0
    np.testing.assert_allclose(rate(100), 0.1, rtol=1e-5)
    assert float(schedule(OptimizerConfig(learning_rate=1.0), 100)(0)) == 1.0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3}, "heads: d_model 32 is not a multiple of 3 heads"),
        ({"kv_heads": 3}, "4 query heads are not a multiple of 3 key-value heads"),
        ({"head": 4}, "head: unknown key; did you mean 'heads'"),
        ({"experts": 1}, "cannot choose 2 of 1 experts"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.model_validate(TINY | sizes)
