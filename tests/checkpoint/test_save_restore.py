"""Checkpoints: every kind of leaf, every mesh, every way to break one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax import nnx, struct
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint
from autoshard.checkpoint import async_write
from autoshard.checkpoint.manifest import LOCK, Manifest
from autoshard.errors import CheckpointError
from autoshard.shared_folder import is_held
from tests.forked import Forked

MESHES = [(2, 4), (8, 1), (1, 8), (1, 1), (2, 2)]


class Moments(NamedTuple):
    mean: Any
    var: Any


@struct.dataclass
class Struct:
    w: Any
    note: str = struct.field(pytree_node=False, default="static")


@dataclass(frozen=True)
class FakePlan:
    """The attributes of a plan that a checkpoint reads."""

    in_avals: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    fingerprint: str = "f00d"

    def json_text(self) -> str:
        return json.dumps({"fingerprint": self.fingerprint})

    @property
    def in_stored(self) -> Any:
        """Without padding."""
        shardings = jax.tree.broadcast(self.in_shardings, self.in_avals)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), self.in_avals, shardings)


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def plan_for(state: Any, mesh: Mesh, *specs: P) -> FakePlan:
    """Shardings for ``state``: ``specs`` in leaf order, the last one repeated."""
    leaves, treedef = jax.tree.flatten(state)
    padded = [*specs, *[specs[-1]] * len(leaves)][: len(leaves)]
    shardings = [NamedSharding(mesh, s) for s in padded]
    avals = jax.eval_shape(lambda s: s, state)
    return FakePlan((avals,), (jax.tree.unflatten(treedef, shardings),))


def assert_equal(got: Any, want: Any) -> None:
    """Same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype, path
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array), path
        if type(b) in (bool, int, float, str):
            assert (type(a), a) == (type(b), b), path
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def small(scale: float = 1.0) -> dict[str, Any]:
    return {"w": scale * jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "b": jnp.full((8,), scale, jnp.float32)}


@pytest.mark.parametrize("shape", MESHES)
def test_a_state_saved_on_one_mesh_restores_on_another(tmp_path: Path, shape: tuple[int, ...]) -> None:
    first = plan_for(small(), mesh_of((4, 2)), P("x"), P("x", "y"))
    state = jax.device_put(small(), first.in_shardings[0])
    checkpoint.save(tmp_path, 7, state, plan=first)
    plan = plan_for(small(), mesh_of(shape), P("y"), P(("x", "y"), None))
    back, report = checkpoint.restore(tmp_path, plan=plan, report=True)
    assert (report.step, report.extra, report.fingerprint) == (7, {}, "f00d")
    assert_equal(back, small())
    assert back["w"].sharding == plan.in_shardings[0]["w"]
    rows = 8 // int(np.prod(shape))
    assert {s.data.shape for s in back["w"].addressable_shards} == {(rows, 8)}


def test_a_one_axis_mesh_and_a_sharding_prefix(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, small())
    sharding = NamedSharding(mesh_of((8,)), P("x"))
    plan = FakePlan((jax.eval_shape(small),), (sharding,))
    back = checkpoint.restore(tmp_path, plan=plan)
    assert_equal(back, small())
    assert back["b"].sharding == back["w"].sharding == sharding


def zoo() -> dict[str, Any]:
    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
    return {
        "adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params),
        "odd keys": {"a/b": jnp.ones(3), "a.b": jnp.zeros(3), "1": jnp.zeros(()), "é": jnp.ones(1)},
        "int keys": {1: jnp.ones(()), 10: jnp.zeros(())},
        "empty": ((), [], {}, None, optax.EmptyState()),
        "moments": Moments(jnp.arange(3), None),
        "struct": Struct(jnp.ones((2, 2), jnp.float16)),
        "nothing": jnp.zeros((0, 4), jnp.bfloat16),
        "zero": jnp.asarray(2.5),
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 4)),
        "no keys": jax.random.split(jax.random.key(5), 0),
        "old key": jax.random.PRNGKey(6),
        "python": (True, -(2**80), 0.1, float("-inf"), "text"),
        "numpy": (np.arange(4, dtype=np.int64), np.float64(0.3), np.zeros((0,), np.uint8), np.ones((), np.float32)),
        "flags": jnp.asarray([True, False]),
        "complex": jnp.asarray([1 + 2j]),
    }


def test_every_kind_of_leaf_is_restored_bit_for_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, zoo())
    back = checkpoint.restore(tmp_path, like=zoo())
    assert_equal(back, zoo())
    assert isinstance(back["numpy"][0], np.ndarray)
    assert type(back["python"][0]) is bool
    assert not back["zero"].committed


@pytest.mark.parametrize(
    "name",
    ["int2", "int4", "uint2", "uint4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "bfloat16"],
)
def test_narrow_dtypes(tmp_path: Path, name: str) -> None:
    state = jnp.asarray([[0, 1], [1, 0]]).astype(name)
    plan = plan_for(state, mesh_of((2,)), P("x"))
    checkpoint.save(tmp_path, 1, jax.device_put(state, plan.in_shardings[0]))
    assert_equal(checkpoint.restore(tmp_path, plan=plan), state)


@pytest.mark.parametrize("state", [{}, None, (), jnp.zeros((0,)), jnp.ones(()), 3])
def test_states_with_nothing_or_one_thing_in_them(tmp_path: Path, state: Any) -> None:
    checkpoint.save(tmp_path, 1, state)
    back = checkpoint.restore(tmp_path, plan=plan_for(state, mesh_of((2,)), P()))
    assert_equal(jax.tree.map(np.asarray, back), jax.tree.map(lambda v: np.asarray(jnp.asarray(v)), state))


def test_keys_and_empty_arrays_take_the_plans_sharding(tmp_path: Path) -> None:
    state = (jax.random.split(jax.random.key(0), 8), jnp.zeros((8, 0)))
    plan = plan_for(state, mesh_of((4, 2)), P("x"), P("y"))
    checkpoint.save(tmp_path, 1, jax.device_put(state, plan.in_shardings[0]))
    back = checkpoint.restore(tmp_path, plan=plan)
    assert_equal(back, state)
    assert tuple(a.sharding for a in back) == plan.in_shardings[0]
    assert_equal(jax.random.normal(back[0][5]), jax.random.normal(state[0][5]))


def test_an_nnx_state(tmp_path: Path) -> None:
    def make(seed: int) -> nnx.State:
        model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(seed)), nnx.Dropout(0.1, rngs=nnx.Rngs(seed)))
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    checkpoint.save(tmp_path, 1, make(0))
    assert_equal(checkpoint.restore(tmp_path, like=make(1)), make(0))


def test_python_numbers_and_0d_arrays_are_interchangeable(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"step": 5, "lr": jnp.asarray(0.25), "on": True})
    like = {"step": jax.ShapeDtypeStruct((), jnp.int32), "lr": 0.0, "on": jnp.asarray(False)}
    back = checkpoint.restore(tmp_path, like=like)
    assert back == {"step": 5, "lr": 0.25, "on": True}
    assert (type(back["lr"]), back["step"].dtype, back["on"].dtype) == (float, jnp.int32, jnp.bool_)
    with pytest.raises(CheckpointError, match=r"lr is float32\[\] in the checkpoint and int here"):
        checkpoint.restore(tmp_path, like=like | {"lr": 1})


def test_weak_scalars_stay_weak(tmp_path: Path) -> None:
    state = jnp.asarray(3)
    aval = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    checkpoint.save(tmp_path, 1, state)
    assert checkpoint.restore(tmp_path, like=aval).weak_type
    assert not checkpoint.restore(tmp_path, like=jax.ShapeDtypeStruct((), jnp.int32)).weak_type


def test_memory_kind_is_the_plans(tmp_path: Path) -> None:
    state = {"w": jnp.ones((8, 8)), "b": jnp.arange(8.0)}
    specs = {"w": P("x"), "b": P()}  # a replicated leaf is read once
    pins = {k: NamedSharding(mesh_of((8,)), spec, memory_kind="pinned_host") for k, spec in specs.items()}
    step = autoshard.jit(lambda s: {k: v * 2 for k, v in s.items()}, in_shardings=(pins,), mesh=mesh_of((8,)))
    plan = step.plan(state)
    checkpoint.save(tmp_path, 1, step(plan.put(state)), plan=plan)
    back = checkpoint.restore(tmp_path, plan=plan)
    assert {k: x.sharding for k, x in back.items()} == pins
    assert_equal(back, {k: x * 2 for k, x in state.items()})
    assert {k: x.sharding for k, x in step(back).items()} == pins


def test_without_plan_or_like_it_is_numpy_by_path(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": [jnp.ones(2, jnp.bfloat16), 3], "k": jax.random.key(1), "e": jnp.zeros((0, 2))})
    state = checkpoint.restore(tmp_path)
    assert sorted(state) == ["e", "k", "w/0", "w/1"]
    assert type(state["w/0"]) is np.ndarray
    assert state["w/0"].dtype == jnp.bfloat16
    assert state["w/1"] == 3
    assert state["e"].shape == (0, 2)
    assert state["k"].tolist() == [0, 1]


def test_donation_and_writes_right_after_save_do_not_reach_the_file(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh_of((4, 2)), P("x", "y"))
    trample = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)

    def pointers(x: jax.Array) -> list[int]:
        return [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]

    unsaved = jax.device_put(jnp.ones((1024, 1024)), sharding)
    before = pointers(unsaved)
    assert pointers(trample(unsaved)) == before, "donation overwrites the buffers in place unless a save holds them"
    for step in range(5):
        value = np.random.default_rng(step).standard_normal((1024, 1024), np.float32)
        device, host = jax.device_put(value, sharding), value.copy()
        checkpoint.save(tmp_path, step, {"device": device, "host": host})
        out = trample(device)
        host[:] = -1
        assert (np.asarray(out) == -1).all()
        back = checkpoint.restore(tmp_path, step)
        assert (back["device"] == value).all()
        assert (back["host"] == value).all()


def test_a_replicated_leaf_may_be_donated_at_once(tmp_path: Path) -> None:
    state = jnp.arange(256 * 256.0).reshape(256, 256)
    plan = plan_for(state, mesh_of((8,)), P())
    checkpoint.save(tmp_path, 1, state)
    back = checkpoint.restore(tmp_path, plan=plan)
    # On CPU the eight devices may share one host buffer, which donation must not overwrite eight times.
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(back)
    assert all((np.asarray(s.data) == np.asarray(state) + 1).all() for s in out.addressable_shards)


def test_extra_is_restored_equal_or_refused(tmp_path: Path) -> None:
    extra = {"data": {"next": 12, "seed": [1, 2]}, "loss": 0.1, "none": None, "text": "é\n"}
    checkpoint.save(tmp_path, 1, small(), extra=extra)
    assert checkpoint.restore(tmp_path, report=True)[1].extra == extra
    for bad, why in (({"x": np.ones(2)}, "not JSON"), ({"x": float("nan")}, "not JSON"), ({"x": (1, 2)}, "lists")):
        with pytest.raises(CheckpointError, match=why):
            checkpoint.save(tmp_path, 2, small(), extra=bad)
    assert checkpoint.steps(tmp_path) == (1,)


def test_keep_leaves_the_newest_and_the_one_just_written(tmp_path: Path) -> None:
    for step in (1, 5, 9, 10):
        checkpoint.save(tmp_path, step, small(step), keep=2)
    assert checkpoint.steps(tmp_path) == (9, 10)
    checkpoint.save(tmp_path, 3, small(), keep=2)
    assert checkpoint.steps(tmp_path) == (3, 10)
    assert checkpoint.latest(tmp_path) == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "3", "save.lock"]
    with pytest.raises(CheckpointError, match="keep=0"):
        checkpoint.save(tmp_path, 11, small(), keep=0)


@dataclass(frozen=True, order=True)
class Anonymous:
    """A key of a dict that prints as every other one does."""

    number: int = field(repr=False)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target = tmp_path / "new"
    for state, why in (
        ({"f": print}, r"state\['f'\] is builtin_function_or_method"),
        ({"s": jax.ShapeDtypeStruct((2,), jnp.float32)}, "has no values"),
        ({"o": np.asarray(["a"])}, "an array of <U1"),
        ({"c": 1 + 2j}, r"state\['c'\] is complex"),
        ({Anonymous(1): 1.0, Anonymous(2): 2.0}, "two leaves have the path .*: their keys print the same"),
        ({"i": 10**5000}, r"state\['i'\]: Exceeds the limit"),
        ({"k" * 5000: 1}, "the path of a leaf has 4,096 letters at most, and this 5,009"),
    ):
        with pytest.raises(CheckpointError, match=why):
            checkpoint.save(target, 1, state)
    with pytest.raises(CheckpointError, match="0 or more"):
        checkpoint.save(target, -1, small())
    assert not target.exists()


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, small(1), wait=True)
    with pytest.raises(CheckpointError, match="step 1 is already in"):
        checkpoint.save(tmp_path, 1, small(2))
    assert_equal(checkpoint.restore(tmp_path, like=small()), small(1))


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.steps(tmp_path / "absent") == ()
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="absent does not exist"):
        checkpoint.restore(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint.restore(tmp_path)


def test_an_absent_step_names_the_nearest(tmp_path: Path) -> None:
    for step in (10, 20, 300):
        checkpoint.save(tmp_path, step, small())
    with pytest.raises(CheckpointError, match=r"no step 26, the nearest is 20\..*step is 300 \(of 10, 20, 300\)"):
        checkpoint.restore(tmp_path, 26)


def test_another_model_is_named_leaf_by_leaf(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, small() | {"old": jnp.ones(1)})
    like = {"w": jnp.ones((8, 4)), "b": jnp.ones(8), "new": jnp.ones(2), "newer": jnp.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path, like=like)
    message = str(caught.value)
    assert "w is float32[8,8] in the checkpoint and float32[8,4] here" in message
    assert "1 differ in shape or dtype, 2 are only here, 1 only there" in message
    assert "only here: new, newer; only in the checkpoint: old" in message
    with pytest.raises(CheckpointError, match=r"b is float32\[8\] in the checkpoint and bfloat16\[8\] here"):
        checkpoint.restore(tmp_path, like=small() | {"b": jnp.ones(8, jnp.bfloat16), "old": jnp.ones(1)})
    assert_equal(checkpoint.restore(tmp_path, like=small() | {"old": jnp.ones(1)})["w"], small()["w"])


def test_a_sharding_that_does_not_divide_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": jnp.ones((6, 2))})
    plan = plan_for({"w": jnp.ones((6, 2))}, mesh_of((4,)), P("x"))
    with pytest.raises(CheckpointError, match=r"state\['w'\]: float32\[6,2\] cannot be sharded"):
        checkpoint.restore(tmp_path, plan=plan)
    with pytest.raises(CheckpointError, match="not both"):
        checkpoint.restore(tmp_path, plan=plan, like={})


def adam_step(state: Any, x: Any) -> Any:
    grads = jax.grad(lambda p: ((jnp.tanh(x @ p["w"]) + p["b"]) ** 2).mean())(state["params"])
    updates, opt = optax.adamw(1e-2).update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "seen": [state["seen"][0] + 1]}


def adam_state() -> Any:
    params = {"w": jnp.arange(256.0).reshape(16, 16) / 256, "b": jnp.ones(16)}
    return {"params": params, "opt": optax.adamw(1e-2).init(params), "seen": [jnp.zeros((), jnp.int32)]}


def test_a_loaded_plan_restores_a_state_of_named_tuples_on_another_mesh(tmp_path: Path) -> None:
    x = np.full((16, 16), 1 / 16, np.float32)  # where tanh is steep: Adam makes as much of a gradient that is rounding
    plans = [
        autoshard.jit(adam_step, mesh=mesh, strategy="fsdp").plan(adam_state(), x)
        for mesh in ({"data": 4, "model": 2}, {"data": 2})
    ]
    loaded = [autoshard.Plan.from_json(json.loads(json.dumps(plan.to_json()))) for plan in plans]
    state = loaded[0].put(adam_step(adam_state(), x))
    checkpoint.save(tmp_path, 1, state, plan=loaded[0])
    back = checkpoint.restore(tmp_path, plan=loaded[1])
    assert jax.tree.map(lambda a: a.sharding, back) == loaded[1].in_shardings[0]
    assert back["opt"][0].mu["w"].sharding.device_set == set(jax.devices()[:2])
    assert_equal(back["opt"][0].nu, state["opt"][0].nu)
    assert type(back["seen"]) is list
    again = jax.tree.unflatten(jax.tree.structure(adam_state()), jax.tree.leaves(back))
    assert_equal(again, state)
    assert_equal(checkpoint.restore(tmp_path, plan=plans[1]), state)
    step = autoshard.jit(adam_step, strategy=loaded[1])
    np.testing.assert_allclose(step(again, x)["params"]["w"], adam_step(state, x)["params"]["w"], rtol=1e-5)


def test_attributes_and_keys_of_one_name_match(tmp_path: Path) -> None:
    state = {"s": Struct(jnp.ones(3)), "m": Moments(jnp.zeros(2), 5), "odd'key": jnp.ones(1), "l": [1, 2]}
    checkpoint.save(tmp_path, 1, state)
    like = {"s": {"w": jnp.zeros(3)}, "m": {"mean": jnp.ones(2), "var": 0}, "odd'key": jnp.zeros(1), "l": {0: 0, 1: 0}}
    back = checkpoint.restore(tmp_path, like=like)
    assert_equal(back, {**state, "s": {"w": jnp.ones(3)}, "m": {"mean": jnp.zeros(2), "var": 5}, "l": {0: 1, 1: 2}})
    with pytest.raises(CheckpointError, match=r"s/v .* is not in the checkpoint"):
        checkpoint.restore(tmp_path, like={**like, "s": {"v": jnp.zeros(3)}})


class Tied(nnx.Module):
    """Two layers with one kernel, and dropout."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.b.kernel = self.a.kernel
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.drop(self.a(x)))


def test_a_module_is_saved_as_its_plan_has_it(tmp_path: Path) -> None:
    def update(model: Tied, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    x = jnp.ones((8, 8))
    plans = [autoshard.jit(update, mesh=mesh, strategy="fsdp").plan(Tied(0), x) for mesh in ({"data": 8}, {"data": 2})]
    checkpoint.save(tmp_path, 1, Tied(0), plan=plans[0])
    other = Tied(1)
    for plan in (plans[1], autoshard.Plan.from_json(plans[1].to_json())):
        back = checkpoint.restore(tmp_path, plan=plan)
        assert jax.tree.map(lambda a: a.sharding, back) == plan.in_shardings[0]
        assert jax.tree.leaves(back)[1].sharding.num_devices == 2
    nnx.update(other, checkpoint.restore(tmp_path, plan=plans[1]))
    assert_equal(nnx.state(other), nnx.state(Tied(0)))
    assert other.b.kernel is other.a.kernel


def test_a_state_that_is_not_the_plans_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target, plan = tmp_path / "new", plan_for(small(), mesh_of((8,)), P())
    for state, why in (
        ({"z": np.ones(3)}, r"z \(float64\[3\]\) is not in the plan"),
        (small() | {"w": jnp.ones((8, 4))}, r"w is float32\[8,8\] in the plan and float32\[8,4\] here"),
        ({"w": small()["w"]}, r"argument 0 of the plan: b \(float32\[8\]\) is in the plan and not here"),
    ):
        with pytest.raises(CheckpointError, match=why):
            checkpoint.save(target, 1, state, plan=plan)
    with pytest.raises(CheckpointError, match="takes no argument"):
        checkpoint.save(target, 1, small(), plan=FakePlan((), ()))
    assert not target.exists()


def test_a_step_is_a_whole_number(tmp_path: Path) -> None:
    for step in ("3", 1.0, None):
        with pytest.raises(CheckpointError, match=f"step {step!r} is a {type(step).__name__}; steps are whole numbers"):
            checkpoint.save(tmp_path / "new", step, small())  # type: ignore[arg-type]
    checkpoint.save(tmp_path, np.int64(3), small())  # type: ignore[arg-type]
    assert checkpoint.restore(tmp_path, np.int32(3), report=True)[1].step == 3  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="step '3' is a str"):
        checkpoint.restore(tmp_path, "3")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def largest(path: Path) -> Path:
    return max((p for p in (path / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "array cut": (lambda step: cut(largest(step)), r"has \d+ bytes of \d+"),
    "array gone": (lambda step: largest(step).unlink(), "is missing"),
    "manifest cut": (lambda step: cut(step / "manifest" / "metadata"), "its manifest cannot be read"),
    "manifest gone": (lambda step: (step / "manifest" / "metadata").unlink(), "it has no manifest"),
    "manifest altered": (
        lambda step: (step / "manifest" / "metadata").write_text(json.dumps({"version": 2, "leaves": []})),
        "its manifest cannot be read",
    ),
    "inventory cut": (lambda step: cut(step / "inventory.json"), "its inventory cannot be read"),
    "inventory gone": (lambda step: (step / "inventory.json").unlink(), "it has no inventory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    break_it, why = DAMAGE[damage]
    checkpoint.save(tmp_path, 1, small(1))
    checkpoint.save(tmp_path, 2, small(2), wait=True)
    break_it(tmp_path / "2")
    with pytest.raises(CheckpointError, match=rf"step 2 in .* is incomplete: .*{why}.*The last complete step is 1"):
        checkpoint.restore(tmp_path, 2, like=small())
    with pytest.warns(UserWarning, match=rf"restoring step 1 .*skipped step 2: .*{why}"):
        back, report = checkpoint.restore(tmp_path, like=small(), report=True)
    assert report.step == checkpoint.latest(tmp_path) == 1
    assert_equal(back, small(1))
    with pytest.warns(UserWarning, match="renamed to .*2.damaged-1"):
        checkpoint.save(tmp_path, 2, small(3))
    assert_equal(checkpoint.restore(tmp_path, like=small()), small(3))
    assert (tmp_path / "2.damaged-1").is_dir()


def test_bytes_changed_in_place_are_an_error_that_names_the_last_complete_step(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, jnp.ones(3))
    checkpoint.save(tmp_path, 2, jnp.ones(3), wait=True)
    for path in (tmp_path / "2" / "arrays").rglob("*.ocdbt"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"arrays of step 2 .* cannot be read: .*The last complete step is 1"):
        checkpoint.restore(tmp_path)
    assert_equal(checkpoint.restore(tmp_path, 1, like=jnp.ones(3)), jnp.ones(3))


def test_no_complete_step_is_left(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, small(), wait=True)
    cut(largest(tmp_path / "1"))
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint \(step 1: "):
        checkpoint.restore(tmp_path)


def test_a_failed_write_is_raised_once_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError("no space left on device")

    checkpoint.save(tmp_path, 1, small(1), wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(async_write, "inventory_text", full)
        saving = checkpoint.save(tmp_path, 2, small(2))
        with pytest.raises(CheckpointError, match="step 2 could not be written to .*: no space left"):
            checkpoint.finish(tmp_path)
    assert saving.done
    checkpoint.finish()
    assert checkpoint.steps(tmp_path) == (1,)
    with pytest.warns(UserWarning, match="skipped step 2: its write never finished"):
        assert_equal(checkpoint.restore(tmp_path, like=small()), small(1))
    checkpoint.save(tmp_path, 2, small(3))
    assert_equal(checkpoint.restore(tmp_path, 2, like=small()), small(3))


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="checkpoint directory .*file cannot be created"):
        checkpoint.save(tmp_path / "file", 1, small())
    with pytest.raises(CheckpointError, match="file is not a directory"):
        checkpoint.restore(tmp_path / "file")


WRITER = """
import jax.numpy as jnp
from autoshard import checkpoint
state = {f"w{i}": jnp.full((512, 512), float(i)) for i in range(40)}
checkpoint.save(where, 1, state, wait=True)
for step in range(2, 100 if then == "loop" else 3):
    checkpoint.save(where, step, {k: v + step - 1 for k, v in state.items()}, keep=2)
if then == "finish":
    checkpoint.finish()
"""


def writer(where: Path, then: str) -> str:
    """The program."""
    return f"where, then = {str(where)!r}, {then!r}{WRITER}"


def ended(program: str) -> tuple[int, str]:
    """The exit code of a program that comes to its end, which a fork has none of, and its errors."""
    env = os.environ | {"PYTHONPATH": str(Path(checkpoint.__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def killed(where: Path, moment: str | float) -> list[int]:
    """Kills a writer ``moment`` seconds after its first complete step, or during a write; the unfinished steps."""
    process = Forked(exec, (writer(where, "loop"), {}), {})
    until = time.monotonic() + 60
    while not (where / "1").exists():
        assert process.returncode is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)
    if isinstance(moment, float):
        time.sleep(moment)
    while moment == "half-written" and not list(where.glob("*-tmp/arrays*/**/d/*")):
        assert time.monotonic() < until
    process.kill()
    process.communicate()
    return [int(p.name.split(".")[0]) for p in where.glob("*-tmp")]


@pytest.mark.filterwarnings("ignore:restoring step")
@pytest.mark.parametrize("moment", ["half-written", 0.0, 0.15, 0.4])
def test_killed_while_writing(tmp_path: Path, moment: str | float) -> None:
    for attempt in range(5):
        where = tmp_path / str(attempt)
        unfinished = killed(where, moment)
        if unfinished or isinstance(moment, float):
            break
    else:
        pytest.fail("the writer finished its step before every one of five kills")
    back, report = checkpoint.restore(where, report=True)
    for i in range(40):
        assert (back[f"w{i}"] == i + report.step - 1).all()
    for step in checkpoint.steps(where):
        assert checkpoint.restore(where, step, report=True)[1].step == step
    for step in unfinished:
        with pytest.raises(CheckpointError, match="its write never finished"):
            checkpoint.restore(where, step)
    checkpoint.save(where, 1000, small(), keep=1, wait=True)
    assert sorted(p.name for p in where.iterdir()) == ["1000", "save.lock"]


def test_a_program_that_ends_without_finish_says_so(tmp_path: Path) -> None:
    code, errors = ended(writer(tmp_path, "end"))
    steps = checkpoint.steps(tmp_path)
    assert steps[:1] == (1,)
    assert steps == (1, 2) or "Call autoshard.checkpoint.finish() before the program ends" in errors
    assert code == 0


def test_all_that_a_run_is_made_of_comes_back_on_another_mesh(tmp_path: Path) -> None:
    """The master copy, moments, a schedule, the scaler, an EMA, keys; the loader, the config; the plan, versions."""
    precision = autoshard.train.Precision(params="bfloat16", master="float32", loss_scale="dynamic")
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(1e-2, 10))
    average = optax.ema(0.9)

    def make() -> Any:
        params = {"w": jnp.eye(8)}
        held = precision.init(params, optimizer)
        return {"train": held, "average": average.init(params), "key": jax.random.key(3), "step": jnp.int32(0)}

    def train(state: Any, x: jax.Array) -> Any:
        key, drop = jax.random.split(state["key"])
        kept = jax.random.bernoulli(drop, 0.5, x.shape)
        _, gradients = precision.value_and_grad(lambda p, x: ((x @ p["w"]) ** 2).mean())(state["train"], x * kept)
        held, _ = precision.update(optimizer, state["train"], gradients)
        _, averaged = average.update(held["master"], state["average"])
        return {"train": held, "average": averaged, "key": key, "step": state["step"] + 1}

    x = jnp.ones((8, 8), jnp.bfloat16)
    state = jax.jit(train)(jax.jit(train)(make(), x), x)
    first = autoshard.jit(train, mesh={"data": 8}, strategy="fsdp").plan(state, x)
    beside = {"batches": {"taken": 16, "of": [3, 4]}, "config": {"seed": 0, "optimizer": {"name": "adam"}}}
    checkpoint.save(tmp_path, 2, state, plan=first, extra=beside)
    second = autoshard.jit(train, mesh={"data": 2, "model": 4}, strategy="tp").plan(state, x)
    back, report = checkpoint.restore(tmp_path, plan=second, report=True)
    assert_equal(back, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, back) == second.in_shardings[0]
    assert jax.tree.map(jnp.any, state["average"]).ema["w"]
    assert (report.step, report.extra, report.left_out) == (2, beside, ())
    assert report.versions["jax"] == jax.__version__
    assert report.versions["autoshard"] == autoshard.__version__
    assert report.plan is not None
    assert autoshard.Plan.load(report.plan) == first


def test_one_program_at_a_time_saves_to_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the lock here: a save is refused, and a restore is not."""
    checkpoint.save(tmp_path, 1, {"w": jnp.ones(3)}, wait=True)
    program = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, 2); print('', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout
        assert other.stdin
        other.stdout.readline()
        with pytest.raises(CheckpointError, match=r"in use by process \d+ on .*one process at a time saves there"):
            checkpoint.save(tmp_path, 2, {"w": jnp.ones(3)})
        assert checkpoint.restore(tmp_path)["w"].tolist() == [1, 1, 1]
        other.stdin.close()
    checkpoint.save(tmp_path, 2, {"w": jnp.ones(3)}, wait=True)
    go, until = threading.Event(), async_write.inventory_text

    def waiting(path: Any) -> str:
        go.wait(60)
        return until(path)

    monkeypatch.setattr(async_write, "inventory_text", waiting)
    checkpoint.save(tmp_path, 3, {"w": jnp.ones(3)})
    assert is_held(epath.Path(tmp_path / LOCK))
    assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    go.set()
    checkpoint.finish(tmp_path)
    assert not is_held(epath.Path(tmp_path / LOCK))
    assert checkpoint.steps(tmp_path) == (1, 2, 3)


def test_a_program_that_finishes_loses_nothing(tmp_path: Path) -> None:
    assert ended(writer(tmp_path, "finish")) == (0, "")
    assert checkpoint.steps(tmp_path) == (1, 2)
    assert (checkpoint.restore(tmp_path, 2)["w3"] == 4).all()


def test_a_folder_of_each_version_of_the_format_is_read(tmp_path):
    """Written once, with the release that brought the version, and never again: an older folder is read for ever.

    A version that is new has a folder of its own beside these.
    """
    kept = Path(__file__).parent / "kept"
    versions = get_args(Manifest.model_fields["version"].annotation)
    assert [f"version-{number}" for number in versions] == sorted(path.name for path in kept.iterdir())
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    for folder in kept.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
        like = {
            "done": True,
            "f8": jax.ShapeDtypeStruct((3,), jnp.float8_e4m3fn),
            "key": jax.eval_shape(lambda: jax.random.key(0)),
            "layers": [np.zeros(4, np.int32)] * 2,
            "params": {
                "b": jax.ShapeDtypeStruct((6,), jnp.bfloat16),
                "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
                "w": jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=NamedSharding(mesh, P("x", "y"))),
            },
            "rate": 0.0,
            "step": 0,
        }
        state, report = checkpoint.restore(tmp_path / folder.name, like=like, report=True)
        assert (state["done"], state["rate"], state["step"]) == (False, 0.1, 3)
        np.testing.assert_array_equal(state["params"]["w"], np.arange(24.0).reshape(6, 4))
        np.testing.assert_array_equal(state["params"]["b"], (np.arange(6) / 8).astype(jnp.bfloat16))
        np.testing.assert_array_equal(state["f8"].astype(jnp.float32), [1, -2, 0.5])
        np.testing.assert_array_equal(state["layers"], [np.arange(4), np.arange(4) + 10])
        np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(jax.random.key(7)))
        assert state["params"]["empty"].shape == (0, 3)
        assert report.extra == {"loader": {"row": 40}, "note": "kept"}
        assert (report.plan is None) == (folder.name == "version-2")
