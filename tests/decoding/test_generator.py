"""The loop around a step that has a cache: its two plans, what it keeps where, and when it ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import ArgumentError

WIDTH, STATE, VOCAB = 16, 4, 32
MESH = {"data": 2, "model": 4}


def params() -> dict[str, jax.Array]:
    shapes = {"embed": (VOCAB, WIDTH), "keep": (WIDTH, STATE), "into": (WIDTH, STATE), "out": (WIDTH, STATE),
              "head": (WIDTH, VOCAB)}  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def mamba_like(params: Any, cache: Any, tokens: Any, position: Any) -> tuple[jax.Array, Any]:
    """A state of a fixed size for each channel, which forgets as the token says; and a convolution over two tokens."""

    def read(state: Any, token: Any) -> tuple[Any, Any]:
        new = params["embed"][token]
        x = jax.nn.silu(new + 0.5 * state["last"])
        kept = jax.nn.sigmoid(x @ params["keep"])[:, None]
        inner = state["state"] * kept + x[:, :, None] * (x @ params["into"])[:, None]
        return {"state": inner, "last": new}, jnp.einsum("bds,ds->bd", inner, params["out"])

    cache, found = jax.lax.scan(read, cache, tokens.T)
    return found[-1] @ params["head"], cache


def new_cache(params: Any, rows: int, length: int) -> Any:
    return {"state": jnp.zeros((rows, WIDTH, STATE)), "last": jnp.zeros((rows, WIDTH))}


def on_one_device(count: int, prompt: np.ndarray) -> np.ndarray:
    """The best tokens, all tokens read anew for each."""
    tokens, run = prompt, jax.jit(lambda tokens: mamba_like(params(), new_cache(None, len(prompt), 0), tokens, 0)[0])
    size = prompt.shape[1]
    state = new_cache(None, len(prompt), 0)
    logits, state = mamba_like(params(), state, jnp.asarray(prompt), 0)
    one = jax.jit(lambda state, token: mamba_like(params(), state, token, 0))
    for _ in range(count):
        token = np.asarray(logits).argmax(-1)[:, None].astype(np.int32)
        tokens = np.concatenate([tokens, token], 1)
        logits, state = one(state, token)
    np.testing.assert_allclose(run(tokens), logits, rtol=1e-4, atol=1e-4)
    return tokens[:, size:]


PROMPT = np.random.default_rng(0).integers(0, VOCAB, (4, 3)).astype(np.int32)


def test_a_state_of_a_fixed_size() -> None:
    generator = autoshard.generate(mamba_like, new_cache, mesh=MESH)
    want = on_one_device(64, PROMPT)
    assert min(len(np.unique(row)) for row in want) >= 6
    np.testing.assert_array_equal(generator(params(), PROMPT, 64), want)
    prepared = generator.prepare(params(), PROMPT, 64)
    assert prepared is generator.prepare(params(), PROMPT, 64)
    together = prepared.together
    for plan in (prepared.prefill_plan, prepared.decode_plan):
        assert plan.in_specs[:2] == together.in_specs[:2]
        assert plan.out_specs[0] == together.in_specs[1]
    assert prepared.prefill_plan.out_specs == prepared.decode_plan.in_specs[1:4]


def counting(params: Any, cache: Any, tokens: Any, position: Any) -> tuple[jax.Array, Any]:
    """The token after t is t + 1."""
    return jax.nn.one_hot(tokens[:, -1] + 1, VOCAB) * params, cache + tokens.shape[1]


def no_tokens(params: Any, rows: int, length: int) -> Any:
    return jnp.zeros((rows,), jnp.int32)


def test_a_row_ends_where_its_stop_is() -> None:
    generator = autoshard.generate(counting, no_tokens, mesh={"data": 8}, strategy="dp")
    prompt = np.arange(8)[:, None]
    made = np.asarray(generator(jnp.float32(1), prompt, 5, stop=4))
    want = np.arange(1, 6) + prompt
    np.testing.assert_array_equal(made, np.where(np.cumsum(want == 4, 1) > 0, 4, want))
    assert len(list(generator.stream(jnp.float32(1), np.full((8, 1), 2), 5, stop=4))) == 2
    np.testing.assert_array_equal(generator(jnp.float32(1), np.full((8, 1), 2), 5, stop=4), [[3, 4, 4, 4, 4]] * 8)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def flat(params: Any, cache: Any, tokens: Any, position: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros((tokens.shape[0], VOCAB)) * params, cache

    options: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "strategy": "dp"}
    made = [
        np.asarray(autoshard.generate(flat, no_tokens, mesh={"data": n}, **options)(jnp.float32(1), PROMPT, 6, seed=s))
        for n, s in ((4, 1), (1, 1), (4, 2))
    ]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).any()
    assert len(np.unique(made[0])) > 8  # each row and each position has a draw of its own


def test_parameters_stay_where_training_has_them_where_that_is_as_good() -> None:
    def train(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(mamba_like(params, new_cache(None, 4, 0), x, 0)[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    trained = autoshard.jit(train, mesh=MESH, strategy="replicated").plan(params(), PROMPT)
    prepared = autoshard.generate(mamba_like, new_cache, like=trained).prepare(params(), PROMPT, 4)
    assert prepared.kept == (prepared.decode_plan.in_specs[0] == trained.in_specs[0])
    assert prepared.decode_plan.mesh == trained.mesh
    free = autoshard.generate(mamba_like, new_cache, mesh=MESH).prepare(params(), PROMPT, 4)
    assert not free.kept
    assert prepared.together.cost.seconds <= 1.02 * free.together.cost.seconds


@pytest.mark.parametrize(
    ("prompt", "count", "why"),
    [
        (np.zeros(3, int), 4, r"the prompt is int64\[3\]|the prompt is int32\[3\]"),
        (np.zeros((2, 0), int), 4, r"\[2, 0\], and integers \[rows, tokens\] of at least one row and token are needed"),
        (np.zeros((2, 3)), 4, "the prompt is float"),
        (PROMPT, 0, "0 tokens are asked for: ask for 1 or more"),
    ],
)
def test_what_cannot_be_gone_on_with(prompt: Any, count: int, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        autoshard.generate(counting, no_tokens, mesh={"data": 8})(jnp.float32(1), prompt, count)
