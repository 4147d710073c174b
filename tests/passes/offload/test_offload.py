"""Optimizer state that is in the host's memory between steps, and comes to the device where the update reads it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Plan, checkpoint
from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError, PassError
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.machine.mesh_config import MeshConfig

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS, WIDTH = 4, 16
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
"""Its epsilon keeps it from amplifying the rounding of small gradients."""


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


PARAMS = {
    "in": normal(WIDTH, WIDTH) / 4,
    "layers": {"up": normal(LAYERS, WIDTH, 64, seed=1) / 4, "down": normal(LAYERS, 64, WIDTH, seed=2) / 8},
}
X = normal(32, WIDTH, seed=3)


def loss_of(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
    return (h**2).mean()


def training(optimizer: optax.GradientTransformation, **extra: Any) -> tuple[Callable[..., Any], Any]:
    """A step of `loss_of` under an optimizer, and the state before it."""

    def train(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    opt = jax.tree.map(np.asarray, optimizer.init(PARAMS))
    return train, {"params": PARAMS, "opt": opt, **extra}


def kinds(tree: Any) -> set[str]:
    """The memories of the arrays that are no scalars."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def check_equal(
    planned: Any, fun: Callable[..., Any], state: Any, steps: int = 3, on_host: str = "opt", params: str = "device"
) -> Any:
    """Runs both, and returns the state: from the second call on, nothing has to be moved (warnings are errors).

    Args:
      params: the memory of the layers' parameters.
    """
    want = state
    for _ in range(steps):
        (state, loss), (want, wanted) = planned(state, X), jax.jit(fun)(want, X)
        chex.assert_trees_all_close((state, loss), (want, wanted), rtol=1e-5, atol=1e-6)
        assert "pinned_host" in kinds(state[on_host])
        assert kinds(state["params"]) == {"device", params}
        assert params == "device" or kinds(state["params"]["layers"]) == {params}
    return state


def host_loops(planned: Any, *args: Any) -> int:
    """Loops that carry arrays in the host's memory."""
    jaxpr = planned.trace(*args).jaxpr
    return sum(any(in_host_memory(v.aval) for v in e.outvars) for e in jx.walk(jaxpr) if jx.regions(e))


@pytest.mark.parametrize("preset", ["", "fsdp+", "tp+", "zero1+"])
def test_equal_step_by_step_and_stays_on_the_host(preset: str) -> None:
    train, state = training(ADAMW)
    planned = autoshard.jit(train, mesh=MESH, strategy=f"{preset}offload:optimizer", donate_argnums=0)
    check_equal(planned, train, state)
    plan = planned.plan(state, X)
    assert plan.strategy == preset.rstrip("+") or (not preset and plan.strategy == "auto")
    assert {p.path for p in plan.inputs if p.offloaded} == {p.path for p in plan.inputs if "u[" in p.path}
    assert host_loops(planned, state, X) == 2  # of the two stacks; the first layer comes in whole
    assert "between calls" not in plan.explain()  # one memory for both on CPU: it takes no time
    assert plan.memory.optimizer == 0  # but for the count of steps, a scalar
    assert plan.memory.host == offloaded_bytes(plan)


def offloaded_bytes(plan: autoshard.Plan) -> int:
    """Of the float32 arguments that are on the host, on each device."""
    return sum(4 * math.prod(p.shape) // p.spec.num_shards(plan.mesh.shape) for p in plan.inputs if p.offloaded)


OPTIMIZERS: dict[str, tuple[optax.GradientTransformation, int]] = {
    "momentum": (optax.sgd(1e-2, momentum=0.9), 2),
    "factored": (optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9), 0),
    "layer norms": (optax.lamb(1e-2), 0),
    "every second step": (optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), 2).gradient_transformation(), 0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str) -> None:
    optimizer, loops = OPTIMIZERS[name]
    train, state = training(optimizer)
    planned = autoshard.jit(train, mesh=MESH, strategy="fsdp+offload:optimizer", donate_argnums=0)
    check_equal(planned, train, state)
    assert host_loops(planned, state, X) == loops


def test_layers_that_no_loop_has_come_in_whole() -> None:
    def train(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: functools.reduce(lambda h, w: jnp.tanh(h @ w), p, x).sum())(state["params"])
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["mean"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], mean), "mean": mean}, x.sum()

    weights = [normal(WIDTH, WIDTH, seed=i) / 4 for i in range(3)]
    planned = autoshard.jit(train, mesh=MESH, passes=["offload:optimizer"], donate_argnums=0)
    state = {"params": weights, "mean": jax.tree.map(np.zeros_like, weights)}
    check_equal(planned, train, state, on_host="mean")
    assert host_loops(planned, state, X) == 0


def test_in_micro_batches_with_padding_and_under_gradient_clipping() -> None:
    train, state = training(ADAMW)
    planned = autoshard.jit(train, mesh=MESH, strategy="offload:optimizer", microbatches=4, donate_argnums=0)
    check_equal(planned, train, state, 1)
    assert host_loops(planned, state, X) == 2
    uneven = {"in": normal(15, 15) / 4}

    def small(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: (jnp.tanh(x[:, :15] @ p["in"]) ** 2).mean())(state["params"])
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["mean"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mean), "mean": mean}, x.sum()

    padded = autoshard.jit(small, mesh=MESH, strategy="fsdp+offload:optimizer", pad_state=True, donate_argnums=0)
    state = {"params": uneven, "mean": jax.tree.map(np.zeros_like, uneven)}
    assert any(p.offloaded and p.stored for p in padded.plan(state, X).inputs)
    check_equal(padded, small, state, on_host="mean")


def test_state_that_is_pinned_returned_as_it_is_or_seen_by_the_host() -> None:
    seen: list[float] = []

    def train(state: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(state["params"], x)
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["mean"], grads)
        jax.debug.callback(lambda m: seen.append(float(m)), mean["in"].sum())
        jax.debug.callback(lambda m: seen.append(float(m)), state["mean"]["in"].sum())
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mean)
        return {"params": params, "mean": mean, "old": state["old"]}, state["mean"]["in"]

    zeros = jax.tree.map(np.zeros_like, PARAMS)
    state = {"params": PARAMS, "mean": zeros, "old": {"a": X, "b": X}}
    device = NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), P(), memory_kind="device")
    one = autoshard.jit(train, mesh=device.mesh, strategy="offload:optimizer")
    after, before = one(state, X)
    jax.effects_barrier()
    want, _ = jax.jit(train)(state, X)
    jax.effects_barrier()
    assert sorted(seen[:2]) == pytest.approx(sorted(seen[2:]), rel=1e-4)
    chex.assert_trees_all_close(after, want, rtol=1e-5)
    assert kinds([after["mean"], after["old"]]) == {"pinned_host"}
    assert kinds(before) == {"device"}
    pins = {"params": None, "mean": {"in": device, "layers": None}, "old": None}
    pinned = autoshard.jit(train, mesh=device.mesh, strategy="offload:optimizer", in_shardings=(pins, None))
    plan = pinned.plan(state, X)
    assert [p.path for p in plan.inputs if p.path.endswith("['in']") and p.offloaded] == []


def test_new_state_that_is_a_result_of_its_own_too() -> None:
    train, state = training(optax.sgd(1e-2, momentum=0.9))

    def telling(state: Any, x: Any) -> Any:
        state, _ = train(state, x)
        return state, state["opt"][0].trace

    planned = autoshard.jit(telling, mesh=MESH, strategy="offload:optimizer", donate_argnums=0)
    check_equal(planned, telling, state)
    assert kinds(planned(state, X)[1]) == {"device"}
    assert host_loops(planned, state, X) == 2


def test_other_shapes_keep_the_state_where_it_is() -> None:
    train, state = training(ADAMW)
    planned = autoshard.jit(train, mesh=MESH, strategy="offload:optimizer", donate_argnums=0)
    state, _ = planned(state, X)
    after, _ = planned(state, X[:16])
    assert kinds(after["opt"]) == {"pinned_host"}


def test_a_stored_plan_a_checkpoint_and_verify(tmp_path: Path) -> None:
    train, state = training(ADAMW)
    planned = autoshard.jit(train, mesh=MESH, strategy="fsdp+offload:optimizer", donate_argnums=0)
    plan = planned.plan(state, X)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    checkpoint.save(tmp_path, 1, check_equal(planned, train, state, 1), plan=plan, wait=True)
    restored = checkpoint.restore(tmp_path, plan=plan)
    assert kinds(restored["opt"]) == {"pinned_host"}
    again = autoshard.jit(train, mesh=MESH, strategy=loaded, donate_argnums=0)
    want, _ = jax.jit(train)(state, X)
    chex.assert_trees_all_close(again(restored, X)[0], jax.jit(train)(want, X)[0], rtol=1e-5, atol=1e-6)
    fresh = autoshard.jit(train, mesh=MESH, strategy="fsdp+offload:optimizer", donate_argnums=0)
    assert kinds(fresh(checkpoint.restore(tmp_path, plan=plan), X)[0]["opt"]) == {"pinned_host"}
    assert autoshard.verify(planned, state, X, passes=True).results
    assert kinds(plan.init(lambda: state)["opt"]) == {"pinned_host"}
    nested, _ = jax.jit(planned)(*plan.put(state, X))
    assert kinds(nested["opt"]) == {"pinned_host"}


# --- parameters too --------------------------------------------------------------------------------------------------


def row_copies(planned: Any, *args: Any) -> int:
    """Copies from the host's memory in the bodies of loops that carry nothing there."""
    jaxpr = planned.trace(*args).jaxpr
    bodies = [
        r.body for e in jx.walk(jaxpr) for r in jx.regions(e) if not any(in_host_memory(v.aval) for v in e.outvars)
    ]
    return sum(
        in_host_memory(e.invars[0].aval) and not in_host_memory(e.outvars[0].aval)
        for body in bodies
        for e in body.eqns
        if e.primitive.name == "device_put"
    )


STATE: dict[str, tuple[dict[str, Any], int]] = {
    "auto": ({"strategy": "offload:state"}, 4),
    "fsdp": ({"strategy": "fsdp+offload:state"}, 4),
    "tp": ({"strategy": "tp+offload:state"}, 4),
    "made again in some layers": ({"strategy": "offload:state", "recompute": {"*.up": 2}}, 8),
    "made again in all layers": ({"strategy": "offload:state", "recompute": {"*": "all"}}, 4),
    "in micro-batches": ({"strategy": "offload:state", "microbatches": 4}, 4),
}


@pytest.mark.parametrize("name", STATE)
def test_parameters_of_layers_come_in_row_by_row(name: str) -> None:
    options, copies = STATE[name]
    train, state = training(ADAMW)
    planned = autoshard.jit(train, mesh=MESH, donate_argnums=0, **options)
    check_equal(planned, train, state, params="pinned_host")
    plan = planned.plan(state, X)
    on_host = {p.path for p in plan.inputs if p.offloaded}
    assert on_host == {p.path for p in plan.inputs if "u[" in p.path or "['params']['layers']" in p.path}
    assert plan.memory.parameters == 4 * WIDTH * WIDTH // next(
        p.spec.num_shards(plan.mesh.shape) for p in plan.inputs if p.path.endswith("['params']['in']")
    )
    assert row_copies(planned, state, X) == copies
    assert host_loops(planned, state, X) == 2  # the updates
    assert "arrays of optimizer state and parameters" in next(p.change for p in plan.passes if p.name == "offload")


def test_parameters_that_more_than_loops_read_stay() -> None:
    """Of those that loops read from casts and slices of them alone, rows come in and are cast."""

    def loss_with(params: Any, x: Any) -> Any:
        casts = jax.tree.map(lambda p: p.astype("bfloat16").astype("float32"), params["layers"])
        first = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["up"]) @ w["down"], None), x @ params["in"], casts)[0]
        second = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), first, params["other"][1:])[0]
        third = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), second, params["both"])[0]
        return (third**2).mean() + (params["read"][0] @ x.T).mean() + (params["both"][0] @ x.T).mean()

    def train(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_with)(state["params"], x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params}, loss

    other = {name: normal(4, WIDTH, WIDTH, seed=5 + i) / 4 for i, name in enumerate(("other", "read", "both"))}
    state = {"params": PARAMS | other}
    planned = autoshard.jit(train, mesh=MESH, strategy="offload:state", donate_argnums=0)
    plan = planned.plan(state, X)
    offloaded = {p.path.partition("['params']")[2] for p in plan.inputs if p.offloaded}
    assert offloaded == {"['layers']['down']", "['layers']['up']", "['other']"}
    want = state
    for _ in range(2):
        (state, loss), (want, wanted) = planned(state, X), jax.jit(train)(want, X)
        chex.assert_trees_all_close((state, loss), (want, wanted), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_offloaded() -> None:
    for strategy in ("offload:params", "fsdp+offload", "offload:"):
        with pytest.raises(PassError, match="does not know what to offload"):
            autoshard.jit(loss_of, mesh=MESH, strategy=strategy)
    with pytest.raises(ArgumentError, match=r"strategy 'fsdq\+offload:optimizer' is not known; did you mean 'fsdp'"):
        autoshard.jit(loss_of, mesh=MESH, strategy="fsdq+offload:optimizer")
    plan = autoshard.jit(loss_of, mesh=MESH, passes=["offload:optimizer"]).plan(PARAMS, X)
    assert "carries no optimizer state" in plan.passes[0].change
    train, state = training(ADAMW)
    piped = MeshConfig(axes={"stage": 2, "data": 4}, pipeline="stage")
    with pytest.raises(PassError, match="offload:optimizer: not with a pipeline yet"):
        autoshard.jit(train, mesh=piped, strategy="offload:optimizer", microbatches=2).plan(state, X)


# --- on a chip whose memory is not the host's ------------------------------------------------------------------------

CHIPS = MeshConfig(axes={"data": 8}, hardware="tpu-v5e")


def wide() -> tuple[Callable[..., Any], Any, Any]:
    """A step whose parameters, gradients and optimizer state are 64 MiB, 64 MiB and 128 MiB."""
    train, _ = training(ADAMW)
    shapes = {"in": (512, 512), "up": (4, 512, 4096), "down": (4, 4096, 512)}
    in_, up, down = (jax.ShapeDtypeStruct(s, "float32") for s in shapes.values())
    params = {"in": in_, "layers": {"up": up, "down": down}}
    state = jax.eval_shape(lambda p: {"params": p, "opt": ADAMW.init(p)}, params)
    return train, state, jax.ShapeDtypeStruct((64, 512), "float32")


def test_it_is_chosen_where_nothing_else_fits() -> None:
    train, *args = wide()
    free = autoshard.jit(train, mesh=CHIPS, donate_argnums=0).plan(*args)
    assert not any(p.offloaded for p in free.inputs)
    plan = autoshard.jit(train, mesh=CHIPS, donate_argnums=0, memory_budget="28MiB").plan(*args)
    assert plan.memory.peak <= 28 * 2**20 < free.memory.parameters + free.memory.optimizer + free.memory.gradients
    assert 15 * 2**20 < plan.memory.host == offloaded_bytes(plan) <= free.memory.optimizer
    assert plan.memory.optimizer == 0
    assert plan.cost.host == pytest.approx(2 * plan.memory.host / plan.mesh.hardware.host_bandwidth)
    assert plan.bound <= plan.cost.seconds
    (note,) = [d.text for d in plan.diagnostics if "offload:optimizer was added" in d.text]
    assert "fits the memory budget of 28.00 MiB" in note
    assert "on the host, and take" in note
    assert "are between calls" in " ".join(plan.explain().split())
    less = autoshard.jit(train, mesh=CHIPS, donate_argnums=0, memory_budget="14MiB").plan(*args)
    assert less.memory.peak <= 14 * 2**20 < free.memory.parameters + free.memory.gradients
    assert {p.path for p in less.inputs if p.offloaded} > {p.path for p in plan.inputs if p.offloaded}
    assert "offload:state was added" in " ".join(d.text for d in less.diagnostics)
    with pytest.raises(autoshard.errors.MemoryBudgetError):
        autoshard.jit(train, mesh=CHIPS, donate_argnums=0, memory_budget="2MiB").plan(*args)


def test_it_is_chosen_where_it_is_faster_than_what_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    train, *args = wide()
    plan = autoshard.jit(train, mesh=CHIPS, donate_argnums=0, memory_budget="60MiB").plan(*args)
    assert not any(p.offloaded for p in plan.inputs), "what fits without is not slower than the host's link"
