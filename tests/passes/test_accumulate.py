"""Loops accumulate one partial sum per device part; everything that is not only accumulated stays."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.errors import PassError
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import Accumulate
from autoshard.rules import SHIPPED
from autoshard.transforms.pipeline import Pipeline

HARDWARE = Hardware("chip", {"float32": 1e10}, 8e9, 1e10, {"link": Link("link", 1e8, 1e-7)}, 1e-8)
MESH = LogicalMesh(("data", "model"), (4, 2), HARDWARE)
PARTS = 4


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rewritten_carries(fun: Any, *args: Any) -> int:
    """How many carries of the loops of ``fun`` become per-part; checks that the rewritten results are the same."""
    before = trace(jax.jit(fun), args, {}, MESH, rules=SHIPPED)
    after = Pipeline((Accumulate("data"),)).run(before)[0]
    got, want = (jx.as_fun(p.jaxpr)(*jax.tree.leaves(args)) for p in (after, before))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-5, strict=True)
    return sum(a != b for a, b in zip(carries(before.jaxpr), carries(after.jaxpr), strict=True))


def carries(jaxpr: jx.Jaxpr) -> list[tuple[int, ...]]:
    """The shapes of what loops carry, at every depth."""
    found: list[tuple[int, ...]] = []
    for eqn in jaxpr.eqns:
        shape = jx.scan_groups(eqn)
        found += [jx.aval(v).shape for v in eqn.outvars[: shape.carry]] if shape else []
        for region in jx.regions(eqn):
            found += carries(region.body)
    return found


def accumulated(loss: Any, params: Any, batches: Any) -> Any:
    """The gradient of ``loss`` and its value, added up over micro-batches."""

    def micro(total: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, batch)), None

    return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)), batches)[0]


def network(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((h @ params["down"] - batch["y"]) ** 2)


def weights() -> Any:
    return {"up": normal(6, 10), "bias": normal(10, seed=1), "down": normal(10, 6, seed=2)}


def batches(steps: int = 3, size: int = 8) -> Any:
    return {"x": normal(steps, size, 6, seed=3), "y": normal(steps, size, 6, seed=4)}


def layers(checkpointed: bool) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w["w"] + w["b"]), None

        h, _ = jax.lax.scan(jax.checkpoint(layer) if checkpointed else layer, batch["x"], params)
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


def unrolled(params: Any, batch: Any) -> Any:
    h = batch["x"]
    for i in range(2):
        h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, params["w"][i])
    return jnp.mean((h - batch["y"]) ** 2)


def embedding(params: Any, ids: Any) -> Any:
    return jnp.mean(jnp.sin(params["table"][ids] @ params["head"]))


def test_gradients_of_micro_batches_are_accumulated_per_part() -> None:
    assert rewritten_carries(lambda p, b: accumulated(network, p, b), weights(), batches()) == 4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_that_a_scan_over_layers_stacks_are(checkpointed: bool) -> None:
    params = {"w": normal(5, 6, 6), "b": normal(5, 6, seed=1)}
    assert rewritten_carries(lambda p, b: accumulated(layers(checkpointed), p, b), params, batches()) == 3


def test_gradients_of_rematerialized_layers_are() -> None:
    assert rewritten_carries(lambda p, b: accumulated(unrolled, p, b), {"w": normal(2, 6, 6)}, batches()) >= 1


def test_the_gradient_of_an_embedding_is() -> None:
    params = {"table": normal(12, 6), "head": normal(6, 5, seed=1)}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 12, (3, 8, 4)))
    assert rewritten_carries(lambda p, b: accumulated(embedding, p, b), params, ids) == 3


def test_the_gradient_of_a_weight_that_every_iteration_reads_is() -> None:
    def loss(w: Any, rows: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((8, 6)), rows)[0])

    assert rewritten_carries(jax.grad(loss), normal(6, 6), normal(5, 8, 6, seed=1)) == 1


def test_so_is_what_a_nested_loop_accumulates() -> None:
    def loss(w: Any, rows: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((8, 6)), rows)[0])

    assert rewritten_carries(lambda w, rows: accumulated(loss, w, rows), normal(6, 6), normal(2, 5, 8, 6, seed=1)) == 3


def test_the_initial_value_is_added_after_the_loop() -> None:
    assert rewritten_carries(
        lambda w, xs: jax.lax.scan(lambda t, x: (t + x.T @ x, None), w, xs)[0], normal(6, 6), normal(3, 8, 6)
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda t, x: (0.9 * t + x.T @ x, None),
        lambda t, x: (t + jnp.tanh(x.T @ x), None),
        lambda t, x: (t + x.T @ x, t.sum()),
        lambda t, x: (t * (x.T @ x), None),
        lambda t, x: (t + x[:6], None),
        lambda t, x: (t + (x[:6].T @ x[:6]), None),
        lambda t, x: (x.T @ x, None),
    ],
    ids=["decays", "no sum", "read", "multiplied", "not summed", "uneven", "replaced"],
)
def test_carries_that_are_not_only_accumulated_or_cannot_be_split_stay(body: Any) -> None:
    assert rewritten_carries(lambda t, xs: jax.lax.scan(body, t, xs), normal(6, 6), normal(3, 8, 6)) == 0


def test_integer_division_is_not_linear() -> None:
    def half(t: Any, x: Any) -> Any:
        return t + jax.lax.div(x.sum(0), 2), None

    xs = jnp.arange(3 * 8 * 6, dtype=jnp.int32).reshape(3, 8, 6)
    assert rewritten_carries(lambda xs: jax.lax.scan(half, jnp.zeros(6, jnp.int32), xs)[0], xs) == 0


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(PassError, match="no axis 'date'; did you mean 'data'"):
        Accumulate("date")(trace(jax.jit(jnp.sin), (normal(2),), {}, MESH, rules=SHIPPED))


def test_there_is_one_variant_for_each_number_of_parts_where_a_loop_accumulates() -> None:
    program = trace(jax.jit(lambda p, b: accumulated(network, p, b)), (weights(), batches()), {}, MESH, rules=SHIPPED)
    assert [str(p) for p in Accumulate().variants(program)] == [
        "accumulate:data+model",
        "accumulate:data",
        "accumulate:model",
    ]
    assert Accumulate().variants(trace(jax.jit(jnp.sin), (normal(2),), {}, MESH, rules=SHIPPED)) == ()


def test_the_planner_chooses_it_where_it_pays_and_the_numbers_are_those_of_one_device() -> None:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = accumulated(network, params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    args = weights(), batches(4, 64)
    stepped = autoshard.jit(step, mesh=LogicalMesh(("data",), (8,), HARDWARE, (), tuple(jax.devices())))
    plan = stepped.plan(*args)
    assert plan.passes[0].written == "accumulate:data"
    found = audit(stepped.lower(*args).compile(), plan)
    assert found.clean, str(found)
    assert [(c.kind, c.count) for c in found.emitted] == [("all-reduce", 1)]
    chex.assert_trees_all_close(stepped(*args), step(*args), rtol=1e-5, atol=1e-6, strict=True)
    again = autoshard.jit(step, mesh=plan.mesh, strategy=plan)
    assert again.plan(*args).passes == plan.passes
