"""The choice of the mesh where none is given, of passes where memory is short, and specs of carried state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ArgumentError, ConfigError, MemoryBudgetError, SpecError
from autoshard.runtime.fit_memory.in_parts import MARGIN

X = np.ones((16, 16), np.float32)


def product(s: Any, b: Any) -> Any:
    return (b @ s).sum()


def test_meshes_without_a_plan_are_left_out():
    assert "model" in autoshard.jit(product, in_shardings=(P(None, "model"), None)).plan(X, X).mesh.shape
    plan = autoshard.jit(product, strategy="fsdp_tp").plan(X, np.ones((4, 16), np.float32))
    assert plan.mesh.shape["data"] <= 4
    annotated = autoshard.jit(lambda x: autoshard.annotate(x * 2, P("model")).sum())
    assert "model" in annotated.plan(X).mesh.shape
    constrained = autoshard.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("model")).sum())
    assert "model" in constrained.plan(X).mesh.shape


def test_the_mesh_of_a_sharding_is_chosen():
    devices = np.array(jax.devices()[::-1])
    mesh = Mesh(devices.reshape(2, 4), ("rows", "columns"))
    for pins in ({"in_shardings": (NamedSharding(mesh, P("rows")), None)}, {"out_shardings": NamedSharding(mesh, P())}):
        step = autoshard.jit(product, **pins)
        assert step.plan(X, X).mesh.shape == dict(mesh.shape)
        np.testing.assert_allclose(step(X, X), product(X, X))
        assert step.plan(X, X).mesh.devices == tuple(devices)
    other = NamedSharding(Mesh(devices, ("all",)), P("all"))
    with pytest.raises(SpecError, match=r"\{'rows': 2, 'columns': 4\} and \{'all': 8\}: choose one"):
        autoshard.jit(product, in_shardings=(NamedSharding(mesh, P("rows")), other)).plan(X, X)


def test_no_mesh_has_a_plan():
    with pytest.raises(SpecError, match=r"product: none of the candidate meshes.*data=8.*data=4.*data=2") as caught:
        autoshard.jit(product, in_shardings=(P(None, "mdel"), None)).plan(X, X)
    assert "did you mean 'model'?" in str(caught.value)
    with pytest.raises(ArgumentError, match="^in_shardings is no pytree prefix"):
        autoshard.jit(product, in_shardings=({"a": None}, None)).plan(X, X)


def test_axes_auto_takes_the_fastest_of_the_meshes_and_shows_the_others():
    auto = autoshard.MeshConfig(axes="auto", devices=8, hardware="h100")
    wide, thin = jax.ShapeDtypeStruct((8192, 8192), jnp.float32), jax.ShapeDtypeStruct((8192, 8), jnp.float32)

    def fun(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w) @ w

    plan = autoshard.jit(fun, mesh=auto).plan(wide, wide)
    each = {str(m): autoshard.jit(fun, mesh=m).plan(wide, wide) for m in auto.meshes()}
    assert plan.cost.seconds == min(p.cost.seconds for p in each.values())
    shown = {a.text: a.seconds for a in plan.alternatives if a.text.startswith("the mesh ")}
    assert shown == {f"the mesh {m}": p.cost.seconds for m, p in each.items() if m != str(plan.mesh)}
    assert autoshard.jit(lambda x: x * 2, mesh=auto, in_shardings=P("model")).plan(thin).mesh.shape["model"] > 1


def test_a_given_plan_decides_an_open_mesh():
    auto = autoshard.MeshConfig(axes="auto", devices=8, hardware="cpu")
    plan = autoshard.jit(product, mesh={"data": 2, "model": 4}).plan(X, X)
    again = autoshard.jit(product, mesh=auto, strategy=plan)
    assert again.plan(X, X).mesh.shape == {"data": 2, "model": 4}
    np.testing.assert_allclose(again(X, X), product(X, X))
    with pytest.raises(ConfigError, match=r"^axes: auto is resolved by planning a step"):
        auto.mesh()


def test_an_error_of_the_function_is_raised_as_it_is():
    def fun(x: Any) -> Any:
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="^of the function") as caught:
        autoshard.jit(fun).plan(X)
    assert caught.value.__context__ is None


# --- carried state has the same specs in all plans of a step ------------------------------------------------------


def carrying(state: Any, batch: Any) -> Any:
    """Constrains its state to one spec for some sizes of the batch, and to another for others."""
    spec = {16: P("data"), 32: P(None, "model")}.get(batch.shape[0], P())
    return {"w": autoshard.annotate(state["w"], spec) + batch.sum()}


MESH = {"data": 4, "model": 2}
STATE = {"w": np.ones((512, 512), np.float32)}


def rows(count: int) -> Any:
    return np.ones((count, 64), np.float32)


def test_carried_state_keeps_the_specs_of_the_first_plan():
    freely = [
        autoshard.jit(carrying, mesh=MESH, donate_argnums=0).plan(STATE, rows(n)).in_specs[0]["w"] for n in (16, 32)
    ]
    assert freely[0] != freely[1]
    step, state = autoshard.jit(carrying, mesh=MESH, donate_argnums=0), STATE
    for n in (16, 32, 8, 16):
        state = step(state, rows(n))  # a move would be a warning, and warnings are errors here
    plans = [step.plan(STATE, rows(n)) for n in (16, 32, 8)]
    assert len({str((p.in_specs[0]["w"], p.out_specs["w"])) for p in plans}) == 1
    assert [p.inputs[0].reason == "first_plan" for p in plans] == [False, True, True]
    np.testing.assert_allclose(state["w"], 1 + (16 + 32 + 8 + 16) * 64)


def test_other_shapes_and_pinned_arguments_do_not_keep_them():
    step = autoshard.jit(carrying, mesh=MESH, donate_argnums=0)
    step.plan(STATE, rows(16))
    other = {"w": np.ones((256, 512), np.float32)}
    assert step.plan(other, rows(32)) == autoshard.jit(carrying, mesh=MESH, donate_argnums=0).plan(other, rows(32))
    pinned = autoshard.jit(carrying, mesh=MESH, donate_argnums=0, in_shardings=(P("model", "data"), None))
    for n in (16, 32):
        assert pinned.plan(STATE, rows(n)).inputs[0].reason == "pinned"


def test_a_diagnostic_names_state_that_cannot_keep_its_specs():
    step = autoshard.jit(carrying, donate_argnums=0)
    first = step.plan(STATE, rows(16))
    assert step.plan(STATE, rows(8)).mesh == first.mesh
    assert "model" not in first.mesh.shape
    second = step.plan(STATE, rows(32))
    assert "model" in second.mesh.shape
    assert any(d.text.startswith("state['w']: another spec than in the first plan") for d in second.diagnostics)
    np.testing.assert_allclose(step(STATE, rows(32))["w"], 1 + 32 * 64)


def deep(weights: Any, x: Any) -> Any:
    """A gradient step of scanned layers."""

    def loss(weights: Any) -> Any:
        return (jax.lax.scan(lambda h, w: (jnp.tanh(jnp.sin(h @ w)), None), x, weights)[0] ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


WEIGHTS, ROWS = np.full((8, 16, 16), 0.1, np.float32), np.full((1024, 16), 0.1, np.float32)


def test_values_are_recomputed_where_nothing_else_fits(tmp_path: Path):
    free = autoshard.jit(deep, mesh={"x": 1}).plan(WEIGHTS, ROWS)
    assert not any(p.name == "recompute" for p in free.passes)
    tight = autoshard.jit(deep, mesh={"x": 1}, memory_budget=int(free.memory.peak * 0.75))
    plan = tight.plan(WEIGHTS, ROWS)
    assert any(p.name == "recompute" for p in plan.passes)
    assert plan.memory.peak <= 0.75 * free.memory.peak
    assert "was added: without it, none of" in plan.diagnostics[-1].text
    np.testing.assert_allclose(tight(WEIGHTS, ROWS), deep(WEIGHTS, ROWS), rtol=1e-6)
    plan.save(tmp_path / "plan.json")
    again = autoshard.jit(deep, mesh={"x": 1}, strategy=autoshard.Plan.load(tmp_path / "plan.json"))
    np.testing.assert_allclose(again(WEIGHTS, ROWS), deep(WEIGHTS, ROWS), rtol=1e-6)


def train(state, x):
    w, m = state["w"], state["m"]
    m = 0.9 * m + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return {"w": w - m, "m": m}


@pytest.mark.parametrize(
    ("asked", "helps"),
    [
        ({}, "; with state donated, "),
        ({"strategy": "dp", "donate_argnums": 0}, "; with strategy 'auto', "),
        ({"in_shardings": (P(), None), "donate_argnums": 0}, "; without the pins of state, "),
        ({"out_shardings": P(), "donate_argnums": 0}, "; without the pins of results, "),
        (
            {"strategy": "dp", "in_shardings": (P(), None), "donate_argnums": 0},
            "; with strategy 'auto' and without the pins of state, ",
        ),
    ],
)
def test_where_nothing_fits_the_error_names_the_demand_to_drop(asked, helps):
    state = dict.fromkeys(("w", "m"), jax.ShapeDtypeStruct((512, 512), np.float32))
    x = jax.ShapeDtypeStruct((64, 512), np.float32)
    budget = 100_000
    with pytest.raises(MemoryBudgetError) as error:
        autoshard.jit(train, mesh={"x": 8}, memory_budget=budget, **asked).plan(state, x)
    assert helps in str(error.value)
    assert error.value.least > budget
    assert autoshard.jit(train, mesh={"x": 8}, donate_argnums=0).plan(state, x).memory.peak < error.value.least


def test_plans_stay_below_the_rematerialization_threshold_if_they_can(tmp_path: Path):
    free = autoshard.jit(deep, mesh={"x": 1}).plan(WEIGHTS, ROWS).memory.peak

    def planned(room: int) -> autoshard.Plan:
        table = "flops: {float32: 1e12}\nmemory: 1GiB\nbandwidth: 1e11\nlinks: {wire: {bandwidth: 1e9, latency: 0}}\n"
        (tmp_path / "chip.yaml").write_text(f"{table}remat_threshold: {room}\n")
        mesh = autoshard.MeshConfig(axes={"x": 1}, hardware=str(tmp_path / "chip.yaml"))
        return autoshard.jit(deep, mesh=mesh).plan(WEIGHTS, ROWS)

    assert planned(int(free * 0.75)).memory.peak <= free * 0.75
    assert planned(int(free)).memory.peak <= (1 - MARGIN) * free
    assert planned(1000).memory_budget == 2**30  # nothing fits in so little: as if there were no such room


def test_only_the_named_passes_run():
    peak = autoshard.jit(deep, mesh={"x": 1}).plan(WEIGHTS, ROWS).memory.peak
    chosen = autoshard.jit(deep, mesh={"x": 1}, memory_budget=int(peak * 0.75), passes=["dead_code"])
    with pytest.raises(MemoryBudgetError, match=r"none of \d+ layouts fits .*; or pass passes=\['recompute:full'\]"):
        chosen.plan(WEIGHTS, ROWS)
    with pytest.raises(MemoryBudgetError, match=r"none of \d+ layouts fits .*\(with recompute:full\)"):
        autoshard.jit(deep, mesh={"x": 1}, memory_budget=1000).plan(WEIGHTS, ROWS)
