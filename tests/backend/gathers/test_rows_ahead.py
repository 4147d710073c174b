"""Weights of scanned layers gathered one layer ahead: the same numbers, and nothing gathered where it is read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import MeshConfig
from autoshard import jaxpr as jx
from autoshard.backend.gathers.rows_ahead import made_ahead
from autoshard.backend.lower import constrain

LAYERS, WIDTH = 5, 8
STORED, READ = P("data", "model"), P(None, "model")
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def gathered(w: jax.Array, stored: P, read: P) -> jax.Array:
    """A row in low precision, constrained as plans constrain it."""
    row = jax.lax.with_sharding_constraint(w, NamedSharding(MESH, stored)).astype(jnp.bfloat16)
    return jax.lax.with_sharding_constraint(row, NamedSharding(MESH, read)).astype(jnp.float32)


def step(reverse: bool, stored: P = STORED, read: P = READ) -> Any:
    def fun(x: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        def layer(h: jax.Array, rows: Any) -> Any:
            w, b = rows
            h = jnp.tanh(h @ gathered(w, stored, read) + b + w[0])
            return h, h.sum()

        return jax.lax.scan(layer, x, (w, b), reverse=reverse)

    return fun


ARGS = (
    jax.random.normal(jax.random.key(0), (3, WIDTH)),
    jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)),
    jax.random.normal(jax.random.key(2), (LAYERS, WIDTH)),
)


def gathers_of(jaxpr: jx.Jaxpr) -> set[jx.Var]:
    """What is constrained to `READ`."""
    return {e.outvars[0] for e in jx.walk(jaxpr) if jx.is_constraint(e) and e.params["sharding"].spec == READ}


def both(fun: Any) -> tuple[jx.Jaxpr, jx.Jaxpr]:
    """``fun`` as it is, and with gathers ahead; checks that their results are the same."""
    jaxpr = jx.normalize(jax.make_jaxpr(fun)(*ARGS))
    new = made_ahead(jaxpr, gathers_of(jaxpr))
    for a, b in zip(*(jax.jit(jx.as_fun(j))(*ARGS) for j in (jaxpr, new)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return jaxpr, new


def scan_of(jaxpr: jx.Jaxpr) -> jx.JaxprEqn:
    (found,) = (e for e in jaxpr.eqns if jx.scan_groups(e))
    return found


@pytest.mark.parametrize("reverse", [False, True])
def test_an_iteration_reads_what_the_one_before_gathered(reverse: bool) -> None:
    before, after = map(scan_of, both(step(reverse)))
    old, new = jx.scan_groups(before), jx.scan_groups(after)
    assert old is not None
    assert new is not None
    assert (new.consts, new.carry, new.xs) == (old.consts + 1, old.carry + 2, old.xs)
    (body,) = (r.body for r in jx.regions(after))
    (product,) = (e for e in body.eqns if jx.has_product(e))
    made = {v: e for e in body.eqns for v in e.outvars}
    weights = made[product.invars[1]].invars[0]  # before the cast
    assert weights in body.invars[new.consts : new.consts + new.carry]


def test_nothing_else_is_changed() -> None:
    jaxpr = jx.normalize(jax.make_jaxpr(step(False))(*ARGS))
    assert made_ahead(jaxpr, set()) is jaxpr
    assert made_ahead(jaxpr, {jaxpr.eqns[0].outvars[0]}) is jaxpr


def test_loops_over_micro_batches_have_loops_over_layers_in_them() -> None:
    def fun(x: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + step(False)(x[None], w, b)[0].sum(), None

        return jax.lax.scan(add, jnp.zeros_like(w), x)

    _, after = both(fun)
    (body,) = (r.body for r in jx.regions(scan_of(after)))
    forward = next(e for e in body.eqns if jx.scan_groups(e))
    groups = jx.scan_groups(forward)
    assert groups is not None
    assert any(jx.aval(v).dtype == jnp.bfloat16 for v in forward.invars[groups.consts : groups.consts + groups.carry])


def planned(mesh: MeshConfig, **options: Any) -> Any:
    """The plan of a step of scanned layers, and its jaxpr with constraints over this machine's devices."""

    def train(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(h @ w.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).T).astype(jnp.float32), None

            return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    args = jax.ShapeDtypeStruct((LAYERS, 256, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    plan = autoshard.jit(train, mesh=mesh, strategy="fsdp", donate_argnums=0, **options).plan(*args)
    study = plan.study
    devices = jax.make_mesh(tuple(plan.mesh.shape.values()), plan.mesh.axis_names, axis_types=(AxisType.Auto,) * 2)
    return plan, constrain(study.graph, plan, devices), train


NODES = MeshConfig(axes={"data": 4, "model": 2}, gpu="h100", nodes=4, per_node=2)


def test_a_plan_for_gpus_says_what_is_gathered_ahead_and_counts_it() -> None:
    plan, jaxpr, train = planned(NODES)
    ahead = [c for c in plan.intermediates if c.ahead]
    assert ahead
    count = len({c.value for c in ahead})
    assert f"gather {count} array{'s' * (count > 1)} of weights one layer ahead" in " ".join(plan.explain().split())
    assert all(c.resharded_from is not None and c.spec.axes < c.resharded_from.axes for c in ahead)
    assert LAYERS + 1 in {c.count for c in plan.cost.collectives if c.kind == "all-gather"}
    carried = [groups.carry for e in jaxpr.eqns if (groups := jx.scan_groups(e))]
    assert max(carried) >= 3  # what is carried anyway, the layer, and its weights
    w, x = 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, 256, 256)), jnp.ones((512, 256))
    for a, b in zip(jax.jit(jx.as_fun(jaxpr))(w, x), jax.tree.leaves(jax.jit(train)(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)  # in bfloat16


def test_what_has_no_room_is_gathered_as_it_is_read() -> None:
    free, _, _ = planned(NODES)
    tight, jaxpr, _ = planned(NODES, memory_budget=free.memory.peak - 1)
    assert not any(c.ahead for c in tight.intermediates)
    assert tight.memory.peak < free.memory.peak
    assert all(groups.carry < 3 for e in jaxpr.eqns if (groups := jx.scan_groups(e)))


def test_other_chips_gather_as_they_read() -> None:
    plan, _, _ = planned(MeshConfig(axes={"data": 4, "model": 2}))
    assert not any(c.ahead for c in plan.intermediates)
