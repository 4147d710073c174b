"""Mixed precision: masters, scales and skipped steps, the same under every strategy and in micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

import autoshard
from autoshard.errors import ArgumentError
from autoshard.train import Precision
from autoshard.train.config import named_config
from autoshard.train.models.own_model import cross_entropy
from autoshard.train.phase import plan_phase
from autoshard.train.work import work_of

drawn = np.random.default_rng(0)
X, Y = (drawn.normal(size=shape).astype(np.float32) for shape in ((16, 8), (16, 4)))
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def loss_of(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"].astype(params["first"].dtype) @ params["first"])
    return jnp.mean((hidden @ params["second"] - batch["y"]).astype(jnp.float32) ** 2)


def params() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {"first": jax.random.normal(first, (8, 16)), "second": jax.random.normal(second, (16, 4))}


def make_step(precision: Precision, optimizer: Any = ADAM) -> Any:
    def step(state: Any, batch: Any) -> Any:
        loss, gradients = precision.value_and_grad(loss_of)(state, batch)
        state, metrics = precision.update(optimizer, state, gradients)
        return state, {"loss": loss, **metrics}

    return step


def taken(step: Any, state: Any, bad: int = 2) -> tuple[Any, list[dict[str, float]]]:
    """Five steps, at one of which the gradients are not finite."""
    seen: list[dict[str, float]] = []
    for n in range(5):
        batch = {"x": X, "y": Y * (np.float32(1e36) if n == bad else 1)}
        state, metrics = step(state, batch)
        seen.append({name: float(x) for name, x in metrics.items()})
    return state, seen


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [("zero1", None), ("zero2", None), ("zero3", 2), ("dp", 4), ("fsdp_tp", None), ("zero1", 2), ("zero2", 2)],
)
def test_scales_masters_and_skipped_steps_are_those_of_one_device(strategy: str, microbatches: int | None):
    precision = Precision(params="bfloat16", compute="float32", master="float32", loss_scale="dynamic")
    start = precision.init(params(), ADAM)
    wanted, losses = taken(jax.jit(make_step(precision)), start)
    given: dict[str, Any] = {"mesh": {"data": 2, "model": 2}, "strategy": strategy, "microbatches": microbatches}
    found, seen = taken(autoshard.jit(make_step(precision), **given), start)
    for one, other in zip(seen, losses, strict=True):
        for name in other:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)
    assert [each["skipped"] for each in seen] == [0, 0, 1, 0, 0]
    assert [each["loss_scale"] for each in seen] == [2.0**15] * 3 + [2.0**14] * 2
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=1e-5, atol=1e-7)
    for name, master in found["master"].items():
        rounded = master.astype(jnp.bfloat16)
        np.testing.assert_array_equal(found["params"][name], rounded)
        assert np.any(np.asarray(master) != np.asarray(rounded, np.float32))  # what is updated has more bits


def test_a_skipped_step_changes_the_scale_alone():
    precision = Precision(loss_scale="dynamic")
    start = precision.init(params(), ADAM)
    after, _ = make_step(precision)(start, {"x": X, "y": Y * np.float32(1e36)})
    assert float(after.pop("loss_scale")["scale"]) == 2.0**14
    start.pop("loss_scale")
    jax.tree.map(np.testing.assert_array_equal, after, start)


@pytest.mark.parametrize("master", [None, "float32"])
@pytest.mark.parametrize("scale", [2.0**16, "dynamic"])
def test_a_scale_may_be_more_than_float16_holds(scale: Any, master: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoshard.train.precision.FIRST_SCALE", 2.0**16)
    precision = Precision(params="float16", master=master, loss_scale=scale)
    state = precision.init({"w": jnp.ones(4)}, optax.sgd(1.0))
    factors = jnp.float16([2.0**-19, 2.0**-10, -0.5, 64])

    def loss_of(params: Any) -> Any:
        return ((params["w"] * factors).astype(jnp.float32) / 16).sum()

    loss, gradients = precision.value_and_grad(loss_of)(state)
    assert float(loss) == float(factors.astype(np.float32).sum() / 16)
    wanted = np.array([*factors[:3] / 16, np.inf], master or "float16")  # the last does not fit while it is scaled
    np.testing.assert_array_equal(gradients["w"], wanted)
    assert gradients["w"].dtype == wanted.dtype


def test_a_scale_grows_after_so_many_finite_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoshard.train.precision.GROWS_AFTER", 2)
    precision = Precision(loss_scale="dynamic")
    _, seen = taken(jax.jit(make_step(precision)), precision.init(params(), ADAM), bad=3)
    assert [each["loss_scale"] / 2.0**15 for each in seen] == [1, 1, 2, 2, 1]


@pytest.mark.parametrize("scale", [None, 1024.0, "dynamic"])
def test_a_scale_changes_no_gradient(scale: Any):
    start = params()
    wanted = jax.grad(loss_of)(start, {"x": X, "y": Y})
    precision = Precision(loss_scale=scale)
    loss, found = precision.value_and_grad(loss_of)(precision.init(start, ADAM), {"x": X, "y": Y})
    np.testing.assert_allclose(loss, loss_of(start, {"x": X, "y": Y}), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_small_updates_add_up_in_the_master_and_are_lost_without_one():
    rate = optax.sgd(1.0)

    def pulled(p: Any) -> Any:  # the gradient is 2^-12, and bfloat16 has 8 bits
        return p["w"].sum() * 2.0**-12

    for master, wanted in (("float32", 1 - 64 * 2.0**-12), (None, 1.0)):
        precision = Precision(params="bfloat16", master=master)
        state = precision.init({"w": jnp.ones(4)}, rate)
        for _ in range(64):
            _, gradients = precision.value_and_grad(pulled)(state)
            state, _ = precision.update(rate, state, gradients)
        assert state["params"]["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(state["params"]["w"], np.full(4, wanted, jnp.bfloat16))


def test_what_is_computed_has_the_dtype_that_is_asked_for():
    seen: list[Any] = []

    def look(p: Any) -> Any:
        seen.append(p["w"].dtype)
        return (p["w"] * 2).sum()

    precision = Precision(params="float32", compute="bfloat16")
    _, gradients = precision.value_and_grad(look)(precision.init({"w": jnp.ones(4)}, optax.sgd(1.0)))
    assert (seen, gradients["w"].dtype) == ([jnp.bfloat16], jnp.float32)
    assert precision.cast({"x": jnp.ones(2), "n": jnp.arange(2)})["n"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": "int8"}, "params='int8': must be float32, bfloat16 or float16"),
        ({"master": "bfloat16"}, "has all bits of the parameters"),
        ({"loss_scale": 0}, "must be a number above 0, or 'dynamic'"),
        ({"loss_scale": "static"}, "must be a number above 0, or 'dynamic'"),
        ({"loss_scale": True}, "must be a number above 0, or 'dynamic'"),
    ],
)
def test_what_is_no_precision_is_refused(given: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        Precision(**given)


class Float8(linen.Module):
    """Two products in float8 with delayed scaling."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Dense(32, dot_general_cls=Fp8DirectDotGeneralOp)(x))
        return linen.Dense(16, dot_general_cls=Fp8DirectDotGeneralOp)(x)


def float8_rows() -> Any:
    rng = np.random.default_rng(0)
    return {"inputs": 3 * rng.normal(size=(16, 16)).astype("float32"), "targets": rng.integers(0, 16, 16, np.int32)}


def test_float8_products_are_scaled_as_flax_does_it(tmp_path: Path):
    entries = {
        "model": {"call": "tests.train.test_precision:Float8"},
        "data": {"call": "tests.train.test_precision:float8_rows"},
        "optimizer": {"call": "optax:sgd", "with": {"learning_rate": 0.1}},
        "batch": 16,
        "mesh": {"axes": {"data": 2, "model": 4}, "hardware": "cpu"},
        "strategy": "fsdp_tp",
        "steps": 3,
        "checkpoint": {"dir": str(tmp_path)},
    }
    (tmp_path / "train.yaml").write_text(json.dumps(entries))
    config = named_config(tmp_path / "train.yaml")
    work = work_of(config)
    planned, batch = plan_phase(config, config.all_phases[0], work), float8_rows()
    state = planned.plan.init(work.steps.init, jax.random.key(0))
    variables = jax.device_get({"params": state["params"], **state["rest"]})

    def apply(variables: Any, x: Any) -> Any:
        return Float8().apply(variables, x)

    alone = TrainState.create(apply_fn=apply, params=variables, tx=optax.sgd(0.1))
    for _ in range(3):
        state, metrics = planned.step(state, batch)
        loss, grads = jax.jit(jax.value_and_grad(lambda v: cross_entropy(apply(v, batch["inputs"]), batch)))(
            alone.params
        )
        alone = alone.apply_gradients(grads=grads)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    found = jax.tree.leaves_with_path({"params": state["params"], **state["rest"]})
    for (path, x), wanted in zip(found, jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-7, err_msg=jax.tree_util.keystr(path))
    scales = {jax.tree_util.keystr(path): float(x[0]) for path, x in found if "scale" in jax.tree_util.keystr(path)}
    assert len(scales) == 6
    assert all(scale != 1 for scale in scales.values())
