"""Exported steps: equal results here, and in a fresh process that has JAX alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, ExportError
from tests import jax_alone

pytest.importorskip("flatbuffers", reason="jax.export writes with it")

X = jnp.arange(128.0).reshape(8, 16) / 128


class Cache(NamedTuple):
    keys: Any
    length: Any


def loss_of(params: Any, x: Any) -> Any:
    return ((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2).mean()


def train(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt = optax.adam(1e-2).update(grads, state["opt"], state["params"])
    key, noise = jax.random.split(state["key"])
    scale = jax.random.uniform(noise)
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss * scale}


def decode(params: Any, cache: Cache, token: Any) -> Any:
    row = jax.nn.one_hot(token, 16) @ params["w"]
    keys = jax.lax.dynamic_update_slice(cache.keys, row[:, None], (0, cache.length, 0))
    scores = jax.nn.softmax(jnp.where(jnp.arange(12) <= cache.length, (keys * row[:, None]).sum(-1), -1e9))
    return Cache(keys, cache.length + 1), ((scores[..., None] * keys).sum(1) @ params["v"]).argmax(-1)


def state() -> Any:
    params = {"w": jax.random.normal(jax.random.key(0), (16, 32)), "v": jax.random.normal(jax.random.key(1), (32, 16))}
    return {"params": params, "opt": optax.adam(1e-2).init(params), "key": jax.random.key_data(jax.random.key(2))}


def cache() -> Cache:
    return Cache(jnp.zeros((8, 12, 32)), jnp.int32(0))


STEPS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "train": (train, (state(), X), {"donate_argnums": 0, "strategy": "fsdp_tp"}),
    "eval": (loss_of, (state()["params"], X), {"strategy": "tp"}),
    "decode": (decode, (state()["params"], cache(), jnp.arange(8) % 16), {"donate_argnums": 1}),
}


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@functools.cache
def made(name: str) -> tuple[Any, tuple[Any, ...], bytes]:
    """The step, its arguments, and the artifact: made once."""
    fun, args, options = STEPS[name]
    step = autoshard.jit(fun, mesh={"data": 4, "model": 2}, **options)
    return step, args, step.export(*args)


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_in_a_process_that_has_jax_alone(tmp_path: Path) -> None:
    steps = {name: made(name) for name in STEPS}
    found = jax_alone.run(tmp_path, {name: (content, args) for name, (_, args, content) in steps.items()})
    for name, (step, args, _) in steps.items():
        assert_same(found[name], step(*copied(args)))


@pytest.mark.parametrize("name", STEPS)
def test_loaded_here(name: str) -> None:
    step, args, content = made(name)
    loaded = autoshard.load_exported(content)
    assert loaded.plan == step.plan(*args)
    assert (loaded.name, repr(loaded)) == (step.__name__, f"<ExportedStep of {step.__name__}, on {loaded.plan.mesh}>")
    found, want = loaded(*copied(args)), step(*copied(args))
    assert_same(found, want)
    shardings = [[x.sharding for x in jax.tree.leaves(tree)] for tree in (found, want)]
    assert all(a.is_equivalent_to(b, x.ndim) for a, b, x in zip(*shardings, jax.tree.leaves(want), strict=True))


def test_what_comes_back_goes_in_again_and_is_donated() -> None:
    """A loop of decoding: the cache comes back as a stand-in for its class, with the same paths."""
    step, (params, _, token), content = made("decode")
    loaded = autoshard.load_exported(content)
    ours: Any = cache(), token
    theirs: Any = cache(), token
    for _ in range(4):
        theirs, before = loaded(params, *theirs), theirs
        ours = step(params, *ours)
        assert_same(theirs, ours)
    assert before[0].keys.is_deleted()
    assert int(theirs[0].length) == 4


def test_static_and_named_arguments() -> None:
    def scaled(w: Any, batch: Any, n: int) -> Any:
        return w * n, batch["x"].sum()

    step = autoshard.jit(scaled, mesh={"data": 8}, static_argnames="n", in_shardings=(P("data"), None))
    loaded = autoshard.load_exported(step.export(X, n=3, batch={"x": X}))
    assert_same(loaded(X, batch={"x": X}), step(X, {"x": X}, 3))


def test_a_module_is_exported_as_its_state() -> None:
    def update(model: nnx.Linear, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    step = autoshard.jit(update, mesh={"data": 8})
    loaded = autoshard.load_exported(step.export(model, X))
    found = loaded(nnx.state(model), X)
    loss = step(model, X)
    assert_same(jax.tree.leaves(found), [*jax.tree.leaves(nnx.state(model)), loss])


def test_other_arguments_are_named() -> None:
    _, (params, x), content = made("eval")
    loaded = autoshard.load_exported(content)
    for args, why in (
        ((params, x[:4]), r"loss_of: \[0\]\[1\] of \(args, kwargs\) is float32\[4, 16\], and float32\[8, 16\] was"),
        ((params, x.astype(jnp.bfloat16)), "is bfloat16"),
        ((params, "x"), r"\[0\]\[1\] of \(args, kwargs\) is a str"),
        (({"w": params["w"]}, x), r"for 3 arrays and is given 2: of \(args, kwargs\) \[0\]\[0\]\['v'\] is missing"),
        (({**params, "u": x}, x), r"\[0\]\[0\]\['u'\] is new"),
    ):
        with pytest.raises(ArgumentError, match=why):
            loaded(*args)


def test_damage_is_found_before_anything_is_read() -> None:
    content = made("eval")[2]
    draw = np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(content)
        changed[int(draw.integers(len(changed)))] ^= int(draw.integers(1, 256))
        with pytest.raises(ExportError, match="checksum differs|are not an exported step"):
            autoshard.load_exported(changed)
    for cut in (0, 7, 20, len(content) - 1):
        with pytest.raises(ExportError, match="checksum differs|are not an exported step"):
            autoshard.load_exported(content[:cut])


def test_a_batch_and_a_length_of_any_size() -> None:
    def attend(params: Any, x: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ params["w"], x @ params["w"]), -1)
        return scores @ x @ params["v"], x.shape[1]

    params = {"w": state()["params"]["w"], "v": jnp.eye(16)}
    step = autoshard.jit(attend, mesh={"data": 4, "model": 2}, in_shardings=(None, P("data")))
    given = jnp.ones((4, 6, 16))
    loaded = autoshard.load_exported(step.export(params, given, symbolic_shapes=(None, "4*b, s, _")))
    assert str(loaded.exported.in_avals[-1].shape) == "(4*b, s, 16)"
    for rows, length in ((4, 6), (8, 3), (12, 1)):
        x = jax.random.normal(jax.random.key(rows), (rows, length, 16))
        found, size = loaded(params, x)
        np.testing.assert_allclose(found, attend(params, x)[0], rtol=1e-4, atol=1e-5)
        assert size == length
        assert found.sharding.spec[0] == "data"
    with pytest.raises(ArgumentError, match=r"attend: .*partitioned 4 times, but the dimension size is 6"):
        loaded(params, jnp.ones((6, 3, 16)))
    with pytest.raises(ArgumentError, match=r"is float32\[4, 3, 8\], and float32\[4\*b, s, 16\] was exported"):
        loaded(params, jnp.ones((4, 3, 8)))


def test_what_cannot_be_exported_for_every_size() -> None:
    step = autoshard.jit(lambda x: x.reshape(2, -1), mesh={"data": 8}, in_shardings=P("data"))
    given = jnp.ones((8, 16))
    for shapes, why in (
        (("b, _",), r"x is split 8 ways over data, and b may not divide so: write a multiple, as 8\*b, or pin"),
        (("12*b, _",), r"and 12\*b may not divide so: write a multiple, as 8\*\(12\*b\)"),
        (("8*b, 3",), "symbolic_shapes="),
        (("8*b, _, _",), "symbolic_shapes="),
    ):
        with pytest.raises(ExportError, match=why):
            step.export(given, symbolic_shapes=shapes)
    branching = autoshard.jit(lambda x: x * 2 if x.shape[0] > 8 else x, mesh={"data": 8}, strategy="dp")
    with pytest.raises(ExportError, match="cannot be exported for every size: .*once for each size"):
        branching.export(given, symbolic_shapes=("8*b, _",))
