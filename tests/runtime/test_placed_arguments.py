"""Arguments that are placed already are taken where they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import PlacementWarning
from autoshard.runtime.shared_layout import placements

MESH = {"data": 4, "model": 2}


class State(NamedTuple):
    params: Any
    mu: Any


def forward(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def train(state: State, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(state.params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state.mu, grads)
    return State(jax.tree.map(lambda p, m: p - 0.1 * m, state.params, mu), mu), value


def evaluate(params: Any, x: Any) -> Any:
    return jnp.mean(forward(params, x) ** 2)


def values(rows: int = 64) -> tuple[State, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(64, 128)), "w2": rng.normal(size=(128, 16))}
    params = jax.tree.map(lambda x: x.astype(np.float32) / 8, params)
    return State(params, jax.tree.map(np.zeros_like, params)), rng.normal(size=(rows, 64)).astype(np.float32)


def over(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def reasons(plan: autoshard.Plan) -> dict[str, str]:
    return {p.path: p.reason for p in plan.inputs}


@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp", "fsdp_tp", "tp", "zero1"])
def test_evaluation_after_training_moves_nothing(strategy: str) -> None:
    (state, x), batch = values(), values(8)[1]
    expected = evaluate(jax.jit(train)(state, x)[0].params, batch)
    state, _ = autoshard.jit(train, mesh=MESH, strategy=strategy, donate_argnums=0)(state, x)
    step = autoshard.jit(evaluate, mesh=MESH)
    for _ in range(2):  # a move would be a warning, and warnings are errors here
        np.testing.assert_allclose(step(state.params, batch), expected, rtol=1e-5)
    plan = step.plan(state.params, batch)
    same = jax.tree.map(lambda s, w: s.is_equivalent_to(w.sharding, w.ndim), plan.in_shardings[0], state.params)
    assert all(jax.tree.leaves(same))
    assert {reason for path, reason in reasons(plan).items() if path.startswith("params")} == {"placed"}
    assert "as it is placed already" in plan.why("params['w1']")


def test_without_it_the_parameters_would_move() -> None:
    (state, x), batch = values(), values(8)[1]
    trained = autoshard.jit(train, mesh=MESH, strategy="fsdp", donate_argnums=0).plan(state, x)
    assert autoshard.jit(evaluate, mesh=MESH).plan(state.params, batch).in_specs[0] != trained.in_specs[0].params


def test_on_a_mesh_that_is_left_open_it_is_that_of_what_is_placed() -> None:
    (state, x), batch = values(), values(8)[1]
    state, _ = autoshard.jit(train, mesh={"a": 2, "b": 4}, strategy="fsdp", donate_argnums=0)(state, x)
    step = autoshard.jit(evaluate)
    np.testing.assert_allclose(step(state.params, batch), evaluate(jax.device_get(state.params), batch), rtol=1e-5)
    assert step.plan(state.params, batch).mesh.shape == {"a": 2, "b": 4}
    one = jax.device_put(batch, NamedSharding(jax.sharding.Mesh(jax.devices()[:1], "x"), P()))
    assert autoshard.jit(evaluate).plan(jax.device_get(state.params), one).mesh.size == 8


def test_state_that_is_replaced_moves_once_and_is_planned_freely() -> None:
    state, x = values()
    whole = jax.device_put(state, NamedSharding(over(**MESH), P()))
    step = autoshard.jit(train, mesh=MESH, strategy="auto", donate_argnums=0, in_shardings=(P(("data", "model")), None))
    with pytest.warns(PlacementWarning, match="resharded at this call"):
        after, _ = step(whole, x)
    for _ in range(2):
        after, _ = step(after, x)
    assert "placed" not in reasons(step.plan(state, x)).values()
    free = autoshard.jit(train, mesh=MESH, donate_argnums=0)
    assert free.plan(whole, x).in_specs == free.plan(state, x).in_specs


def test_a_batch_that_is_placed_stays() -> None:
    state, x = values()
    step = autoshard.jit(evaluate, mesh=MESH)
    expected = evaluate(state.params, x)
    for spec in (P("data"), P(None, "model"), P("model", "data"), P()):
        placed = jax.device_put(x, NamedSharding(over(**MESH), spec))
        for _ in range(2):
            np.testing.assert_allclose(step(state.params, placed), expected, rtol=1e-5)
        plan = step.plan(state.params, placed)
        assert plan.in_shardings[1].is_equivalent_to(placed.sharding, 2)
        assert step.plan(state.params, placed) is plan


def test_a_plan_does_not_depend_on_what_was_called_before() -> None:
    """Each place has its own plan; where an earlier one has the arguments in their places, it serves."""
    state, x = values()
    specs = (P("data"), P(None, "model"), P("model"), P())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(over(**MESH), s)) for s in specs]
    alone = [autoshard.jit(evaluate, mesh=MESH).plan(state.params, s) for s in shapes]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        step = autoshard.jit(evaluate, mesh=MESH)
        for i in order:
            assert step.plan(state.params, shapes[i]).in_specs == alone[i].in_specs
    step = autoshard.jit(evaluate, mesh=MESH)
    free = step.plan(state.params, x)
    assert step.plan(*free.put(state.params, x)) is free


def test_pins_and_plans_of_the_user_and_presets_come_first() -> None:
    state, x = values()
    placed = jax.device_put(x, NamedSharding(over(**MESH), P(None, "model")))
    pinned = autoshard.jit(evaluate, mesh=MESH, in_shardings=(None, P("data")))
    preset = autoshard.jit(evaluate, mesh=MESH, strategy="dp")
    given = autoshard.jit(evaluate, strategy=preset.plan(state.params, x))
    for step, spec in ((pinned, P("data")), (preset, P(("data", "model"))), (given, P(("data", "model")))):
        assert step.plan(state.params, placed).in_specs[1] == spec
        assert step.plan(state.params, placed) is step.plan(state.params, x)
        with pytest.warns(PlacementWarning):
            step(state.params, placed)


def test_what_is_elsewhere_is_moved() -> None:
    state, x = values()
    one, other = jax.device_put(x, jax.devices()[3]), jax.device_put(x, NamedSharding(over(rows=8), P(None, "rows")))
    assert placements([one, x, jnp.asarray(x)]) == (None, None, None)
    for placed in (one, other):
        step = autoshard.jit(evaluate, mesh=MESH)
        assert step.plan(state.params, placed).in_specs == step.plan(state.params, x).in_specs
        with pytest.warns(PlacementWarning):
            step(state.params, placed)


def test_where_it_does_not_fit_in_memory_the_plan_says_what_each_call_moves() -> None:
    w = jnp.ones((1024, 1024))
    config = autoshard.MeshConfig(axes=MESH, memory_budget="2MiB")
    step = autoshard.jit(lambda w, x: (x @ w).sum(), mesh=config)
    placed = jax.device_put(w, NamedSharding(over(**MESH), P()))
    plan = step.plan(placed, np.ones((8, 1024), np.float32))
    assert plan.inputs[0].spec.axes
    (said,) = [d.text for d in plan.diagnostics if "moved at each call" in d.text]
    assert said.startswith("w is placed as P() over {'data': 4, 'model': 2}, and planned as P(")
    assert step.plan(placed, np.ones((8, 1024), np.float32)) is plan


def test_modules_that_a_step_only_reads() -> None:
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
    learning, infer = (
        autoshard.jit(f, mesh=MESH, strategy=s) for f, s in ((learn, "fsdp"), (lambda m, x: m(x), "auto"))
    )
    for _ in range(2):  # either step would move the parameters to its own layout, with a warning
        learning(model, x)
        np.testing.assert_allclose(infer(model, x[:4]), model(x[:4]), rtol=1e-5)


def test_lowered_and_traced_as_called() -> None:
    state, x = values()
    placed = jax.device_put(x, NamedSharding(over(**MESH), P(None, "model")))
    step = autoshard.jit(evaluate, mesh=MESH)
    step.plan(state.params, x)
    for lowered in (step.lower(state.params, placed), step.trace(state.params, placed).lower()):
        assert lowered.compile().input_shardings[0][1].is_equivalent_to(placed.sharding, 2)
