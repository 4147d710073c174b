"""Lowering: what is planned is what the compiler emits, and values stay what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.auditing import audit
from tests.programs import mlp_args, mlp_step


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def layers(params: Any, batch: Any) -> tuple[Any, Any]:
    """A step of a scanned residual network."""

    def loss(p: Any) -> Any:
        def block(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        h, _ = jax.lax.scan(block, batch["x"], p["blocks"])
        return jnp.mean((h @ p["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


LAYERS = ({"blocks": {"up": (4, 32, 64), "down": (4, 64, 32)}, "out": (32, 16)}, {"x": (64, 32), "y": (64, 16)})


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp", "zero2", "fsdp_tp", "replicated"])
@pytest.mark.parametrize(("fun", "args"), [(mlp_step, mlp_args(64, 16, 32)), (layers, LAYERS)], ids=["mlp", "scanned"])
def test_planned_and_emitted_collectives_agree(fun: Any, args: Any, strategy: str, mesh: dict[str, int]) -> None:
    params, batch = (shapes(a) for a in args)
    step = autoshard.jit(fun, mesh=mesh, strategy=strategy, donate_argnums=0)
    plan = step.plan(params, batch)
    found = audit(step.lower(params, batch).compile(), plan)
    assert found.clean, str(found)


def test_a_pin_inside_a_loop_holds_in_the_compiled_program() -> None:
    def fun(x: Any, ws: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return jnp.tanh(autoshard.annotate(h @ w, P(None, "a"))), None

        return jax.lax.scan(body, x, ws)[0]

    x, ws = np.ones((8, 16), "f4"), np.full((3, 16, 16), 0.1, "f4")
    step = autoshard.jit(fun, mesh={"a": 8})
    text = step.lower(x, ws).as_text()
    assert "sdy.sharding_constraint" in text
    assert '[{}, {"a"}]' in text
    np.testing.assert_allclose(step(x, ws), jax.jit(fun)(x, ws), rtol=1e-6)


def test_user_lines_reach_the_compiled_program() -> None:
    step = autoshard.jit(lambda x, w: jnp.tanh(x @ w), mesh={"a": 8}, in_shardings=(P(None, "a"), P("a")))
    text = step.lower(np.ones((8, 16), "f4"), np.ones((16, 8), "f4")).compile().as_text()
    assert __file__ in text


def test_nothing_is_constrained_on_one_device() -> None:
    params, batch = (shapes(a) for a in LAYERS)
    step = autoshard.jit(layers, mesh={"data": 1})
    assert step.plan(params, batch).cost.collectives == ()
    assert "all-" not in step.lower(params, batch).compile().as_text()
