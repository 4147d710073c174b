"""Steps whose state is stored with padding: an eighth of it on each of eight devices, and the numbers of one device."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint
from autoshard.errors import ArgumentError, MemoryBudgetError, PlacementWarning, PlanError
from tests.two_processes import run

VOCABULARY, WIDTH, HEADS, LAYERS = 50_257, 12, 6, 2
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (8, 9)).astype("i4")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def decoder(key: Any) -> Any:
    """Parameters, optimizer state and step number of a decoder of which no size is a multiple of eight."""

    def normal(n: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.fold_in(key, n), shape) * 0.3

    layers = {
        "qkv": normal(0, LAYERS, WIDTH, HEADS, 4),
        "out": normal(1, LAYERS, HEADS, 4, WIDTH),
        "up": normal(2, LAYERS, WIDTH, 7),
        "odd": normal(3, LAYERS, 7, 7),
        "down": normal(4, LAYERS, 7, WIDTH),
    }
    params = {"embedding": normal(5, VOCABULARY, WIDTH), "layers": layers, "scale": jnp.ones(7)}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": 0}


def decoder_loss(params: Any, tokens: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        q = jnp.einsum("btd,dhk->bthk", x, w["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, q))
        x = x + jnp.einsum("bhts,bshk,hkd->btd", scores, q, w["out"])
        return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["odd"] * params["scale"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], params["layers"])
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_decoder(state: Any, tokens: Any) -> Any:
    loss, grads = jax.value_and_grad(decoder_loss)(state["params"], tokens)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss


@pytest.fixture(scope="module")
def expected() -> Any:
    """The state of the decoder before and after three steps on one device, and the losses."""
    before = state = jax.device_get(jax.jit(decoder)(jax.random.key(0)))
    step, losses = jax.jit(train_decoder), []
    for _ in range(3):
        state, loss = step(state, TOKENS)
        losses.append(loss)
    return before, state, losses


def loss_of(params: Any, x: Any) -> Any:
    return ((jnp.tanh(x @ params["w"] + params["b"]) @ params["table"].T) ** 2).mean()


def train(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    return {"params": jax.tree.map(lambda p, m: p - m, state["params"], mu), "mu": mu}, loss


def small() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 7), "b": (7,), "table": (101, 7)}
    params = {k: rng.normal(size=s).astype("f4") for k, s in shapes.items()}
    return {"params": params, "mu": jax.tree.map(np.zeros_like, params)}


X = np.random.default_rng(1).normal(size=(8, 6)).astype("f4")


def planned(mesh: Any, fun: Any = train, **options: Any) -> Any:
    return autoshard.jit(fun, mesh=mesh, donate_argnums=0, pad_state=True, **{"strategy": "fsdp", **options})


def stored(x: Any) -> Any:
    return x.stored if isinstance(x, autoshard.PaddedArray) else x


def share(state: Any) -> float:
    """The largest part of ``state`` that a device holds."""
    leaves = jax.tree.leaves(state)
    held = [sum(stored(x).addressable_shards[d].data.nbytes for x in leaves) for d in range(8)]
    return max(held) / sum(x.nbytes for x in leaves)


def close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == np.shape(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=2e-6)


def equal(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}], ids=str)
def test_an_eighth_of_the_state_on_each_device_and_the_numbers_of_one(mesh: Any, expected: Any) -> None:
    first, last, losses = expected
    step = planned(mesh, train_decoder)
    plan = step.plan(first, TOKENS)
    state = plan.put(first, TOKENS)[0]
    assert share(state) < 0.126
    for loss in losses:
        before = state
        state, found = step(before, TOKENS)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    close(state, last)
    assert share(state) < 0.126
    embedding = state["params"]["embedding"]
    assert embedding.shape == (VOCABULARY, WIDTH)
    assert not np.asarray(embedding.stored)[VOCABULARY:].any()
    assert "50,257 stored as 50,2" in plan.explain()
    gathers = [r for r in autoshard.audit(step.executable(state, TOKENS).compiled, plan).rows if r.kind == "all-gather"]
    assert {r.verdict for r in gathers} <= {"same", "explained"}
    assert max(c.bytes for r in gathers for c in r.emitted) < embedding.nbytes / 8


def test_without_padding_it_stays_whole() -> None:
    step = autoshard.jit(train, mesh={"data": 2, "model": 4}, donate_argnums=0, strategy="fsdp")
    state, _ = step(small(), X)
    assert share(state) > 0.9
    assert not any(isinstance(x, autoshard.PaddedArray) for x in jax.tree.leaves(state))


def test_the_vocabulary_is_split_and_its_logits_are_not_gathered() -> None:
    step = planned({"model": 8}, train_decoder, strategy="tp")
    plan = step.plan(jax.eval_shape(decoder, jax.random.key(0)), TOKENS)
    logits = 8 * 8 * VOCABULARY * 4
    assert plan.in_specs[0]["params"]["embedding"] == P("model")
    assert max(c.bytes for c in plan.cost.collectives) < logits / 8


def test_it_is_made_in_its_shards_and_its_buffers_are_reused() -> None:
    step = planned({"data": 8})
    plan = step.plan(small(), X)
    state = plan.init(lambda: jax.tree.map(jnp.asarray, small()))
    equal(state, small())
    assert share(state) < 0.14

    def addresses(state: Any) -> Any:
        return [s.data.unsafe_buffer_pointer() for s in state["params"]["table"].stored.addressable_shards]

    before = addresses(state)
    state, _ = step(state, X)
    assert addresses(state) == before


def test_a_checkpoint_has_the_true_shapes_and_is_restored_on_another_mesh(tmp_path) -> None:
    one, other = planned({"data": 8}), planned({"a": 2, "b": 4})
    plans = [s.plan(small(), X) for s in (one, other)]
    state, _ = one(small(), X)
    checkpoint.save(tmp_path, 1, state, plan=plans[0], wait=True)
    for restored in (
        checkpoint.restore(tmp_path, plan=plans[1]),
        checkpoint.restore(tmp_path, plan=plans[0]),
        checkpoint.restore(tmp_path, like=state),
    ):
        equal(restored, state)
        assert isinstance(restored["params"]["b"], autoshard.PaddedArray)
        assert not np.asarray(restored["params"]["table"].stored)[101:].any()
        assert share(restored) < 0.14
    plain = checkpoint.restore(tmp_path)
    assert plain["params/table"].shape == (101, 7)
    unpadded = autoshard.jit(train, mesh={"data": 2}, strategy="fsdp").plan(small(), X)
    back = checkpoint.restore(tmp_path, plan=unpadded)
    equal(back, state)
    checkpoint.save(tmp_path, 2, back, plan=unpadded, wait=True)
    equal(checkpoint.restore(tmp_path, 2, plan=plans[1]), state)


def test_a_plan_saved_and_given_again_stores_the_same(tmp_path) -> None:
    step = planned({"a": 2, "b": 4})
    plan = step.plan(small(), X)
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.Plan.load(tmp_path / "plan.json")
    assert loaded == plan == copy.deepcopy(plan)
    again = autoshard.jit(train, strategy=loaded, donate_argnums=0)
    equal(again(small(), X), step(small(), X))
    written = plan.to_json()
    place = next(p for p in written["inputs"] if p["stored"])
    place["stored"] = [n - 1 for n in place["shape"]]
    with pytest.raises(PlanError, match="which it is stored as"):
        autoshard.Plan.from_json(written)


def test_evaluation_takes_the_state_as_training_stores_it() -> None:
    step = planned({"a": 2, "b": 4})
    state, _ = step(small(), X)
    evaluate = autoshard.jit(loss_of, like=step)
    plans = evaluate.plan(state["params"], X), step.plan(state, X)
    places = [[p.stored for p in plan.inputs if p.path.partition("params")[1]] for plan in plans]
    assert places[0] == places[1] == [(8,), (104, 7), (6, 8)]
    expected = jax.jit(loss_of)(jax.device_get(state["params"]), X)
    np.testing.assert_allclose(evaluate(state["params"], X), expected, rtol=1e-6)
    grads = jax.grad(evaluate)(state["params"], X)
    close(grads, jax.grad(loss_of)(jax.device_get(state["params"]), X))


def test_within_another_function_and_lowered_it_takes_and_returns_true_shapes() -> None:
    step = planned({"data": 2, "model": 4})
    state, _ = step(small(), X)
    expected = jax.jit(train)(jax.device_get(state), X)
    close(jax.jit(lambda s: step(s, X))(state), expected)
    lowered = step.lower(state, X)
    assert lowered.out_info[0]["params"]["table"].shape == (101, 7)
    assert {i.shape for i in jax.tree.leaves(lowered.args_info)} == {(7,), (101, 7), (6, 7), (8, 6)}
    close(lowered.compile()(copy.deepcopy(state), X), expected)
    assert step.trace(state, X).in_avals[0][0]["params"]["table"].shape == (101, 7)
    assert autoshard.verify(step, state, X, passes=True).results
    with pytest.raises(PlanError, match="pad_state"):
        jax.export.export(step)(state, X)


def test_what_is_given_in_another_form_is_padded_and_named_once() -> None:
    step = planned({"data": 8})
    plan = step.plan(small(), X)
    expected = jax.jit(train)(small(), X)
    close(step(small(), X), expected)
    on_mesh = jax.device_put(small(), plan.in_shardings[0])
    with pytest.warns(PlacementWarning, match=r"\['b'\] is on .*, the plan has .* of \[8\], with padding"):
        close(step(on_mesh, X), expected)
    other = planned({"a": 2, "b": 4}).plan(small(), X).put(small(), X)[0]
    close(planned({"data": 8})(other, X), expected)  # the same shards under other names
    other = planned({"data": 2}).plan(small(), X).put(small(), X)[0]
    with pytest.warns(PlacementWarning, match="'data': 2"):
        close(planned({"data": 8})(other, X), expected)
    with pytest.raises(ArgumentError, match=r"\['b'\] of train is float32\[7\], it was given \[8\]"):
        plan.put(jax.tree.map(stored, plan.put(small(), X)[0]), X)


def test_modules() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(7, 7, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.linear(x))

    def step(model: Model, optimizer: nnx.Optimizer, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    models, losses = [Model(), Model()], []
    for model, call in zip(
        models, (nnx.jit(step), autoshard.jit(step, mesh={"x": 8}, strategy="fsdp", pad_state=True)), strict=True
    ):
        optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
        losses.append([float(call(model, optimizer, jnp.ones((8, 7)))) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    kernel = models[1].linear.kernel.get_raw_value()
    assert isinstance(kernel, autoshard.PaddedArray)
    np.testing.assert_allclose(kernel, models[0].linear.kernel.get_raw_value(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(models[1](np.ones((2, 7))), models[0](np.ones((2, 7))), rtol=1e-5)


def test_it_is_a_truth_value() -> None:
    with pytest.raises(ArgumentError, match="pad_state='yes'"):
        autoshard.jit(train, pad_state="yes")


def in_two_processes(folder: str) -> dict[str, Any]:
    """What one of two processes, of two devices each, finds."""
    step = planned({"data": 2, "model": 2})
    plan = step.plan(small(), X)
    whole = plan.put(small(), X)
    rows = plan.local_rows("state['params']['table']")
    local = jax.tree.map_with_path(lambda path, x: x[plan.local_rows(f"state{jax.tree_util.keystr(path)}")], small())
    own = plan.put(local, X[plan.local_rows("x")], local=True)
    same = all(
        np.array_equal(a.stored.addressable_data(i), b.stored.addressable_data(i))
        for a, b in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(own[0]), strict=True)
        for i in range(2)
    )
    state, loss = step(*own)
    other = planned({"a": 4})
    checkpoint.save(folder, 1, state, plan=plan, wait=True)
    restored = checkpoint.restore(folder, plan=other.plan(small(), X))
    read = jax.jit(lambda s: s, out_shardings=jax.sharding.NamedSharding(plan.jax_mesh, P()))
    table = np.asarray(read(state["params"])["table"])
    again, _ = step(plan.init(lambda: jax.tree.map(jnp.asarray, small())), X)
    return {
        "rows": rows.tolist(),
        "same": same,
        "loss": float(loss),
        "table": table.tolist(),
        "b": np.asarray(read(again["params"])["b"]).tolist(),
        "restored": [x.stored.shape for x in jax.tree.leaves(restored["params"])],
        "next": float(other(restored, X)[1]),
        "verified": len(autoshard.verify(step, step.plan(small(), X).put(small(), X)[0], X).results),
    }


def test_over_several_processes(tmp_path) -> None:
    found = run("tests.runtime.test_pad_state:in_two_processes", str(tmp_path))
    ((after, loss),) = [jax.jit(train)(small(), X)]
    for each in found:
        assert each["same"]
        assert each["verified"] == 7
        np.testing.assert_allclose(each["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(each["table"], after["params"]["table"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(each["b"], after["params"]["b"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(each["next"], jax.jit(train)(after, X)[1], rtol=1e-5)
        assert each["restored"] == [[8], [104, 7], [6, 8]]
    assert sorted({n for each in found for n in each["rows"]}) == list(range(101))


def test_where_memory_is_short_the_error_proposes_it() -> None:
    def step(state: Any) -> Any:
        return jax.tree.map(lambda x: x * 2, state)

    options: Any = {"mesh": {"data": 8}, "donate_argnums": 0, "memory_budget": "20MiB"}
    state = {"v": jax.ShapeDtypeStruct((7,), "f4"), "w": jax.ShapeDtypeStruct((4999, 3331), "f4")}
    with pytest.raises(MemoryBudgetError, match=r"with pad_state=True, .* would do"):
        autoshard.jit(step, **options).plan(state)
    assert autoshard.jit(step, **options, pad_state=True).plan(state).memory.peak < 20 * 2**20
