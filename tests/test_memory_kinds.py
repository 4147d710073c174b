"""Arguments, results and values inside a step that are in the host's memory, and that stay or return there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Plan, checkpoint
from autoshard.errors import ArgumentError, MemoryBudgetError, PlacementWarning, PlanError, SpecError
from autoshard.machine.mesh_config import MeshConfig
from tests.two_processes import run

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HOST = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
UNPINNED = NamedSharding(MESH, P("data"), memory_kind="unpinned_host")
DEVICE = NamedSharding(MESH, P("data"))
SPACE = jax.memory.Space
jit = functools.partial(autoshard.jit, mesh=MESH)

X = np.linspace(-1, 1, 512, dtype=np.float32).reshape(32, 16)
STATE = {"a": X[:16] / 4, "b": X[16:] / 4}


def step(state: Any, x: Any) -> Any:
    """Takes its state from either memory, and returns it on the device."""
    state = jax.device_put(state, SPACE.Device)
    return jax.tree.map(lambda w: w - 0.1 * (x.T @ jnp.tanh(x @ w)), state), x.sum()


def returning(where: Any) -> Callable[..., Any]:
    """`step`, with its state moved inside."""

    def fun(state: Any, x: Any) -> Any:
        state, loss = step(state, x)
        return jax.device_put(state, where), loss

    return fun


def kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


ROUTES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "pinned": (step, {"in_shardings": (HOST, None), "out_shardings": (HOST, None)}, "pinned_host"),
    "argument pinned": (step, {"in_shardings": (HOST, None)}, "pinned_host"),
    "result pinned": (step, {"out_shardings": (HOST, None)}, "pinned_host"),
    "result pinned to the device": (returning(SPACE.Host), {"out_shardings": (DEVICE, None)}, "device"),
    "moved inside": (returning(SPACE.Host), {}, "pinned_host"),
    "moved inside, pinned to a spec": (returning(SPACE.Host), {"out_shardings": (P("data"), None)}, "pinned_host"),
    "moved inside to a sharding": (returning(HOST), {}, "pinned_host"),
    "moved inside, preset": (returning(SPACE.Host), {"strategy": "fsdp"}, "pinned_host"),
    "another kind": (step, {"in_shardings": (UNPINNED, None), "out_shardings": (UNPINNED, None)}, "unpinned_host"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_state_stays_in_its_memory_from_call_to_call(route: str) -> None:
    fun, options, kind = ROUTES[route]
    planned, (state, want) = jit(fun, **options), (STATE, STATE)
    for _ in range(3):  # warnings are errors: from the second call on, nothing has to be moved
        state, _ = planned(state, X)
        want, _ = jax.jit(step)(want, X)
        assert kinds(state) == [kind] * 2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, want)
    plan = planned.plan(state, X)
    stored = None if kind == "device" else kind
    assert [p.memory_kind for p in plan.outputs] == [stored, stored, None]
    assert "in pinned_host" in plan.explain() or kind != "pinned_host"
    assert (plan.memory.host > 0) == (kind != "device")


def test_a_named_sharding_inside_is_a_pin() -> None:
    plan = jit(returning(NamedSharding(MESH, P(None, "model"), memory_kind="pinned_host"))).plan(STATE, X)
    assert [p.where for p in plan.outputs[:2]] == ["[_, model] in pinned_host"] * 2


def test_arguments_that_are_on_the_host_are_taken_as_they_are() -> None:
    planned = jit(step, in_shardings=(P("data"), None))
    on_host = jax.device_put(STATE, HOST)
    assert [p.memory_kind for p in planned.plan(on_host, X).inputs] == ["pinned_host", "pinned_host", None]
    assert [p.memory_kind for p in planned.plan(STATE, X).inputs] == [None] * 3
    abstract = jax.ShapeDtypeStruct((16, 16), "float32", sharding=HOST)
    assert planned.plan({"a": abstract, "b": abstract}, X) is planned.plan(on_host, X)
    assert kinds(planned(on_host, X)) == ["device"] * 3  # as the step has it


def test_what_is_in_another_memory_than_planned_is_moved_and_reported() -> None:
    on_host = jax.device_put(STATE, HOST)
    with pytest.warns(PlacementWarning, match=r"state\['.'\] is on .* in pinned_host, the plan has P\('data'") as said:
        assert kinds(jit(step, in_shardings=(DEVICE, None))(on_host, X)[0]) == ["device"] * 2
    assert len(said) == 1  # of both arrays
    with pytest.warns(PlacementWarning, match=r"the plan has P\('data',?\) in pinned_host"):
        jit(step, in_shardings=(HOST, None))(jax.device_put(STATE, DEVICE), X)


def test_a_stored_plan_keeps_the_memory() -> None:
    pinned = jit(step, in_shardings=(HOST, None), out_shardings=(HOST, None))
    plan = pinned.plan(STATE, X)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    for given in ({}, {"in_shardings": (P("data"), None)}):
        again = jit(step, strategy=loaded, **given)
        assert again.plan(STATE, X).in_shardings == plan.in_shardings
        assert kinds(again(STATE, X)[0]) == ["pinned_host"] * 2
    with pytest.raises(PlanError, match=r"state\['a'\] is pinned to device memory, and the plan has it in pinned_host"):
        jit(step, strategy=loaded, in_shardings=(DEVICE, None)).plan(STATE, X)
    other = jit(step, in_shardings=(P("data"), None)).plan(STATE, X)
    assert "[data, _] in pinned_host" in other.diff(plan)


def test_placed_lowered_exported_nested_and_verified() -> None:
    pinned = jit(step, in_shardings=(HOST, None), out_shardings=(HOST, None), donate_argnums=0)
    plan, want = pinned.plan(STATE, X), jax.jit(step)(STATE, X)
    assert kinds(plan.init(lambda: STATE)) == ["pinned_host"] * 2
    nested = jax.jit(pinned)
    for call in (
        lambda: pinned.lower(STATE, X).compile()(*plan.put(STATE, X)),
        lambda: jax.export.export(pinned)(STATE, X).call(*plan.put(STATE, X)),
        lambda: nested(STATE, X),
        lambda: nested(*plan.put(STATE, X)),
    ):
        state, _ = call()
        assert kinds(state) == ["pinned_host"] * 2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, want[0])
    assert autoshard.verify(pinned, STATE, X, passes=True).results
    moves = jit(returning(HOST))
    assert autoshard.verify(moves, jax.device_put(STATE, HOST), X).results


def test_under_a_mesh_of_explicit_axes() -> None:
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    pinned = jit(step, in_shardings=(HOST, None), out_shardings=(HOST, None))
    want = jax.jit(step)(STATE, X)[0]
    with jax.set_mesh(explicit):
        for call in (pinned, pinned, jax.jit(pinned)):
            state, _ = call(STATE, X)
            assert kinds(state) == ["pinned_host"] * 2
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, want)


def test_residuals_that_xla_does_not_move_are_named() -> None:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def fun(w: Any) -> Any:
        return jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(w @ w)), policy=policy)(w).sum())(w)

    planned = jit(fun)
    np.testing.assert_allclose(planned(STATE["a"]), jax.jit(fun)(STATE["a"]), rtol=1e-5)
    (said,) = map(str, planned.plan(STATE["a"]).diagnostics)
    assert "test_memory_kinds.py" in said
    assert "on cpu XLA moves arguments and results" in said
    assert jit(step).plan(jax.device_put(STATE, HOST), X).diagnostics == ()


def test_a_step_that_computes_with_what_is_on_the_host_is_told_of_the_argument() -> None:
    def fun(state: Any, *, x: Any) -> Any:
        return jax.tree.map(lambda w: w + x, state)

    on_host = jit(fun, in_shardings=({"a": HOST, "b": None},))
    with pytest.raises(ArgumentError, match=r"^argument 0\['a'\] is in the host's memory.*device_put.*JAX says: "):
        on_host(STATE, x=X[:16])
    with pytest.raises(ArgumentError, match=r"^x is in the host's memory"):
        jit(fun).plan(STATE, x=jax.device_put(X[:16], HOST))
    with pytest.raises(ArgumentError, match=r"^argument 0\['a'\] \(and 1 more\) is in the host's memory"):
        jit(fun).plan(jax.device_put(STATE, HOST), x=X[:16])


def test_a_loop_over_what_is_on_the_host() -> None:
    def fun(xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            return c + jax.device_put(x, SPACE.Device), jax.device_put(c, SPACE.Host)

        return jax.lax.scan(body, jnp.zeros(16), xs)

    sharding = NamedSharding(MESH, P(None, "data"), memory_kind="pinned_host")
    got, want = jit(fun, in_shardings=sharding)(X), jax.jit(fun)(X)
    assert kinds(got) == ["device", "pinned_host"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_an_annotation_with_a_memory_is_refused() -> None:
    with pytest.raises(SpecError, match="annotate: the sharding is in pinned_host"):
        jit(lambda x: autoshard.annotate(x * 2, HOST)).plan(X)


def in_one_of_two_processes(folder: str) -> list[Any]:
    """State in the host memories of two processes: placed, stepped, moved by the step itself, saved and restored."""
    pinned = jit(step, in_shardings=(HOST, None), out_shardings=(HOST, None), donate_argnums=0)
    plan = pinned.plan(STATE, X)
    state = plan.put(STATE, X)[0]
    checkpoint.save(folder, 1, state, plan=plan, wait=True)
    losses, found = (
        [],
        [kinds(state), kinds(plan.init(lambda: STATE)), kinds(checkpoint.restore(folder, plan=plan))],
    )
    for planned in (pinned, pinned, jit(returning(SPACE.Host)), jit(returning(HOST))):
        state, loss = planned(state, X)
        found.append(kinds(state))
        losses.append(float(loss))
    found.append(len(autoshard.verify(pinned, state, X).results))
    shards = [s.data.devices().pop().process_index for s in state["a"].addressable_shards]
    return [found, losses, sorted(set(shards)) == [jax.process_index()]]


def test_in_a_program_of_two_processes(tmp_path: Path) -> None:
    host = ["pinned_host"] * 2
    for found, losses, own in run("tests.test_memory_kinds:in_one_of_two_processes", str(tmp_path / "run"), devices=4):
        assert found == [host] * 7 + [3]
        assert losses == [pytest.approx(X.sum(), abs=1e-4)] * 4
        assert own


# --- what it costs, on a chip whose memory is not the host's ---------------------------------------------------------

CHIPS = AbstractMesh((4, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
TPUS = MeshConfig(axes={"data": 4, "model": 4}, hardware="tpu-v5e")
WIDE, BATCH = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((4096, 2048), "float32")


def momentum_step(state: Any, x: Any) -> Any:
    weights, momentum = state
    grads = jax.grad(lambda ws: (functools.reduce(lambda h, w: jnp.tanh(h @ w), ws, x) ** 2).mean())(weights)
    momentum = [0.9 * m + g for m, g in zip(jax.device_put(momentum, SPACE.Device), grads, strict=True)]
    return [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], momentum


def momentum_plan(memory_kind: str, **options: Any) -> Plan:
    """The plan of `momentum_step` with its momentum in that memory, split over all chips in either."""
    pin = NamedSharding(CHIPS, P("data", "model"), memory_kind=memory_kind)
    weights = NamedSharding(CHIPS, P("data", "model"))
    pins = {"in_shardings": ((weights, [pin] * 4), None), "out_shardings": (None, [pin] * 4)}
    given = autoshard.jit(momentum_step, mesh=TPUS, donate_argnums=0, **pins, **options)
    return given.plan(([WIDE] * 4, [WIDE] * 4), BATCH)


def test_host_memory_is_none_of_the_device_s_and_transfers_are_priced() -> None:
    on_device, on_host = momentum_plan("device"), momentum_plan("pinned_host")
    size = 4 * 2048 * 2048 * 4 // 16
    assert (on_device.memory.optimizer, on_device.memory.host) == (size, 0)
    assert (on_host.memory.optimizer, on_host.memory.host) == (0, size)
    there_and_back = 2 * size / on_host.mesh.hardware.host_bandwidth
    assert on_host.cost.seconds - on_device.cost.seconds == pytest.approx(there_and_back, rel=0.05)
    assert on_host.bound <= on_host.cost.seconds
    assert on_host.diagnostics == ()
    assert "host" in dict(on_host.memory.items())


def test_a_budget_is_of_device_memory() -> None:
    def trivial(state: Any) -> Any:
        return jax.device_put(state, SPACE.Host)

    pin = NamedSharding(CHIPS, P("data"), memory_kind="pinned_host")
    (plan, refused) = (
        functools.partial(autoshard.jit(trivial, mesh=TPUS, memory_budget="2MiB", in_shardings=p).plan, [WIDE] * 4)
        for p in (pin, P("data"))
    )
    assert plan().memory.peak == 0
    assert plan().memory.host == 8 * 2048 * 2048 * 4 // 4
    with pytest.raises(MemoryBudgetError):
        refused()
