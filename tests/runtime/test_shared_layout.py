"""Steps that share a state: evaluation and decoding with the layout of training."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, MeshError, PlacementWarning, PlanError

MESH = {"data": 4, "model": 2}


class State(NamedTuple):
    params: Any
    mu: Any


def forward(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def train(state: State, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state.mu, grads)
    return State(jax.tree.map(lambda p, m: p - 0.1 * m, state.params, mu), mu), value


def evaluate(params: Any, batch: Any) -> Any:
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def predict(p: Any, x: Any) -> Any:
    return forward(p, x)


def values(rows: int) -> tuple[State, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(64, 128)), "w2": rng.normal(size=(128, 16))}
    params = jax.tree.map(lambda x: x.astype(np.float32) / 8, params)
    batch = {"x": rng.normal(size=(rows, 64)).astype(np.float32), "y": np.zeros((rows, 16), np.float32)}
    return State(params, jax.tree.map(np.zeros_like, params)), batch


@pytest.mark.parametrize("strategy", ["auto", "fsdp", "fsdp_tp", "tp", "zero1"])
def test_train_then_evaluate_then_predict_moves_nothing(strategy):
    state, batch = values(64)
    step = autoshard.jit(train, mesh=MESH, strategy=strategy, donate_argnums=0)
    evaluation, prediction = autoshard.jit(evaluate, like=step), autoshard.jit(predict, like=step)
    expected_state, _ = jax.jit(train)(state, batch)
    placed = step.plan(state, batch).put(state, batch)
    state, _ = step(*placed)
    specs = step.plan(state, batch).in_shardings[0].params
    for like in (evaluation.plan(state.params, batch), prediction.plan(state.params, batch["x"][:8])):
        same = jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), like.in_shardings[0], specs, state.params)
        assert all(jax.tree.leaves(same))
        assert {p.reason for p in like.inputs if p.path.startswith("p")} == {"shared"}
    for _ in range(2):  # a move would be a warning, and warnings are errors here
        found = evaluation(state.params, placed[1]), prediction(state.params, batch["x"][:8])
        expected = evaluate(expected_state.params, batch), predict(expected_state.params, batch["x"][:8])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_without_it_the_parameters_of_this_example_would_move():
    state, batch = values(64)
    step = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0)
    free = autoshard.jit(predict, mesh=MESH).plan(state.params, batch["x"][:8])
    assert free.in_specs[0] != step.plan(state, batch).in_specs[0].params


def decode(params: Any, cache: Any, token: Any) -> Any:
    """A step of a decoder with one layer: the next token of each sequence, and its keys so far."""
    keys, at = cache
    x = params["w1"][token[:, 0]]
    keys = jax.lax.dynamic_update_slice_in_dim(keys, x[:, None], at, axis=1)
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, keys))
    logits = jnp.einsum("bs,bsd->bd", weights, keys) @ params["w1"].T
    return (keys, at + 1), jnp.argmax(logits, axis=-1, keepdims=True).astype(token.dtype)


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_decode_loop_moves_nothing(strategy):
    state, batch = values(64)
    step = autoshard.jit(train, mesh=MESH, strategy=strategy, donate_argnums=0)
    params = step.plan(state, batch).put(state).params
    one = autoshard.jit(decode, like=step, donate_argnames=("cache", "token"))
    token, cache = np.arange(8, dtype=np.int32)[:, None], (np.zeros((8, 4, 128), np.float32), np.int32(0))
    expected = jax.device_put((cache, token))
    plan = one.plan(params, cache, token)
    assert {p.path: p.spec for p in plan.inputs}["token"] == plan.outputs[-1].spec
    for _ in range(4):  # a move would be a warning, and warnings are errors here
        cache, token = one(params, cache, token)
        expected = jax.jit(decode)(state.params, *expected)
        np.testing.assert_array_equal(token, expected[1])
        np.testing.assert_allclose(cache[0], expected[0][0], rtol=1e-5)


def test_a_token_that_is_fed_back_stays_though_it_is_not_donated():
    state, batch = values(64)
    step = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0)
    params = step.plan(state, batch).put(state).params
    one = autoshard.jit(decode, like=step, donate_argnames="cache")
    token, cache = np.arange(8, dtype=np.int32)[:, None], (np.zeros((8, 4, 128), np.float32), np.int32(0))
    plan = one.plan(params, cache, token)
    assert {p.path: p.spec for p in plan.inputs}["token"] == plan.outputs[-1].spec
    assert "returned" in {p.reason for p in (*plan.inputs, *plan.outputs)}
    for _ in range(3):  # a move would be a warning, and warnings are errors here
        cache, token = one(params, cache, token)


def test_a_warning_says_that_what_is_fed_back_should_be_donated():
    step = autoshard.jit(lambda token: token + 1, mesh=MESH, in_shardings=P("data"), out_shardings=P())
    token = step(np.arange(8, dtype=np.int32))
    with pytest.warns(PlacementWarning, match=r"token is on .* \(as a result is placed: donated, it keeps its spec\)"):
        step(token)


def test_a_plan_says_what_is_shared_and_keeps_it(tmp_path):
    state, batch = values(64)
    trained = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0).plan(state, batch)
    plan = autoshard.jit(evaluate, like=trained).plan(state.params, batch)
    assert plan.inputs[0].sources == ("state.params['w1'] of train",)
    assert "4 arrays have their specs in the plan given as like=: params, batch" in plan.explain()
    assert "spec of state.params['w1'] of train, as like= asks" in plan.why("params['w1']")
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    free = autoshard.jit(evaluate, like=autoshard.Plan.load(tmp_path / "plan.json")).plan(state.params, batch)
    assert free.in_specs == plan.in_specs


def test_pins_of_the_user_come_first_and_the_plan_says_that_the_steps_disagree():
    state, batch = values(64)
    trained = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0).plan(state, batch)
    pinned = ({"w1": P(None, "model"), "w2": None}, None)
    plan = autoshard.jit(evaluate, like=trained, in_shardings=pinned).plan(state.params, batch)
    assert plan.in_specs[0]["w1"] == P(None, "model")
    (text,) = [d.text for d in plan.diagnostics if "like=" in d.text]
    assert text.startswith("pinned otherwise than in train")
    assert "params['w1'] is [_, model] here and" in text
    other = autoshard.jit(lambda z: z + 1, like=trained).plan(np.ones(8, np.float32))
    assert any("no argument has the path, shape and dtype of one of train" in d.text for d in other.diagnostics)


def test_the_difference_of_two_steps_is_what_moves_between_them():
    state, batch = values(64)
    trained = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0).plan(state, batch)
    split = autoshard.jit(evaluate, mesh=MESH, in_shardings=(P(None, "model"), None)).plan(state.params, batch)
    text = split.diff(trained)
    assert "What evaluate and train both take" in text
    assert "have other specs, and move at every change of step; plan one like= the other." in text
    assert "params['w1']" in text
    assert "[_, model]" in text
    same = autoshard.jit(evaluate, like=trained).plan(state.params, batch)
    assert "4 arrays, with the same specs: nothing moves between the steps." in same.diff(trained)
    elsewhere = autoshard.jit(evaluate, mesh={"data": 8}, strategy="replicated").plan(state.params, batch)
    assert "4 of 4 arrays have other specs" in elsewhere.diff(trained)


def test_modules_of_nnx():
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 8, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            return self.b(jnp.tanh(self.a(x)))

    def learn(model: Net, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return value

    model, x = Net(), np.ones((16, 16), np.float32)
    step = autoshard.jit(learn, mesh=MESH, strategy="fsdp")
    infer = autoshard.jit(lambda model, x: model(x), like=step)
    step(model, x)
    for _ in range(2):
        np.testing.assert_allclose(infer(model, x[:4]), model(x[:4]), rtol=1e-5)
    shared = [p for p in infer.plan(model, x[:4]).inputs if p.reason == "shared"]
    assert len(shared) == 4
    assert any(p.spec.axes for p in shared)


def test_what_cannot_be_is_an_error():
    state, batch = values(8)
    step = autoshard.jit(train, mesh=MESH, donate_argnums=0)
    evaluation = autoshard.jit(evaluate, like=step)
    with pytest.raises(PlanError, match=r"train has no plan yet.*train\.plan"):
        evaluation.plan(state.params, batch)
    plan = step.plan(state, batch)
    assert evaluation.plan(state.params, batch).mesh == plan.mesh
    step.clear_cache()
    with pytest.raises(PlanError, match="train has no plan yet"):
        autoshard.jit(evaluate, like=step).plan(state.params, batch)
    with pytest.raises(MeshError, match="the plan of train given as like= is for"):
        autoshard.jit(evaluate, mesh={"data": 8}, like=plan).plan(state.params, batch)
    with pytest.raises(ArgumentError, match="like="):
        autoshard.jit(evaluate, strategy=plan, like=plan)
    with pytest.raises(ArgumentError, match="takes a plan or a decorated step, not str"):
        autoshard.jit(evaluate, like="train")
